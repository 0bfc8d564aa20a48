"""The ranges of a config's numbers: which are refused, and what was expected."""

from __future__ import annotations

import math
from typing import Any

from .field_values import check_seconds

# Seconds: a week. Clocks and timers take more, but nobody waits longer for a plan or a rank.
LONGEST_WAIT = 7 * 24 * 3600.0
# Least value, and what an error says was expected.
_AT_LEAST: dict[str, tuple[int, str]] = {
    "refresh_every": (1, "at least 1"),
    "first_refresh": (1, "at least 1"),
    "apply_delay": (0, "at least 0"),
    "probes": (1, "at least 1"),
    "probe_tokens": (128, "None or at least 128 (one tile)"),
    "probe_batch_tokens": (128, "None or at least 128 (one tile)"),
    "timing_tokens": (1, "None or at least 1"),
    "stages": (1, "None, a number of at least 1, or lists of names"),
    "guard_window": (8, "at least 8"),
    "guard_patience": (1, "at least 1"),
    "seed": (0, "at least 0"),
}
_AT_MOST = {
    "probes": 10_000,
    # GEMMs of more rows are beyond 32-bit indices, and beyond any GPU's memory.
    "timing_tokens": 2**31 - 1,
    # The solver takes costs up to 1e100, which are these times the divergences.
    "loss_divergence_factor": 1e50,
    "weight_divergence_factor": 1e50,
    "solver_gap": 1e50,
    # Their figures are in every state.
    "guard_window": 100_000,
}


def check_least(config: Any) -> None:
    """Refuses whole numbers of a SnipConfig that are too small.

    Raises:
        ValueError: names the field and what was expected.
    """
    for name, (least, expected) in _AT_LEAST.items():
        if isinstance(getattr(config, name), int) and getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)!r} is too small; expected {expected}.")


def check_ranges(config: Any) -> None:
    """Refuses numbers of a SnipConfig that cannot work, alone or together.

    Raises:
        ValueError: names the fields and what was expected.
    """
    if config.refresh_every is not None and config.apply_delay > config.refresh_every:
        raise ValueError(
            f"apply_delay={config.apply_delay} is larger than refresh_every={config.refresh_every}; a plan must be "
            "applied before the next probe. Lower apply_delay or raise refresh_every."
        )
    for name in ("loss_divergence_factor", "weight_divergence_factor", "solver_gap"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) >= 0):
            raise ValueError(f"{name}={getattr(config, name)!r} is not a finite number of at least 0.")
    for name, most in _AT_MOST.items():
        if getattr(config, name) is not None and getattr(config, name) > most:
            raise ValueError(f"{name}={getattr(config, name)!r} is too large; expected at most {most}.")
    if config.loss_divergence_factor == config.weight_divergence_factor == 0:
        raise ValueError(
            "loss_divergence_factor and weight_divergence_factor are both 0; at least one must be above 0."
        )
    for name in ("solver_time_limit", "rank_timeout"):
        check_seconds(name, getattr(config, name), LONGEST_WAIT)
    if not (math.isfinite(config.guard_spike) and config.guard_spike > 0):
        raise ValueError(f"guard_spike={config.guard_spike!r} is not a finite number above 0.")
