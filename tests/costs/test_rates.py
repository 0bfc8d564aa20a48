"""Rates of formats per hardware, and the speed-up of a plan that follows from them."""

from __future__ import annotations

import pytest
from configs import fp4_config
from registries import restored

from snip_hf.config import RATES
from snip_hf.costs.rates import Rates, linear_times, register_rates, speedup
from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.numerics.formats import E2M1, FORMATS, NumberFormat, register_format
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

# Dense peaks that datasheets print, in PFLOP/s: BF16 and what they name beside it.
PEAKS = {
    "h100": (0.9895, {"fp8": 1.979, "int8": 1.979}),
    "b200": (2.25, {"fp8": 4.5, "mxfp8": 4.5, "mxfp6": 4.5, "int8": 4.5, "mxfp4": 9.0, "nvfp4": 9.0}),
    "gb300": (2.5, {"fp8": 5.0, "mxfp8": 5.0, "mxfp6": 5.0, "mxfp4": 15.0, "nvfp4": 15.0}),
    "rtx50": (0.2095, {"fp8": 0.419, "mxfp8": 0.419, "int8": 0.838, "mxfp4": 1.676, "nvfp4": 1.676}),
    "mi355": (2.5166, {"fp8": 5.0332, "mxfp8": 5.0332, "int8": 5.0332, "mxfp6": 10.0663, "mxfp4": 10.0663}),
}
FLOPS = {"layers.0.fc": dict.fromkeys(GEMMS, 1.0), "layers.1.fc": dict.fromkeys(GEMMS, 3.0)}


def plan_of(*formats: str, **config: object) -> PrecisionPlan:
    """Layer by layer, one stage each."""
    assignment = {layer: dict.fromkeys(GEMMS, name) for layer, name in zip(FLOPS, formats, strict=True)}
    provenance = PlanProvenance(step=0, policy="snip", config=config or None)
    return PrecisionPlan(assignment, FLOPS, tuple((layer,) for layer in FLOPS), provenance)


@pytest.mark.parametrize("name", PEAKS)
def test_rates_are_the_datasheet_s_peaks_by_that_of_bf16(name: str) -> None:
    bf16, peaks = PEAKS[name]
    for fmt, peak in peaks.items():
        assert RATES[name].rates[fmt] == pytest.approx(peak / bf16, rel=1e-3)


def test_bf16_has_the_rate_1_everywhere_and_ideal_rates_follow_the_bits() -> None:
    assert {table.rate("bf16") for table in RATES.values()} == {1.0}
    assert [RATES["ideal"].rate(name) for name in ("fp8", "fp4")] == [2.0, 4.0]
    assert RATES["ideal"].formats == tuple(FORMATS)


def test_a_variant_has_the_rate_of_what_its_name_begins_with() -> None:
    shared = {"grid": E2M1, "bits": 4, "speed": 2.0, "label": "X", "colour": "#000000"}
    with restored(FORMATS):
        register_format(NumberFormat(name="nvfp4-of-mine", **shared))
        register_format(NumberFormat(name="nvfp4x", **shared))
        assert RATES["b200"].rate("nvfp4-of-mine") == 4
        assert RATES["b200"].rate("nvfp4x") is None


def test_a_table_of_one_s_own_is_a_budget_s() -> None:
    with restored(RATES):
        register_rates(Rates(name="mine", rates={"fp4": 3.0, "fp8": 1.5}, source="measured by me"))
        config = fp4_config(target_linear_speedup=2.0, rates="mine")
        assert plan_of("fp4", "fp8", rates=config.rates).linear_speedup() == pytest.approx(4 / (1 / 3 + 3 / 1.5))


def test_a_rate_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Rates 'x': the rate of 'fp8' is 0; expected a number above 0\.$"):
        Rates(name="x", rates={"fp8": 0}, source="")


def test_the_speed_up_is_flops_by_flops_over_rates() -> None:
    plan = plan_of("fp4", "bf16", rates="ideal")
    assert plan.linear_speedup() == pytest.approx(4 / (1 / 4 + 3))
    assert plan.stage_linear_speedups() == (4.0, 1.0)
    assert plan_of("bf16", "bf16", rates="b200").linear_speedup() == 1.0


def test_without_rates_or_times_the_speed_up_is_not_known() -> None:
    for plan in (plan_of("fp4", "fp8"), plan_of("fp4", "fp8", rates="b200")):
        assert plan.linear_speedup() is None
        assert plan.stage_linear_speedups() is None


def test_measured_times_are_counted_as_they_are() -> None:
    seconds = {
        layer: {gemm: {"bf16": 4.0 * size, "fp8": 2.0, "fp4": 5.0} for gemm in GEMMS}
        for layer, size in zip(FLOPS, (1, 2), strict=True)
    }
    measured = MeasuredCost(machine=Machine("a GPU", "2.11.0", "hopper", "bfloat16"), tokens=8, seconds=seconds)
    times = linear_times(FLOPS, ("fp8", "fp4"), None, measured)
    assignment = {"layers.0.fc": dict.fromkeys(GEMMS, "fp4"), "layers.1.fc": dict.fromkeys(GEMMS, "fp8")}
    assert speedup(FLOPS, assignment, times) == pytest.approx(12 / 7)
    plan = PrecisionPlan(assignment, FLOPS, (tuple(FLOPS),), PlanProvenance(step=0, policy="snip"), measured)
    assert plan.linear_speedup() == pytest.approx(12 / 7)
