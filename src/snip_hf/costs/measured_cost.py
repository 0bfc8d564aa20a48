"""The cost of each GEMM, in FLOPs or in measured time: the work that the program's efficiency constraint counts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import nn

from ..layers.labels import endings, split_layer, without_numbers
from ..layers.state import gemms_of, snip_linears
from ..numerics.formats import FORMATS, REFERENCE, UNQUANTIZED
from ..numerics.gemms import GEMMS
from ..text import printable
from .flops import Tokens, Work, tokens_of_gemm
from .gemm_timing import GemmShape, Machine, Timer, gemm_times, reference_format


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """How long each GEMM takes in each format, and where that was measured."""

    machine: Machine
    tokens: int
    """Tokens of the micro-batch that the times are of, each of which passes through every layer once."""
    seconds: Mapping[str, Mapping[str, Mapping[str, float]]]
    """{layer: {gemm: {format: seconds per micro-batch}}}; a frozen weight has no grad_weight."""
    reference: str = REFERENCE.name
    """The format whose time is what a GEMM counts (`gemm_timing.reference_format`)."""

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
        """Returns the times by the tokens that layers saw, to which they are taken to be proportional."""
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

    def to_dict(self) -> dict[str, object]:
        seconds = {layer: {gemm: dict(times) for gemm, times in row.items()} for layer, row in self.seconds.items()}
        # Times in FP8 are written as earlier versions wrote them.
        reference = {} if self.reference == REFERENCE.name else {"reference": self.reference}
        return {"machine": asdict(self.machine), "tokens": self.tokens, "seconds": seconds, **reference}


@dataclass(frozen=True)
class CostShare:
    """What one GEMM of all linears of one kind costs, by both measures."""

    kind: str
    """The end of their names, but for numbers, that tells them from other kinds."""
    gemm: str
    flops: float
    """Share of the linear FLOPs, 0..1."""
    time: float
    """Share of the linears' measured time in the reference format, 0..1."""
    seconds: Mapping[str, float]
    """Format -> seconds of all of them, per micro-batch."""

    @property
    def ratio(self) -> float:
        """How much more this counts by time than by FLOPs."""
        return self.time / self.flops


def measure_cost(
    model: nn.Module,
    tokens: int,
    backend: str,
    path: str | os.PathLike[str] | None = None,
    timer: Timer | None = None,
    formats: Sequence[str] = (),
    is_first: bool = True,
) -> MeasuredCost:
    """Returns the times of every GEMM of every swapped layer, on the device of the weights.

    Args:
        model: a converted model.
        tokens: of a micro-batch, all of which pass through every layer.
        backend, path, timer, formats, is_first: as in `gemm_timing.gemm_times`.

    Raises:
        ValueError: as `gemm_times`.
    """
    layers = snip_linears(model)
    shapes = {
        (name, gemm): GemmShape(gemm, tokens, layer.in_features, layer.out_features)
        for name, layer in layers.items()
        for gemm in gemms_of(layer)
    }
    device = next(iter(layers.values())).weight.device
    times = gemm_times(shapes.values(), backend, device, path, timer, formats, is_first)
    seconds = {name: {gemm: times[shapes[name, gemm]] for gemm in gemms_of(layer)} for name, layer in layers.items()}
    return MeasuredCost(
        machine=Machine.of(device, backend), tokens=tokens, seconds=seconds, reference=reference_format(formats)
    )


def predicted_times(flops: Work, measured: MeasuredCost | None) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Returns layer -> GEMM -> format -> time for one micro-batch.

    Measured times are in seconds. Modelled ones come from `NumberFormat.speed`; their unit is the time that all of
    these linears take in the reference format.
    """
    if measured is not None:
        return measured.seconds
    total = math.fsum(value for row in flops.values() for value in row.values())
    return {
        layer: {
            gemm: {name: number / total / fmt.speed for name, fmt in FORMATS.items()} for gemm, number in row.items()
        }
        for layer, row in flops.items()
    }


def cost_shares(flops: Work, measured: MeasuredCost) -> list[CostShare]:
    """Returns the shares of FLOPs and time of every kind of linear and GEMM that has any, in the model's order."""
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
