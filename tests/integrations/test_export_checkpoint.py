"""transformers loads a quantized checkpoint, with the weights quantized by the plan, and runs it on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from snip_hf.cli import main
from snip_hf.costs.flops import linear_flops
from snip_hf.integrations import export_checkpoint
from snip_hf.integrations.export_checkpoint import WEIGHT_KINDS
from snip_hf.layers.convert import convert_model
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

WORDS = ["the", "cat", "sat", "on", "mat", "dog", "ran", "off"]


def config(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**{**sizes, "vocab_size": 9, "max_position_embeddings": 8, **changes})


def save_plan(path: Path, formats: dict[str, str], **changes: Any) -> None:
    """A model in `model/` and a plan for it: the end of a layer's name -> the format of its forward GEMM; others bf16.

    The GEMMs of the backward pass, which inference does not have, are in fp8.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(**changes))
    model.save_pretrained(path / "model")
    vocabulary = {word: row for row, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(path / "model")
    snip = fp4_config(include_modules=("lm_head",) if "lm_head" in formats else ())
    layers = convert_model(model, snip)
    forward = {layer: next((formats[end] for end in formats if layer.endswith(end)), "bf16") for layer in layers}
    assignment = {layer: dict(zip(GEMMS, (forward[layer], "fp8", "fp8"), strict=True)) for layer in layers}
    provenance = PlanProvenance(step=1, policy="snip", config=snip.to_dict())
    PrecisionPlan(assignment, linear_flops(model), (tuple(layers),), provenance).save(path / "plan.json")


def export(path: Path) -> int:
    paths = ["--model", str(path / "model"), "--output", str(path / "quantized")]
    return main(["export", str(path / "plan.json"), "--to", "checkpoint", *paths])


def load(path: Path, **settings: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, **settings).eval()


MIXED = {
    "0.self_attn.q_proj": "fp8",
    "0.self_attn.k_proj": "fp8-tensor",
    "0.self_attn.v_proj": "mxfp8",
    "0.self_attn.o_proj": "fp8-delayed",
    "0.mlp.gate_proj": "nvfp4",
    "0.mlp.up_proj": "mxfp4",
    "0.mlp.down_proj": "int4",
    "1.mlp.gate_proj": "int8",
    "1.mlp.up_proj": "ufp4",
    "1.mlp.down_proj": "fp4",
    "lm_head": "fp8",
}
TYPES = {
    "0.self_attn.q_proj": "Float8Tensor",
    "0.self_attn.k_proj": "Float8Tensor",
    "0.self_attn.v_proj": "Float8Tensor",
    "0.self_attn.o_proj": "Float8Tensor",
    "0.mlp.gate_proj": "NVFP4Tensor",
    "0.mlp.up_proj": "NVFP4Tensor",
    "0.mlp.down_proj": "IntxUnpackedToInt8Tensor",
    "1.mlp.gate_proj": "Int8Tensor",
    "1.mlp.up_proj": "IntxUnpackedToInt8Tensor",
    "1.mlp.down_proj": "NVFP4Tensor",
    "lm_head": "Float8Tensor",
}


def test_transformers_loads_each_weight_back_as_the_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(tmp_path, MIXED)
    assert export(tmp_path) == 0
    model, before = load(tmp_path / "quantized"), load(tmp_path / "model", dtype=torch.bfloat16)
    types = {
        name.removeprefix("model.layers.").removesuffix(".weight"): type(parameter).__name__
        for name, parameter in model.named_parameters()
        if type(parameter) is not torch.nn.Parameter
    }
    assert types == TYPES
    tokens = torch.tensor([[1, 2, 3, 4, 1, 5]])
    with torch.no_grad():
        logits, expected = (x(tokens).logits.float() for x in (model, before))
    assert 0 < (logits - expected).norm() < 0.2 * expected.norm()

    first, second, *kinds = capsys.readouterr().out.splitlines()
    assert first.startswith("The plan fits") and second == f"Written: {tmp_path / 'quantized'}"
    assert set(kinds) == {f"  {name}: {WEIGHT_KINDS[name].label}" for name in MIXED.values()}


def test_biases_stay_as_they_are(tmp_path: Path) -> None:
    save_plan(tmp_path, {"0.self_attn.q_proj": "nvfp4", "0.self_attn.o_proj": "fp8"}, attention_bias=True)
    assert export(tmp_path) == 0
    model, before = load(tmp_path / "quantized"), load(tmp_path / "model", dtype=torch.bfloat16)
    for name, module in before.named_modules():
        if getattr(module, "bias", None) is not None:
            assert torch.equal(model.get_submodule(name).bias, module.bias)
    assert type(model.model.layers[0].self_attn.q_proj.weight).__name__ == "NVFP4Tensor"


def test_no_format_but_those_without_a_kind_of_weights_is_left_out() -> None:
    assert set(FORMATS) - set(WEIGHT_KINDS) == {"bf16", "mxfp6", "mxfp6-e2m3", "fp4-pqt"}


def test_formats_that_torchao_cannot_store_are_refused_with_every_layer_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = {"0.self_attn.q_proj": "mxfp6", "0.mlp.gate_proj": "nvfp4", "0.mlp.up_proj": "fp8"}
    save_plan(tmp_path, formats, intermediate_size=72)
    assert export(tmp_path) == 1
    *reasons, last = capsys.readouterr().err.splitlines()
    assert [line for line in reasons if line.startswith("  ")] == [
        "  model.layers.0.self_attn.q_proj: torchao cannot store weights in mxfp6",
        "  model.layers.0.mlp.gate_proj: its shape (72, 64) is not a multiple of (16, 16), which 'E2M1, an E4M3 scale "
        "per 16 values' needs",
    ]
    assert last.startswith("snip-hf: The target 'checkpoint' cannot express the plan: it does not support 2 modules")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "plan.json"]


def test_a_plan_without_a_quantized_forward_gemm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(tmp_path, {})
    assert export(tmp_path) == 2
    assert "No layer of the plan has a forward GEMM whose weights can be quantized." in capsys.readouterr().err


@pytest.mark.parametrize("output", ["quantized", "new/folders/quantized"])
def test_a_model_that_does_not_run_when_it_is_quantized_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    def fails(model: Any) -> None:
        raise ValueError("The model does not run.")

    save_plan(tmp_path, {"0.mlp.up_proj": "fp8"})
    command = ["export", str(tmp_path / "plan.json"), "--to", "checkpoint", "--model", str(tmp_path / "model")]
    command += ["--output", str(tmp_path / output)]
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(export_checkpoint, "_check_runs", fails)
        assert main(command) == 2
    assert "The model does not run." in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / output).parent.iterdir() if path.name.startswith(".")) == []
    assert (tmp_path / output / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "quantized/x").mkdir(parents=True), "expected a new or an empty folder"),
        (lambda path: (path / "model/model.safetensors").unlink(), "Cannot load the model in"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, message: str
) -> None:
    save_plan(tmp_path, {"0.mlp.up_proj": "fp8"})
    spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert export(tmp_path) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_is_quantized_already_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(tmp_path, {"0.mlp.up_proj": "fp8"})
    assert export(tmp_path) == 0
    (tmp_path / "model").rename(tmp_path / "old")
    (tmp_path / "quantized").rename(tmp_path / "model")
    assert export(tmp_path) == 2
    assert "The model is already quantized" in capsys.readouterr().err
    assert not (tmp_path / "quantized").exists()


def test_a_checkpoint_needs_a_model_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(tmp_path, {"0.mlp.up_proj": "fp8"})
    assert main(["export", str(tmp_path / "plan.json"), "--to", "checkpoint"]) == 2
    assert "A checkpoint needs --model" in capsys.readouterr().err
