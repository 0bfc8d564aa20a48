"""Gated MLPs, down(silu(gate(x)) * up(x)), found by what they compute, and run as one where their backend can.

A module is taken for one if it has three swapped linears and its forward, with outputs put in their place, gives the
second two what the formula says. For the time of a run it then has a forward of its own. Where that is compiled, it
asks the backend first, unless something that the module's own forward reads has changed since.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layer import Dispatch, SnipLayer

_LAYERS = 3
# Where a module has the names of its gate, up and down, and what it was made of when it was found.
_NAMES, _MADE_OF = "snip_gate_up_down", "snip_made_of"
# Of the trial: tokens, and the spread of what stands for the outputs of gate and up. Large numbers tell limits.
_TOKENS, _SPREAD = 5, 8.0
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that may say what a forward computes. Not whole numbers and texts: torch.compile guards what is compared,
# and a layer's index or name would have each block compiled by itself.
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_READ = (*_FUNCTIONS, bool, float, NoneType)


class _Part(NamedTuple):
    """A part of a gated MLP beside its linears, or the MLP itself, as it was when the MLP was found."""

    path: tuple[str, ...]
    """Names that lead to it; () is the MLP."""
    class_: type[nn.Module]
    forward: Any
    """Of the class."""
    attributes: tuple[tuple[str, Any], ...]

    def is_in(self, module: nn.Module) -> bool:
        """Returns True if the MLP has this part as it was."""
        part: Any = module
        for name in self.path:
            part = getattr(part, name, None)
        if type(part) is not self.class_ or self.class_.forward is not self.forward:
            return False
        # Read before, since torch.compile guards the attribute alone.
        if self.path and (part.forward is None or "forward" in vars(part)):
            return False
        return all(_is_equal(getattr(part, name, ...), value) for name, value in self.attributes)


def _is_equal(now: Any, value: Any) -> bool:
    # What is of another type may have no truth value, as comparisons of tensors.
    return type(now) is type(value) and bool(now == value)


class _MadeOf:
    """The parts of a gated MLP beside its linears; copies share it, and pickles leave it out with the forward."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = tuple(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> _MadeOf:
        return self

    def __reduce__(self) -> tuple[type[_MadeOf], tuple[tuple[()]]]:
        return _MadeOf, ((),)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a gated MLP in a run. A copy of the module has it too; a pickled one has its class's."""
    # Without names the run has ended, and something that was put around this forward since calls it still. What is
    # looked at here torch.compile looks at once, and guards.
    if torch.compiler.is_compiling() and len(args) == 1 and not kwargs and _NAMES in vars(self) and _is_as_found(self):
        layers = gate_up_down(self)
        y = None if any(map(_needs_call, layers)) else layers[-1].snip_backend.gated_forward(layers, args[0])
        if y is not None:
            return y
    return type(self).forward(self, *args, **kwargs)


def gate_up_down(module: nn.Module) -> tuple[Any, ...]:
    """Returns the linears of a module that `put_gates` has found."""
    return tuple(getattr(module, name) for name in vars(module)[_NAMES])


def is_gated(module: nn.Module) -> bool:
    """Returns True if `put_gates` has found the module."""
    return getattr(vars(module).get("forward"), "__func__", None) is forward


def _is_as_found(module: nn.Module) -> bool:
    """Returns True if nothing looks on, and the module's own forward would compute what it did when it was found."""
    return not _is_watched(module) and all(part.is_in(module) for part in vars(module)[_MADE_OF].parts)


def _needs_call(layer: nn.Module) -> bool:
    """Returns True if a layer has to be called by itself: something sees its input or output, its backend runs it
    alone, or something else, such as an adapter, has taken its place since."""
    if not isinstance(layer, SnipLayer):
        return True
    is_its_own = type(layer).forward is not SnipLayer.forward or "forward" in vars(layer)
    return is_its_own or layer.snip_recorder is not None or not layer.snip_backend.runs_gates


def _is_watched(module: nn.Module) -> bool:
    """Returns True if a part of the module has hooks: who runs it as one, or tries it, would pass them by or call them
    for nothing."""
    return any(_has_hooks(part) for part in module.modules() if part is not module)


def _has_hooks(module: nn.Module) -> bool:
    return any(len(getattr(module, hooks)) > 0 for hooks in _HOOKS)


def put_gates(model: nn.Module, log: logging.Logger) -> int:
    """Gives each gated MLP of a model its forward, where its backend runs such; returns how many have one.

    Args:
        model: the model.
        log: is told how many were found.
    """
    gated = [module for module in model.modules() if is_gated(module)]
    found: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        layers = {child_name: child for child_name, child in module.named_children() if isinstance(child, SnipLayer)}
        can = len(layers) == _LAYERS and all(layer.snip_backend.runs_gates for layer in layers.values())
        if not can or is_gated(module):
            continue
        _remove(module)  # what a pickled one has
        made_of = _made_of(module)
        names = None if made_of is None else _find(module, layers, log)
        (others if names is None else found).append(name)
        if names is not None:
            # torch.compile guards the function of a method, and so compiles blocks alike once.
            vars(module).update({_NAMES: names, _MADE_OF: made_of, "forward": MethodType(forward, module)})
    if len(found) == 1:
        log.info("snip-hf: 1 gated MLP runs as one where it is compiled: %s.", found[0])
    elif found:
        log.info("snip-hf: %d gated MLPs run as one where they are compiled, such as %s.", len(found), found[0])
    elif others:
        log.info("snip-hf: linears run one by one in %s: no down(silu(gate(x)) * up(x)).", others[0])
    return len(gated) + len(found)


def remove_gates(model: nn.Module) -> None:
    """Undoes `put_gates`."""
    for module in model.modules():
        _remove(module)


def _remove(module: nn.Module) -> None:
    own = getattr(vars(module).get("forward"), "__func__", None)
    # One that something else has put there since is left alone.
    vars(module).pop(_MADE_OF, None)
    if vars(module).pop(_NAMES, None) is not None and own in (forward, type(module).forward):
        del vars(module)["forward"]


def _made_of(module: nn.Module) -> _MadeOf | None:
    """Returns what the module's forward may read beside its linears; None if a change of that could not be seen, or
    would be seen where there is none: NaN is not equal to itself."""
    found = []
    for path, part in module.named_modules():
        if isinstance(part, SnipLayer):
            continue
        own = {name: value for name, value in vars(part).items() if name != "training" and not name.startswith("_")}
        # Tensors may be written to, and callable objects may hold anything.
        tensors = any(isinstance(value, Tensor) for value in (*part._buffers.values(), *vars(part).values()))
        if tensors or any(map(_is_other_call, own.values())):
            return None
        read = tuple((name, value) for name, value in own.items() if isinstance(value, _READ))
        found.append(_Part(tuple(path.split(".")) if path else (), type(part), type(part).forward, read))
    return _MadeOf(found) if all(part.is_in(module) for part in found) else None


def _is_other_call(value: object) -> bool:
    return callable(value) and not isinstance(value, _FUNCTIONS)


def _find(module: nn.Module, layers: Mapping[str, SnipLayer], log: logging.Logger) -> tuple[str, ...] | None:
    """Returns the names of the linears as gate, up and down if the module computes the formula, else None."""
    own = {id(parameter) for layer in layers.values() for parameter in (layer.weight, layer.bias)}
    trains_more = any(id(parameter) not in own for parameter in module.parameters())
    if trains_more or _is_watched(module) or "forward" in vars(module) or any(map(_needs_call, layers.values())):
        return None
    for names in permutations(layers):
        gate, up, down = order = [layers[name] for name in names]
        outer, inner = {gate.in_features, up.in_features}, {gate.out_features, up.out_features, down.in_features}
        if len(outer) == len(inner) == 1 and _computes(module, order, log):
            return names
    return None


def _computes(module: nn.Module, layers: Sequence[SnipLayer], log: logging.Logger) -> bool:
    """Returns True if the module's forward, on a tensor of no meaning, calls the linears as the formula does."""
    generator = torch.Generator().manual_seed(0)
    x, *outputs = (
        _SPREAD * torch.randn(1, _TOKENS, size, generator=generator, device="cpu", dtype=torch.float32)
        for size in (layers[0].in_features, *(layer.out_features for layer in layers))
    )
    inputs: dict[int, list[Tensor]] = {id(layer): [] for layer in layers}
    given = {id(layer): output for layer, output in zip(layers, outputs, strict=True)}

    def record(layer: SnipLayer, input: Tensor, dispatch: Dispatch | None) -> Tensor:
        if dispatch is None:  # one matrix for all tokens
            inputs[id(layer)].append(input.clone())
        return given[id(layer)].clone()

    try:
        with _trained(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for layer in layers:
                layer.snip_recorder = record
            y = type(module).forward(module, x)  # without its hooks
    except Exception as error:
        log.debug("snip-hf: a trial of %s failed: %s", type(module).__name__, error)
        return False
    finally:
        for layer in layers:
            layer.snip_recorder = None
    product = torch.nn.functional.silu(outputs[0]) * outputs[1]
    expected = [[x], [x], [product]]
    got = [inputs[id(layer)] for layer in layers]
    return isinstance(y, Tensor) and all(map(_same, [*got, [y]], [*expected, [outputs[2]]]))


def _same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Returns True if the tensors are equal but for the rounding of FP32; in another dtype they are not."""
    pairs = zip(got, expected, strict=False)
    return len(got) == len(expected) and all(
        (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        and torch.allclose(one, other, rtol=1e-5, atol=1e-6)
        for one, other in pairs
    )


@contextmanager
def _trained(module: nn.Module) -> Iterator[None]:
    """The module and its parts in training mode, as they are when it counts."""
    before = {part: part.training for part in module.modules()}
    module.train()
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training
