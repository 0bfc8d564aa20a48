"""The time that one GEMM takes on this machine in each format, measured once and kept in a file.

Legend: T tokens of a micro-batch, I in_features, O out_features. What is timed is what training runs: the quantization
of the operands and the product (`Backend.gemm_call`), after warm-up, the median of several runs.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..json_io import read_json, write_json_atomic
from ..kernels.backend import BACKENDS
from ..numerics.formats import FORMATS, REFERENCE
from ..numerics.gemms import GEMMS
from ..progress import progress
from ..text import printable

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
KIND = "snip-hf GEMM times"

T = TypeVar("T")
_WARM_UP, _REPEATS = 3, 15
# The first GPUs whose tensor cores multiply BF16.
_AMPERE = (8, 0)
# Clock ticks (about a millisecond) for which the GPU waits before a run, so that Python has launched all of it by then:
# what is timed is the GPU's work and not the launches, which a compiled model does not have.
_HEAD_START = 2_000_000


@dataclass(frozen=True)
class Machine:
    """What a time holds for, besides the GEMM's own shape."""

    device: str
    """Name of the GPU; of a CPU its architecture and torch's number of threads."""
    torch_version: str
    backend: str
    """Name of the backend."""
    dtype: str
    """Compute dtype of the run that was timed: bfloat16 on a GPU, float16 on one without it, float32 on a CPU."""

    @classmethod
    def of(cls, device: torch.device, backend: str) -> Machine:
        """Returns the machine that this process runs on."""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        else:
            name = f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"
        return cls(name, torch.__version__, backend, str(_dtype(device)).removeprefix("torch."))


@dataclass(frozen=True)
class GemmShape:
    """One of the three GEMMs of a linear layer, for the tokens of one micro-batch."""

    gemm: str
    tokens: int
    in_features: int
    out_features: int


Seconds = dict[str, float]
"""Format -> seconds."""
Times = dict[tuple[Machine, GemmShape], Seconds]
Timer = Callable[[str, torch.device, GemmShape, str], float]
"""(backend, device, shape, format) -> seconds, as `time_gemm`."""


def gemm_times(
    shapes: Iterable[GemmShape],
    backend: str,
    device: torch.device,
    path: str | os.PathLike[str] | None = None,
    timer: Timer | None = None,
    formats: Sequence[str] = (),
    is_first: bool = True,
) -> dict[GemmShape, Seconds]:
    """Returns the seconds of each shape in every format of the run; equal shapes are timed once.

    Args:
        shapes: the shapes of the GEMMs.
        backend: the backend whose kernels are timed.
        device: the device that they run on.
        path: a file of times; what it has for this machine is not timed again, what is new is added to it. A file that
            cannot be written costs a warning.
        timer: times one GEMM in one format; None: `time_gemm`.
        formats: the run's formats; `timed_formats` says which are timed.
        is_first: whether this is the first process, which may show a progress bar.

    Raises:
        ValueError: as `read_times`.
    """
    machine, run = Machine.of(device, backend), timer or time_gemm
    known = {} if path is None else read_times(path)
    wanted = dict.fromkeys(shapes)
    timed = timed_formats(formats)
    missing = [(shape, fmt) for shape in wanted for fmt in timed if fmt not in known.setdefault((machine, shape), {})]
    with progress("timing of GEMMs", len(missing), is_first) as tell:
        for shape, fmt in missing:
            known[machine, shape][fmt] = run(backend, device, shape, fmt)
            tell()
    if missing and path is not None:
        try:
            write_times(path, known)
        except (OSError, ValueError) as error:
            logger.warning(
                "snip-hf: could not write the times of GEMMs to %s, training goes on: %s",
                printable(path, 1000),
                printable(error, 1000),
            )
    return {shape: {fmt: known[machine, shape][fmt] for fmt in timed} for shape in wanted}


def timed_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Returns the formats that are timed for a run in these: its own, the reference and the unquantized ones."""
    reference = reference_format(formats)
    return tuple(name for name, fmt in FORMATS.items() if name in (*formats, reference) or not fmt.is_quantized)


def reference_format(formats: Sequence[str]) -> str:
    """Returns the format whose time is what a GEMM counts: the most precise quantized one of a run's formats.

    Args:
        formats: of the run, the least precise first; without a quantized one FP8 serves.
    """
    return next((name for name in reversed(formats) if FORMATS[name].is_quantized), REFERENCE.name)


def time_gemm(backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
    """Returns the median seconds of one GEMM in one format: both operands' quantization and the product.

    On a GPU this is the GEMM's own time, from events, with operands read from memory and not from the cache: in
    training, other layers run in between. On a CPU it is wall-clock time. The process's generators are left alone.
    """
    call = _prepared(backend, device, shape, format)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for _ in range(_WARM_UP):
            call()
        seconds = _gpu_seconds(call, device) if device.type == "cuda" else _cpu_seconds(call)
    return statistics.median(seconds)


def read_times(path: str | os.PathLike[str]) -> Times:
    """Returns the times in a file that `write_times` wrote, of all machines in it; nothing if there is no file.

    Raises:
        ValueError: it cannot be read, or is not exactly such a file. It may be anything, so it is not written over.
    """
    if not Path(path).exists():
        return {}
    try:
        document = read_json(path)
        _check_keys(document, ("schema_version", "kind", "times"), "the document")
        if (document["kind"], document["schema_version"]) != (KIND, SCHEMA_VERSION):
            found = ascii((document["kind"], document["schema_version"]))[:80]
            raise ValueError(f"kind and schema_version are {found}, expected {(KIND, SCHEMA_VERSION)}.")
        rows = _typed(document["times"], list, "times")
        return dict(_entry(row, f"times[{index}]") for index, row in enumerate(rows))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{printable(path, 1000)} is not a usable file of GEMM times: {error} Remove it, or name another as "
            "timing_file; what is missing is timed anew."
        ) from error


def write_times(path: str | os.PathLike[str], times: Mapping[tuple[Machine, GemmShape], Seconds]) -> None:
    """Writes times atomically and creates the folder if it is missing; raises OSError if that fails."""
    rows = [asdict(machine) | asdict(shape) | {"seconds": seconds} for (machine, shape), seconds in times.items()]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"schema_version": SCHEMA_VERSION, "kind": KIND, "times": rows})


def check_seconds(value: object, where: str, reference: str | None = None) -> Seconds:
    """Returns format -> seconds as plain data; raises ValueError unless all are times above 0, one of the reference."""
    seconds = _typed(dict(value) if isinstance(value, Mapping) else value, dict, where)
    if not seconds:
        raise ValueError(f"{where} is empty, expected seconds in at least one format.")
    if reference is not None and reference not in seconds:
        raise ValueError(f"{where} has no entry {reference!r}.")
    for fmt, number in seconds.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ValueError(f"{where}.{fmt} is {ascii(number)[:60]}, expected a number of seconds above 0.")
    return {str(fmt): float(number) for fmt, number in seconds.items()}


def _prepared(backend: str, device: torch.device, shape: GemmShape, format: str) -> Callable[[], Tensor]:
    # Random and not zeros, with which a GPU draws less power and clocks higher.
    generator = torch.Generator(device).manual_seed(0)
    sizes = (
        (shape.tokens, shape.in_features),
        (shape.out_features, shape.in_features),
        (shape.tokens, shape.out_features),
    )
    x, weight, grad_output = (
        torch.randn(size, generator=generator, device=device, dtype=_dtype(device)) for size in sizes
    )
    codes = [FORMATS[format].code] * len(GEMMS)
    state = torch.tensor([*codes, 0, 0, 1], device=device)
    return BACKENDS[backend].gemm_call(shape.gemm, x, weight, grad_output, state)


def _dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    is_old = torch.version.cuda is not None and torch.cuda.get_device_capability(device) < _AMPERE
    return torch.float16 if is_old else torch.bfloat16


def _gpu_seconds(call: Callable[[], Tensor], device: torch.device) -> list[float]:
    seconds = []
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Twice the cache, written before each run: afterwards nothing of the operands is left in it.
        flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
        for _ in range(_REPEATS):
            flush.zero_()
            torch.cuda._sleep(_HEAD_START)
            start.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def _cpu_seconds(call: Callable[[], Tensor]) -> list[float]:
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def _entry(row: object, where: str) -> tuple[tuple[Machine, GemmShape], Seconds]:
    values = _typed(row, dict, where)
    machine, shape = ([field.name for field in fields(kind)] for kind in (Machine, GemmShape))
    _check_keys(values, (*machine, *shape, "seconds"), where)
    for name in (*machine, "gemm"):
        _typed(values[name], str, f"{where}.{name}")
    for name in shape[1:]:
        if _typed(values[name], int, f"{where}.{name}") < 1:
            raise ValueError(f"{where}.{name} is {values[name]}, expected at least 1.")
    if values["gemm"] not in GEMMS:
        raise ValueError(f"{where}.gemm is {ascii(values['gemm'])[:60]}, expected one of {', '.join(GEMMS)}.")
    key = Machine(*(values[name] for name in machine)), GemmShape(*(values[name] for name in shape))
    return key, check_seconds(values["seconds"], f"{where}.seconds")


def _typed(value: Any, kind: type[T], where: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where} is {ascii(value)[:60]}, expected {_KINDS[kind]}.")
    return value


_KINDS = {dict: "a JSON object", list: "a list", str: "text", int: "an integer"}


def _check_keys(value: object, expected: tuple[str, ...], where: str) -> None:
    found = _typed(value, dict, where)
    if set(found) != set(expected):
        names = ascii(", ".join(sorted(map(str, found))))[1:-1][:200] or "(none)"
        raise ValueError(f"{where} has the entries {names}; expected exactly {', '.join(expected)}.")
