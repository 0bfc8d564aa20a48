"""A plan with the formats of some layers raised by one: the next more precise format that the run knows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..numerics.formats import FORMATS, UNQUANTIZED
from .plan import PrecisionPlan


def raised_plan(plan: PrecisionPlan, layers: Collection[str], formats: Sequence[str]) -> PrecisionPlan:
    """Returns the plan in which GEMMs of `layers` have the next format of more bits; the last one is unquantized.

    Args:
        plan: in force.
        layers: to raise; what is unquantized stays so.
        formats: of the run. Of several with as many bits, the first one is taken.
    """
    ladder = sorted(dict.fromkeys([*formats, UNQUANTIZED.name]), key=lambda name: FORMATS[name].bits)
    assignment = {
        layer: {gemm: _next(name, ladder) if layer in layers else name for gemm, name in row.items()}
        for layer, row in plan.assignment.items()
    }
    return replace(plan, assignment=assignment)


def _next(name: str, ladder: Sequence[str]) -> str:
    return next((other for other in ladder if FORMATS[other].bits > FORMATS[name].bits), name)
