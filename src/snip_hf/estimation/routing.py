"""Routers' choices, held fixed over several passes on one batch.

A router sends each token to the experts of its k largest scores. Its choices are constant but for jumps, so that a
derivative along moved weights is one at fixed choices. Two passes at slightly different weights choose differently for
the few tokens whose scores are nearly equal, and their difference, divided by a small step, would consist of these
jumps. So passes whose results are compared choose alike: in the later ones `torch.topk`, and `torch.max` along a
dimension (PhiMoE's router), return the elements at the places that they found in the first one. Scores and their
gradients are those of the pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..python_state import Shared

_topk: Callable[..., Any] = torch.topk
_max: Callable[..., Any] = torch.max
# Scores have a row per token, or per token of each sequence. Maxima of more dimensions are those of attention.
_MOST_DIMENSIONS = 3
# The routing that this thread's pass follows, and those of all threads: on a GPU, blocks that are recomputed run in
# threads of torch's own.
_here = threading.local()
_every: list[FixedRouting] = []


class FixedRouting:
    """The choices that the first of its passes makes, and that all others repeat."""

    def __init__(self) -> None:
        self._is_first = True
        self._choices: list[Tensor] = []
        # What the forward of the running pass chose from, in the order of its calls.
        self._scores: list[Tensor] = []

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Lets the forward and backward pass within the context choose, or repeat what was chosen."""
        before = getattr(_here, "routing", None)
        _here.routing, self._scores = self, []
        _every.append(self)
        try:
            with _in_place():
                yield
        finally:
            _every.remove(self)
            _here.routing, self._scores = before, []
        self._is_first = False

    def choose(self, scores: Tensor, k: int, dim: int, find: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        """Returns the values and the places of k elements along `dim`: what `find` does, at the places of the first
        pass."""
        shape = _chosen_shape(scores, k, dim)
        if _in_backward():  # a block that is recomputed: from the same scores as in the forward, in another order
            places = None if self._is_first else self.repeated(scores, shape)
        else:
            index = len(self._scores)
            self._scores.append(scores.detach().clone())
            places = None if self._is_first or index >= len(self._choices) else self._choices[index]
        if places is None or places.shape != shape:
            values, places = find()
            if self._is_first and not _in_backward():
                self._choices.append(places)
            return values, places
        return scores.gather(dim, places), places

    def repeated(self, scores: Tensor, shape: torch.Size) -> Tensor | None:
        """Returns the places that the forward of the running pass took from these scores; None if it never did."""
        for seen, places in zip(self._scores, self._choices, strict=False):
            if places.shape == shape and seen.device == scores.device and torch.equal(seen, scores):
                return places
        return None


def _chosen_shape(scores: Tensor, k: int, dim: int) -> torch.Size:
    shape = list(scores.shape)
    shape[dim] = k
    return torch.Size(shape)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _routing_of(scores: Tensor, k: int, dim: int) -> FixedRouting | None:
    """Returns the routing of the pass that this call belongs to."""
    own: FixedRouting | None = getattr(_here, "routing", None)
    if own is not None or not _in_backward():
        return own
    shape = _chosen_shape(scores, k, dim)
    return next((routing for routing in _every if routing.repeated(scores, shape) is not None), None)


def _fixed_topk(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
) -> Any:
    routing = None if out is not None or input.dim() == 0 else _routing_of(input, k, dim)
    if routing is None:
        return _topk(input, k, dim, largest, sorted, out=out)
    return torch.return_types.topk(routing.choose(input, k, dim, lambda: _topk(input, k, dim, largest, sorted)))


def _fixed_max(input: Tensor, *args: Any, **options: Any) -> Any:
    named: dict[str, Any] = dict(zip(("dim", "keepdim"), args, strict=False)) | options
    dim = named.get("dim")
    is_choice = set(named) <= {"dim", "keepdim"} and 0 < input.dim() <= _MOST_DIMENSIONS
    routing = _routing_of(input, 1, dim) if is_choice and isinstance(dim, int) else None
    if routing is None or not isinstance(dim, int):
        return _max(input, *args, **options)
    chosen = routing.choose(input, 1, dim, lambda: _max(input, dim, keepdim=True))
    values, places = chosen if named.get("keepdim") else (each.squeeze(dim) for each in chosen)
    return torch.return_types.max((values, places))


@contextmanager
def _patched() -> Iterator[None]:
    fixed = {"topk": _fixed_topk, "max": _fixed_max}
    own = {name: vars(torch.Tensor)[name] for name in fixed if name in vars(torch.Tensor)}
    plain = {name: getattr(torch, name) for name in fixed}
    for name, function in fixed.items():
        setattr(torch, name, function)
        setattr(torch.Tensor, name, function)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(torch, name, function)
            delattr(torch.Tensor, name)
        for name, method in own.items():
            setattr(torch.Tensor, name, method)


_in_place = Shared(_patched)
