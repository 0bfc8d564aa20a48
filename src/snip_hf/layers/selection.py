"""The selection of layers: which ones are swapped, why the others are not, and which weights have no layer kind.

Routers and indexers stay in high precision. A small error in a router's output sends a token to another expert, and a
small error in an indexer's output hides a token from sparse attention. This library's estimates see no such jumps.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ..config import DoesNotFit, SnipConfig
from ..parallel.tensor_parallel import split_of
from ..parallel.zero3 import whole_shape
from ..text import printable
from .adapters import ADAPTER, adapter_reasons
from .kinds import LayerKind, kind_of, known_weights
from .labels import without_numbers
from .layer import SnipLayer
from .state import plain_name, snip_linears

# Reasons.
LEFT_OUT = "skip_modules"
ROUTER = "router"
_NO_BLOCK = "outside the transformer blocks"
# The kind of weights that hold the matrices of several experts.
EXPERTS = "MoE experts"
_QLORA = (
    " In place of QLoRA, train the adapters on a base in BF16: snip-hf multiplies with its frozen weights in low "
    "precision."
)
# Fields of configs that count experts: num_experts, num_local_experts, n_routed_experts, moe_num_experts, ...
_COUNTS = re.compile(r"(\w+_)?(num|n)(_local|_routed)?_experts")
# Words, beside "router", in the names of routers and of the modules around them.
_GATES = {"gate", "gating", "classifier", "wg"}
# The part of a name between a module and the parameters from which torch computes another one.
_PARAMETRIZED = ".parametrizations."
# Groups of weights that a line of the log names.
_MOST_NAMED = 20


class _Decoder(NamedTuple):
    """The language model's decoder."""

    name: str
    """Its plain name in the model; "" if it is not a module of the model."""
    modules: frozenset[int]
    """Their ids."""


def skip_reasons(model: nn.Module, config: SnipConfig) -> dict[str, str | None]:
    """Returns, for every layer of a known kind, why `convert_model` skips it, or None if it is swapped."""
    head, decoder = head_of(model), _decoder_of(model)
    routers, adapters = _Routers(model), adapter_reasons(model)

    def reason(name: str, module: nn.Module, kind: LayerKind) -> str | None:
        if module is head and name not in config.include_modules:
            return "output head"
        if module is head and _is_tied(model):
            return "its weight is that of the input embeddings"
        if id(module) in adapters:
            return adapters[id(module)]
        outside = _outside(name, module, decoder)
        if outside is not None and not matches(name, config.include_modules):
            return outside
        refusal = None if isinstance(module, SnipLayer) else kind.refuses(module)
        if refusal is not None:
            return refusal
        if routers.has(name, module):
            return ROUTER
        if "indexer" in name.split("."):  # of DeepSeek-V3.2, and of models built after it
            return "chooses the tokens of sparse attention"
        # A swap of the class would not replace it.
        if "forward" in vars(module) and split_of(module) is None:
            return "another forward function is set on it (device_map, tensor parallelism)"
        if matches(name, config.skip_modules):
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


def check_patterns(model: nn.Module, config: SnipConfig, reasons: Mapping[str, str | None]) -> None:
    """Refuses names in `skip_modules` and `include_modules` that match nothing, or a layer that cannot be swapped.

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
        if not any(matches(name, [pattern]) for name in reasons):
            raise DoesNotFit(
                f"skip_modules: {pattern!r} matches no linear layer; {known}. "
                "Use exact names or globs over the whole name, such as '*.down_proj'."
            )
    decoder, head = _decoder_of(model), head_of(model)
    modules = {name: module for name, (module, _) in known_layers(model).items()}
    outside = [name for name in reasons if modules[name] is not head and _outside(name, modules[name], decoder)]
    for pattern in config.include_modules:
        if (reason := reasons.get(pattern)) is not None:
            before = ", or call snip_hf.convert_model(model, config) before the model is sharded"
            raise DoesNotFit(
                f"include_modules: {pattern!r} names a layer that cannot be swapped: {reason}. Leave the name out"
                f"{before if reason.startswith('class FSDP') else ''}."
            )
        is_head = pattern in modules and modules[pattern] is head
        if not is_head and not any(matches(name, [pattern]) for name in outside):
            named = f"those are named like {outside[0]!r}" if outside else "the model has no other one"
            raise DoesNotFit(
                f"include_modules: {pattern!r} matches no linear layer outside the decoder's blocks; {named}. "
                "Linears inside the blocks are swapped without it, and the output head only by its full name."
            )


def _outside(name: str, module: nn.Module, decoder: _Decoder | None) -> str | None:
    """Returns why a layer is swapped only if it is named; None if it is inside a block of the decoder."""
    if not any(part.isdigit() for part in name.split(".")):
        return _NO_BLOCK
    if decoder is None or id(module) in decoder.modules:
        return None
    return f"outside the language model's decoder (include_modules={(_part_beside(decoder, name),)!r} swaps it)"


def _part_beside(decoder: _Decoder, name: str) -> str:
    """Returns a pattern for the largest part of the model that contains the layer `name` but not the decoder."""
    parts = name.split(".")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parts, decoder.name.split("."), strict=False))))
    part = ".".join(parts[: shared + 1])
    return part if part == name else f"{part}.*"


def _decoder_of(model: nn.Module) -> _Decoder | None:
    """Returns the decoder that `model.get_decoder()` names; None if there is none, or it has no blocks.

    The decoder of a vision-language model is its language model.
    """
    decoder = getattr(model, "get_decoder", lambda: None)()
    if not isinstance(decoder, nn.Module):
        return None
    has_blocks = any(part.isdigit() for name, _ in decoder.named_modules() for part in name.split("."))
    if not has_blocks:
        return None
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    return _Decoder(plain_name(name), frozenset(map(id, decoder.modules())))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns True if one of the patterns is a layer's name or a glob that matches all of it."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def head_of(model: nn.Module) -> object:
    """Returns the model's output head, if it has one."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def _is_tied(model: nn.Module) -> bool:
    """Returns True if the output head has the weight of the input embeddings."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(head_of(model), "weight", None) is getattr(embeddings, "weight", ...)


def refuse_quantized(model: nn.Module) -> None:
    """Raises ValueError for a model that another method has quantized."""
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
        # A DTensor is sharded, not quantized. The dtype of any other subclass does not tell what it holds.
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


class _Routers:
    """Recognizes the linears of a model that are routers, by their names and numbers of outputs."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for name, module in model.named_modules() if "router" in type(module).__name__.lower()}
        counts = (*_experts_of_modules(model), *_experts_of_configs(getattr(model, "config", None)))
        self._counts = {count for count in counts if count}

    def has(self, name: str, module: nn.Module) -> bool:
        """Returns True for a linear whose name, or a module around it, is called a router or a gate of experts.

        Linears inside a module whose class is called a router count too (Zaya's, under the name `gate`). A linear that
        is only called a gate must have as many outputs as the model has experts somewhere: other gates exist.
        """
        parts = name.split(".")
        if any(".".join(parts[:end]) in self._names for end in range(1, len(parts))):
            return True
        words = [set(part.split("_")) for part in parts]
        if any("router" in part or ("gate" in part and part & {"expert", "experts"}) for part in words):
            return True
        is_gate = any(part & _GATES and "proj" not in part for part in words[-2:])
        return is_gate and getattr(module, "out_features", None) in self._counts

    def is_of_class(self, module: nn.Module, outputs: int) -> bool:
        """Returns True for a module of no known kind whose class is called a router or a gate and chooses experts.

        Args:
            module: the module.
            outputs: of its weight; must be a number of experts in the model.
        """
        name = type(module).__name__.lower()
        return ("router" in name or "gate" in name) and outputs in self._counts


def _experts_of_modules(model: nn.Module) -> Iterator[int]:
    """Yields the number of experts in each list, or module, of experts."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            yield len(module) if isinstance(module, nn.ModuleList) else _whole(getattr(module, "num_experts", 0))


def _experts_of_configs(config: object) -> Iterator[int]:
    """Yields the numbers of experts in a config and in those inside it."""
    for field, value in getattr(config, "__dict__", {}).items():
        if _COUNTS.fullmatch(field):
            yield from map(_whole, value if isinstance(value, list | tuple) else [value])
        elif field.endswith("_config"):
            yield from _experts_of_configs(value)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class WeightMatrix:
    """A parameter that may be an operand of matrix products, in the module that multiplies with it."""

    parameter: nn.Parameter
    name: str
    """Name of the module, or of the parameter if it is not called "weight"; `*` stands for a number."""
    kind: str
    """`EXPERTS`, `ROUTER` or the module's class."""
    reason: str | None
    """Why no plan decides on it; None: one does."""
    is_aside: bool
    """True for the output head and embeddings."""

    @property
    def size(self) -> int:
        """Elements, on all ranks that share it."""
        return math.prod(whole_shape(self.parameter))


def weight_matrices(model: nn.Module, config: SnipConfig | None) -> list[WeightMatrix]:
    """Returns every floating-point parameter that is not a bias, once.

    A weight that several modules share belongs to the module that a plan decides on, or else to the first one. Reads
    shapes only: weights may be sharded or on the meta device.

    Args:
        model: a model, converted or not.
        config: selects the layers; None: the swapped ones, or the defaults in a model that is not converted.
    """
    reasons, routers, adapters = layer_reasons(model, config), _Routers(model), adapter_reasons(model)
    head = head_of(model)
    tables = [one for one in model.modules() if one is head or isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    aside = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    found: dict[int, WeightMatrix] = {}
    for long_name, module in model.named_modules():
        name = plain_name(long_name)
        for own_name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter) or not parameter.is_floating_point() or own_name.endswith("bias"):
                continue
            kind = _kind(name, module, parameter)
            reason: str | None = f"no registered layer kind handles {type(module).__name__}"
            if kind == EXPERTS:
                reason = f"{type(module).__name__} does not run through transformers' ExpertsInterface"
            if f"{name}.{own_name}" in reasons:  # one of several layers of this module, or of the one around it
                reason = reasons[f"{name}.{own_name}"]
            elif any(parameter is weight for weight in known_weights(module)):
                reason = reasons[name]
            elif reasons.get(name.partition(_PARAMETRIZED)[0]) is not None:  # a part of a computed weight
                reason = reasons[name.partition(_PARAMETRIZED)[0]]
            elif adapters.get(id(module)) == ADAPTER:
                reason = ADAPTER
            elif routers.is_of_class(module, (*whole_shape(parameter), 0)[0]):
                reason = ROUTER
            place = without_numbers(name if own_name == "weight" else f"{name}.{own_name}".lstrip("."))
            kind = ROUTER if reason == ROUTER else kind
            one = WeightMatrix(parameter, place, kind, reason, id(parameter) in aside and reason is not None)
            if id(parameter) not in found or (reason is None and found[id(parameter)].reason is not None):
                found[id(parameter)] = one
    return list(found.values())


def layer_reasons(model: nn.Module, config: SnipConfig | None) -> Mapping[str, str | None]:
    """Returns, for every layer of a known kind, why no plan decides on it, or None if one does.

    Args:
        model: a model, converted or not.
        config: as in `weight_matrices`.
    """
    reasons, swapped = skip_reasons(model, config or SnipConfig()), snip_linears(model)
    if config is not None or not swapped:
        return reasons
    return {name: None if name in swapped else reason or "not swapped" for name, reason in reasons.items()}


def _kind(name: str, module: nn.Module, parameter: nn.Parameter) -> str:
    described, last = type(module).__name__, name.rpartition(".")[2]
    if len(whole_shape(parameter)) > 2 and "expert" in f"{described}.{last}".lower():
        return EXPERTS
    if "router" in f"{described}.{last}".lower() or last == "gate":
        return ROUTER
    return class_name(module)


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class; of a swapped module, of its original class."""
    return (module.snip_original_class if isinstance(module, SnipLayer) else type(module)).__name__


def describe_unswapped(matrices: list[WeightMatrix]) -> str:
    """Returns names, kinds and reasons of weight matrices that no plan decides on, the largest first; "" if none.

    The matrices of adapters are only counted, since every adapted layer has some.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    of_adapters = 0
    for one in matrices:
        if one.reason is None or one.is_aside or len(whole_shape(one.parameter)) < 2:
            continue
        if one.reason == ADAPTER:
            of_adapters += 1
        else:
            groups.setdefault((one.name, one.kind, one.reason), []).append(one.size)
    ordered = sorted(groups, key=lambda group: -sum(groups[group]))
    texts = [
        f"{printable(name)}{f' x {len(groups[name, kind, reason])}' * (len(groups[name, kind, reason]) > 1)} "
        f"({printable(kind)}{f', {reason}' * (reason != kind)})"
        for name, kind, reason in ordered[:_MOST_NAMED]
    ]
    more = [f"and {len(ordered) - _MOST_NAMED} more"] * (len(ordered) > _MOST_NAMED)
    adapters = [f"{of_adapters} {'matrix' if of_adapters == 1 else 'matrices'} of adapters"] * (of_adapters > 0)
    return ", ".join(texts + more + adapters)
