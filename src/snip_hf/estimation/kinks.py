"""Kinks of ReLU and its kin, smoothed in the backward passes of a probe.

A kink between the two sides of a difference looks like a curvature of 1 / step. The infinitesimal derivative knows no
kinks at all, but the rounding errors whose effect is wanted do cross them (docs/method.md, section 3). So in a probe's
passes these functions keep their values, and their slope changes over a width of the size of rounding errors instead
of at once. The width belongs to each token alone, so that it makes no difference how a batch is cut into passes.

A module's code tells whether it calls such a function. Only these modules run differently, in whatever thread and
however often their forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import getattr_static, unwrap
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Over which a slope changes, in standard deviations of a token's features. An error e of the input flips the slope with
# the mean square p(0) E|e|, p the density there; a slope that changes as a normal distribution of this width responds
# with e^2 p(0) / (2 sqrt(pi) width). They agree at 0.35 of e's root mean square. Measured best: 0.007 for FP8's errors,
# 0.025 for FP4's (docs/log.md, 2026-11-22); this is between them.
RELATIVE_WIDTH = 0.0125


@dataclass(frozen=True)
class _Kinked:
    """A function whose slope is `left` below the bottom, 1 from there to the top and 0 above it."""

    values: Callable[[Tensor], Tensor]
    left: float = 0.0
    bottom: float = 0.0
    top: float | None = None

    def slope(self, x: Tensor) -> Tensor:
        """Returns the smoothed slope; x (..., features)."""
        width = RELATIVE_WIDTH * x.std(-1, correction=0, keepdim=True)
        slope = self.left + (1 - self.left) * _step(x - self.bottom, width)
        return slope if self.top is None else slope - _step(x - self.top, width)

    def __call__(self, x: Tensor, inplace: bool) -> Tensor:
        smoothed: Tensor = _Smoothed.apply(x.clone() if inplace else x, self)
        return x.copy_(smoothed) if inplace else smoothed


class _Smoothed(torch.autograd.Function):
    """The function's own values; backward smooths the changes of its slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kinked: _Kinked) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kinked = kinked
        return kinked.values(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad_output * ctx.kinked.slope(x), None


def _step(x: Tensor, width: Tensor) -> Tensor:
    """Returns 0 far below 0 and 1 far above it; 0 at exactly 0, where masks and padding are, as torch has it."""
    return torch.where(x == 0, 0.0, torch.special.ndtr(x / width))


def _relu(input: Tensor, inplace: bool = False) -> Tensor:
    return _Kinked(torch.relu)(input, inplace)


def _relu6(input: Tensor, inplace: bool = False) -> Tensor:
    return _hardtanh(input, 0.0, 6.0, inplace)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    values = partial(nn.functional.hardtanh, min_val=min_val, max_val=max_val)
    return _Kinked(values, bottom=min_val, top=max_val)(input, inplace)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    values = partial(nn.functional.leaky_relu, negative_slope=negative_slope)
    return _Kinked(values, left=negative_slope)(input, inplace)


_INSTEAD: dict[Callable[..., Any], Callable[..., Tensor]] = {
    nn.functional.relu: _relu,
    nn.functional.relu6: _relu6,
    nn.functional.hardtanh: _hardtanh,
    nn.functional.leaky_relu: _leaky_relu,
    nn.functional.leaky_relu_: partial(_leaky_relu, inplace=True),
    torch.relu: _relu,
    torch.relu_: partial(_relu, inplace=True),
    Tensor.relu: _relu,
    Tensor.relu_: partial(_relu, inplace=True),
}
_NAMES = {function.__name__ for function in _INSTEAD}


class _Smoothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def smooth_kinks(model: nn.Module) -> Iterator[None]:
    """Lets the model's modules run with smoothed kinks for the time of the context."""
    calls_one = {kind: _calls_kinked(kind) for kind in {type(module) for module in model.modules()}}
    modules = [module for module in model.modules() if calls_one[type(module)] or _holds_kinked(module)]
    before = [vars(module).get("forward") for module in modules]
    try:
        for module in modules:
            vars(module)["forward"] = _with_smoothing(module.forward)
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def _with_smoothing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Smoothing():
            return original(*args, **kwargs)

    return forward


def _holds_kinked(module: nn.Module) -> bool:
    """Returns True if one of the functions is an attribute of the module."""
    functions = (FunctionType, BuiltinFunctionType)
    return any(isinstance(value, functions) and value in _INSTEAD for value in vars(module).values())


def _calls_kinked(kind: type[nn.Module]) -> bool:
    """Returns True if the code of a class's forward names one of the functions.

    So does that of its methods, or of functions of the same file, that the forward names in turn.
    """
    seen: set[object] = set()
    waiting: list[object] = [getattr_static(kind, "forward")]
    while waiting:
        # Below what decorates it.
        function = unwrap(waiting.pop())  # type: ignore[arg-type]
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        names = _names_in(function.__code__)
        if not _NAMES.isdisjoint(names):
            return True
        for name in names - vars(nn.Module).keys():
            method, beside = getattr_static(kind, name, None), function.__globals__.get(name)
            waiting.append(getattr(method, "__func__", method))
            if getattr(beside, "__module__", None) == function.__module__:
                waiting.append(beside)
    return False


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *(name for nested in inner for name in _names_in(nested))}
