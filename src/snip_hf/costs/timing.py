"""Measured time of each GEMM on this machine in each format, cached in a file, and the cost of plans by these times.

Legend: T tokens of a micro-batch, I in_features, O out_features. A time covers the work of training: the quantization
of the operands and the product (`Backend.gemm_call`). It is the median of several runs after a warm-up.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..json_io import SCHEMA_VERSION, from_json, read_json, short, write_json_atomic
from ..kernels.backend import BACKENDS
from ..layers.labels import endings, split_layer, without_numbers
from ..layers.state import gemms_of, snip_linears
from ..numerics.formats import FORMATS, REFERENCE, UNQUANTIZED, check_format
from ..numerics.gemms import GEMMS
from ..progress import progress
from ..text import printable
from .flops import Tokens, Work, tokens_of_gemm

logger = logging.getLogger(__name__)

KIND = "snip-hf GEMM times"

_WARM_UP, _REPEATS = 3, 15
# The first GPUs with BF16 tensor cores.
_AMPERE = (8, 0)
# Clock ticks (about a millisecond) for which the GPU waits before a run, so that Python has launched all of it by then.
# The time is then that of the GPU's work without the launches, which a compiled model does not have.
_HEAD_START = 2_000_000


@dataclass(frozen=True)
class Machine:
    """The conditions of a measurement, besides the GEMM's shape."""

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


@dataclass(frozen=True, kw_only=True)
class TimedGemm:
    """One entry of a file of times."""

    machine: Machine
    shape: GemmShape
    seconds: Mapping[str, float]

    def __post_init__(self) -> None:
        gemm, times = self.shape.gemm, self.seconds.values()
        if gemm not in GEMMS or not times or not all(0 < time < math.inf for time in times):
            raise ValueError(f"the entry of {gemm!r} is not a GEMM with times above 0 in at least one format.")


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """The time of each GEMM in each format, and the machine that it was measured on."""

    machine: Machine
    tokens: int
    """Tokens of the timed micro-batch; each passes through every layer once."""
    seconds: Mapping[str, Mapping[str, Mapping[str, float]]]
    """{layer: {gemm: {format: seconds per micro-batch}}}; a frozen weight has no grad_weight."""
    reference: str = REFERENCE.name
    """The format whose time is the weight of a GEMM (`reference_format`)."""

    @property
    def work(self) -> dict[str, dict[str, float]]:
        """Layer -> GEMM -> seconds in the reference format."""
        return {
            layer: {gemm: times[self.reference] for gemm, times in row.items()} for layer, row in self.seconds.items()
        }

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that were timed, the same for every GEMM."""
        return tuple(next(iter(self.seconds.values()))[GEMMS[0]])

    def executed(self, tokens: Tokens | None) -> MeasuredCost:
        """Returns the times scaled by the tokens that layers saw."""
        if tokens is None:
            return self
        seconds = {
            layer: {
                gemm: {name: value * tokens_of_gemm(tokens, layer, gemm) for name, value in times.items()}
                for gemm, times in row.items()
            }
            for layer, row in self.seconds.items()
        }
        return replace(self, seconds=seconds)

    def total(self, format: str) -> float:
        """Returns the seconds of all GEMMs in one format."""
        return math.fsum(seconds[format] for row in self.seconds.values() for seconds in row.values())

    def check(self, flops: Work) -> None:
        """Raises ValueError unless every GEMM that has FLOPs has a time in each format, the reference among them."""
        for layer in sorted(self.seconds.keys() ^ flops.keys()):
            raise ValueError(
                f"measured.seconds and flops do not both name layer {short(layer)}; expected the same layers."
            )
        check_format(self.reference, "measured.reference")
        formats = {name for row in self.seconds.values() for times in row.values() for name in times} | {self.reference}
        for layer, row in flops.items():
            for gemm in row:
                where, times = f"measured.seconds[{layer!r}][{gemm!r}]", self.seconds[layer].get(gemm, {})
                if set(times) != formats:
                    raise ValueError(f"{where} has times in {short(', '.join(times))}; expected one in each format.")
                if row[gemm] > 0 and not all(0 < seconds < math.inf for seconds in times.values()):
                    raise ValueError(f"{where} has a time that is not above 0; expected seconds.")

    def to_dict(self) -> dict[str, object]:
        seconds = {layer: {gemm: dict(times) for gemm, times in row.items()} for layer, row in self.seconds.items()}
        reference = {} if self.reference == REFERENCE.name else {"reference": self.reference}
        return {"machine": asdict(self.machine), "tokens": self.tokens, "seconds": seconds, **reference}


@dataclass(frozen=True)
class CostShare:
    """The cost of one GEMM of all linears of one kind, in FLOPs and in time."""

    kind: str
    """The end of their names, without numbers, that distinguishes them from other kinds."""
    gemm: str
    flops: float
    """Share of the linear FLOPs, 0..1."""
    time: float
    """Share of the linears' measured time in the reference format, 0..1."""
    seconds: Mapping[str, float]
    """Format -> seconds of all of them, per micro-batch."""

    @property
    def ratio(self) -> float:
        """Share of time divided by share of FLOPs."""
        return self.time / self.flops


def measure_cost(
    model: nn.Module,
    tokens: int,
    backend: str,
    path: str | os.PathLike[str] | None = None,
    formats: Sequence[str] = (),
    is_first: bool = True,
) -> MeasuredCost:
    """Returns the times of every GEMM of every swapped layer, on the device of the weights.

    Args:
        model: a converted model.
        tokens: of a micro-batch, all of which pass through every layer.
        backend, path, formats, is_first: as in `gemm_times`.

    Raises:
        ValueError: as `gemm_times`.
    """
    layers = snip_linears(model)
    shapes = {
        (name, gemm): GemmShape(gemm, tokens, layer.in_features, layer.out_features)
        for name, layer in layers.items()
        for gemm in gemms_of(layer)
    }
    device = next(iter(layers.values())).snip_state.device
    times = gemm_times(shapes.values(), backend, device, path, formats, is_first)
    seconds = {name: {gemm: times[shapes[name, gemm]] for gemm in gemms_of(layer)} for name, layer in layers.items()}
    return MeasuredCost(
        machine=Machine.of(device, backend), tokens=tokens, seconds=seconds, reference=reference_format(formats)
    )


def cost_shares(flops: Work, measured: MeasuredCost) -> list[CostShare]:
    """Returns the shares of FLOPs and time of every kind of linear and GEMM, in the model's order."""
    kinds = {layer: without_numbers(split_layer(layer)[1]) for layer in flops}
    names = list(dict.fromkeys(kinds.values()))
    labels = dict(zip(names, endings(names), strict=True))
    members: dict[tuple[str, str], list[str]] = {}
    for layer, row in flops.items():
        for gemm, number in row.items():
            if number > 0:
                members.setdefault((labels[kinds[layer]], gemm), []).append(layer)
    all_flops = math.fsum(value for row in flops.values() for value in row.values())
    all_seconds = measured.total(measured.reference)
    shares = []
    for (kind, gemm), layers in members.items():
        seconds = {fmt: math.fsum(measured.seconds[x][gemm][fmt] for x in layers) for fmt in measured.formats}
        share = math.fsum(flops[x][gemm] for x in layers) / all_flops
        shares.append(CostShare(kind, gemm, share, seconds[measured.reference] / all_seconds, seconds))
    return shares


def describe_cost(flops: Work, measured: MeasuredCost) -> str:
    """Returns a sentence on how FLOPs and measured time relate, and one naming GEMMs that no format makes faster."""
    shares = cost_shares(flops, measured)
    dearest, cheapest = max(shares, key=lambda share: share.ratio), min(shares, key=lambda share: share.ratio)
    fastest = [share for share in shares if min(share.seconds, key=share.seconds.__getitem__) == UNQUANTIZED.name]
    names = ", ".join(f"{printable(share.kind)} {share.gemm}" for share in fastest)
    left = f" Fastest in {UNQUANTIZED.label}: {names}." if fastest else ""
    totals = ", ".join(f"{measured.total(fmt) * 1e3:.4g} ms in {FORMATS[fmt].label}" for fmt in measured.formats)
    return (
        f"All GEMMs of the linears take {totals} per micro-batch of {measured.tokens} tokens "
        f"({measured.machine.backend} backend, {measured.machine.device}); by measured time "
        f"{printable(dearest.kind)} {dearest.gemm} counts {dearest.ratio:.2f} times what it counts by FLOPs "
        f"({dearest.time:.1%} against {dearest.flops:.1%}), {printable(cheapest.kind)} {cheapest.gemm} "
        f"{cheapest.ratio:.2f} times ({cheapest.time:.1%} against {cheapest.flops:.1%}).{left}"
    )


def gemm_times(
    shapes: Iterable[GemmShape],
    backend: str,
    device: torch.device,
    path: str | os.PathLike[str] | None = None,
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
        formats: the run's formats; `timed_formats` says which are timed.
        is_first: whether this is the first process, which may show a progress bar.

    Raises:
        ValueError: as `read_times`.
    """
    machine = Machine.of(device, backend)
    known = {} if path is None else read_times(path)
    wanted = dict.fromkeys(shapes)
    timed = timed_formats(formats)
    missing = [(shape, fmt) for shape in wanted for fmt in timed if fmt not in known.setdefault((machine, shape), {})]
    with progress("timing of GEMMs", len(missing), is_first) as tell:
        for shape, fmt in missing:
            known[machine, shape][fmt] = time_gemm(backend, device, shape, fmt)
            tell()
    if missing and path is not None:
        try:
            write_times(path, known)
        except (OSError, ValueError) as error:
            logger.warning(
                "snip-hf: could not write the times of GEMMs to %s, training continues: %s",
                printable(path),
                printable(error),
            )
    return {shape: {fmt: known[machine, shape][fmt] for fmt in timed} for shape in wanted}


def timed_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Returns the formats that are timed for a run in these: its own, the reference and the unquantized ones."""
    reference = reference_format(formats)
    return tuple(name for name, fmt in FORMATS.items() if name in (*formats, reference) or not fmt.is_quantized)


def reference_format(formats: Sequence[str]) -> str:
    """Returns the format whose time is the weight of a GEMM: the most precise quantized one of a run's formats.

    Args:
        formats: of the run, the least precise first; without a quantized one FP8 serves.
    """
    return next((name for name in reversed(formats) if FORMATS[name].is_quantized), REFERENCE.name)


def time_gemm(backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
    """Returns the median seconds of one GEMM in one format: both operands' quantization and the product.

    On a GPU this is the GEMM's own time, from events, with operands read from memory and not from the cache: in
    training, other layers run in between. On a CPU it is wall-clock time. The process's generators do not advance.
    """
    call = _prepared(backend, device, shape, format)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for _ in range(_WARM_UP):
            call()
        seconds = _gpu_seconds(call, device) if device.type == "cuda" else _cpu_seconds(call)
    return statistics.median(seconds)


def read_times(path: str | os.PathLike[str]) -> Times:
    """Reads the times of all machines in a file that `write_times` wrote; returns nothing if there is no file.

    Raises:
        ValueError: it cannot be read, or is not exactly such a file. It may be anything, so it is not written over.
    """
    if not Path(path).exists():
        return {}
    try:
        document = read_json(path)
        if not isinstance(document, dict) or (document.get("kind"), document.get("schema_version")) != (
            KIND,
            SCHEMA_VERSION,
        ):
            raise ValueError(f"it is {short(document)}, expected kind {KIND!r} of schema_version {SCHEMA_VERSION}.")
        rows: tuple[TimedGemm, ...] = from_json(tuple[TimedGemm, ...], document.get("times"), "times")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{printable(path)} is not a usable file of GEMM times: {error} Remove it, or name another as "
            "timing_file; missing times are measured again."
        ) from error
    return {(row.machine, row.shape): dict(row.seconds) for row in rows}


def write_times(path: str | os.PathLike[str], times: Mapping[tuple[Machine, GemmShape], Seconds]) -> None:
    """Writes times atomically, and makes the folder; raises OSError if that fails."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    rows = [
        asdict(TimedGemm(machine=machine, shape=shape, seconds=seconds)) for (machine, shape), seconds in times.items()
    ]
    write_json_atomic(path, {"schema_version": SCHEMA_VERSION, "kind": KIND, "times": rows})


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
