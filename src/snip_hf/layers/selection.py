"""The selection of layers: which ones are swapped, and why the others are not."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

from torch import nn

from ..config import DoesNotFit, SnipConfig
from .adapters import adapter_reasons
from .kinds import LayerKind, kind_of, known_weights
from .layer import SnipLayer
from .routers import Routers, is_in_indexer
from .state import plain_name

# The reason for what the user named in `skip_modules`.
LEFT_OUT = "skip_modules"
ROUTER = "router"
_NO_BLOCK = "outside the transformer blocks"
_QLORA = (
    " In place of QLoRA, train the adapters on a base in BF16: snip-hf multiplies with its frozen weights in low "
    "precision."
)


class _Decoder(NamedTuple):
    """The language model's decoder."""

    name: str
    """In the model, without what wrappers add; "": it is no module of it."""
    modules: frozenset[int]
    """Their ids."""


def skip_reasons(model: nn.Module, config: SnipConfig) -> dict[str, str | None]:
    """Returns, for every layer of a known kind, why `convert_model` leaves it alone, or None if it is swapped."""
    head, decoder = head_of(model), _decoder_of(model)
    routers, adapters = Routers(model), adapter_reasons(model)

    def reason(name: str, module: nn.Module, kind: LayerKind) -> str | None:
        if module is head:
            return "output head"
        outside = _outside(name, module, decoder)
        if outside is not None and not _matches(name, config.include_modules):
            return outside
        if id(module) in adapters:
            return adapters[id(module)]
        refusal = None if isinstance(module, SnipLayer) else kind.refuses(module)
        if refusal is not None:
            return refusal
        if routers.has(name, module):
            return ROUTER
        if is_in_indexer(name):
            return "chooses the tokens of sparse attention"
        if "forward" in vars(module):  # which a swap of the class would not replace
            return "another forward function is set on it (device_map, tensor parallelism)"
        if _matches(name, config.skip_modules):
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


def modules_of_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the model's modules by their names, and what has layers of other names, such as experts, by these too."""
    return dict(model.named_modules()) | {name: module for name, (module, _) in known_layers(model).items()}


def check_patterns(model: nn.Module, config: SnipConfig, reasons: Mapping[str, str | None]) -> None:
    """Refuses names in `skip_modules` and `include_modules` that match nothing.

    Args:
        model: the model.
        config: the names.
        reasons: `skip_reasons`.

    Raises:
        DoesNotFit: names the field and the pattern.
    """
    example = next((name for name, reason in reasons.items() if reason is None), next(iter(reasons), None))
    known = "the model has none" if example is None else f"the layers are named like {example!r}"
    for pattern in config.skip_modules:
        if not any(_matches(name, [pattern]) for name in reasons):
            raise DoesNotFit(
                f"skip_modules: {pattern!r} matches no linear layer; {known}. "
                "Use exact names or globs over the whole name, such as '*.down_proj'."
            )
    decoder, head = _decoder_of(model), head_of(model)
    modules = {name: module for name, (module, _) in known_layers(model).items()}
    outside = [name for name in reasons if modules[name] is not head and _outside(name, modules[name], decoder)]
    for pattern in config.include_modules:
        if not any(_matches(name, [pattern]) for name in outside):
            named = f"those are named like {outside[0]!r}" if outside else "the model has no other one"
            raise DoesNotFit(
                f"include_modules: {pattern!r} matches no linear layer outside the decoder's blocks; {named}. "
                "Linears inside the blocks are swapped without it, and the output head never is."
            )


def _outside(name: str, module: nn.Module, decoder: _Decoder | None) -> str | None:
    """Returns why a layer is not swapped unless it is named; None if it is inside a block of the decoder."""
    if not any(part.isdigit() for part in name.split(".")):
        return _NO_BLOCK
    if decoder is None or id(module) in decoder.modules:
        return None
    return f"outside the language model's decoder (include_modules={(_part_beside(decoder, name),)!r} swaps it)"


def _part_beside(decoder: _Decoder, name: str) -> str:
    """Returns a pattern for the largest part of the model that has the layer `name` and does not have the decoder."""
    parts = name.split(".")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parts, decoder.name.split("."), strict=False))))
    part = ".".join(parts[: shared + 1])
    return part if part == name else f"{part}.*"


def _decoder_of(model: nn.Module) -> _Decoder | None:
    """Returns the language model's decoder; None: the model tells no part of it from it.

    Hugging Face models tell it. That of a vision-language model is its language model. What has no blocks, such as a
    head of that name, is none.
    """
    decoder = getattr(model, "get_decoder", lambda: None)()
    if not isinstance(decoder, nn.Module) or decoder is model:
        return None
    has_blocks = any(part.isdigit() for name, _ in decoder.named_modules() for part in name.split("."))
    if not has_blocks:
        return None
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    return _Decoder(plain_name(name), frozenset(map(id, decoder.modules())))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def head_of(model: nn.Module) -> object:
    return getattr(model, "get_output_embeddings", lambda: None)()


def refuse_quantized(model: nn.Module) -> None:
    qlora = _QLORA if adapter_reasons(model) else ""
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    if method is not None or getattr(model, "is_quantized", False):
        raise ValueError(
            "The model is already quantized "
            f"({type(method).__name__ if method is not None else 'is_quantized is set'}); expected ordinary weights. "
            f"Load it without a quantization_config, or dequantize it first.{qlora}"
        )
    known = ((name, weight) for name, module in model.named_modules() for weight in known_weights(module))
    for name, weight in known:
        # DTensor: sharded, not quantized. Any other subclass holds something else than its dtype says.
        if type(weight).__name__ not in ("Parameter", "Tensor", "DTensor") or not weight.is_floating_point():
            raise ValueError(
                f"Layer {name!r} has {weight.dtype} weights of the type {type(weight).__name__}; expected ordinary "
                f"floating-point weights. Load the model without quantization.{qlora}"
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
