"""The schedule of a config: shares of FP4 that change during a run, and the checks between refreshes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Share = tuple[int, float]
"""The step from which a share of FP4 is aimed at, and the share."""

_EXAMPLE = "e.g. 0.75, or ((1, 0.9), (800, 0.5)): 0.9 from step 1 on, 0.5 from step 800 on"


def as_shares(value: Any) -> float | tuple[Share, ...] | None:
    """Returns `target_fp4_fraction` with pairs as tuples, checked.

    Raises:
        TypeError: a list of anything but pairs of a step and a share.
        ValueError: a share outside 0..1, no share for step 1, or steps that do not increase.
    """
    if not isinstance(value, list | tuple):
        share: float | None = value
        _check_range(share)
        return share
    for index, pair in enumerate(value):
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and _is_step(pair[0]) and _is_share(pair[1])):
            raise TypeError(
                f"target_fp4_fraction[{index}]={pair!r} is no pair of a step and a share; expected {_EXAMPLE}."
            )
        _check_range(pair[1], f"[{index}]")
    shares = tuple((step, share) for step, share in value)
    if not shares or shares[0][0] != 1:
        begins = f"begins at step {shares[0][0]}" if shares else "has no entry"
        raise ValueError(
            f"target_fp4_fraction={shares!r} {begins}; expected step 1 first, whose share the run begins with, "
            f"{_EXAMPLE}."
        )
    for (step, _), (later, _) in pairwise(shares):
        if later <= step:
            raise ValueError(
                f"target_fp4_fraction={shares!r} names step {later} after step {step}; expected steps that increase, "
                f"{_EXAMPLE}."
            )
    return shares


def read_shares(value: Any) -> tuple[Share, ...] | None:
    """Returns the shares that a config from anywhere names; None if it has no list of them that can be used."""
    if not isinstance(value, list | tuple):
        return None
    try:
        shares = as_shares(value)
    except (TypeError, ValueError):
        return None
    return shares if isinstance(shares, tuple) else None


def share_at(value: float | tuple[Share, ...] | None, step: int) -> float | None:
    """Returns the share that a plan made at an optimizer step aims at; step 0 is before training, as step 1.

    Args:
        value: as `as_shares` returns it.
        step: from 0.
    """
    if not isinstance(value, tuple):
        return value
    return next(share for begins, share in reversed(value) if begins <= max(step, 1))


def largest_share(value: float | tuple[Share, ...] | None) -> float:
    """Returns the largest share that a run aims at; 0 without one."""
    return max(share for _, share in value) if isinstance(value, tuple) else value or 0.0


def shares_text(value: float | tuple[Share, ...] | None, spec: str = "g") -> str:
    """Returns a share, or those of a schedule, in words: "0.9 from step 1, 0.5 from step 800".

    Args:
        value: as `as_shares` returns it.
        spec: how a share is written, as `format` takes it.
    """
    if not isinstance(value, tuple):
        return format(value or 0.0, spec)
    return ", ".join(f"{format(share, spec)} from step {step}" for step, share in value)


def mean_share(value: float | tuple[Share, ...] | None, steps: int) -> float:
    """Returns the mean of the share that is aimed at over the steps from 1 to `steps`, of which there is at least one.

    Args:
        value: as `as_shares` returns it.
        steps: the last one.
    """
    if not isinstance(value, tuple):
        return value or 0.0
    ends = [min(begins - 1, steps) for begins, _ in value[1:]] + [steps]
    begins = [min(begins - 1, steps) for begins, _ in value]
    return sum(share * (end - begin) for (_, share), begin, end in zip(value, begins, ends, strict=True)) / steps


def _check_range(share: float | None, place: str = "") -> None:
    if share is not None and not 0 <= share <= 1:
        raise ValueError(
            f"target_fp4_fraction{place}={share!r} is outside 0..1; it is the share of the linear FLOPs that run in "
            "FP4, e.g. 0.75."
        )


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 63


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
