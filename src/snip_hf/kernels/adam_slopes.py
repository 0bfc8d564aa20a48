"""The derivative of Adam's update times a tensor, in one launch on a GPU instead of 25 (`optimizers.update_rules`).

Each element is computed in the order of `update_rules.adam`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .launching import launch
from .rounding import has_kernels

_BLOCK = 1024
_MOMENTS = (torch.float32, torch.bfloat16)


class AdamNumbers(NamedTuple):
    """The constants of a step; `first` and `second` are the moments."""

    first_kept: float
    first_taken: float
    second_kept: float
    second_taken: float
    second_slope: float
    """2 (1 - beta2)"""
    inverse_unbiased_first: float
    inverse_unbiased_second: float
    eps: float
    mean_slope: float
    """(1 - beta1) / (1 - beta1 ** step)"""
    inverse_twice_unbiased_second: float
    lr: float


def takes(gradient: Tensor, first: object, second: object, tangent: Tensor) -> bool:
    """Returns True if `adam_slopes` runs on these: dense tensors of one layout on one GPU with Triton's kernels."""
    if any(type(one) is not Tensor for one in (gradient, first, second)):
        return False
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    tensors = (gradient, first, second)
    if any(not one.is_contiguous() or one.shape != gradient.shape for one in tensors):
        return False
    if any(one.device != gradient.device for one in (first, second, tangent)):
        return False
    if gradient.dtype != torch.float32 or first.dtype not in _MOMENTS or first.dtype != second.dtype:
        return False
    is_dense = tangent.is_contiguous() or not any(tangent.stride())
    is_alike = tangent.shape == gradient.shape and tangent.dtype == torch.float32
    return is_dense and is_alike and gradient.numel() > 0 and has_kernels(gradient.device)


def adam_slopes(gradient: Tensor, first: Tensor, second: Tensor, tangent: Tensor, numbers: AdamNumbers) -> Tensor:
    """Returns h'(gradient) * tangent, FP32; 0 if the second moment is 0. Call it only if `takes` returns True.

    Args:
        first, second: moments before the step.
        tangent: FP32; may be a single number, expanded.
    """
    slopes, size = torch.empty_like(gradient), gradient.numel()
    programs, tensors = (triton.cdiv(size, _BLOCK),), (gradient, first, second, tangent, slopes)
    constants, free = (first.dtype == torch.float32, int(any(tangent.stride())), _BLOCK), tuple(map(float, numbers))
    launch(_adam_slopes_kernel, programs, tensors, (size,), constants, free, enable_fp_fusion=False)
    return slopes


if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _adam_slopes_kernel(  # type: ignore[no-untyped-def]
        gradient,
        first,
        second,
        tangent,
        slopes,
        first_kept,
        first_taken,
        second_kept,
        second_taken,
        second_slope,
        inverse_unbiased_first,
        inverse_unbiased_second,
        eps,
        mean_slope,
        inverse_twice_unbiased_second,
        lr,
        size,
        WIDE: tl.constexpr,  # moments are in FP32
        STEP: tl.constexpr,  # of the tangent: 0 for one number
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(gradient + at, inside, other=0.0)
        m, v = tl.load(first + at, inside, other=0.0), tl.load(second + at, inside, other=0.0)
        if not WIDE:
            m, v = m.to(tl.float32), v.to(tl.float32)
        m = first_kept * m + first_taken * g
        v = second_kept * v + second_taken * (g * g)
        root = tl.sqrt_rn(v * inverse_unbiased_second)
        divisor = root + eps
        by_root = tl.div_rn(m * inverse_unbiased_first, divisor)
        by_root *= tl.div_rn(second_slope * g * inverse_twice_unbiased_second, root)
        slope = tl.where(v > 0, lr * tl.div_rn(mean_slope - by_root, divisor), 0.0)
        tl.store(slopes + at, slope * tl.load(tangent + at * STEP, inside, other=0.0), inside)
