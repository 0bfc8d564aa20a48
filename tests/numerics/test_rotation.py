"""The random Hadamard transform against scipy's and torchao's matrices, and what it leaves of a product."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from snip_hf.numerics.rotation import rotate, rotate_back, signs

SIZES = [2, 16, 32, 128]
each_size = pytest.mark.parametrize("size", SIZES)


def matrix(length: int, size: int) -> Tensor:
    """Returns the FP64 matrix by which `rotate` multiplies rows of this length: per run diag(signs) H / sqrt(size)."""
    found = torch.zeros(length, length, dtype=torch.float64)
    start = 0
    while start < length:
        while start + size > length:
            size //= 2
        run = slice(start, start + size)
        found[run, run] = torch.tensor(signs(size)).double()[:, None] * torch.from_numpy(hadamard(size)) / size**0.5
        start += size
    return found


@each_size
@pytest.mark.parametrize("length", [128, 200, 75, 1])
def test_is_the_product_with_scipy_s_matrices_in_whole_and_in_shorter_runs(length: int, size: int) -> None:
    x = torch.randn(5, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = x @ matrix(length, size)
    torch.testing.assert_close(rotate(x, size, 1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate(x.t(), size, 0), expected.t(), rtol=0, atol=1e-12)


def test_is_torchao_s_matrix_of_16() -> None:
    utils = pytest.importorskip("torchao.prototype.moe_training.nvfp4_training.hadamard_utils")
    expected = utils.get_rht_matrix(tuple(int(sign) for sign in signs(16)), "cpu", torch.float64, 16)
    assert torch.equal(rotate(torch.eye(16, dtype=torch.float64), 16, 1), expected)


@each_size
@pytest.mark.parametrize("length", [256, 200, 75])
def test_is_orthogonal_and_taken_back(length: int, size: int) -> None:
    rotated = rotate(torch.eye(length, dtype=torch.float64), size, 1)
    torch.testing.assert_close(rotated @ rotated.t(), torch.eye(length, dtype=torch.float64), rtol=0, atol=1e-12)
    x = torch.randn(7, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotate_back(rotate(x, size, 1), size, 1), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate_back(rotate(x, size, 0), size, 0), x, rtol=0, atol=1e-12)


def test_signs_are_balanced_and_shorter_runs_take_the_first() -> None:
    assert set(signs(128)) == {1.0, -1.0} and abs(sum(signs(128))) < 2.5 * 128**0.5
    assert signs(16) == signs(128)[:16]
