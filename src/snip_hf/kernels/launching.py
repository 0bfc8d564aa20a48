"""Launches of Triton kernels with little work on the host.

`kernel[grid](...)` looks at every argument and every global that the kernel names, some 50 to 100 microseconds in
Python, which a model of 1B does over a thousand times per step. A kernel that was compiled for such arguments is
launched here at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# (Kernel, device, kind of the first tensor, numbers, constants, options) -> the compiled kernel. Texts of ever other
# lengths would fill it.
_COMPILED: dict[tuple[Any, ...], Any] = {}
_MOST = 4096
_ALIGNED = 15  # of the bytes that Triton compiles for: multiples of 16 or any
_MOST_PROGRAMS = 65_535  # of CUDA, along all axes but the first


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    free: tuple[float, ...] = (),
    **options: Any,
) -> None:
    """Launches a kernel on the current device.

    Args:
        kernel: has as parameters, in this order, the tensors, the free numbers, the numbers and the constants.
        grid: numbers of programs.
        tensors: on one device; all but the first have the same dtypes in every call.
        numbers: numbers that are not compiled in, but for what Triton sees of whole ones: 1, multiples of 16, 64 bits.
        constants: its `tl.constexpr` parameters.
        free: numbers of which Triton sees nothing: floats, and whole ones whose parameters have a type and are not
            specialized. Other values need no other kernel.
        options: warps, and others of the compiler.

    Raises:
        ValueError: there are more programs along an axis than a GPU takes.
    """
    first, together = tensors[0], 0
    addresses = [tensor.data_ptr() for tensor in tensors]
    for address in addresses:
        together |= address
    key = (kernel.fn, first.get_device(), first.dtype, numbers, constants, *options.values())
    compiled = None if together & _ALIGNED else _COMPILED.get(key)
    if compiled is not None:
        # Of an address Triton does not ask the driver whether the device can read it.
        compiled[(*grid, 1, 1)[:3]](*addresses, *free, *numbers, *constants)
        return
    if max(grid[1:], default=0) > _MOST_PROGRAMS:
        raise ValueError(
            f"Got an operand of shape {tuple(first.shape)} for {kernel.fn.__name__}, which takes {max(grid[1:]):,} "
            f"rows of blocks; expected at most {_MOST_PROGRAMS:,}. Use smaller micro-batches, and more of them."
        )
    compiled = kernel[grid](*tensors, *free, *numbers, *constants, **options)
    if together & _ALIGNED or compiled is None:  # the interpreter compiles nothing
        return
    if len(_COMPILED) >= _MOST:
        _COMPILED.clear()
    _COMPILED[key] = compiled
