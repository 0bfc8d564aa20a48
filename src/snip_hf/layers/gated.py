"""Gated MLPs, down(silu(gate(x)) * up(x)), found by what they compute, and run as one where their backend can.

A module is taken for one if it has three swapped linears and its forward, with outputs put in their place, gives the
second two what the formula says. For the time of a run it then has a forward of its own, which asks the backend first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .layer import Dispatch, SnipLayer

logger = logging.getLogger(__name__)

_LAYERS = 3
# Where a module has the names of its gate, up and down.
_NAMES = "snip_gate_up_down"
# Of the trial: tokens, and the spread of what stands for the outputs of gate and up. Large numbers tell limits.
_TOKENS, _SPREAD = 5, 8.0
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a gated MLP in a run. A copy of the module has it too; a pickled one has its class's."""
    # Without names the run has ended, and something that was put around this forward since calls it still.
    if len(args) == 1 and not kwargs and _NAMES in vars(self) and not _is_watched(self):
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


def put_gates(model: nn.Module) -> int:
    """Gives each gated MLP of a model its forward, where its backend runs such; returns how many have one."""
    gated = [module for module in model.modules() if is_gated(module)]
    found: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        layers = {child_name: child for child_name, child in module.named_children() if isinstance(child, SnipLayer)}
        can = len(layers) == _LAYERS and all(layer.snip_backend.runs_gates for layer in layers.values())
        if not can or is_gated(module):
            continue
        _remove(module)  # what a pickled one has
        names = _find(module, layers)
        (others if names is None else found).append(name)
        if names is not None:
            # torch.compile guards the function of a method, and so compiles blocks alike once.
            vars(module).update({_NAMES: names, "forward": MethodType(forward, module)})
    if found:
        logger.info("snip-hf: %d gated MLPs run as one where they are compiled, such as %s.", len(found), found[0])
    elif others:
        logger.info("snip-hf: linears run one by one in %s: no down(silu(gate(x)) * up(x)).", others[0])
    return len(gated) + len(found)


def remove_gates(model: nn.Module) -> None:
    """Undoes `put_gates`."""
    for module in model.modules():
        _remove(module)


def _remove(module: nn.Module) -> None:
    own = getattr(vars(module).get("forward"), "__func__", None)
    # One that something else has put there since is left alone.
    if vars(module).pop(_NAMES, None) is not None and own in (forward, type(module).forward):
        del vars(module)["forward"]


def _find(module: nn.Module, layers: Mapping[str, SnipLayer]) -> tuple[str, ...] | None:
    """Returns the names of the linears as gate, up and down if the module computes the formula, else None."""
    own = {id(parameter) for layer in layers.values() for parameter in (layer.weight, layer.bias)}
    trains_more = any(id(parameter) not in own for parameter in module.parameters())
    if trains_more or _is_watched(module) or "forward" in vars(module) or any(map(_needs_call, layers.values())):
        return None
    for names in permutations(layers):
        gate, up, down = order = [layers[name] for name in names]
        outer, inner = {gate.in_features, up.in_features}, {gate.out_features, up.out_features, down.in_features}
        if len(outer) == len(inner) == 1 and _computes(module, order):
            return names
    return None


def _computes(module: nn.Module, layers: Sequence[SnipLayer]) -> bool:
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
        logger.debug("snip-hf: a trial of %s failed: %s", type(module).__name__, error)
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
