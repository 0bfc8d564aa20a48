"""The selection of layers: which ones are swapped, and why the others are not."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from ..config import SnipConfig
from .kinds import LayerKind, kind_of, known_weights
from .layer import SnipLayer
from .routers import Routers
from .state import plain_name

# The reason for what the user named in `skip_modules`.
LEFT_OUT = "skip_modules"
# Small matrices of adapters, by their names in PEFT; they stay in high precision.
_ADAPTERS = ("*.lora_A.*", "*.lora_B.*")


def skip_reasons(model: nn.Module, config: SnipConfig) -> dict[str, str | None]:
    """Returns, for every layer of a known kind, why `convert_model` leaves it alone, or None if it is swapped."""
    head, routers = head_of(model), Routers(model)

    def reason(name: str, module: nn.Module, kind: LayerKind) -> str | None:
        if module is head:
            return "output head"
        if not any(part.isdigit() for part in name.split(".")):
            return "outside the transformer blocks"
        refusal = None if isinstance(module, SnipLayer) else kind.refuses(module)
        if refusal is not None:
            return refusal
        if routers.has(name, module):
            return "router"
        if "forward" in vars(module):  # which a swap of the class would not replace
            return "another forward function is set on it (device_map, tensor parallelism)"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _ADAPTERS):
            return "adapter"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.skip_modules):
            return LEFT_OUT
        return None

    return {name: reason(name, module, kind) for name, (module, kind) in known_layers(model).items()}


def known_layers(model: nn.Module) -> dict[str, tuple[nn.Module, LayerKind]]:
    """Returns the name of every layer of a known kind, swapped or not -> the module that it is or is a part of."""
    found: dict[str, tuple[nn.Module, LayerKind]] = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None:
            names = (f"{name}.{part}" if part else name for part in kind.parts(module))
            found |= {plain_name(own): (module, kind) for own in names}
    return found


def head_of(model: nn.Module) -> object:
    return getattr(model, "get_output_embeddings", lambda: None)()


def refuse_quantized(model: nn.Module) -> None:
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    if method is not None or getattr(model, "is_quantized", False):
        raise ValueError(
            "The model is already quantized "
            f"({type(method).__name__ if method is not None else 'is_quantized is set'}); expected ordinary weights. "
            "Load it without a quantization_config, or dequantize it first."
        )
    known = ((name, weight) for name, module in model.named_modules() for weight in known_weights(module))
    for name, weight in known:
        # DTensor: sharded, not quantized. Any other subclass holds something else than its dtype says.
        if type(weight).__name__ not in ("Parameter", "Tensor", "DTensor") or not weight.is_floating_point():
            raise ValueError(
                f"Layer {name!r} has {weight.dtype} weights of the type {type(weight).__name__}; expected ordinary "
                "floating-point weights. Load the model without quantization."
            )


def summary(skipped: Mapping[str, str | None]) -> str:
    """Returns "reason: names" for every reason, with at most three names each."""
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        names.setdefault(str(reason), []).append(name)
    return (
        "; ".join(f"{reason}: {', '.join(group[:3])}{', ...' * (len(group) > 3)}" for reason, group in names.items())
        or "none"
    )
