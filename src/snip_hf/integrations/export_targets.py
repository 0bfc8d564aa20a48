"""The targets of an export as data: what a module can be set to there, and how the file is written.

A target names its settings by the formats of the three GEMMs. docs/export.md lists them, with the sources of each file
format and what the target's numbers differ in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from ..layers.state import without_group
from ..numerics.formats import UNQUANTIZED, NumberFormat
from ..numerics.gemms import GEMMS
from ..registry import Registry
from .export_names import FOUR_OVER_SIX, MEGATRON, TORCHAO


@dataclass(frozen=True)
class Setting:
    """What one module of a target can be set to."""

    formats: tuple[str, ...]
    """Of the three GEMMs, in the order of `GEMMS`."""
    config: Any
    """The target's own words for it."""


@dataclass(frozen=True)
class Target:
    """A library that plans are exported to."""

    name: str
    settings: tuple[Setting, ...]
    """What a module can be set to. Of equally near settings the first is taken."""
    write: Callable[[Mapping[str, Setting], Sequence[str]], str]
    """(module there -> its setting, linear layers outside the plan) -> the text of the file."""
    module_of: Callable[[str], str | None] = str
    """The module there that a layer is, or is a part of; None: not known."""
    together: frozenset[str] = frozenset()
    """Last parts of the names of layers that are only ever parts of one module together."""
    unfit: Callable[[Setting, nn.Module | None], str | None] = lambda setting, module: None
    """(setting, layer of the model) -> why the target cannot set the layer so; None: it can, or it has no such limits
    that are known."""


TARGETS: Registry[Target] = Registry("target")


def _everywhere(name: str, config: Any) -> Setting:
    return Setting((name,) * len(GEMMS), config)


# Megatron-LM: megatron/core/quantization/quant_config.py and TEQuantizationRecipe in
# megatron/core/extensions/transformer_engine.py.
_RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
    "fp8": {"fp8_quantization_recipe": "blockwise"},
    "mxfp8": {"fp8_quantization_recipe": "mxfp8"},
    "fp8-tensor": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "e4m3"},
    "fp8-tensor-e5m2": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
}
# Modules of Megatron's transformer layer, by the names that Hugging Face's model files give to their parts.
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
_PARTS = {part: module for module, parts in _MEGATRON_MODULES.items() for part in parts}
_BLOCK = re.compile(r"(?:.+\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
_MEGATRON_HEADER = """\
# Precision of each module, for Megatron-LM's --te-precision-config-file. The first glob that matches decides.
# Modules are named as in a model that is not split into pipeline stages.
"""


def _megatron_module(layer: str) -> str | None:
    found = _BLOCK.fullmatch(layer)
    module = _PARTS.get(found[2]) if found else None
    return None if found is None or module is None else f"decoder.layers.{int(found[1])}.{module}"


def _write_megatron(modules: Mapping[str, Setting], outside: Sequence[str]) -> str:
    import yaml

    kept = UNQUANTIZED.name
    used = dict.fromkeys([*(setting.formats[0] for setting in modules.values()), kept])
    configs = {
        name: {
            "transformer_engine_config_type": "TEQuantizationParams",
            # A quantized module is so whatever the launch says of its layer; an empty recipe is high precision.
            "training_recipe": _RECIPES[name] | ({"override_nonquantized_autocast": True} if name != kept else {}),
        }
        for name in used
    }

    def matcher(pattern: str, config: str) -> dict[str, Any]:
        return {"config": config, "type": "glob", "pattern": pattern, "enabled": True}

    matchers = {name: matcher(f"*{name}", setting.formats[0]) for name, setting in modules.items()}
    # What the plan does not name stays in high precision.
    document = {"configs": configs, "matchers": matchers | {"others": matcher("*", kept)}}
    return _MEGATRON_HEADER + str(yaml.safe_dump(document, sort_keys=False))


TARGETS.register(
    Target(
        MEGATRON,
        tuple(_everywhere(name, None) for name in _RECIPES),
        _write_megatron,
        _megatron_module,
        together=frozenset({"q_proj", "k_proj", "v_proj"}),
    )
)

# mit-han-lab/fouroversix: ModuleQuantizationConfig in src/fouroversix/model/config.py. An override replaces the
# model's configuration as a whole, so each has every field that matters.
_FOUR_OVER_SIX: dict[str, dict[str, Any]] = {
    "nvfp4": {"dtype": "nvfp4", "scale_rule": "static_6", "weight_scale_2d": True},
    "nvfp4-1x16": {"dtype": "nvfp4", "scale_rule": "static_6", "weight_scale_2d": False},
    "nvfp4-46": {
        **{"dtype": "nvfp4", "scale_rule": "mse", "gradient_scale_rule": "static_6"},
        "weight_scale_2d": True,
    },
    "mxfp4": {"dtype": "mxfp4", "scale_rule": "static_6", "weight_scale_2d": False},
}
_DISABLED = ("disable_fprop_quantization", "disable_dgrad_quantization", "disable_wgrad_quantization")


def _four_over_six_settings() -> tuple[Setting, ...]:
    """Every GEMM of a module is quantized in the module's format or not at all."""
    kept = UNQUANTIZED.name
    settings = [_everywhere(kept, None)]
    for name, config in _FOUR_OVER_SIX.items():
        for formats in product((name, kept), repeat=len(GEMMS)):
            if name in formats:
                disabled = {flag: True for flag, format in zip(_DISABLED, formats, strict=True) if format == kept}
                settings.append(Setting(formats, {**config, "keep_master_weights": True, **disabled}))
    return tuple(settings)


def _write_four_over_six(modules: Mapping[str, Setting], outside: Sequence[str]) -> str:
    overrides = {name: setting.config for name, setting in modules.items() if setting.config is not None}
    # Groups of experts are no modules there, but their projection is.
    others = [*outside, *(without_group(name) for name in modules if name not in overrides)]
    document = {
        "quant_method": "fouroversix",
        **_FOUR_OVER_SIX["nvfp4"],
        "keep_master_weights": True,
        "module_config_overrides": overrides,
        "modules_to_not_convert": list(dict.fromkeys(others)),
    }
    return json.dumps(document, indent=1) + "\n"


def _four_over_six_unfit(setting: Setting, module: nn.Module | None) -> str | None:
    """Returns why the package would leave a layer alone."""
    if setting.config is None or type(module).__name__ == "Linear":
        return None
    return f"its class is {type(module).__name__}, expected nn.Linear itself"


TARGETS.register(Target(FOUR_OVER_SIX, _four_over_six_settings(), _write_four_over_six, unfit=_four_over_six_unfit))


@dataclass(frozen=True)
class _Conversion:
    """Lines of the script for torchao 0.18 that convert layers."""

    imports: tuple[str, ...]
    call: str
    """With `model` and `chosen`, the filter."""
    multiple: int = 16
    """In- and out-features are multiples of this."""
    takes_bias: bool = True


_QUANTIZE = "from torchao.quantization import quantize_"
_FLOAT8 = "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
_MX = "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig"
_NVFP4_FILE = "torchao.prototype.moe_training.nvfp4_training.nvfp4_training"


def _mxfp8(arguments: str) -> _Conversion:
    call = f"quantize_(model, MXFP8TrainingOpConfig({arguments}), chosen)"
    return _Conversion((_MX, _QUANTIZE), call, multiple=32, takes_bias=False)


_TORCHAO = (
    _everywhere(UNQUANTIZED.name, None),
    _everywhere(
        "fp8",
        _Conversion(
            ("from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig", _QUANTIZE),
            "quantize_(model, Float8BlockwiseLinearConfig(), chosen)",
            multiple=128,
            takes_bias=False,
        ),
    ),
    _everywhere(
        "fp8-tensor-e5m2",
        _Conversion(
            (_FLOAT8,), "convert_to_float8_training(model, config=Float8LinearConfig(), module_filter_fn=chosen)"
        ),
    ),
    _everywhere(
        "fp8-tensor",
        _Conversion(
            ("import torch", "from torchao.float8 import CastConfig", _FLOAT8),
            "gradients = CastConfig(target_dtype=torch.float8_e4m3fn)\n"
            "config = Float8LinearConfig(cast_config_grad_output=gradients)\n"
            "convert_to_float8_training(model, config=config, module_filter_fn=chosen)",
        ),
    ),
    _everywhere("mxfp8", _mxfp8("")),
    Setting(
        ("mxfp8", "mxfp8", UNQUANTIZED.name),
        _mxfp8("wgrad_with_hp=True"),
    ),
    _everywhere(
        "nvfp4",
        _Conversion(
            (f"from {_NVFP4_FILE} import NVFP4TrainingConfig", _QUANTIZE),
            "quantize_(model, NVFP4TrainingConfig(), chosen)",
            multiple=128,
        ),
    ),
)
_SCRIPT = '''\
"""Sets the linear layers of a model to the formats of a precision plan, for training with torchao 0.18.

Call `convert(model)` on the model as it was loaded: before the optimizer is made, before FSDP and torch.compile.
Sizes are checked there: it raises ValueError, before it converts anything, for a layer that torchao cannot convert.
"""

{imports}


{functions}


# How to convert -> the names of the layers. Those that are not named stay as they are.
LAYERS = {{
{layers}
}}
# How to convert -> the number of which in- and out-features are multiples, and whether a layer may have a bias.
LIMITS = {{{limits}}}


def convert(model: nn.Module) -> None:
    """Converts the layers in place, after a check of all of them."""
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


def _write_torchao(modules: Mapping[str, Setting], outside: Sequence[str]) -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, setting in modules.items():
        if setting.config is not None:
            groups.setdefault(setting.formats, []).append(name)
    used = [setting for setting in _TORCHAO if setting.formats in groups]
    names = {
        setting.formats: "_".join(dict.fromkeys(setting.formats)).replace("-", "_") for setting in used
    }  # of functions
    functions = "\n\n\n".join(
        f"def {names[setting.formats]}(model, chosen):\n    " + setting.config.call.replace("\n", "\n    ")
        for setting in used
    )
    lists = ("".join(f"        {layer!a},\n" for layer in groups[setting.formats]) for setting in used)
    return _SCRIPT.format(
        imports=_imports(used),
        functions=functions,
        layers="\n".join(
            f"    {names[setting.formats]}: {{\n{rows}    }}," for setting, rows in zip(used, lists, strict=True)
        ),
        limits=", ".join(
            f"{names[setting.formats]}: ({setting.config.multiple}, {setting.config.takes_bias})" for setting in used
        ),
    )


def _imports(used: Sequence[Setting]) -> str:
    lines = {"from torch import nn", *(line for setting in used for line in setting.config.imports)}
    plain = sorted(line for line in lines if line.startswith("import "))
    return "\n".join([*plain, *sorted(lines - set(plain))])


def _torchao_unfit(setting: Setting, module: nn.Module | None) -> str | None:
    """Returns what `convert` of the script would say of a layer."""
    if setting.config is None:
        return None
    if module is None or type(module).__name__ != "Linear":
        return f"its class is {type(module).__name__}, expected nn.Linear itself"
    rows, columns = module.get_parameter("weight").shape
    multiple, name = setting.config.multiple, setting.formats[0]
    if rows % multiple or columns % multiple:
        return f"its in- and out-features are {columns} and {rows}, expected multiples of {multiple} for {name}"
    if getattr(module, "bias", None) is not None and not setting.config.takes_bias:
        return f"it has a bias, which torchao drops or refuses in {name}"
    return None


TARGETS.register(Target(TORCHAO, _TORCHAO, _write_torchao, unfit=_torchao_unfit))


@dataclass(frozen=True)
class WeightKind:
    """How torchao stores a weight for inference, with activations as they are."""

    label: str
    config: Callable[[], Any]
    """Builds torchao's configuration."""
    scale: str = "fp32"
    """Kind of its scales, as `NumberFormat.scale` names it."""
    multiples: tuple[int, int] = (1, 1)
    """Rows and columns of the weight are multiples of these."""

    def keeps(self, format: NumberFormat) -> bool:
        """Whether a weight keeps the kind and the rule of a format's scales. Its blocks may have another shape."""
        is_rotated = GEMMS[0] in format.rotated
        return format.scale == self.scale and not format.weight.targets and not is_rotated


def _float8(granularity: str) -> Any:
    from torchao import quantization

    return quantization.Float8WeightOnlyConfig(granularity=getattr(quantization, granularity)())


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _e2m1() -> Any:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig()


def _int4(group: int) -> Any:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group))  # type: ignore[attr-defined]


_ROWS = WeightKind("E4M3, a scale per row", partial(_float8, "PerRow"))
_TENSOR = WeightKind("E4M3, a scale per tensor", partial(_float8, "PerTensor"))
_BLOCKS = WeightKind("E2M1, an E4M3 scale per 16 values", _e2m1, "e4m3", multiples=(16, 16))
_GROUPS = WeightKind("4-bit integers in bytes, a scale per 32 values", partial(_int4, 32), multiples=(1, 32))

WEIGHT_KINDS = {
    "fp8": _ROWS,
    "fp8-tensor": _TENSOR,
    "fp8-tensor-e5m2": _TENSOR,
    "mxfp8": _ROWS,
    "int8": WeightKind("8-bit integers, a scale per row", _int8),
    **dict.fromkeys(("fp4", "fp4-46", "mxfp4", "mxfp4-32x32", "mxfp4-rht"), _BLOCKS),
    **dict.fromkeys(("nvfp4", "nvfp4-1x16", "nvfp4-46", "nvfp4-rht", "nvfp4-rht128"), _BLOCKS),
    "int4": WeightKind("4-bit integers in bytes, a scale per 128 values", partial(_int4, 128), multiples=(1, 128)),
    "ufp4": _GROUPS,
    "ufp4-rht": _GROUPS,
}
"""Format of the forward GEMM -> the nearest that torchao stores: the same elements, blocks at most as large or whole
rows. Others have none."""
