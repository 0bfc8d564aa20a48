"""Does a file for another library say, to that library's own parser, what the plan says?"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import types
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
import yaml
from llama_plans import BLOCK, llama, make_plan
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from snip_hf import SnipConfig, convert_model, restore_model
from snip_hf.cli import main
from snip_hf.costs.flops import linear_flops
from snip_hf.integrations.export import NotExpressible, export_plan
from snip_hf.integrations.export_targets import TARGETS
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

# --- Megatron-LM -----------------------------------------------------------------------------------------------------

# Fields of TEQuantizationRecipe in NVIDIA/Megatron-LM, megatron/core/extensions/transformer_engine.py, and the values
# of Fp8Recipe and Fp4Recipe in megatron/core/enums.py, of 22 August 2026.
RECIPE_FIELDS = {
    *("fp8_quantization_recipe", "fp4_quantization_recipe", "custom_recipe_factory", "fp8_format"),
    *("override_quantized_autocast", "override_nonquantized_autocast", "tp_only_amax_red", "fp8_param", "fp4_param"),
}
FP8_RECIPES, FP4_RECIPES = {"tensorwise", "mxfp8", "blockwise"}, {"nvfp4"}


def megatron_recipe(text: str, module: str) -> dict[str, Any]:
    """The training recipe of a module, as RecipeConfig.match (megatron/core/quantization/quant_config.py) and
    TEQuantizationParams.parse_from_config find it."""
    document = yaml.safe_load(text)
    assert set(document) == {"configs", "matchers"}
    key = None
    for matcher in document["matchers"].values():
        assert set(matcher) == {"config", "type", "pattern", "enabled"}
        assert matcher["type"] == "glob"
        if matcher["enabled"] and fnmatch.fnmatch(module, matcher["pattern"]):
            key = matcher["config"]
            break
    assert key is not None
    config = document["configs"][key]
    assert set(config) == {"transformer_engine_config_type", "training_recipe"}
    assert config["transformer_engine_config_type"] == "TEQuantizationParams"
    recipe: dict[str, Any] = config["training_recipe"]
    assert set(recipe) <= RECIPE_FIELDS
    assert recipe.get("fp8_quantization_recipe") in {None, *FP8_RECIPES}
    assert recipe.get("fp4_quantization_recipe") in {None, *FP4_RECIPES}
    assert recipe.get("fp8_format", "e4m3") in {"e4m3", "hybrid"}
    assert not {"fp8_quantization_recipe", "fp4_quantization_recipe"} <= set(recipe)
    return {name: value for name, value in recipe.items() if name != "override_nonquantized_autocast"}


def test_megatron_finds_the_recipe_of_each_module_in_the_yaml() -> None:
    plan = make_plan("nvfp4", b1_gate_proj="mxfp8", b1_up_proj="mxfp8", b1_down_proj="bf16", b0_o_proj="fp8")
    text = export_plan(plan, "megatron").text
    block = "decoder.layers"
    assert megatron_recipe(text, f"{block}.0.self_attention.linear_qkv") == {"fp4_quantization_recipe": "nvfp4"}
    assert megatron_recipe(text, f"{block}.0.self_attention.linear_proj") == {"fp8_quantization_recipe": "blockwise"}
    assert megatron_recipe(text, f"{block}.1.mlp.linear_fc1") == {"fp8_quantization_recipe": "mxfp8"}
    assert megatron_recipe(text, f"{block}.1.mlp.linear_fc2") == {}
    assert megatron_recipe(text, "output_layer") == {}


@pytest.mark.parametrize(("name", "fp8_format"), [("fp8-tensor", "e4m3"), ("fp8-tensor-e5m2", "hybrid")])
def test_megatron_is_told_the_format_of_gradients_with_a_scale_per_tensor(name: str, fp8_format: str) -> None:
    recipe = megatron_recipe(export_plan(make_plan(name), "megatron").text, "decoder.layers.0.mlp.linear_fc1")
    assert recipe == {"fp8_quantization_recipe": "tensorwise", "fp8_format": fp8_format}


def test_block_1_of_megatron_is_not_block_11() -> None:
    config = llama(num_hidden_layers=12)
    text = export_plan(make_plan("nvfp4", config, b11_down_proj="mxfp8"), "megatron").text
    assert megatron_recipe(text, "decoder.layers.1.mlp.linear_fc2") == {"fp4_quantization_recipe": "nvfp4"}
    assert megatron_recipe(text, "decoder.layers.11.mlp.linear_fc2") == {"fp8_quantization_recipe": "mxfp8"}


def test_what_megatron_cannot_express_is_refused_with_the_reason_for_each_module() -> None:
    plan = make_plan("nvfp4", b0_q_proj="mxfp8", b0_down_proj="mxfp6", b1_o_proj=("nvfp4", "nvfp4", "bf16"))
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, "megatron")
    offered = "bf16, fp8, fp8-tensor, fp8-tensor-e5m2, mxfp8, nvfp4"
    assert error.value.reasons == {
        "decoder.layers.0.self_attention.linear_qkv": "its parts differ in the plan: q_proj mxfp8/mxfp8/mxfp8; "
        "k_proj nvfp4/nvfp4/nvfp4; v_proj nvfp4/nvfp4/nvfp4",
        "decoder.layers.0.mlp.linear_fc2": f"mxfp6 is no format there (it has {offered})",
        "decoder.layers.1.self_attention.linear_proj": "forward, grad_input, grad_weight cannot be nvfp4, nvfp4, bf16 "
        "in one module",
    }


def renamed(plan: PrecisionPlan, old: str, new: str) -> PrecisionPlan:
    return PrecisionPlan.from_dict(json.loads(json.dumps(plan.to_dict()).replace(old, new)))


@pytest.mark.parametrize("nearest", [False, True])
def test_a_layer_whose_name_means_nothing_to_megatron_is_refused_even_with_nearest(nearest: bool) -> None:
    plan = renamed(make_plan("nvfp4"), f"{BLOCK}.1.self_attn.o_proj", f"{BLOCK}.1.mixer.in_proj")
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, "megatron", nearest)
    assert error.value.reasons == {f"{BLOCK}.1.mixer.in_proj": "no module there is known for this name"}


def test_two_towers_are_not_taken_for_one_by_megatron() -> None:
    plan = renamed(make_plan("nvfp4"), f"{BLOCK}.1.mlp.down_proj", "vision.layers.0.mlp.down_proj")
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, "megatron")
    assert error.value.reasons == {
        "vision.layers.0.mlp.down_proj": f"decoder.layers.0.mlp.linear_fc2 is already that of {BLOCK}.0.mlp.down_proj"
    }


def without(plan: PrecisionPlan, *ends: str) -> PrecisionPlan:
    document = plan.to_dict()
    for table in (document["assignment"], document["flops"]):
        for layer in [layer for layer in table if layer.endswith(ends)]:
            del table[layer]
    document["stages"] = [[layer for layer in stage if layer in document["flops"]] for stage in document["stages"]]
    return PrecisionPlan.from_dict(document)


def test_a_module_is_not_quantized_whose_part_the_plan_leaves_out() -> None:
    plan = without(make_plan("nvfp4"), "k_proj", "0.mlp.up_proj")
    reason = "is a part of the module that the plan leaves in bf16"
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, "megatron")
    assert error.value.reasons == {
        "decoder.layers.0.self_attention.linear_qkv": f"k_proj {reason}",
        "decoder.layers.0.mlp.linear_fc1": f"up_proj {reason}",
        "decoder.layers.1.self_attention.linear_qkv": f"k_proj {reason}",
    }
    text = export_plan(plan, "megatron", nearest=True).text
    assert megatron_recipe(text, "decoder.layers.0.mlp.linear_fc1") == {}
    assert megatron_recipe(text, "decoder.layers.1.mlp.linear_fc1") == {"fp4_quantization_recipe": "nvfp4"}


# --- nearest ---------------------------------------------------------------------------------------------------------


def test_nearest_takes_the_format_of_most_flops_and_says_what_changed() -> None:
    # 128 x 128 each: of nine GEMMs of one module, seven are nvfp4.
    plan = make_plan("nvfp4", b0_q_proj=("mxfp8", "nvfp4", "mxfp8"))
    export = export_plan(plan, "megatron", nearest=True)
    assert export.changes == {
        f"{BLOCK}.0.self_attn.q_proj:forward": ["mxfp8", "nvfp4"],
        f"{BLOCK}.0.self_attn.q_proj:grad_weight": ["mxfp8", "nvfp4"],
    }
    total = 2 * 3 * (4 * 128 * 128 + 3 * 128 * 256)
    assert plan.fp4_fraction == pytest.approx(1 - 2 * 128 * 128 / total)
    assert export.coarser == pytest.approx(2 * 128 * 128 / total)
    assert export.plan.fp4_fraction == 1.0


def test_nearest_takes_more_bits_where_flops_are_equal() -> None:
    plan = make_plan("nvfp4", b0_gate_proj="mxfp8")
    export = export_plan(plan, "megatron", nearest=True)
    assert set(export.changes) == {f"{BLOCK}.0.mlp.up_proj:{gemm}" for gemm in GEMMS}
    assert export.coarser == 0.0


@pytest.mark.parametrize(
    ("target", "given", "expected"),
    [
        ("megatron", "fp4", "nvfp4"),
        ("megatron", "mxfp6", "mxfp8"),  # not fewer bits, scales of the same kind
        ("megatron", "int8", "fp8"),
        ("fouroversix", "mxfp4-rht", "mxfp4"),
        ("fouroversix", "mxfp8", "bf16"),
        ("torchao", "mxfp4", "nvfp4"),
    ],
)
def test_a_format_that_a_target_lacks_becomes_the_next_one_with_no_fewer_bits(
    target: str, given: str, expected: str
) -> None:
    export = export_plan(make_plan(given), target, nearest=True)
    assert {name for row in export.plan.assignment.values() for name in row.values()} == {expected}


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_format_that_quantizes_weights_alone_becomes_bf16(target: str) -> None:
    export = export_plan(make_plan("fp4-pqt"), target, nearest=True)
    assert {name for row in export.plan.assignment.values() for name in row.values()} == {"bf16"}
    assert export.coarser == 0.0


def test_operands_that_a_format_leaves_alone_are_coarser_in_4_bits() -> None:
    # One module there, for which k_proj and v_proj decide. fp4-pqt leaves activations and gradients in BF16.
    plan = make_plan("nvfp4", b0_q_proj="fp4-pqt")
    export = export_plan(plan, "megatron", nearest=True)
    assert set(export.changes) == {f"{BLOCK}.0.self_attn.q_proj:{gemm}" for gemm in GEMMS}
    assert export.coarser == pytest.approx(3 * 128 * 128 / (2 * 3 * (4 * 128 * 128 + 3 * 128 * 256)))


def test_a_bias_that_torchao_drops_is_refused_where_the_model_is_known() -> None:
    config = llama(mlp_bias=True)
    plan, model = make_plan("bf16", config, b1_up_proj="mxfp8"), AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, "torchao", model=model)
    why = "it has a bias, which torchao drops or refuses in mxfp8"
    assert error.value.reasons == {f"{BLOCK}.1.mlp.up_proj": why}
    kept = export_plan(plan, "torchao", nearest=True, model=model)
    assert (kept.unfit, kept.plan.fp4_fraction) == (error.value.reasons, 0.0)
    assert set(kept.plan.assignment[f"{BLOCK}.1.mlp.up_proj"].values()) == {"bf16"}
    script(kept.text).convert(model)


@pytest.mark.parametrize("target", ["torchao", "fouroversix"])
def test_experts_are_refused_where_the_model_is_known(target: str) -> None:
    model = mixtures.build("mixtral")
    convert_model(model, SnipConfig())
    assignment = {layer: dict.fromkeys(GEMMS, "nvfp4") for layer in snip_linears(model)}
    plan = PrecisionPlan(assignment, linear_flops(model), (tuple(assignment),), PlanProvenance(step=1, policy="snip"))
    restore_model(model)
    reasons = export_plan(plan, target, nearest=True, model=model).unfit
    experts = {layer: reasons[layer] for layer in assignment if "experts" in layer}
    assert len(experts) == 2 * mixtures.LAYERS
    assert set(experts.values()) == {"its class is MixtralExperts, expected nn.Linear itself"}
    in_fp4 = dataclasses.replace(plan, assignment={layer: dict.fromkeys(GEMMS, "fp4") for layer in assignment})
    with pytest.raises(NotExpressible) as error:
        export_plan(in_fp4, target, model=model)
    assert all(
        error.value.reasons[layer].startswith("fp4 is no format there")
        and error.value.reasons[layer].endswith("; its class is MixtralExperts, expected nn.Linear itself")
        for layer in experts
    )
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, "megatron", nearest=True, model=model)
    assert error.value.reasons == dict.fromkeys(experts, "no module there is known for this name")


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("target", ["torchao", "fouroversix"])
def test_experts_are_refused_where_the_model_is_not_known(target: str, nearest: bool) -> None:
    names = ["0.self_attn.q_proj", "0.mlp.experts.gate_up_proj", "0.ffn.experts.mlp.w1", "0.mlp.input_linear.weight"]
    linears = ["0.mlp.experts.0.down_proj", "0.mlp.gate_up_proj", "0.mlp.shared_experts.up_proj"]
    flops = {f"{BLOCK}.{name}": dict.fromkeys(GEMMS, 1.0) for name in names + linears}
    plan = PrecisionPlan.uniform(flops, "nvfp4", [list(flops)], PlanProvenance(step=1, policy="snip"))
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, target, nearest=nearest)
    assert list(error.value.reasons) == [f"{BLOCK}.{name}" for name in names[1:]]
    assert all("name the model with --model" in why for why in error.value.reasons.values())


def test_a_gemm_that_does_not_run_stops_no_export() -> None:
    plan = make_plan(("nvfp4", "nvfp4", "mxfp8"))
    document = plan.to_dict()
    for row in document["flops"].values():
        row["grad_weight"] = 0.0  # frozen weights
    export = export_plan(PrecisionPlan.from_dict(document), "megatron")
    assert export.changes == {}
    assert megatron_recipe(export.text, "decoder.layers.0.mlp.linear_fc1") == {"fp4_quantization_recipe": "nvfp4"}


def test_a_layer_without_tokens_is_refused_like_others() -> None:
    config = llama(mlp_bias=True)
    model = AutoModelForCausalLM.from_config(config)
    plan = make_plan("bf16", config, b0_up_proj="mxfp8", b1_up_proj="mxfp8", b1_o_proj="fp4")
    idle = {f"{BLOCK}.1.mlp.up_proj", f"{BLOCK}.1.self_attn.o_proj"}
    plan = dataclasses.replace(plan, tokens={layer: float(layer not in idle) for layer in plan.assignment})
    with pytest.raises(NotExpressible) as error:
        export_plan(plan, "torchao", model=model)
    assert error.value.reasons.keys() == {f"{BLOCK}.0.mlp.up_proj", *idle}
    assert error.value.reasons[f"{BLOCK}.1.self_attn.o_proj"].startswith("fp4 is no format there")
    kept = export_plan(plan, "torchao", nearest=True, model=model)
    assert list(kept.unfit) == [f"{BLOCK}.0.mlp.up_proj", f"{BLOCK}.1.mlp.up_proj"]
    assert set(kept.plan.assignment[f"{BLOCK}.1.self_attn.o_proj"].values()) == {"nvfp4"}


@pytest.mark.parametrize("target", list(TARGETS))
def test_what_was_rounded_can_be_expressed(target: str) -> None:
    names = list(FORMATS)
    layers = make_plan("bf16").assignment
    rows = {layer: [names[(7 * i + 3 * j) % len(names)] for j in range(3)] for i, layer in enumerate(layers)}
    document = make_plan("bf16").to_dict()
    document["assignment"] = {layer: dict(zip(GEMMS, row, strict=True)) for layer, row in rows.items()}
    rounded = export_plan(PrecisionPlan.from_dict(document), target, nearest=True)
    again = export_plan(rounded.plan, target)
    assert again.changes == {}
    assert again.text == rounded.text


# --- fouroversix -----------------------------------------------------------------------------------------------------

# Fields of ModuleQuantizationConfig in mit-han-lab/fouroversix, src/fouroversix/model/config.py, of 21 April 2026.
OVERRIDE_FIELDS = {
    *("dtype", "scale_rule", "gradient_scale_rule", "weight_scale_2d", "keep_master_weights"),
    *("disable_fprop_quantization", "disable_dgrad_quantization", "disable_wgrad_quantization"),
}
SCALE_RULES = {"abs_max", "mae", "mse", "static_4", "static_6"}


def test_transformers_reads_the_overrides_of_each_module() -> None:
    quantization_config = pytest.importorskip("transformers.utils.quantization_config")
    if not hasattr(quantization_config, "FourOverSixConfig"):
        pytest.skip("needs FourOverSixConfig")
    plan = make_plan("nvfp4", b0_q_proj="bf16", b0_k_proj=("mxfp4", "bf16", "mxfp4"), b1_up_proj="nvfp4-46")
    document = json.loads(export_plan(plan, "fouroversix", outside=["lm_head", "score"]).text)
    config = quantization_config.FourOverSixConfig.from_dict(document)
    # Every entry is a field: what the class does not know it drops without a word.
    assert {name: getattr(config, name) for name in document} == document
    layers = set(plan.assignment)
    overrides = config.module_config_overrides
    assert config.modules_to_not_convert == ["lm_head", "score", f"{BLOCK}.0.self_attn.q_proj"]
    assert set(overrides) == layers - set(config.modules_to_not_convert)
    for override in overrides.values():
        assert set(override) <= OVERRIDE_FIELDS
        assert {override["scale_rule"], override.get("gradient_scale_rule", "mse")} <= SCALE_RULES
        assert override["keep_master_weights"] is True
    assert overrides[f"{BLOCK}.0.self_attn.k_proj"] == {
        "dtype": "mxfp4",
        "scale_rule": "static_6",
        "weight_scale_2d": False,
        "keep_master_weights": True,
        "disable_dgrad_quantization": True,
    }
    assert overrides[f"{BLOCK}.1.mlp.up_proj"]["scale_rule"] == "mse"
    assert overrides[f"{BLOCK}.1.mlp.up_proj"]["gradient_scale_rule"] == "static_6"
    assert overrides[f"{BLOCK}.0.self_attn.v_proj"]["scale_rule"] == "static_6"
    assert overrides[f"{BLOCK}.0.self_attn.v_proj"]["weight_scale_2d"] is True


# --- torchao ---------------------------------------------------------------------------------------------------------


def script(text: str) -> Any:
    module = types.ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), module.__dict__)
    return module


def test_the_torchao_script_converts_each_layer_as_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    from torchao.prototype.blockwise_fp8_training import linear as blockwise
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor

    monkeypatch.setattr(blockwise, "is_sm_at_least_90", lambda: True)  # which it asserts when it converts
    plan = make_plan(
        "bf16",
        b0_q_proj="fp8",
        b0_k_proj="fp8-tensor",
        b0_v_proj="fp8-tensor-e5m2",
        b0_up_proj="mxfp8",
        b0_down_proj=("mxfp8", "mxfp8", "bf16"),
        b1_q_proj="nvfp4",
    )
    model = AutoModelForCausalLM.from_config(llama())
    parameters = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    script(export_plan(plan, "torchao").text).convert(model)
    block = model.model.layers[0]
    assert type(block.self_attn.q_proj) is blockwise.Float8BlockwiseLinear
    for module, dtype in ((block.self_attn.k_proj, torch.float8_e4m3fn), (block.self_attn.v_proj, torch.float8_e5m2)):
        assert type(module) is Float8Linear
        assert isinstance(module.config, Float8LinearConfig)
        assert module.config.cast_config_grad_output.target_dtype == dtype
        assert module.config.cast_config_input.target_dtype == torch.float8_e4m3fn
    for module, kept in ((block.mlp.up_proj, False), (block.mlp.down_proj, True)):
        assert type(module.weight.data) is MXFP8TrainingWeightWrapperTensor
        assert module.weight.data.config.wgrad_with_hp is kept
    assert type(model.model.layers[1].self_attn.q_proj) is NVFP4Linear
    named = {name for name, formats in plan.assignment.items() if set(formats.values()) != {"bf16"}}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in named:
            assert type(module) is nn.Linear
            assert module.weight.data_ptr() == parameters[f"{name}.weight"]
            assert type(module.weight.data) is torch.Tensor


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (llama(num_hidden_layers=1), "model.layers.1.mlp.up_proj is NoneType, expected nn.Linear. Is it the plan's"),
        (llama(intermediate_size=144), "in_features=128, out_features=144, bias=False), expected multiples of 32."),
        (llama(mlp_bias=True), "model.layers.1.mlp.up_proj has a bias"),
    ],
)
def test_the_torchao_script_refuses_what_torchao_cannot_convert_before_it_converts(
    config: LlamaConfig, message: str
) -> None:
    plan = make_plan("bf16", b0_q_proj="fp8-tensor", b1_up_proj="mxfp8")
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=re.escape(message)):
        script(export_plan(plan, "torchao").text).convert(model)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_a_layer_name_cannot_put_code_into_the_script() -> None:
    name = 'model.layers.0.\'}, print(1), {\'"""\\u2028'
    plan = renamed(make_plan("mxfp8"), f"{BLOCK}.0.mlp.up_proj", json.dumps(name)[1:-1])
    (names,) = script(export_plan(plan, "torchao").text).LAYERS.values()
    assert names == set(plan.assignment)
    assert name in names


# --- five formats in one plan ----------------------------------------------------------------------------------------

FIVE = ("mxfp4", "nvfp4", "mxfp6", "fp8", "bf16")


def a_plan_of_five_formats() -> PrecisionPlan:
    """Each format for all three GEMMs of some layers, and one layer that has three of them."""
    document = make_plan("bf16").to_dict()
    rows = {layer: dict.fromkeys(GEMMS, FIVE[i % 5]) for i, layer in enumerate(document["assignment"])}
    rows[f"{BLOCK}.1.mlp.down_proj"] = dict(zip(GEMMS, ("nvfp4", "mxfp6", "bf16"), strict=True))
    return PrecisionPlan.from_dict({**document, "assignment": rows})


def inexpressible(plan: PrecisionPlan, target: str) -> set[str]:
    """Modules of which no setting of the target says what the plan says, found by trying all settings."""
    there = TARGETS[target]
    offered = {setting.formats for setting in there.settings}
    rows: dict[str, set[tuple[str, ...]]] = {}
    for layer, formats in plan.assignment.items():
        rows.setdefault(there.module_of(layer) or layer, set()).add(tuple(formats.values()))
    return {module for module, found in rows.items() if len(found) > 1 or not found <= offered}


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_plan_of_five_formats_is_refused_with_every_module_or_rounded_with_its_share(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, output = a_plan_of_five_formats(), tmp_path / "exported"
    plan.save(tmp_path / "plan.json")
    command = ["export", str(tmp_path / "plan.json"), "--to", target, "-o", str(output)]
    assert main(command) == 1
    *lines, last = capsys.readouterr().err.splitlines()
    expected = inexpressible(plan, target)
    assert {line.strip().split(": ")[0] for line in lines} == expected and len(lines) == len(expected) > 3
    assert f"lacks the above for {len(expected)} modules. --nearest rounds what it can." in last
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert main([*command, "--nearest"]) == 0
    share = export_plan(plan, target, nearest=True).plan.fp4_fraction
    out = capsys.readouterr().out
    assert f"FP4 share {plan.fp4_fraction:.4f} in the plan, {share:.4f} in the file." in out
    assert output.read_text() == export_plan(plan, target, nearest=True).text
