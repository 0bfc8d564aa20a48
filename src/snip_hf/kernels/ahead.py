"""Kernels that are compiled and not launched, in a process that fills Triton's cache on disk for another one.

Such a process has no GPU. Tensors without memory (torch's device "meta") stand for those of the GPU that it compiles
for: they have shapes, strides, dtypes and offsets, which is all that Triton compiles for. So the code that launches
kernels in training compiles the same ones here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..json_io import write_atomic

# The compute capability that tensors without memory have; empty in all other processes.
_of_meta: list[tuple[int, int]] = []
# While `find_kernels` looks for kernels: what they are compiled for -> their compilation.
_noted: list[dict[Hashable, Callable[[], object]]] = []


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU, or that which "meta" stands for; (0, 0) of other devices."""
    if device.type == "meta" and _of_meta:
        return _of_meta[0]
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def compile_for(gpu: tuple[int, int], folders: Sequence[str]) -> dict[str, str]:
    """Has this process compile kernels for a compute capability from now on, and never launch one.

    Args:
        gpu: the compute capability.
        folders: as `cache_folders` gives them, where kernels are looked for.

    Returns: the kernels that were compiled so far and not found in the first folder, cache key -> name; it grows.
    """
    import triton

    compiled: dict[str, str] = {}
    compile_launcher = _Launchers(folders)

    def keep(*, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **rest: Any) -> None:
        if not rest["cache_hit"]:
            compiled[metadata["hash"]] = src.name
        for folder in folders[1:]:
            with _said(folder):
                _copy(metadata["hash"], metadata_group, folder)
        compile_launcher(src, metadata)

    triton.knobs.cache.dir = folders[0]
    triton.knobs.compilation.listener = keep
    driver = _NamedGpu(gpu)
    triton.runtime.driver.set_active(driver)
    _of_meta[:] = [gpu]
    with contextlib.suppress(Exception):  # else the first compilation does it, in each process
        _identify_compiler(driver.get_current_target())
    return compiled


def _identify_compiler(target: Any) -> None:
    """Computes what each cache key is made of, and Triton remembers: it reads all files of its own."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    triton_key()
    make_backend(target).hash()


def find_kernels(parts: Iterable[tuple[str, Callable[[], object]]]) -> list[Callable[[], object]]:
    """Calls what launches kernels on tensors without memory; says on stderr what failed. Nothing is compiled.

    Args:
        parts: name and what to call.

    Returns: the compilation of each kernel that is launched, each once, in the order of the launches.
    """
    _noted.append({})
    try:
        for name, part in parts:
            try:
                part()
            except Exception as error:  # it is then compiled where it is launched
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return list(_noted[-1].values())
    finally:
        _noted.pop()


def compile_or_note(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    numbers: tuple[tuple[float, ...], tuple[float, ...], tuple[Any, ...]],
    options: Mapping[str, Any],
) -> None:
    """Compiles a kernel that is launched on tensors without memory, or notes it.

    Args:
        kernel, grid, tensors, options: as in `launching.launch`.
        numbers: its free ones, the others and the constants.
    """
    free, specialized, constants = numbers
    work = partial(kernel.warmup, *tensors, *free, *specialized, *constants, grid=grid, **options)
    if not _noted:
        work()
        return
    # What Triton sees of numbers, and more where their parameters are not specialized.
    seen = tuple((type(number), number == 1, number % 16 == 0, -(2**31) <= number < 2**31) for number in specialized)
    places = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
    _noted[-1].setdefault((kernel.fn, places, seen, constants, *options.items()), work)


class _Launchers:
    """Compiles the C programs that launch kernels. Up to version 3.6 Triton has one for each signature of a kernel, for
    which it calls a C compiler, a quarter of a second each; later versions have one for all.

    Args:
        folders: as in `compile_for`.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        from triton.backends.nvidia import driver

        self._folders = folders
        self._launcher = driver.CudaLauncher if hasattr(driver, "make_launcher") else None

    def __call__(self, source: Any, metadata: Mapping[str, Any]) -> None:
        if self._launcher is None:
            return
        try:
            program = self._launcher(source, SimpleNamespace(**metadata)).launch.__self__
        except Exception as error:
            self._launcher = None  # without a C compiler or the driver's library the next one would fail too
            print(f"launchers of kernels: {type(error).__name__}: {error}", file=sys.stderr)
            return
        file = Path(program.__file__)
        for folder in self._folders[1:]:
            copy = Path(folder, file.parent.name, file.name)
            with _said(folder):
                if not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(copy, file.read_bytes())


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


def cache_folders(devices: int) -> Sequence[str]:
    """Returns where this process looks for compiled kernels, on a machine with so many GPUs.

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
