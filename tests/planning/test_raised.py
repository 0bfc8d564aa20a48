"""Raised formats: the next one of more bits, of the layers that are named, and unquantized at last."""

from __future__ import annotations

import pytest

from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PrecisionPlan
from snip_hf.planning.provenance import PlanProvenance
from snip_hf.planning.raised import raised_plan


def plan(**formats: str) -> PrecisionPlan:
    assignment = {layer: dict.fromkeys(GEMMS, name) for layer, name in formats.items()}
    flops = {layer: dict.fromkeys(GEMMS, 2.0) for layer in formats}
    return PrecisionPlan(assignment, flops, (tuple(formats),), PlanProvenance(step=3, policy="snip"))


@pytest.mark.parametrize(
    ("formats", "steps"),
    [
        (("fp4", "fp8"), ["fp4", "fp8", "bf16", "bf16"]),
        (("fp4", "mxfp4", "fp8"), ["mxfp4", "fp8", "bf16", "bf16"]),
        (("mxfp4", "mxfp6", "mxfp8"), ["mxfp4", "mxfp6", "mxfp8", "bf16"]),
        (("fp4", "bf16"), ["fp4", "bf16", "bf16"]),
    ],
)
def test_formats_go_up_by_their_bits(formats: tuple[str, ...], steps: list[str]) -> None:
    found = plan(a=steps[0])
    seen = [steps[0]]
    for _ in steps[1:]:
        found = raised_plan(found, ["a"], formats)
        assert len(set(found.assignment["a"].values())) == 1
        seen.append(found.assignment["a"]["forward"])
    assert seen == steps


def test_other_layers_stages_flops_and_provenance_stay() -> None:
    before = plan(a="fp4", b="fp4", c="fp8")
    after = raised_plan(before, {"a", "c"}, ("fp4", "fp8"))
    assert {layer: row["grad_weight"] for layer, row in after.assignment.items()} == {
        "a": "fp8",
        "b": "fp4",
        "c": "bf16",
    }
    assert (after.flops, after.stages, after.provenance) == (before.flops, before.stages, before.provenance)
