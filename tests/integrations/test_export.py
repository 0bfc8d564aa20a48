"""Another library's own parser reads the plan's formats from the exported file."""

from __future__ import annotations

import fnmatch
import json
import re
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kernels.test_hopper_layers import randn
from llama_plans import BLOCK, llama, make_plan
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from snip_hf import cli, quantize
from snip_hf.cli import main
from snip_hf.integrations.export import TARGETS, NotExpressible
from snip_hf.planning.plan import PrecisionPlan

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
    text = TARGETS["megatron"](plan)
    block = "decoder.layers"
    assert megatron_recipe(text, f"{block}.0.self_attention.linear_qkv") == {"fp4_quantization_recipe": "nvfp4"}
    assert megatron_recipe(text, f"{block}.0.self_attention.linear_proj") == {"fp8_quantization_recipe": "blockwise"}
    assert megatron_recipe(text, f"{block}.1.mlp.linear_fc1") == {"fp8_quantization_recipe": "mxfp8"}
    assert megatron_recipe(text, f"{block}.1.mlp.linear_fc2") == {}
    assert megatron_recipe(text, "output_layer") == {}


@pytest.mark.parametrize(
    ("name", "fp8_format"), [("fp8-tensor", "e4m3"), ("fp8-delayed", "e4m3"), ("fp8-tensor-e5m2", "hybrid")]
)
def test_megatron_is_told_the_format_of_gradients_with_a_scale_per_tensor(name: str, fp8_format: str) -> None:
    recipe = megatron_recipe(TARGETS["megatron"](make_plan(name)), "decoder.layers.0.mlp.linear_fc1")
    assert recipe == {"fp8_quantization_recipe": "tensorwise", "fp8_format": fp8_format}


def test_block_1_of_megatron_is_not_block_11() -> None:
    config = llama(num_hidden_layers=12)
    text = TARGETS["megatron"](make_plan("nvfp4", config, b11_down_proj="mxfp8"))
    assert megatron_recipe(text, "decoder.layers.1.mlp.linear_fc2") == {"fp4_quantization_recipe": "nvfp4"}
    assert megatron_recipe(text, "decoder.layers.11.mlp.linear_fc2") == {"fp8_quantization_recipe": "mxfp8"}


def test_plans_that_megatron_cannot_express_are_refused_with_the_reason_for_each_module() -> None:
    plan = make_plan("nvfp4", b0_q_proj="mxfp8", b0_down_proj="mxfp6", b1_o_proj=("nvfp4", "nvfp4", "bf16"))
    with pytest.raises(NotExpressible) as error:
        TARGETS["megatron"](plan)
    offered = "bf16, fp8, fp8-delayed, fp8-tensor, fp8-tensor-e5m2, mxfp8, nvfp4"
    assert error.value.reasons == {
        "decoder.layers.0.self_attention.linear_qkv": "its parts differ in the plan: q_proj mxfp8/mxfp8/mxfp8; "
        "k_proj nvfp4/nvfp4/nvfp4; v_proj nvfp4/nvfp4/nvfp4",
        "decoder.layers.0.mlp.linear_fc2": f"it has no format mxfp6 (only {offered})",
        "decoder.layers.1.self_attention.linear_proj": "forward, grad_input, grad_weight cannot be nvfp4, nvfp4, bf16 "
        "in one module",
    }


def renamed(plan: PrecisionPlan, old: str, new: str) -> PrecisionPlan:
    return PrecisionPlan.from_dict(json.loads(json.dumps(plan.to_dict()).replace(old, new)))


def test_a_layer_whose_name_means_nothing_to_megatron_is_refused() -> None:
    plan = renamed(make_plan("nvfp4"), f"{BLOCK}.1.self_attn.o_proj", f"{BLOCK}.1.mixer.in_proj")
    with pytest.raises(NotExpressible) as error:
        TARGETS["megatron"](plan)
    assert error.value.reasons == {f"{BLOCK}.1.mixer.in_proj": "no module of Megatron-LM is known for this name"}


def test_two_towers_are_not_taken_for_one_by_megatron() -> None:
    plan = renamed(make_plan("nvfp4"), f"{BLOCK}.1.mlp.down_proj", "vision.layers.0.mlp.down_proj")
    with pytest.raises(NotExpressible) as error:
        TARGETS["megatron"](plan)
    assert error.value.reasons == {
        "vision.layers.0.mlp.down_proj": f"decoder.layers.0.mlp.linear_fc2 already stands for {BLOCK}.0.mlp.down_proj"
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
    with pytest.raises(NotExpressible) as error:
        TARGETS["megatron"](plan)
    assert error.value.reasons == {
        "decoder.layers.0.self_attention.linear_qkv": "the plan leaves its part k_proj in bf16",
        "decoder.layers.0.mlp.linear_fc1": "the plan leaves its part up_proj in bf16",
        "decoder.layers.1.self_attention.linear_qkv": "the plan leaves its part k_proj in bf16",
    }
    in_bf16 = make_plan("nvfp4", b0_q_proj="bf16", b0_v_proj="bf16", b1_q_proj="bf16", b1_v_proj="bf16")
    text = TARGETS["megatron"](without(in_bf16, "k_proj"))
    assert megatron_recipe(text, "decoder.layers.0.self_attention.linear_qkv") == {}


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
        b0_o_proj="fp8-delayed",
        b0_up_proj="mxfp8",
        b0_down_proj=("mxfp8", "mxfp8", "bf16"),
        b1_q_proj="nvfp4",
    )
    model = AutoModelForCausalLM.from_config(llama())
    parameters = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    script(TARGETS["torchao"](plan)).convert(model)
    block = model.model.layers[0]
    attention = block.self_attn
    assert type(attention.q_proj) is blockwise.Float8BlockwiseLinear
    for module, dtype, rounds in (
        (attention.k_proj, torch.float8_e4m3fn, False),
        (attention.v_proj, torch.float8_e5m2, False),
        (attention.o_proj, torch.float8_e4m3fn, True),
    ):
        assert type(module) is Float8Linear
        assert isinstance(module.config, Float8LinearConfig)
        assert module.config.cast_config_grad_output.target_dtype == dtype
        assert module.config.round_scales_to_power_of_2 is rounds
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


def test_torchao_s_powers_of_two_round_as_the_emulated_fp8_delayed_does(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.float8
    from torchao.float8 import Float8LinearConfig, float8_linear

    # Products on FP8 tensor cores need a GPU.
    monkeypatch.setattr(torchao.float8, "Float8LinearConfig", partial(Float8LinearConfig, emulate=True))
    seen: list[tuple[str, Tensor, Tensor]] = []
    encode = float8_linear.hp_tensor_to_float8_dynamic

    def noted(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        encoded = encode(tensor, *arguments, **more)
        seen.append((more["gemm_input_role"].name, tensor, encoded.to_original_precision()))
        return encoded

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", noted)
    model = AutoModelForCausalLM.from_config(llama()).bfloat16()
    script(TARGETS["torchao"](make_plan("bf16", b0_up_proj="fp8-delayed"))).convert(model)
    model.model.layers[0].mlp(randn(48, 128).requires_grad_()).backward(1e-4 * randn(48, 128, seed=1))
    operands = {"INPUT": "activation", "WEIGHT": "weight", "GRAD_OUTPUT": "gradient"}
    assert [role for role, *_ in seen] == ["INPUT", "WEIGHT", "GRAD_OUTPUT", "WEIGHT", "GRAD_OUTPUT", "INPUT"]
    for role, tensor, rounded in seen:
        assert torch.equal(quantize(tensor, "fp8-delayed", operands[role]).to(rounded.dtype), rounded)
        assert not torch.equal(quantize(tensor, "fp8-tensor", operands[role]).to(rounded.dtype), rounded)


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
        script(TARGETS["torchao"](plan)).convert(model)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_a_layer_name_cannot_put_code_into_the_script() -> None:
    name = 'model.layers.0.\'}, print(1), {\'"""\\u2028'
    plan = renamed(make_plan("mxfp8"), f"{BLOCK}.0.mlp.up_proj", json.dumps(name)[1:-1])
    (names,) = script(TARGETS["torchao"](plan)).LAYERS.values()
    assert names == set(plan.assignment)
    assert name in names


def test_a_gemm_that_does_not_run_stops_no_export() -> None:
    document = make_plan(("nvfp4", "nvfp4", "mxfp8")).to_dict()
    for row in document["flops"].values():
        row["grad_weight"] = 0.0  # frozen weights
    plan = PrecisionPlan.from_dict(document)
    text = TARGETS["megatron"](plan)
    assert megatron_recipe(text, "decoder.layers.0.mlp.linear_fc1") == {"fp4_quantization_recipe": "nvfp4"}
    assert "nvfp4" in script(TARGETS["torchao"](plan)).__dict__


def test_plans_that_torchao_cannot_express_are_refused_with_the_reason_for_each_layer() -> None:
    plan = make_plan("mxfp8", b0_q_proj="mxfp4", b1_up_proj=("nvfp4", "nvfp4", "bf16"))
    with pytest.raises(NotExpressible, match="The target 'torchao' cannot express the plan: it does not support 2 "):
        TARGETS["torchao"](plan)
    with pytest.raises(NotExpressible) as error:
        TARGETS["torchao"](plan)
    assert error.value.reasons == {
        f"{BLOCK}.0.self_attn.q_proj": "it has no format mxfp4 (only bf16, fp8, fp8-delayed, fp8-tensor, "
        "fp8-tensor-e5m2, mxfp8, nvfp4)",
        f"{BLOCK}.1.mlp.up_proj": "forward, grad_input, grad_weight cannot be nvfp4, nvfp4, bf16 in one module",
    }


# --- snip-hf export --------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "model")
    make_plan("nvfp4", b0_down_proj="mxfp8").save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_command_writes_the_file_and_keeps_one_that_exists(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = plan_path.with_name("precision.yaml")
    command = ["export", str(plan_path), "--to", "megatron", "-o", str(output)]
    assert main([*command, "--model", str(plan_path.with_name("model"))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Written: {output}"
    assert output.read_text() == TARGETS["megatron"](PrecisionPlan.load(plan_path))
    assert main(command) == 2
    assert "exists already; give another --output, or --overwrite." in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


def test_the_command_prints_the_file_alone_to_stdout(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(plan_path), "--to", "torchao", "--model", str(plan_path.with_name("model"))]) == 0
    captured = capsys.readouterr()
    assert captured.out == TARGETS["torchao"](PrecisionPlan.load(plan_path))
    assert "The plan fits" in captured.err


def test_the_command_refuses_with_exit_code_1_and_a_list_and_writes_nothing(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan("nvfp4", b0_q_proj="mxfp8").save(plan_path)
    output = plan_path.with_name("precision.yaml")
    assert main(["export", str(plan_path), "--to", "megatron", "-o", str(output)]) == 1
    captured = capsys.readouterr()
    first, last = captured.err.splitlines()
    assert captured.out == "" and first.startswith("  decoder.layers.0.self_attention.linear_qkv: its parts differ")
    assert last.startswith("snip-hf: The target 'megatron' cannot express the plan: it does not support 1 modules. ")
    assert not output.exists()


def test_the_command_refuses_another_model(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(num_hidden_layers=1).save_pretrained(plan_path.with_name("other"))
    output = plan_path.with_name("script.py")
    other = ["--model", str(plan_path.with_name("other"))]
    assert main(["export", str(plan_path), "--to", "torchao", "-o", str(output), *other]) == 1
    assert "7 layers are in the plan but not in" in capsys.readouterr().out
    assert not output.exists()


def test_an_unknown_target_and_an_unknown_format_are_refused(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(cli.TARGETS) == [*TARGETS, "checkpoint"]
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(plan_path), "--to", "vllm"])
    message = capsys.readouterr().err
    assert all(name in message for name in cli.TARGETS)
    plan_path.write_text(plan_path.read_text().replace("nvfp4", "nvfp3"))
    assert main(["export", str(plan_path), "--to", "megatron"]) == 2
    assert "Unknown format 'nvfp3'" in capsys.readouterr().err
