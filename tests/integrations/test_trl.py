"""Do TRL's trainers train, refresh, save and resume with SnipCallback as one added line?"""

from __future__ import annotations

import copy
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from tiny_runs import differing, history, weights
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback

pytest.importorskip("trl")

import trl
from trl_runs import CHATS, CONFIG, PAIRS, PREFERENCES, UNTOUCHED, TRLRun, build, model_for, run, saved_model

from snip_hf import SnipCallback
from snip_hf.cli import main
from snip_hf.layers.state import snip_linears

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


def assert_refreshed(found: TRLRun) -> None:
    assert [(line["step"], line["status"]) for line in found.refreshes] == [(2, "applied")]


class Counting(TrainerCallback):
    """Notes how many micro-batches SNIP counts in each step."""

    def __init__(self, snip: SnipCallback) -> None:
        self.snip = snip
        self.counts: list[int] = []

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        assert self.snip.controller is not None
        self.counts.append(self.snip.controller._micro_batch)


# ----------------------------------------------------------------------------------------------------------------- SFT

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "packing": {"packing": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "completion only": {"rows": PAIRS, "completion_only_loss": True},
    "assistant only": {"rows": CHATS, "assistant_only_loss": True},
    "bf16": {"bf16": True},
    "dft": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_supervised_fine_tuning_is_probed_by_its_own_loss_in_every_mode(mode: str, tmp_path: Path) -> None:
    found = run(tmp_path / "snip", "SFT", UNTOUCHED, **MODES[mode])
    assert_refreshed(found)
    assert found.probed_loss == pytest.approx(found.logged[1]["loss"], rel=0.05)
    plain = run(tmp_path / "plain", "SFT", **MODES[mode])
    # Metrics, too, which the trainer collects in its compute_loss.
    assert found.logged == plain.logged


@pytest.mark.slow
def test_the_page_trains_merges_and_exports_adapters_on_chats(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS), encoding="utf-8")
    page = (Path(__file__).parents[2] / "docs/trl.md").read_text(encoding="utf-8")
    section = page.partition("\n## SFT with LoRA on chats\n")[2].partition("\n## ")[0]
    train, merge = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    here = {'"Qwen/Qwen3-0.6B"': repr(model), "bf16=True, torch_compile=True": "use_cpu=True, bf16=False, max_steps=25"}
    for theirs, ours in here.items():
        assert theirs in train
        train = train.replace(theirs, ours)
    exec(train, {})
    exec(merge, {})
    assert [line.get("status") for line in history(Path("out"))] == [None, "applied"]
    command = re.search(r"^snip-hf (export .*)$", section, re.MULTILINE)
    assert command is not None and main(command[1].split()) == 0
    merged, quantized = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("merged", "quantized"))
    words = torch.arange(1, 33)[None]
    difference = (quantized(words).logits - merged(words).logits).norm() / merged(words).logits.norm()
    assert 0 < difference < 0.3


@pytest.mark.slow
def test_supervised_fine_tuning_by_a_loss_function_is_probed_by_that(tmp_path: Path) -> None:
    def twice(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        from torch.nn.functional import cross_entropy

        logits = outputs.logits[:, :-1].flatten(0, 1)
        return 2 * cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    found = run(tmp_path, "SFT", UNTOUCHED, more={"compute_loss_func": twice})
    assert_refreshed(found)
    assert found.probed_loss == pytest.approx(found.logged[1]["loss"], rel=0.05)


# ------------------------------------------------------------------------------------------------ preferences, rewards


def test_margins_of_the_first_step_are_0_with_a_reference_in_the_policys_formats(model: str, tmp_path: Path) -> None:
    found = run(tmp_path, "DPO", CONFIG, model=model)
    assert_refreshed(found)
    assert found.logged[0]["rewards/margins"] == found.logged[0]["rewards/chosen"] == 0.0
    assert found.logged[1]["rewards/margins"] != 0
    reference, own = (snip_linears(one) for one in (found.trainer.ref_model, found.trainer.model))
    assert {name: layer.formats for name, layer in reference.items()} == {
        name: layer.formats for name, layer in own.items()
    }
    assert "fp4" in {name for layer in reference.values() for name in layer.formats.values()}


@pytest.mark.slow
def test_a_reference_in_high_precision_is_compared_with_a_model_that_rounds(model: str, tmp_path: Path) -> None:
    found = run(tmp_path, "DPO", callback=SnipCallback(CONFIG, reference="high"), model=model)
    assert_refreshed(found)
    assert found.logged[0]["rewards/margins"] != 0
    assert snip_linears(found.trainer.ref_model) == {}


@pytest.mark.slow
def test_a_reference_that_is_a_copy_of_the_converted_model_follows_the_plan_too(tmp_path: Path) -> None:
    first = run(tmp_path / "first", "SFT", CONFIG)
    policy = first.trainer.model
    found = run(tmp_path / "dpo", "DPO", CONFIG, model=policy, more={"ref_model": copy.deepcopy(policy)})
    assert found.logged[0]["rewards/margins"] == 0.0
    own, reference = snip_linears(found.trainer.model), snip_linears(found.trainer.ref_model)
    assert [layer.formats for layer in own.values()] == [layer.formats for layer in reference.values()]


def test_a_reference_of_other_layers_is_refused_before_training(model: str, tmp_path: Path) -> None:
    own = model_for("SFT").config.to_dict()
    other = LlamaForCausalLM(LlamaConfig(**own | {"intermediate_size": own["intermediate_size"] + 16}))
    with pytest.raises(ValueError) as caught:
        run(tmp_path, "DPO", fp4_config(policy="layer-position"), model=model, more={"ref_model": other})
    assert str(caught.value) == (
        "The layers of the reference model differ from those of the trained model: 'model.layers.0.mlp.gate_proj' is "
        f"{own['intermediate_size'] + 16}x32 in the reference and {own['intermediate_size']}x32 in the trained model. "
        "Use SnipCallback(..., reference='high')."
    )
    assert snip_linears(other) == {}


def test_a_reference_that_is_the_model_without_its_adapters_cannot_be_in_high_precision(
    model: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    snip = SnipCallback(fp4_config(policy="layer-position"), reference="high")
    more = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    with pytest.raises(ValueError, match=r"^reference='high' cannot work: .* Use reference='policy'\.$"):
        run(tmp_path, "DPO", callback=snip, model=model, more=more)


def test_an_unknown_option_for_the_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^reference='low' is not known; expected 'policy' \(the arithmetic of the"):
        SnipCallback(reference="low")


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO precomputed": ("DPO", {"precompute_ref_log_probs": True}),
    "DPO ipo": ("DPO", {"loss_type": "ipo"}),
    "DPO synced": ("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "KTO": ("KTO", {}),
    "SFT of adapters": ("SFT", {}),
    "DPO of adapters": ("DPO", {"gradient_checkpointing": True}),
    "KTO of adapters": ("KTO", {"gradient_checkpointing": True}),
    "GRPO of adapters": ("GRPO", {"beta": 0.1}),
    "Reward": ("Reward", {}),
    "GRPO dapo": ("GRPO", {}),
    "GRPO in BF16": ("GRPO", {"bf16": True}),
    "GRPO twice": ("GRPO", {"num_iterations": 2}),
    "GRPO by sequences": ("GRPO", {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
    "GRPO with a reference": ("GRPO", {"beta": 0.1}),
    "RLOO in BF16": ("RLOO", {"bf16": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_losses_of_preferences_rewards_and_policies_are_probed_as_they_are(
    form: str, model: str, tmp_path: Path
) -> None:
    trainer, changes = FORMS[form]
    given = None if trainer == "Reward" else model
    if form.endswith("adapters"):  # the reference is the model with its adapters off
        peft = pytest.importorskip("peft")
        changes = changes | {"more": {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}}
    snip = SnipCallback(UNTOUCHED)
    counting = Counting(snip)
    found = run(tmp_path / "snip", trainer, callback=snip, callbacks=[counting], model=given, **changes)
    assert_refreshed(found)
    # Generation, references and old probabilities count for nothing.
    assert counting.counts == [2] * 4
    plain = run(tmp_path / "plain", trainer, model=given, **changes)
    assert found.logged == plain.logged


def test_this_trl_pads_the_batches_of_all_trainers_but_sft(model: str, tmp_path: Path) -> None:
    """docs/trl.md says so; a TRL that packs them needs a test of tokens, labels and shares as SFT has."""
    trainer = build(tmp_path, "DPO", padding_free=True, model=model)
    assert trainer.padding_free is False
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 2 * trainer.args.per_device_train_batch_size
    others = {config: getattr(trl, config).__dataclass_fields__ for config in ("GRPOConfig", "RLOOConfig", "KTOConfig")}
    assert not [
        (config, name) for config, names in others.items() for name in names if "pack" in name or "free" in name
    ]


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.mark.slow
def test_a_resumed_run_of_grpo_goes_on_to_the_bit(model: str, tmp_path: Path) -> None:
    """Those of SFT and DPO do on two ranks (tests/distributed/test_trl_on_ranks.py)."""
    saving: dict[str, Any] = {"model": model, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    full = run(tmp_path, "GRPO", CONFIG, **saving)
    state = tmp_path / "checkpoint-3" / "snip_state.json"
    assert state.is_file()
    expected = full.logged, weights(full.trainer.model), full.refreshes
    resumed = run(tmp_path, "GRPO", CONFIG, resume=state.parent, **saving)
    assert resumed.logged == expected[0]
    assert differing(weights(resumed.trainer.model), expected[1]) == []
    assert [line["step"] for line in resumed.refreshes] == [line["step"] for line in expected[2]] == [2]


# -------------------------------------------------------------------------------------------------------------- recipe


@pytest.mark.slow
def test_the_recipe_trains_and_goes_on_from_its_last_checkpoint(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = tmp_path / "pairs.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in PREFERENCES))
    recipe = str(Path(__file__).parents[2] / "recipes" / "trl_dpo.py")
    monkeypatch.setattr(sys, "argv", [recipe, model, str(data), str(output), "--steps", "8", "--batch", "2"])
    runpy.run_path(recipe)
    weights_after = (output / "model.safetensors").read_bytes()
    refreshes = [(line["step"], line["status"]) for line in history(output) if line["event"] == "refresh"]
    assert refreshes == [(2, "applied"), (6, "applied")]
    shutil.rmtree(output / "checkpoint-8")
    runpy.run_path(recipe)
    assert (output / "model.safetensors").read_bytes() == weights_after
