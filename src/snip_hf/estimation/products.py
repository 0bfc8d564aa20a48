"""FP32 matrix products on a GPU, fast and all but exact, as three BF16 products (ours).

FP32 products run beside the tensor cores, more than ten times slower than BF16 ones. To 16 bits an FP32 number is the
sum of two BF16 numbers, high + low, and so

    left right = high high + high low + low high        (low low is of the size of what the two numbers leave out)

which is one BF16 product three times as long, summed in FP32: right to about 2^-17 of its terms. What a probe looks
for is some 2^-10 of them (docs/method.md, section 3); one BF16 product is right to 2^-9, one TF32 product to 2^-12.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.bf16_parts import bf16_parts
from ..kernels.rounding import capability, has_kernels

# The first GPUs whose tensor cores multiply BF16.
_AMPERE = (8, 0)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right, (..., M, K) x (..., K, N), both of two or both of three dimensions.

    FP32 operands on a GPU with BF16 tensor cores are split (`split_product`), all others multiplied as they are.
    """
    return split_product(left, right) if is_split(left, right) else left @ right


def rough_product(left: Tensor, right: Tensor, is_narrow: bool = False) -> Tensor:
    """As `product`, but with one BF16 product where that takes three: right to 2^-9 of its terms.

    For what only squares are summed of, whose errors of rounding, unlike each other, are as if they were not there.

    Args:
        left: as `product` takes it, or in BF16 as `product` would split it.
        right: as left.
        is_narrow: whether such a product may be in BF16 itself.
    """
    if torch.bfloat16 not in (left.dtype, right.dtype) and not is_split(left, right):
        return left @ right
    return _multiplied(left.bfloat16(), right.bfloat16(), is_narrow and has_kernels(left.device))


def roughly(x: Tensor) -> Tensor:
    """Returns an operand as `rough_product` multiplies it, for several products: in BF16 where it does so in BF16."""
    return x.bfloat16() if is_split(x, x) else x


def split_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right from three products of BF16 parts; shapes as in `product`, FP32.

    On a CPU the same parts are multiplied in FP32, where their products are exact.
    """
    one, other = bf16_parts(left, -1, 2), bf16_parts(right, -2, 1)
    return _multiplied(one, other)


def _multiplied(left: Tensor, right: Tensor, is_narrow: bool = False) -> Tensor:
    """Returns left @ right of BF16 matrices, summed in FP32; a narrow product is in BF16, others are in FP32."""
    if not left.is_cuda:
        found = left.to(torch.float32) @ right.to(torch.float32)
        return found.bfloat16() if is_narrow else found
    if is_narrow:
        return left @ right
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    wide: Tensor = multiply(left, right, out_dtype=torch.float32)
    return wide


def is_split(left: Tensor, right: Tensor) -> bool:
    """Returns True if `product` splits these operands: FP32, outside of autocast, on a GPU with BF16 tensor cores."""
    if capability(left.device) < _AMPERE or torch.is_autocast_enabled("cuda"):
        return False
    return left.dtype == right.dtype == torch.float32 and left.numel() * right.numel() > 0
