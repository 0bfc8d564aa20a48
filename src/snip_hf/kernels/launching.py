"""Launches of Triton kernels with little work on the host, and copies to a device without waiting.

`kernel[grid](...)` looks at every argument and every global that the kernel names, some 50 to 100 microseconds in
Python, which a model of 1B does over a thousand times per step. A kernel that was compiled for such arguments is
launched here at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Key -> the compiled kernel as it is launched on a grid, and its last arguments. At `_MOST` entries it is emptied:
# sequences of ever new lengths would fill it.
_COMPILED: dict[Hashable, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
_MOST = 4096
_ALIGNED = 15  # of the bytes that Triton compiles for: multiples of 16 or any
_MOST_PROGRAMS = 65_535  # of CUDA, along all axes but the first


def is_elsewhere(x: Tensor) -> bool:
    """Returns True if a tensor is on a GPU that is not the current device, on which Triton launches."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def relaunch(key: Hashable, tensors: Sequence[Tensor], free: tuple[float, ...] = ()) -> bool:
    """Launches a kernel as `launch` did before with this key; returns False if it did not, or may not again.

    Args:
        key: names the kernel, the device, and all that the arguments of `launch` are derived from but for the tensors'
            addresses and the free numbers.
        tensors, free: as in `launch`.
    """
    known = _COMPILED.get(key)
    if known is None:
        return False
    together = 0
    addresses = [tensor.data_ptr() for tensor in tensors]
    for address in addresses:
        together |= address
    if together & _ALIGNED:
        return False
    run, rest = known
    # Of an address Triton does not ask the driver whether the device can read it.
    run(*addresses, *free, *rest)
    return True


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    free: tuple[float, ...] = (),
    key: Hashable = None,
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
        key: what the caller has just tried `relaunch` with, so that the next such launch need not make these arguments;
            None: they are the key.
        options: warps, and others of the compiler.

    Raises:
        ValueError: there are more programs along an axis than a GPU takes.
    """
    first = tensors[0]
    if key is None:
        key = (kernel.fn, first.get_device(), first.dtype, grid, numbers, constants, *options.values())
        if relaunch(key, tensors, free):
            return
    if max(grid[1:], default=0) > _MOST_PROGRAMS:
        raise ValueError(
            f"Got an operand of shape {tuple(first.shape)} for {kernel.fn.__name__}, which takes {max(grid[1:]):,} "
            f"rows of blocks; expected at most {_MOST_PROGRAMS:,}. Use smaller micro-batches, and more of them."
        )
    compiled = kernel[grid](*tensors, *free, *numbers, *constants, **options)
    if compiled is None or any(tensor.data_ptr() & _ALIGNED for tensor in tensors):  # the interpreter compiles nothing
        return
    if len(_COMPILED) >= _MOST:
        _COMPILED.clear()
    _COMPILED[key] = compiled[(*grid, 1, 1)[:3]], (*numbers, *constants)


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns a host's tensor on a device, for which the host does not wait. On the CPU it is the tensor itself.

    To CUDA by way of pinned memory, which torch keeps until the copy has been done: the host may write `numbers` anew,
    unless they are pinned. Of pageable memory CUDA says only that a copy "might be synchronous with respect to host".
    """
    if device.type == "cuda":
        numbers = numbers.contiguous().pin_memory()
    return numbers.to(device, non_blocking=True)


@cache
def kept_on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns numbers that are the same at every step, which are brought to the device once."""
    return torch.tensor(numbers, device=device)
