"""Kernels that are compiled and not launched, in a process that fills Triton's cache on disk for another one.

Such a process has no GPU. Tensors without memory (torch's device "meta") stand for those of the GPU that it compiles
for: they have shapes, strides, dtypes and offsets, which is all that Triton compiles for. So the code that launches
kernels in training compiles the same ones here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

# The compute capability that tensors without memory have; empty in all other processes.
_of_meta: list[tuple[int, int]] = []


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU, or that which "meta" stands for; (0, 0) of other devices."""
    if device.type == "meta" and _of_meta:
        return _of_meta[0]
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def compile_for(gpu: tuple[int, int], devices: int) -> list[str]:
    """Has this process compile kernels for a compute capability from now on, and never launch one.

    Args:
        gpu: the compute capability.
        devices: how many GPUs the machine has.

    Returns: the names of the kernels that were compiled so far and not found in the cache; it grows.
    """
    import triton

    folders = _folders(devices)
    compiled: list[str] = []

    def keep(*, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **rest: Any) -> None:
        if not rest["cache_hit"]:
            compiled.append(src.name)
        for folder in folders[1:]:
            with _said(folder):
                _copy(metadata["hash"], metadata_group, folder)

    triton.knobs.cache.dir = folders[0]
    triton.knobs.compilation.listener = keep
    triton.runtime.driver.set_active(_NamedGpu(gpu))
    _of_meta[:] = [gpu]
    return compiled


class _NamedGpu:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, gpu: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * gpu[0] + gpu[1], 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Says on stderr what keeps a cache from being written, which does no harm to others."""
    try:
        yield
    except OSError as error:
        print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)


def _folders(devices: int) -> Sequence[str]:
    """Returns where a process of the same environment looks for compiled kernels.

    Where TRITON_CACHE_DIR is not set, Inductor sets it for the process that it compiles in, to a folder of the GPU's.
    """
    import triton

    folders = [triton.knobs.cache.dir]
    with contextlib.suppress(ImportError), _said("Inductor's cache"):
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        folders += [triton_cache_dir(device) for device in range(devices)]
    return list(dict.fromkeys(folders))


def _copy(key: str, files: Mapping[str, str], folder: str) -> None:
    """Copies the files of one compiled kernel to another cache."""
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    own = knobs.cache.dir
    knobs.cache.dir = folder
    try:
        cache = get_cache_manager(key)
        described = next(name for name in files if name.endswith(".json"))
        if cache.get_group(described) is None:
            copies = {name: cache.put(Path(path).read_bytes(), name) for name, path in files.items()}
            cache.put_group(described, copies)
    finally:
        knobs.cache.dir = own


def is_compiled(device: torch.device) -> bool:
    """Returns True if kernels that run on a device are compiled for it, and not interpreted."""
    if capability(device) < (8, 0) or find_spec("triton") is None:
        return False
    import triton

    return not triton.knobs.runtime.interpret
