"""Exports a plan to another training library: a YAML file for Megatron-LM, or a script for torchao.

Each target has one table from formats to its own settings. A plan that a target cannot express is refused, with a
reason for each layer. docs/sharing.md lists the tables with their sources.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..numerics.formats import UNQUANTIZED
from ..numerics.gemms import GEMMS
from ..planning.plan import PrecisionPlan

_BF16 = UNQUANTIZED.name


class NotExpressible(ValueError):
    """A target cannot express a plan."""

    def __init__(self, target: str, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        """Layer, or module of the target -> reason."""
        super().__init__(
            f"The target {target!r} cannot express the plan: it does not support {len(reasons)} modules. Train with "
            "formats that it supports (docs/sharing.md), or name these layers in skip_modules."
        )


def _running(plan: PrecisionPlan, layer: str) -> dict[str, str]:
    """Returns GEMM -> format of the GEMMs that run; a frozen weight has no gradient."""
    return {gemm: name for gemm, name in plan.assignment[layer].items() if plan.flops[layer][gemm] > 0}


def _lacking(formats: Mapping[str, str], known: Collection[str]) -> str:
    """Returns why a target has no setting for the formats of a layer."""
    unknown = [name for name in dict.fromkeys(formats.values()) if name not in known]
    if unknown:
        return f"it has no format {', '.join(unknown)} (only {', '.join(sorted(known))})"
    return f"{', '.join(formats)} cannot be {', '.join(formats.values())} in one module"


# --- Megatron-LM: megatron/core/quantization/quant_config.py and TEQuantizationRecipe in
# megatron/core/extensions/transformer_engine.py. All GEMMs of a module share one recipe.

_RECIPES: dict[str, dict[str, Any]] = {
    _BF16: {},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
    "fp8": {"fp8_quantization_recipe": "blockwise"},
    "mxfp8": {"fp8_quantization_recipe": "mxfp8"},
    "fp8-tensor": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "e4m3"},
    # Megatron refuses its recipe "delayed" for single modules. This one scales by the current tensor's FP32 amax.
    "fp8-delayed": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "e4m3"},
    "fp8-tensor-e5m2": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
}
# Modules of Megatron's transformer layer -> the names of their parts in Hugging Face's model files.
_MEGATRON_MODULES = {
    "self_attention.linear_qkv": (
        *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")),
        *("self_attention.query_key_value", "attention.query_key_value", "attn.c_attn"),
    ),
    "self_attention.linear_proj": (
        *("self_attn.o_proj", "self_attn.out_proj", "self_attn.dense"),
        *("self_attention.dense", "attention.dense", "attn.c_proj"),
    ),
    "mlp.linear_fc1": (
        *("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
        *("mlp.dense_h_to_4h", "mlp.fc1", "fc1", "mlp.c_fc"),
    ),
    "mlp.linear_fc2": ("mlp.down_proj", "mlp.dense_4h_to_h", "mlp.fc2", "fc2", "mlp.c_proj"),
}
_MODULE_OF_PART = {part: module for module, parts in _MEGATRON_MODULES.items() for part in parts}
# Parts that only ever occur together.
_QKV = {"q_proj", "k_proj", "v_proj"}
_BLOCK = re.compile(r"(?:.+\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
_MEGATRON_HEADER = """\
# Precision of each module, for Megatron-LM's --te-precision-config-file. The first glob that matches decides.
# Modules are named as in a model that is not split into pipeline stages.
"""


def _megatron(plan: PrecisionPlan) -> str:
    import yaml

    modules: dict[str, dict[str, str]] = {}  # module -> last part of a layer's name -> layer
    reasons: dict[str, str] = {}
    for layer in plan.assignment:
        found = _BLOCK.fullmatch(layer)
        module = None if found is None else _MODULE_OF_PART.get(found[2])
        if found is None or module is None:
            reasons[layer] = "no module of Megatron-LM is known for this name"
            continue
        name, part = f"decoder.layers.{int(found[1])}.{module}", layer.rpartition(".")[2]
        if part in modules.get(name, ()):
            reasons[layer] = f"{name} already stands for {modules[name][part]}"
        else:
            modules.setdefault(name, {})[part] = layer
    recipes: dict[str, str] = {}
    for name, layers in modules.items():
        rows = [_running(plan, layer) for layer in layers.values()]
        formats = {name for row in rows for name in row.values()} or {_BF16}
        missing = sorted(_expected_parts(name, modules) - layers.keys())
        if missing and formats != {_BF16}:
            reasons[name] = f"the plan leaves its part {', '.join(missing)} in {_BF16}"
        elif len(formats) == 1 and formats <= _RECIPES.keys():
            (recipes[name],) = formats
        elif formats <= _RECIPES.keys() and all(len(set(row.values())) == 1 for row in rows):
            parts = (f"{part} {'/'.join(row.values())}" for part, row in zip(layers, rows, strict=True))
            reasons[name] = f"its parts differ in the plan: {'; '.join(parts)}"
        else:
            reasons[name] = next(
                _lacking(row, _RECIPES)
                for row in rows
                if len(set(row.values())) > 1 or not {*row.values()} <= {*_RECIPES}
            )
    if reasons:
        raise NotExpressible("megatron", reasons)
    configs = {
        name: {
            "transformer_engine_config_type": "TEQuantizationParams",
            # The override quantizes the module whatever the launch options are. An empty recipe means high precision.
            "training_recipe": _RECIPES[name] | ({"override_nonquantized_autocast": True} if name != _BF16 else {}),
        }
        for name in dict.fromkeys([*recipes.values(), _BF16])
    }
    # The last glob keeps all other modules in high precision.
    globs = {name: (f"*{name}", recipe) for name, recipe in recipes.items()} | {"others": ("*", _BF16)}
    matchers = {
        name: {"config": recipe, "type": "glob", "pattern": pattern, "enabled": True}
        for name, (pattern, recipe) in globs.items()
    }
    return _MEGATRON_HEADER + str(yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False))


def _expected_parts(module: str, modules: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Returns the parts that such modules have anywhere in the plan; with any of q, k and v, all three."""
    kind = module.split(".", 3)[3]
    parts = {part for name, layers in modules.items() if name.split(".", 3)[3] == kind for part in layers}
    return parts | _QKV if parts & _QKV else parts


# --- torchao 0.18 as installed: float8, prototype/blockwise_fp8_training, prototype/moe_training.


@dataclass(frozen=True)
class _Conversion:
    """Lines of the script that convert layers."""

    imports: tuple[str, ...]
    call: str
    """Uses `model`, and the filter `chosen`."""
    multiple: int = 16
    """Number that must divide in_features and out_features."""
    takes_bias: bool = True


_QUANTIZE = "from torchao.quantization import quantize_"
_FLOAT8 = "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
_MX = "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig"
_NVFP4 = "from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig"
_BLOCKWISE = "from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig"


def _mxfp8(arguments: str) -> _Conversion:
    call = f"quantize_(model, MXFP8TrainingOpConfig({arguments}), chosen)"
    return _Conversion((_MX, _QUANTIZE), call, multiple=32, takes_bias=False)


def _e4m3(scales: str = "") -> _Conversion:
    return _Conversion(
        ("import torch", "from torchao.float8 import CastConfig", _FLOAT8),
        "gradients = CastConfig(target_dtype=torch.float8_e4m3fn)\n"
        f"config = Float8LinearConfig(cast_config_grad_output=gradients{scales})\n"
        "convert_to_float8_training(model, config=config, module_filter_fn=chosen)",
    )


# Formats of the three GEMMs -> conversion.
_CONVERSIONS: dict[tuple[str, ...], _Conversion] = {
    ("fp8",) * 3: _Conversion(
        (_BLOCKWISE, _QUANTIZE), "quantize_(model, Float8BlockwiseLinearConfig(), chosen)", 128, takes_bias=False
    ),
    ("fp8-tensor-e5m2",) * 3: _Conversion(
        (_FLOAT8,), "convert_to_float8_training(model, config=Float8LinearConfig(), module_filter_fn=chosen)"
    ),
    ("fp8-tensor",) * 3: _e4m3(),
    ("fp8-delayed",) * 3: _e4m3(", round_scales_to_power_of_2=True"),
    ("mxfp8",) * 3: _mxfp8(""),
    ("mxfp8", "mxfp8", _BF16): _mxfp8("wgrad_with_hp=True"),
    ("nvfp4",) * 3: _Conversion((_NVFP4, _QUANTIZE), "quantize_(model, NVFP4TrainingConfig(), chosen)", 128),
}
_SCRIPT = '''\
"""Sets the linear layers of a model to the formats of a precision plan, for training with torchao 0.18.

Call `convert(model)` on the loaded model, before you build the optimizer and before FSDP and torch.compile. It first
checks all layers, and raises ValueError for a layer that torchao cannot convert.
"""

{imports}


{functions}


# Conversion -> names of the layers. All other layers stay as they are.
LAYERS = {{
{layers}
}}
# Conversion -> the number that must divide in_features and out_features, and whether a layer may have a bias.
LIMITS = {{{limits}}}


def convert(model: nn.Module) -> None:
    """Checks all layers, then converts them in place."""
    modules = dict(model.named_modules())
    for how, names in LAYERS.items():
        multiple, takes_bias = LIMITS[how]
        for name in names:
            module = modules.get(name)
            if type(module) is not nn.Linear:
                raise ValueError(f"{{name}} is {{type(module).__name__}}, expected nn.Linear. Is it the plan's model?")
            if module.in_features % multiple or module.out_features % multiple:
                raise ValueError(f"{{name}} is {{module}}, expected multiples of {{multiple}}.")
            if module.bias is not None and not takes_bias:
                raise ValueError(f"{{name}} has a bias, which torchao drops or refuses in this format.")
    for how, names in LAYERS.items():
        how(model, lambda module, name, names=names: name in names)
'''


def _torchao(plan: PrecisionPlan) -> str:
    layers: dict[tuple[str, ...], list[str]] = {}
    reasons: dict[str, str] = {}
    known = {_BF16, *(name for formats in _CONVERSIONS for name in formats)}
    for layer in plan.assignment:
        running = _running(plan, layer)
        if set(running.values()) <= {_BF16}:
            continue
        fitting = (row for row in _CONVERSIONS if running.items() <= dict(zip(GEMMS, row, strict=True)).items())
        formats = next(fitting, None)
        if formats is None:
            reasons[layer] = _lacking(running, known)
        else:
            layers.setdefault(formats, []).append(layer)
    if reasons:
        raise NotExpressible("torchao", reasons)
    used = {formats: how for formats, how in _CONVERSIONS.items() if formats in layers}
    names = {formats: "_".join(dict.fromkeys(formats)).replace("-", "_") for formats in used}
    imports = sorted({"from torch import nn", *(line for how in used.values() for line in how.imports)})
    functions = (
        f"def {names[formats]}(model, chosen):\n    " + how.call.replace("\n", "\n    ")
        for formats, how in used.items()
    )
    sets = ("".join(f"        {layer!a},\n" for layer in layers[formats]) for formats in used)
    return _SCRIPT.format(
        imports="\n".join(sorted(imports, key=lambda line: not line.startswith("import "))),
        functions="\n\n\n".join(functions),
        layers="\n".join(f"    {name}: {{\n{rows}    }}," for name, rows in zip(names.values(), sets, strict=True)),
        limits=", ".join(f"{names[formats]}: ({how.multiple}, {how.takes_bias})" for formats, how in used.items()),
    )


TARGETS = {"megatron": _megatron, "torchao": _torchao}
"""Target -> the function that returns the text of a plan's file; raises `NotExpressible`."""
