"""Gaussian noise that the passes of a probe add in place of moving weights (policy "snip-paper")."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..numerics.random_streams import stream_key
from .moved_weights import Draw

Place = Literal["input", "grad_output"]
PLACES: tuple[Place, ...] = ("input", "grad_output")
# Streams of their own: random directions have operand 0, sampled tokens 1, rounding the ones after that.
_NOISE_OPERANDS = {"input": 16, "grad_output": 17}


@dataclass(frozen=True)
class Noise:
    """Gaussian noise that one pass adds to what every swapped layer reads, relative to its size (policy "snip-paper").

    With noise on inputs, each layer multiplies X + N instead of X, and its own weight's gradient is taken with X + N
    too. With noise on output gradients, both backward GEMMs of each layer read G + N instead of G. The root mean square
    of N is `relative` times that of the tensor that it is added to, in each call of the layer.

    The numbers are a function of the draw, the data rank and the layer's name, so a resumed run and a recomputed block
    repeat them, and torch's own generators do not advance. A layer that is called twice in a pass with inputs of one
    shape adds the same numbers twice.
    """

    place: Place
    """The tensor that it is added to."""
    draw: Draw
    """Decides its numbers, with the layer's name."""
    relative: float
    """Root mean square of the noise / that of the tensor."""
    rank: int = 0
    """Data rank; each has its own tokens and noise."""

    def on_input(self, name: str, x: Tensor) -> Tensor:
        """Returns the input that the layer reads instead of x (T, I)."""
        return x + self._of(name, x) if self.place == "input" else x

    def on_output(self, name: str, y: Tensor) -> Tensor:
        """Returns y (T, O), with noise on its gradient if the pass has noise there."""
        if self.place == "input":
            return y
        return _NoisyGradient.apply(y, name, self)

    def _of(self, name: str, tensor: Tensor) -> Tensor:
        of_draw = stream_key(*self.draw, zlib.crc32(name.encode(errors="surrogatepass")), _NOISE_OPERANDS[self.place])
        generator = torch.Generator(tensor.device).manual_seed(stream_key(of_draw, 0, self.rank, 0, 0) >> 1)
        numbers = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
        size = tensor.detach().square().mean().sqrt()
        return numbers.mul_(self.relative * size)


class _NoisyGradient(torch.autograd.Function):
    """The identity; its backward pass adds noise to the gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, name: str, noise: Noise) -> Tensor:
        ctx.name, ctx.noise = name, noise
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad_output + ctx.noise._of(ctx.name, grad_output), None, None
