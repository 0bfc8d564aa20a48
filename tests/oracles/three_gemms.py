"""The output and gradients of one linear layer under a plan, written out as in docs/method.md, section 1.

Legend: T tokens, I in_features, O out_features. Operands are quantized by `oracles.rounding`, products are summed in
float64. Beside every result stands the sum of the absolute products, by which rounding errors of an FP32 sum are
bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .rounding import Floats, quantized, random_numbers

GRID_OF = {"fp8": "e4m3", "fp4": "e2m1"}
# Number that keys the output gradient's stream, the same for both GEMMs that read it.
GRAD_OUTPUT = 1


@dataclass(frozen=True)
class Product:
    """A matrix product, the sums of its absolute terms, and the number of terms per sum."""

    value: NDArray[np.float64]
    absolute: NDArray[np.float64]
    terms: int

    def check(self, got: Floats, unit: float, name: str) -> None:
        """Fails unless `got` is this product up to FP32 summation and one rounding to a dtype of unit roundoff `unit`.

        The bound is the classical one for sums in any order: terms * 2**-24 * sum |a b|, twice for safety.
        """
        bound = 2 * self.terms * 2.0**-24 * self.absolute + 2 * unit * np.abs(self.value)
        worst = np.max(np.abs(got - self.value) - bound, initial=-1.0)
        assert got.shape == self.value.shape and worst <= 0, f"{name} is outside its error bound by {worst}."


def product(left: Floats, right: Floats) -> Product:
    a, b = left.astype(np.float64), right.astype(np.float64)
    return Product(a @ b, np.abs(a) @ np.abs(b), a.shape[1])


class Layer:
    """A layer's tensors x (T, I), weight (O, I), bias (O,) or None, grad_output (T, O), its random key, and the rank
    among how many that has these tokens."""

    def __init__(
        self,
        x: Floats,
        weight: Floats,
        bias: Floats | None,
        grad_output: Floats,
        key: tuple[int, int, int, int],
        rank: tuple[int, int] = (0, 1),
    ) -> None:
        self.x, self.weight, self.bias, self.grad_output, self.key = x, weight, bias, grad_output, key
        self.rank = rank
        self._products: dict[tuple[str, str], Product] = {}

    def output(self, fmt: str) -> Product:
        """Y = X W^T + b, contracts I: X in 1x128, W in 128x128."""
        result = self._product("forward", fmt, (1, 128), (128, 128))
        if self.bias is None:
            return result
        return Product(result.value + self.bias, result.absolute + np.abs(self.bias), result.terms + 1)

    def grad_input(self, fmt: str) -> Product:
        """dX = G W, contracts O: G in 1x128, W in 128x128."""
        return self._product("grad_input", fmt, (1, 128), (128, 128))

    def grad_weight(self, fmt: str) -> Product:
        """dW = G^T X, contracts T: G and X in 128x1."""
        return self._product("grad_weight", fmt, (128, 1), (128, 1))

    @cached_property
    def grad_bias(self) -> Product:
        return product(np.ones((1, len(self.grad_output)), np.float32), self.grad_output)

    def _product(self, gemm: str, fmt: str, left_tile: tuple[int, int], right_tile: tuple[int, int]) -> Product:
        if (gemm, fmt) not in self._products:
            left = self.x if gemm == "forward" else self.grad_output
            right = self.x if gemm == "grad_weight" else self.weight
            if fmt != "bf16":
                # Only output gradients in FP4 are rounded stochastically.
                random = None
                if fmt == "fp4" and gemm != "forward":
                    random = random_numbers((*self.key, GRAD_OUTPUT), left.shape, *self.rank)
                left = quantized(left, GRID_OF[fmt], left_tile, random)[2]
                right = quantized(right, GRID_OF[fmt], right_tile)[2]
            if gemm == "forward":
                right = right.T
            elif gemm == "grad_weight":
                left = left.T
            self._products[gemm, fmt] = product(left, right)
        return self._products[gemm, fmt]
