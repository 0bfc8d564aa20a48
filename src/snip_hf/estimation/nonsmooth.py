"""Kinks and jumps, which the difference of two passes would mistake for derivatives.

**Kinks** of ReLU. A kink between the two sides of a difference looks like a curvature of 1 / step. The infinitesimal
derivative ignores kinks, but the rounding errors that the estimate is about do cross them (docs/method.md, section 3).
So in passes on moved weights ReLU keeps its values, and its slope changes over a width of the size of rounding errors
instead of at once. The width is each token's own: it does not depend on how a batch is cut into passes.

**Jumps** of routers, which send each token to the experts of its k largest scores. Two passes at slightly different
weights choose differently for the few tokens whose scores are nearly equal; divided by a small step, these jumps would
be all of the difference. So passes that are compared make the same choices: in the later ones `torch.topk`, and
`torch.max` along a dimension (PhiMoE's router), return the elements at the places that the first pass chose. Scores and
their gradients are those of the running pass.

Both are torch-function modes around a pass: they see the functions of torch and `nn.functional` wherever a module calls
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..python_state import binding_kept

# Width over which a slope changes, in standard deviations of a token's features. An error e of the input flips the
# slope with the mean square p(0) E|e|, p the density there; a slope that changes as a normal distribution of this width
# responds with e^2 p(0) / (2 sqrt(pi) width). They agree at 0.35 of e's root mean square. Measured best: 0.007 for
# FP8's errors, 0.025 for FP4's (docs/log, 2026-11-22); this is between them.
RELATIVE_WIDTH = 0.0125
# Scores have a row per token, or per token of each sequence. Maxima of more dimensions are those of attention.
_MOST_DIMENSIONS = 3


@contextmanager
def _in_force(model: nn.Module, modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Puts modes in force for a forward and backward pass.

    Backward passes drop modes. So modules enter them again when they are recomputed there (checkpointing), in whatever
    thread that is.
    """

    def entering(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                return original(*args, **kwargs)
            stack = _get_current_function_mode_stack()
            with ExitStack() as entered:
                for mode in modes:
                    if not any(one is mode for one in stack):
                        entered.enter_context(mode)
                return original(*args, **kwargs)

        return forward

    modules = list(model.modules())
    with binding_kept(map(vars, modules)), ExitStack() as entered:
        for module in modules:
            vars(module)["forward"] = entering(module.forward)
        for mode in modes:
            entered.enter_context(mode)
        yield


def in_backward() -> bool:
    """Returns True in a backward pass, where checkpointed blocks run forward again."""
    return bool(torch._C._current_graph_task_id() != -1)


# --------------------------------------------------------------------------------------------------------------- kinks


class SmoothKinks(TorchFunctionMode):
    """Smooths the slope of ReLU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _SMOOTH.get(func, func)(*args, **(kwargs or {}))


class _SmoothedReLU(torch.autograd.Function):
    """ReLU's own values; backward smooths the change of its slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        width = RELATIVE_WIDTH * x.std(-1, correction=0, keepdim=True)
        # 0 at exactly 0, as in torch: masks and padding are there.
        return grad_output * torch.where(x == 0, 0.0, torch.special.ndtr(x / width))


def _relu(input: Tensor, inplace: bool = False) -> Tensor:
    smoothed: Tensor = _SmoothedReLU.apply(input.clone() if inplace else input)
    return input.copy_(smoothed) if inplace else smoothed


_SMOOTH: dict[Callable[..., Any], Callable[..., Tensor]] = {
    nn.functional.relu: _relu,
    torch.relu: _relu,
    torch.relu_: partial(_relu, inplace=True),
    Tensor.relu: _relu,
    Tensor.relu_: partial(_relu, inplace=True),
}


# --------------------------------------------------------------------------------------------------------------- jumps


class FixedRouting:
    """The choices that the first of its passes makes and all others repeat."""

    def __init__(self) -> None:
        self._is_first = True
        self._choices: list[Tensor] = []

    @contextmanager
    def one_pass(self, model: nn.Module, smooth_kinks: bool = False) -> Iterator[None]:
        """Lets the model's forward and backward pass within the context choose, or repeat what was chosen."""
        kinks = [SmoothKinks()] if smooth_kinks else []
        with _in_force(model, [_Choosing(self._choices, self._is_first), *kinks]):
            yield
        self._is_first = False


class _Choosing(TorchFunctionMode):
    """The choices of one pass.

    Args:
        choices: places that the first pass chose, in the order of its calls; the first pass adds to them.
        is_first: whether this is the first pass.
    """

    def __init__(self, choices: list[Tensor], is_first: bool) -> None:
        super().__init__()
        self._choices, self._is_first = choices, is_first
        self._scores: list[Tensor] = []
        """The scores that the forward pass chose from, in the order of its calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            named = _named(("input", "k", "dim", "largest", "sorted"), args, kwargs)
            chosen = self._choose(named["input"], named["k"], named.get("dim", -1), partial(func, *args, **kwargs))
            return torch.return_types.topk(chosen)
        if func in (torch.max, Tensor.max):
            named = _named(("input", "dim", "keepdim"), args, kwargs)
            scores, dim = named["input"], named.get("dim")
            if isinstance(dim, int) and scores.dim() <= _MOST_DIMENSIONS:
                chosen = self._choose(scores, 1, dim, lambda: torch.max(scores, dim, keepdim=True))
                if not named.get("keepdim"):
                    chosen = chosen[0].squeeze(dim), chosen[1].squeeze(dim)
                return torch.return_types.max(chosen)
        return func(*args, **kwargs)

    def _choose(self, scores: Tensor, k: int, dim: int, find: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        """Returns values and places of k elements along `dim`: those at the first pass's places, or `find`'s."""
        shape = list(scores.shape)
        shape[dim] = k
        if in_backward():  # a block that is recomputed: from the same scores as in the forward, in another order
            places = None if self._is_first else self._repeated(scores, shape)
        else:
            index = len(self._scores)
            self._scores.append(scores.detach().clone())
            places = None if self._is_first or index >= len(self._choices) else self._choices[index]
        if places is not None and list(places.shape) == shape:
            return scores.gather(dim, places), places
        values, places = find()
        if self._is_first and not in_backward():
            self._choices.append(places)
        return values, places

    def _repeated(self, scores: Tensor, shape: list[int]) -> Tensor | None:
        """Returns the places that this pass's forward took from these scores; None if it never did."""
        for seen, places in zip(self._scores, self._choices, strict=False):
            if list(places.shape) == shape and seen.device == scores.device and torch.equal(seen, scores):
                return places
        return None


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | {("input" if key == "self" else key): kwargs[key] for key in kwargs}
