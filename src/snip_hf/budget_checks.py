"""The checks of a budget by speed: `SnipConfig.target_linear_speedup` and the table of rates that it counts by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .numerics.formats import FORMATS
from .registry import Registry
from .schedule_checks import Share, as_shares

# How fast hardware runs each format. The entries are in `costs.rates`; users may add their own.
RATES: Registry[Any] = Registry("table of rates", "snip_hf.costs.rates")
# What `target_fp4_fraction` is where neither budget is given.
DEFAULT_FP4_FRACTION = 0.75
# What `decides` is where the plan decides on every GEMM, and on the forward ones alone.
ALL, FORWARD = "all", "forward"


def fp4_fraction_of(
    fraction: float | tuple[Share, ...] | None, speedup: float | None
) -> float | tuple[Share, ...] | None:
    """Returns the share of FP4 that a config asks for, or its shares: None where it asks for a speed-up.

    Raises:
        ValueError: it asks for both, or as `as_shares`.
        TypeError: as `as_shares`.
    """
    fraction = as_shares(fraction)
    if fraction is not None and speedup is not None:
        raise ValueError(
            f"target_fp4_fraction={fraction!r} and target_linear_speedup={speedup!r} are two targets; expected one of "
            "them. Leave the other one out, or set it to None."
        )
    return DEFAULT_FP4_FRACTION if fraction is None and speedup is None else fraction


def check_rates(rates: str | None, formats: Sequence[str], measured: bool) -> None:
    """Refuses a table of rates that is not known, or that does not have a format of the run.

    Raises:
        ValueError: says which tables or formats there are.
    """
    if rates is None:
        return
    table = RATES[RATES.checked(rates, "rates")]
    if measured:
        raise ValueError(
            f"rates={rates!r} and budget='measured' are two sources of speed; expected one of them. Set rates=None, or "
            "budget='flops'."
        )
    for name in formats:
        if table.rate(name) is None:
            raise ValueError(
                f"rates={rates!r} has no rate of the format {name!r}, which that hardware does not run; it has "
                f"{', '.join(table.formats)}. Choose other formats or rates, e.g. rates='ideal', which has all."
            )


def check_fraction(fraction: float, of: str, formats: Sequence[str]) -> None:
    """Refuses a share of FP4 that the formats which a policy chooses from cannot make.

    Args:
        fraction: `SnipConfig.target_fp4_fraction`.
        of: what an error says of its origin.
        formats: those that the policy chooses from.

    Raises:
        ValueError: none of them counts towards the share.
    """
    if fraction and not any(FORMATS[name].counts_as_fp4 for name in formats):
        example = next(name for name, format in FORMATS.items() if format.counts_as_fp4)
        raise ValueError(
            f"target_fp4_fraction={fraction!r}{of} cannot be met in the formats {tuple(formats)!r}: 0 is the largest "
            f"attainable; expected among them a format that rounds both operands to at most 4 bits, e.g. {example!r}. "
            "Without one, set target_linear_speedup with rates, or target_fp4_fraction=0."
        )


def refuse_speedup(speedup: float | None, policy: str) -> None:
    """Refuses a speed-up that a policy without a target would ignore.

    Raises:
        ValueError: there is one.
    """
    if speedup is not None:
        raise ValueError(
            f"target_linear_speedup={speedup!r} with policy={policy!r} has no effect: that policy meets no target. "
            "Leave it out, or take a policy that meets one (docs/policies.md)."
        )


def check_decided(config: Any, meets_target: bool) -> None:
    """Refuses a budget over the forward GEMMs alone (`decides`) where it cannot be kept.

    Args:
        config: the SnipConfig.
        meets_target: whether its policy meets a target.

    Raises:
        ValueError: says which other field does not fit.
    """
    if config.decides == ALL:
        return
    what = f"decides={config.decides!r}"
    if not meets_target:
        raise ValueError(
            f"{what} with policy={config.policy!r} has no effect: that policy meets no target. Leave it out, or take a "
            "policy that meets one (docs/policies.md)."
        )
    if config.granularity == "layer":
        raise ValueError(
            f"{what} with granularity='layer' cannot work: it decides the forward GEMM of a linear apart from the "
            "others. Set granularity='gemm'."
        )
    if config.target_linear_speedup is not None:
        raise ValueError(
            f"{what} with target_linear_speedup={config.target_linear_speedup!r} cannot work: a speed-up counts all "
            "GEMMs of the linears. Set target_fp4_fraction, a share of the forward GEMMs, in its place."
        )


def check_timing(config: Any, policy: Any) -> None:
    """Refuses fields about measured times without them, and a rule that does not know how many tokens to measure.

    Args:
        config: the SnipConfig.
        policy: the one that it names.

    Raises:
        ValueError: names the field.
    """
    if config.budget == "flops":
        for name in ("timing_file", "timing_tokens"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name}={getattr(config, name)!r} is for budget='measured'; set that too.")
    by_rule = config.fixed_plan is None and policy.aims_at_share and not policy.needs_probe
    if config.budget == "measured" and config.timing_tokens is None and by_rule:
        raise ValueError(
            f"budget='measured' with policy={config.policy!r} needs timing_tokens, the tokens of a micro-batch: its "
            "plan is made before the first one is there. Set it to batch size times sequence length, e.g. 16384."
        )


def check_speedup(speedup: float, rates: str | None, formats: Sequence[str], measured: bool) -> None:
    """Refuses a speed-up that is no number of at least 1, that nothing tells the speed for, or that is out of reach.

    Args:
        speedup: `SnipConfig.target_linear_speedup`.
        rates: name of a table that `check_rates` has accepted.
        formats: those that the policy chooses from.
        measured: whether GEMMs are timed; what is in reach is then not known yet.

    Raises:
        ValueError: says what was expected.
    """
    if not (math.isfinite(speedup) and speedup >= 1):
        raise ValueError(
            f"target_linear_speedup={speedup!r} is not a finite number of at least 1, which is the speed of BF16; "
            "expected e.g. 1.8."
        )
    if rates is None:
        if measured:
            return
        raise ValueError(
            f"target_linear_speedup={speedup!r} needs to know how fast each format runs. Set rates to one of "
            f"{', '.join(RATES)}, or set budget='measured'."
        )
    largest = max(RATES[rates].rate(name) for name in formats)
    if speedup > largest * (1 + 1e-9):
        raise ValueError(
            f"target_linear_speedup={speedup!r} is out of reach: with every GEMM in the fastest of the formats "
            f"{', '.join(formats)} it is {largest:g} by rates={rates!r}, the largest attainable. Lower it, or add a "
            "faster format."
        )
