"""Backends by name, for tests that go through several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snip_hf.kernels import backend


def hopper_lacks(device: torch.device | str) -> str | None:
    """The reason why the Hopper kernels cannot run on a device."""
    return backend.BACKENDS["hopper"].lacks(torch.device(device))


def select_backend(requested: str, device: torch.device | str) -> str:
    """The name of the backend that is selected for the paper's formats."""
    return backend.select_backend(requested, device, ("fp4", "fp8")).name


def gemm_call(name: str, *arguments: Any) -> Callable[[], Tensor]:
    return backend.BACKENDS[name].gemm_call(*arguments)
