"""The weights that a probe moves along a random direction d = J^T z, held in FP32 or made again when they are read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from statistics import median

import torch
from torch import Tensor

from ..layers.layer import SnipLayer
from ..numerics.random_streams import stream_key
from ..parallel.ranks import Processes
from ..parallel.sharding import compute_device, on_compute_device, pending_squares, sharded_as, whole

# Least step, relative to the one that suits the median weight. Otherwise a weight that is almost 0 would make all
# others move by less than FP32 resolves (docs/log/2026-11.md has the errors).
_LEAST_STEP = 0.1

Draw = tuple[int, int, int]
"""Seed, step and index of a probe; they decide its random direction."""


class MovedWeights:
    """W + eps d, and after `turn` W - eps d, in FP32, laid out as the weight.

    The constructor only launches the computation of the directions. The first use of `epsilon` or of a moved weight
    waits for the device, and is collective.

    A layer's random numbers depend on its name only, not on which other layers a process holds, nor on whether its
    weight is held or remade. Sharded weights move in place on their shards.

    Args:
        layers: the swapped layers; their weights must be those of the model and no stand-ins.
        pullbacks: layer, or name of another parameter -> function from z ~ N(0, 1) to the direction, both laid out as
            the weight.
        draw: decides z.
        relative_step: the largest |eps * d| / |W|, of all weights together and of each one that is not much smaller
            than the others (`_LEAST_STEP`); with `others`, the root mean square of an element of eps * d / that of the
            swapped weights, since a parameter of an adapter may still be 0.
        processes: the processes that probe together.
        remade: layers whose moved weights are not held.
        others: parameters that `pullbacks` names besides layers; None: none.
    """

    def __init__(
        self,
        layers: Mapping[str, SnipLayer],
        pullbacks: Mapping[str, Callable[[Tensor], Tensor]],
        draw: Draw,
        relative_step: float,
        processes: Processes,
        remade: Collection[str] = (),
        others: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._layers, self._pullbacks, self._draw = layers, pullbacks, draw
        every = {**{name: layer.weight for name, layer in layers.items()}, **(others or {})}
        self._weights = {name: every[name].detach() for name in pullbacks}
        self._is_turned = False
        self._directions: dict[str, Tensor] = {}
        """Directions that are held; `_held` moves them in place."""
        self._relative_step, self._processes, self._has_others = relative_step, processes, others is not None
        self._remade = [name for name in pullbacks if name in remade]

        def directions() -> Iterator[Tensor]:
            for name in pullbacks:
                direction = self._direction(name)
                if name not in self._remade:
                    self._directions[name] = direction
                yield direction

        weights = list(self._weights.values())
        measured = weights if others is None else [layer.weight.detach() for layer in layers.values()]
        self._counts = [sum(weight.numel() for weight in group) for group in (weights, measured)]
        self._squares = pending_squares(measured), pending_squares(directions())

    @cached_property
    def epsilon(self) -> float:
        """eps: the factor of the direction."""
        weights, directions = (squares.tolist() for squares in self._squares)
        own = [sum(weights), sum(directions), *self._counts]
        ratios = [] if self._has_others else self._ratios(weights, directions)
        *totals, gathered = zip(*self._processes.pipeline.gather([*own, ratios]), strict=True)
        size, moves, moved_count, measured_count = (float(sum(column)) for column in totals)
        if moves == 0:
            return 1.0
        size *= moved_count / measured_count
        step, every = (size / moves) ** 0.5, [ratio for one in gathered for ratio in one]
        if every:
            step = min(step, max(min(every), _LEAST_STEP * median(every)))
        return float(self._relative_step * step)

    def _ratios(self, weights: Sequence[float], directions: Sequence[float]) -> list[float]:
        """Returns |W| / |d| of each weight that is not 0 and moves, from the squares of all of them."""
        pairs = zip(weights, directions, strict=True)
        return [(size / squares) ** 0.5 for size, squares in pairs if squares > 0 and size > 0]

    @cached_property
    def _held(self) -> dict[str, Tensor]:
        """The moved weights that are held."""
        # Collective, so also computed by a rank that holds none.
        _ = self.epsilon
        return {name: self._move(name, direction) for name, direction in self._directions.items()}

    def turn(self) -> None:
        """Changes W + eps * d to W - eps * d, in place."""
        for name, moved in self._held.items():
            self._turn(name, moved)
        self._is_turned = True

    def by_parameter(self) -> dict[str, Tensor | Callable[[], Tensor]]:
        """Returns parameter name -> the tensor that a pass uses instead; for remade weights a function that makes it.

        Collective if a parameter beside the swapped weights is sharded: its module needs the whole of it.
        """
        remade: dict[str, Tensor | Callable[[], Tensor]] = {name: partial(self._made, name) for name in self._remade}
        used = self._held | remade
        of_layers = {self._layers[name].weight_name(name): used[name] for name in used if name in self._layers}
        return {**of_layers, **{name: whole(moved) for name, moved in self._held.items() if name not in self._layers}}

    @torch.no_grad()
    def _made(self, name: str) -> Tensor:
        moved = self._move(name, self._direction(name))
        if self._is_turned:
            self._turn(name, moved)
        return moved

    def _direction(self, name: str) -> Tensor:
        layer, weight = self._layers.get(name), self._weights[name]
        if layer is None:
            z = random_direction(name, weight, self._draw)
        else:
            z = layer.laid_out(random_directions(name, layer, self._draw))
        return sharded_as(self._pullbacks[name](z), weight)

    def _move(self, name: str, direction: Tensor) -> Tensor:
        return direction.mul_(self.epsilon).add_(on_compute_device(self._weights[name]))

    def _turn(self, name: str, moved: Tensor) -> None:
        moved.neg_().add_(on_compute_device(self._weights[name]), alpha=2.0)


def random_directions(name: str, layer: SnipLayer, draw: Draw) -> tuple[Tensor, ...]:
    """Returns `random_direction` of each matrix of a layer, (O, I)."""
    # One direction per matrix, since the derivatives of samples and the traces are along matrices.
    shapes = layer.matrices(torch.empty(layer.weight.shape, device="meta"))
    like = torch.empty(1, device=compute_device(layer.weight)).expand(len(shapes), *shapes[0].shape)
    return random_direction(name, like, draw).unbind()


def random_direction(name: str, weight: Tensor, draw: Draw) -> Tensor:
    """Returns the z ~ N(0, 1) of a layer, FP32, whole: the same numbers whenever it is drawn.

    Args:
        name: of the layer, or of another parameter.
        weight: of the layer as a matrix (O, I), or as matrices (E, O, I), or the other parameter; gives shape and
            device.
        draw: what decides the numbers, with the name.
    """
    device = compute_device(weight)
    generator = torch.Generator(device).manual_seed(
        stream_key(*draw, zlib.crc32(name.encode(errors="surrogatepass")), 0) >> 1
    )
    return torch.randn(weight.shape, generator=generator, dtype=torch.float32, device=device)
