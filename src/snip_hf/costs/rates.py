"""Rates of each format's GEMMs on known hardware, relative to BF16, and the speed-up of a plan that follows.

A rate is a vendor's dense peak divided by the peak for BF16, from the datasheet that the table names. Peaks are upper
bounds: they ignore quantization, memory and small GEMMs. Measured times (`costs.timing.MeasuredCost`) include them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..config import RATES
from ..numerics.formats import FORMATS, UNQUANTIZED
from .flops import Work
from .timing import MeasuredCost

GemmTimes = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Layer -> GEMM -> format -> time, in any unit."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speed of one kind of hardware's GEMMs in each format, as a multiple of that in BF16.

    Raises:
        ValueError: a rate is not above 0.
    """

    name: str
    rates: Mapping[str, float] | None
    """Format -> rate. A variant ("nvfp4-rht") without an entry has the rate of what its name begins with ("nvfp4").
    None: every format has a rate, `NumberFormat.speed` by that of BF16."""
    source: str

    def __post_init__(self) -> None:
        for name, rate in (self.rates or {}).items():
            if not 0 < rate < math.inf:
                raise ValueError(f"Rates {self.name!r}: the rate of {name!r} is {rate!r}; expected a number above 0.")

    def rate(self, format: str) -> float | None:
        """Returns the rate of a registered format; None: the hardware does not run it."""
        if not FORMATS[format].is_quantized:
            return 1.0
        if self.rates is None:
            return FORMATS[format].speed / UNQUANTIZED.speed
        return self.rates.get(format, self.rates.get(format.partition("-")[0]))

    @property
    def formats(self) -> tuple[str, ...]:
        """The registered formats that have a rate."""
        return tuple(name for name in FORMATS if self.rate(name) is not None)


def register_rates(rates: Rates) -> Rates:
    """Registers a user's table, which `SnipConfig.rates` may then name. Returns it.

    Raises:
        ValueError: there is another table of this name.
    """
    return RATES.register(rates)


_BUILT_IN = (
    (
        "ideal",
        None,
        "No device: half of the bits, twice the rate (`NumberFormat.speed`). For formats without hardware.",
    ),
    (
        "h100",
        # Formats stored as E4M3 run at the rate of FP8 (docs/method.md). NVFP4 only fits into BF16, and "fp4-pqt" adds
        # noise to it.
        {"fp8": 2, "int8": 2, "fp4": 2, "mxfp4": 2, "int4": 2, "ufp4": 2, "nvfp4": 1, "fp4-pqt": 1},
        "NVIDIA H100 and H200 SXM datasheets, dense peak: BF16 989, FP8 and INT8 1,979 TFLOP/s.",
    ),
    (
        "b200",
        {"fp8": 2, "mxfp8": 2, "mxfp6": 2, "int8": 2, "mxfp4": 4, "nvfp4": 4},
        "NVIDIA HGX B200 datasheet, dense peak per GPU: BF16 2.25, FP8, FP6 and INT8 4.5, FP4 9 PFLOP/s.",
    ),
    (
        "gb300",
        {"fp8": 2, "mxfp8": 2, "mxfp6": 2, "mxfp4": 6, "nvfp4": 6},
        "NVIDIA GB300 NVL72 datasheet, dense peak per GPU: BF16 2.5, FP8 and FP6 5, FP4 15 PFLOP/s.",
    ),
    (
        "rtx50",
        # FP8 with sums in FP32, as snip-hf sums. Products of FP4 are not slowed down by FP32 sums.
        {"fp8": 2, "mxfp8": 2, "int8": 4, "mxfp4": 8, "nvfp4": 8},
        "NVIDIA RTX Blackwell architecture whitepaper, RTX 5090, dense peak with FP32 sums: BF16 209.5, FP8 419, "
        "INT8 838, FP4 1,676 TFLOP/s.",
    ),
    (
        "mi355",
        {"fp8": 2, "mxfp8": 2, "int8": 2, "mxfp6": 4, "mxfp4": 4},
        "AMD Instinct MI355X datasheet, dense peak: BF16 2.5, FP8 and INT8 5.0, MXFP6 and MXFP4 10.1 PFLOP/s.",
    ),
)
for _name, _rates, _source in _BUILT_IN:
    register_rates(Rates(name=_name, rates=_rates, source=_source))


def linear_times(flops: Work, formats: Iterable[str], rates: str | None, measured: MeasuredCost | None) -> GemmTimes:
    """Returns the time of each GEMM in BF16 and in these formats: measured seconds, or FLOPs divided by rate.

    Args:
        flops: of each layer and GEMM.
        formats: those to look up; each has a rate or was timed.
        rates: name of a table; ignored if there are measured times.
        measured: the times, if any.

    Raises:
        KeyError: neither times nor a table, or a format that they do not have.
    """
    if measured is not None:
        return measured.seconds
    table: Rates = RATES[rates or ""]
    found = {name: table.rate(name) for name in (UNQUANTIZED.name, *formats)}
    for name, rate in found.items():
        if rate is None:
            raise KeyError(f"The rates {table.name!r} have no format {name!r}; they have {', '.join(table.formats)}.")
    return {
        layer: {gemm: {name: number / rate for name, rate in found.items() if rate} for gemm, number in row.items()}
        for layer, row in flops.items()
    }


def speedup(layers: Iterable[str], assignment: Mapping[str, Mapping[str, str]], times: GemmTimes) -> float:
    """Returns the time that all GEMMs of these layers take in BF16, divided by their time under an assignment."""
    cells = [(times[layer][gemm], name) for layer in layers for gemm, name in assignment[layer].items()]
    return math.fsum(row[UNQUANTIZED.name] for row, _ in cells) / math.fsum(row[name] for row, name in cells)
