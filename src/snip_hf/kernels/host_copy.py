"""Copies of the host's numbers on a device, for which the host does not wait."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


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
