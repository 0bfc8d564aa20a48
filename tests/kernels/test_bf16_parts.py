"""Are the BF16 parts of the kernel those of torch's operations, bit for bit?"""

from __future__ import annotations

import pytest
import torch
from kernel_runs import Run
from torch import Tensor

from snip_hf.kernels.bf16_parts import bf16_parts


def drawn(*shape: int) -> Tensor:
    """Numbers of many magnitudes, among them none, subnormal and infinite ones."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))
    flat = x.view(-1)
    flat[:5] = torch.tensor([0.0, -0.0, 1e-40, torch.inf, 3.4e38])
    return x


LAYOUTS = {
    "matrix": drawn(5, 130),
    "wide": drawn(3, 1100),
    "column": drawn(7, 1),
    "one": torch.tensor([[1.2345678]]),
    "batch": drawn(3, 4, 37),
    "part of a batch": drawn(2, 3, 40)[:, :, 7:29],
    "every other column": drawn(4, 60)[:, ::2],
}


@pytest.mark.parametrize("low", [1, 2])
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
def test_parts_are_high_high_and_low_in_the_places_of_the_joined_matrix(
    run: Run, x: Tensor, dim: int, low: int
) -> None:
    found, expected = run("bf16_parts", x, dim, low), bf16_parts(x, dim, low)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    same = found.float().nan_to_num(nan=0.0) == expected.float().nan_to_num(nan=0.0)
    assert same.all()


def test_the_parts_add_up_to_16_bits_of_a_number() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    high, again, low = bf16_parts(x, -1, 2).float().chunk(3, -1)
    assert torch.equal(high, again)
    assert ((high + low - x).abs() <= 2.0**-16 * x.abs()).all()


def test_a_transposed_tensor_stays_as_it_lies_in_memory() -> None:
    assert bf16_parts(torch.ones(3, 4, 5).mT, -2, 1).stride() == (60, 1, 15)
