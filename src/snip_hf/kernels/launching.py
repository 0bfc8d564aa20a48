"""Launches of Triton kernels with little work on the host, and copies to a device without waiting.

`kernel[grid](...)` inspects every argument and every global that the kernel names, some 50 to 100 microseconds in
Python, over a thousand times per step for a model of 1B. Here a kernel that was compiled for such arguments is launched
directly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Key -> launcher of the compiled kernel on a grid, and its last arguments. Cleared at `_MOST` entries, since sequences
# of varying lengths would fill it.
_COMPILED: dict[Hashable, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
_MOST = 4096
_ALIGNED = 15  # Triton compiles for addresses that are multiples of 16, and for others
_MOST_PROGRAMS = 65_535  # of CUDA, along all axes but the first


def relaunch(key: Hashable, tensors: Sequence[Tensor], free: tuple[float, ...] = ()) -> bool:
    """Launches a kernel as `launch` did before with this key; returns False if it has not, or must not.

    Args:
        key: identifies the kernel, the device, and everything that determines the arguments of `launch`, except the
            tensors' addresses and the free numbers.
        tensors, free: as in `launch`.
    """
    known = _COMPILED.get(key)
    if known is None or _is_elsewhere(tensors[0]):
        return False
    together = 0
    addresses = [tensor.data_ptr() for tensor in tensors]
    for address in addresses:
        together |= address
    if together & _ALIGNED:
        return False
    run, rest = known
    # For an address Triton does not ask the driver whether the device can read it.
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
    """Launches a kernel on the device of its tensors.

    Args:
        kernel: has as parameters, in this order, the tensors, the free numbers, the numbers and the constants.
        grid: numbers of programs.
        tensors: on one device; all but the first have the same dtypes in every call.
        numbers: not compiled in, but Triton specializes integers that are 1, multiples of 16, or need 64 bits.
        constants: its `tl.constexpr` parameters.
        free: numbers that Triton does not specialize by: floats, and integers whose parameters have a type and are not
            specialized. All values use the same kernel.
        key: the key that the caller has just tried with `relaunch`, so that its next launch skips these arguments;
            None: the arguments are the key.
        options: of the compiler, such as num_warps.

    Raises:
        ValueError: there are more programs along an axis than a GPU supports.
    """
    first = tensors[0]
    if _is_elsewhere(first):  # Triton launches on the current device
        with torch.cuda.device_of(first):
            return launch(kernel, grid, tensors, numbers, constants, free, key, **options)
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


def _is_elsewhere(x: Tensor) -> bool:
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host to a device without waiting; returns the tensor itself for the CPU.

    Copies to CUDA go through pinned memory, which torch keeps until the copy is done: the host may overwrite `numbers`
    unless they are pinned. For pageable memory CUDA says only that a copy "might be synchronous with respect to host".
    """
    if device.type == "cuda":
        numbers = numbers.contiguous().pin_memory()
    return numbers.to(device, non_blocking=True)


@cache
def kept_on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns constant numbers on a device, copied once."""
    return torch.tensor(numbers, device=device)
