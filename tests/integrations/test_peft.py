"""Do PEFT's adapters train on a frozen base in low precision, and are they afterwards what PEFT makes of them?"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import build
from slow_cases import slow
from small import convert_in_formats, text, tiny_llama
from tiny_runs import SCHEDULE, Run, data, differing, train, weights
from torch import nn
from transformers import Trainer

from snip_hf import SnipCallback, SnipConfig, convert_model, coverage, estimate_divergence, restore_model
from snip_hf.config import DEFAULT_FP4_FRACTION
from snip_hf.estimation.table import DivergenceTable
from snip_hf.layers.selection import skip_reasons
from snip_hf.layers.state import plain_name, snip_linears
from snip_hf.numerics.gemms import GEMMS

peft = pytest.importorskip("peft")
# PEFT calls transformers' methods by their old names.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread_only"),
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
METHODS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=ALL, lora_dropout=0.1),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=ALL, use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": lambda: peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=["q_proj", "v_proj"], total_step=100, tinit=1, tfinal=1),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, target_modules=["q_proj", "v_proj"]),
}


def adapted(method: str = "LoRA", seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(tiny_llama(hidden=32, **options), METHODS[method]())


def run(folder: Path, model: nn.Module, config: SnipConfig | None = None, **options: Any) -> Run:
    return train(folder, config or fp4_config(**SCHEDULE), model=model, **options)


BARE = [name for name, reason in skip_reasons(tiny_llama(), fp4_config()).items() if reason is None]


# -------------------------------------------------------------------------------------------------- names and selection


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_named_as_without_adapters_of_which_nothing_is_swapped(method: str) -> None:
    model = adapted(method)
    reasons = skip_reasons(model, fp4_config())
    assert [name for name, reason in reasons.items() if reason is None] == BARE
    assert {reason for reason in reasons.values() if reason is not None} <= {"output head", "adapter"}
    assert convert_model(model, fp4_config(skip_modules=("*.mlp.up_proj",))) == [n for n in BARE if "up_proj" not in n]


def test_a_named_output_head_is_swapped_beside_its_adapter() -> None:
    base = tiny_llama(hidden=32, tie_word_embeddings=False)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    reasons = skip_reasons(model, fp4_config(include_modules=("lm_head",)))
    assert reasons["lm_head"] is None
    assert {reason for name, reason in reasons.items() if ".lora_" in name} == {"adapter"}


def test_encoders_of_prompts_are_not_swapped() -> None:
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8)
    model = peft.get_peft_model(tiny_llama(hidden=32), config)
    assert convert_model(model, fp4_config()) == BARE


def test_a_layer_whose_adapter_multiplies_with_a_weight_of_its_own_is_not_swapped() -> None:
    model = peft.get_peft_model(tiny_llama(hidden=32), peft.HRAConfig(r=2, target_modules=["v_proj"]))
    reasons = skip_reasons(model, fp4_config())
    assert {name: reason for name, reason in reasons.items() if "v_proj" in name} == {
        f"model.layers.{index}.self_attn.v_proj": "not run, since HRA multiplies with a weight of its own"
        for index in range(2)
    }


def test_a_weight_that_its_adapter_changes_is_not_swapped() -> None:
    config = peft.LoraConfig(r=2, target_parameters=["mlp.up_proj.weight"])
    reasons = skip_reasons(peft.get_peft_model(tiny_llama(hidden=32), config), fp4_config())
    assert reasons["model.layers.0.mlp.up_proj"] == "target_parameters: its adapter changes the weight itself"
    assert reasons["model.layers.0.mlp.gate_proj"] is None


def test_the_running_copy_of_modules_to_save_is_swapped() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["down_proj"])
    model = peft.get_peft_model(tiny_llama(hidden=32), config)
    model.add_adapter("other", config)
    name = "model.layers.0.mlp.down_proj"
    reasons = skip_reasons(model, fp4_config())
    assert {other: reason for other, reason in reasons.items() if other.startswith(name)} == {
        f"{name}.original_module": "not run, since modules_to_save has a copy in its place",
        f"{name}.modules_to_save.default": None,
        f"{name}.modules_to_save.other": "not run, since another adapter is active",
    }
    convert_model(model, fp4_config())
    trained = {name for name, layer in snip_linears(model).items() if layer.weight.requires_grad}
    assert trained == {f"model.layers.{index}.mlp.down_proj.modules_to_save.default" for index in range(2)}


def test_a_quantized_base_is_refused_with_what_to_do() -> None:
    model = adapted()
    model.base_model.model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError) as error:
        convert_model(model, fp4_config())
    assert str(error.value) == (
        "The model is already quantized (dict); expected ordinary weights. Load it without a quantization_config, or "
        "dequantize it first. In place of QLoRA, train the adapters on a base in BF16: snip-hf multiplies with its "
        "frozen weights in low precision."
    )


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("method", ["LoRA", *map(slow, [name for name in METHODS if name != "LoRA"])])
def test_the_frozen_base_is_planned_by_what_its_errors_do_to_the_adapters_updates(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished = run(tmp_path, adapted(method), max_steps=4)
    (line,) = finished.refreshes
    assert line["status"] == "applied" and line["fp4_fraction"] >= DEFAULT_FP4_FRACTION
    assert line["divergence"]["fp4"]["weight"] > line["divergence"]["fp8"]["weight"] > 0
    plan = finished.callback.controller.plan  # type: ignore[union-attr]
    assert list(plan.assignment) == BARE
    assert {tuple(row) for table in (plan.assignment, plan.flops) for row in table.values()} == {GEMMS[:2]}
    assert not [record.message for record in caplog.records if "learning rate" in record.message]


@pytest.mark.slow
def test_by_gemm_the_program_has_no_gradient_of_a_frozen_weight(tmp_path: Path) -> None:
    config = fp4_config(granularity="gemm", ties=(("q_proj", "k_proj", "v_proj"),), stages=2, **SCHEDULE)
    finished = run(tmp_path, adapted(), config, max_steps=4)
    (line,) = finished.refreshes
    assert line["status"] == "applied"
    assert all(share >= DEFAULT_FP4_FRACTION for share in line["stage_fp4_fractions"])
    assert not [cell for cell in line["changes"] if cell.endswith(":grad_weight")]
    assignment = finished.callback.controller.plan.assignment  # type: ignore[union-attr]
    for index in range(2):
        rows = [assignment[f"model.layers.{index}.self_attn.{name}"] for name in ("q_proj", "k_proj", "v_proj")]
        assert rows[0] == rows[1] == rows[2]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["uniform-fp4", "first2-last8", "fisher", "min-abs-err"])
def test_other_policies_work_on_a_frozen_base(policy: str, tmp_path: Path) -> None:
    schedule = SCHEDULE if policy in ("fisher", "min-abs-err") else {}
    finished = run(tmp_path, adapted(), fp4_config(policy=policy, **schedule), max_steps=4)
    assert finished.callback.controller.plan.fp4_fraction >= DEFAULT_FP4_FRACTION  # type: ignore[union-attr]


def test_a_resumed_run_is_the_whole_run_to_the_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", adapted(), max_steps=5, save_strategy="steps", save_steps=3)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    callback = SnipCallback(fp4_config(**SCHEDULE))
    again = train(tmp_path / "again", callback=callback, model=adapted(), max_steps=5, resume=checkpoint)
    assert differing(weights(whole.model), weights(again.model)) == []
    assert {step: loss for step, loss in whole.losses.items() if step > 3} == {
        step: loss for step, loss in again.losses.items() if step > 3
    }
    plans = [json.loads((tmp_path / name / "snip" / "plan.json").read_text()) for name in ("whole", "again")]
    assert plans[0]["assignment"] == plans[1]["assignment"]


@pytest.mark.slow
def test_recomputed_activations_give_the_same_training_to_the_bit(tmp_path: Path) -> None:
    """Nothing before the first block is trained: PEFT lets the embedding's output ask for gradients."""
    plain = run(tmp_path / "plain", adapted(), max_steps=4)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    model = adapted()
    model.enable_input_require_grads()
    again = run(tmp_path / "again", model, max_steps=4, **options)
    assert differing(weights(plain.model), weights(again.model)) == []
    assert plain.refreshes[0]["divergence"] == again.refreshes[0]["divergence"]


@pytest.mark.slow
def test_adapters_may_come_before_or_after_the_swap(tmp_path: Path) -> None:
    before = run(tmp_path / "before", adapted(), max_steps=4)
    model = tiny_llama(hidden=32)
    convert_model(model, fp4_config(**SCHEDULE))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        later = peft.get_peft_model(model, METHODS["LoRA"]())
    after = run(tmp_path / "after", later, max_steps=4)
    assert differing(weights(before.model), weights(after.model)) == []
    assert before.losses == after.losses


# -------------------------------------------------------------------------------------------------- what PEFT does then


def trained_twins(method: str, tmp_path: Path) -> tuple[Any, Any]:
    """A model after some steps with SNIP, and one that never knew it with the same weights."""
    model = run(tmp_path, adapted(method), max_steps=4).model
    twin = adapted(method)
    twin.load_state_dict(model.state_dict())
    return model.eval(), twin.eval()


@pytest.mark.parametrize("method", ["LoRA", *map(slow, ("DoRA", "IA3", "VeRA", "OFT"))])
def test_adapter_files_and_merged_weights_are_those_of_an_unconverted_model(method: str, tmp_path: Path) -> None:
    model, twin = trained_twins(method, tmp_path)
    assert list(model.state_dict()) == list(twin.state_dict())
    for name, one in (("model", model), ("twin", twin)):
        one.save_pretrained(tmp_path / name)
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("model", "twin")]
    assert files[0] == files[1]
    loaded = peft.PeftModel.from_pretrained(tiny_llama(hidden=32), tmp_path / "model").eval()
    batch = text(2, 24)
    assert torch.equal(loaded(**batch).loss, twin(**batch).loss)
    merged, expected = model.merge_and_unload(), twin.merge_and_unload()
    assert snip_linears(merged)  # still in low precision, until it is restored
    restore_model(merged)
    assert differing(weights(merged), weights(expected)) == []
    assert torch.equal(merged(**batch).loss, expected(**batch).loss)


def test_without_the_adapter_the_base_runs_in_the_plan_s_formats() -> None:
    model, base = adapted(), tiny_llama(hidden=32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    for one in (model, base):
        convert_in_formats(one, fp4_config(start_format="fp8"))
    batch = text(2, 24)
    with torch.no_grad():
        expected = base(**batch).loss
        with model.disable_adapter():
            assert torch.equal(model(**batch).loss, expected)
        assert not torch.equal(model(**batch).loss, expected)


@pytest.mark.slow
def test_the_adapter_that_is_active_is_the_one_that_counts(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("other", METHODS["LoRA"]())
    model.set_adapter("other")
    before = weights(model)
    finished = run(tmp_path, model, max_steps=4)
    (line,) = finished.refreshes
    assert line["divergence"]["fp4"]["weight"] > 0
    assert {name.split(".")[-2] for name in differing(before, weights(model))} == {"other"}


@pytest.mark.slow
def test_a_pass_without_the_adapter_is_no_micro_batch(tmp_path: Path) -> None:
    """The reference model of a preference loss runs in this way."""

    class WithReference(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad(), model.disable_adapter():
                model(**inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    plain = run(tmp_path / "plain", adapted(), max_steps=4)
    again = run(tmp_path / "again", adapted(), max_steps=4, trainer_class=WithReference)
    assert plain.refreshes[0]["divergence"] == again.refreshes[0]["divergence"]
    assert plain.losses == again.losses


# ----------------------------------------------------------------------------------- losses that switch adapters


def compare(found: DivergenceTable, expected: DivergenceTable) -> None:
    """Fails unless two tables are equal but for FP32's rounding errors."""
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert (row.layer, row.gemm, row.format) == (other.layer, other.gemm, other.format)
        assert row.loss_divergence == pytest.approx(other.loss_divergence, rel=1e-3)
        assert row.weight_divergence == pytest.approx(other.weight_divergence, rel=1e-2)


def preference(reference: Callable[[Any], torch.Tensor], is_first: bool) -> Callable[..., torch.Tensor]:
    """A loss that compares the model with a reference, which runs before or after it."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        found = {}
        for part in ("reference", "policy") if is_first else ("policy", "reference"):
            with torch.set_grad_enabled(part == "policy"):
                found[part] = reference(batch) if part == "reference" else model(**batch).logits
        return (found["policy"] - found["reference"]).square().mean() + found["policy"][..., 0].mean()

    return loss


@pytest.mark.parametrize(
    ("kind", "checkpoints", "is_first"),
    [
        # There are three choices of two; four cases have all pairs.
        case
        for case in itertools.product(("off", "other"), (False, True), (True, False))
        if sum((case[0] == "off", *case[1:])) % 2 == 0
    ],
)
def test_a_loss_may_switch_adapters(kind: str, checkpoints: bool, is_first: bool) -> None:
    """It has the divergences of the loss whose reference is a model of its own."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["o_proj"])
    model = peft.get_peft_model(tiny_llama(hidden=32), config)
    model.add_adapter("other", config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    apart = copy.deepcopy(model)
    apart.set_adapter("other")
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def switched(batch: Any) -> torch.Tensor:
        if kind == "off":
            with model.disable_adapter():
                return model(**batch).logits
        model.set_adapter("other")
        try:
            return model(**batch).logits
        finally:
            model.set_adapter("default")

    def of_its_own(batch: Any) -> torch.Tensor:
        if kind == "off":
            with apart.disable_adapter():
                return apart(**batch).logits
        return apart(**batch).logits

    before = {name: (value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    tables = [
        estimate_divergence(model.train(), text(2, 24), compute_loss=preference(reference, is_first))
        for reference in (switched, of_its_own)
    ]
    compare(*tables)
    after = dict(model.named_parameters())
    assert [name for name, (value, _) in before.items() if not torch.equal(value, after[name])] == []
    assert [name for name, (_, asks) in before.items() if asks is not after[name].requires_grad] == []


def test_a_loss_whose_reference_has_the_adapters_off_is_refreshed(tmp_path: Path) -> None:
    class Preference(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            logits = model(**inputs).logits
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                reference = model(**inputs).logits
            return logits[..., 0].mean() + (logits - reference).square().mean()

    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    model = adapted()
    model.enable_input_require_grads()
    (line,) = run(tmp_path, model, max_steps=4, trainer_class=Preference, **options).refreshes
    assert line["status"] == "applied", line["reason"]


# --------------------------------------------------------------------------------------------------- target_parameters


def test_a_weight_that_its_adapter_changes_lets_the_others_be_probed_as_beside_its_own_products() -> None:
    config = fp4_config(skip_modules=("*.q_proj",), probe_tokens=None, probe_batch_tokens=None)
    tables = []
    for options in ({"target_modules": ["q_proj"]}, {"target_modules": [], "target_parameters": ["q_proj.weight"]}):
        model = peft.get_peft_model(tiny_llama(hidden=32), peft.LoraConfig(r=4, **options))
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0.0, 0.1, generator=generator)
        before = weights(model)
        tables.append(estimate_divergence(model, text(2, 24), config=config))
        assert differing(before, weights(model)) == []
    compare(*tables)


def test_the_products_of_weights_that_adapters_change_are_counted() -> None:
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.up_proj.weight"])
    model = tiny_llama(hidden=32)
    up = model.model.layers[0].mlp.up_proj.weight
    every = sum(one.weight.numel() for name, one in model.named_modules() if name in BARE)
    found = coverage(peft.get_peft_model(model, config), text(2, 24))
    tokens = 48
    # Forward and grad_input, as all weights are frozen. In front of the first adapter no gradient is needed.
    block = model.model.layers[0]
    before = [getattr(block.self_attn, f"{name}_proj") for name in "qkvo"] + [block.mlp.gate_proj]
    idle = sum(one.weight.numel() for one in before) + up.numel()
    assert found.covered == 2 * tokens * (2 * (every - 2 * up.numel()) - (idle - up.numel()))
    (left,) = [one for one in found.uncovered if one.reason.startswith("target_parameters")]
    # grad_weight of the sum of weight and adapter counts too.
    assert left.share * found.flops == pytest.approx(2 * tokens * (6 * up.numel() - up.numel()))


def test_grad_inputs_in_front_of_the_first_adapter_count_nothing(tmp_path: Path) -> None:
    config = fp4_config(granularity="gemm", **SCHEDULE)
    plan = run(tmp_path, adapted(), config, max_steps=4).callback.controller.plan  # type: ignore[union-attr]
    first = {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    idle = {"forward": 1.0, "grad_input": 0.0}
    assert plan.tokens == {name: idle if name in first else 1.0 for name in BARE}
    assert plan.fp4_fraction >= DEFAULT_FP4_FRACTION
    work = [
        (plan.assignment[name][gemm], flops)
        for name, row in plan.flops.items()
        for gemm, flops in row.items()
        if name not in first or gemm == "forward"
    ]
    low = sum(flops for format, flops in work if format == "fp4")
    assert plan.fp4_fraction == pytest.approx(low / sum(flops for _, flops in work))


def test_experts_whose_parameters_have_adapters_let_the_other_layers_be_refreshed(tmp_path: Path) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(
        build("mixtral"), peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    )
    names = [plain_name(name) for name, _ in model.named_parameters()]
    assert len(set(names)) == len(names)
    rows = [{"input_ids": [token % 24 for token in row["input_ids"]]} for row in data()]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    (line,) = run(tmp_path, model, max_steps=4, trainer={"train_dataset": rows}).refreshes
    assert line["status"] == "applied", line["reason"]
    assert not [cell for cell in line["changes"] if "experts" in cell]
