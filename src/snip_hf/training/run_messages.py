"""What the log says of a run as a whole: what it begins with, once its first step has run, and what it came to."""

from __future__ import annotations

import logging
import math

from ..config import SnipConfig, shares_text
from ..estimation.coverage import Coverage
from ..kernels.backend import BACKENDS
from ..numerics.formats import FORMATS
from ..planning.plan import PrecisionPlan
from ..policies.registry import aims_at_share, needs_probe
from ..records.events import Event, Refresh
from .plans import describe_plan


class RunMessages:
    """Says both, once each.

    Args:
        config: of the run.
        backend: name of the one in use.
        log: is told, of the first rank alone.
    """

    def __init__(self, config: SnipConfig, backend: str, log: logging.Logger) -> None:
        self._config, self._backend, self._log = config, backend, log
        self._has_begun, self._has_ended = False, False
        self._refreshes: list[bool] = []
        self._seconds: dict[str, list[float]] = {"probe": [], "solver": [], "waited": []}

    def note(self, event: Event) -> None:
        """Takes an event of the run, for what it came to."""
        if isinstance(event, Refresh):
            self._refreshes.append(event.applied_step is not None)
            for part, values in self._seconds.items():
                seconds = event.seconds.get(part)
                if seconds is not None:
                    values.append(seconds)

    def begin(self, plan: PrecisionPlan, coverage: Coverage | None, expected: str | None) -> None:
        """Says what the run begins with.

        Args:
            plan: the one in force.
            coverage: of the first micro-batch; None: not known.
            expected: the speed that was measured of the backend, or what it lacks for it; None: not known.
        """
        if self._has_begun:
            return
        self._has_begun = True
        config = self._config
        lines = {
            "plan": f"policy {config.policy}, {describe_plan(plan)}",
            "target": _target(config),
            "formats": f"{', '.join(FORMATS[name].label for name in config.formats)}, decided per {config.granularity}",
            "backend": self._backend,
            "coverage": "not known" if coverage is None else f"the plan can decide on {coverage.describe()}",
            "refreshes": _refreshes(config),
            "speed": expected or _unmeasured(self._backend),
        }
        width = max(map(len, lines))
        text = "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())
        self._log.info("snip-hf: training under SNIP.\n%s", text)

    def end(self, step: int, plan: PrecisionPlan) -> None:
        """Says what the run came to after a number of optimizer steps; nothing where none was taken."""
        if self._has_ended or not self._has_begun:
            return
        self._has_ended = True
        applied, seconds = sum(self._refreshes), {part: math.fsum(values) for part, values in self._seconds.items()}
        self._log.info(
            "snip-hf: ended after step %d: %s. New plans: %d; refreshes that kept the plan: %d. "
            "Probes took %.1f s, solvers %.1f s beside training, which waited %.1f s for them.",
            step,
            describe_plan(plan),
            applied,
            len(self._refreshes) - applied,
            seconds["probe"],
            seconds["solver"],
            seconds["waited"],
        )


def _target(config: SnipConfig) -> str:
    if config.fixed_plan is not None or not aims_at_share(config):
        return "none"
    if config.target_linear_speedup is not None:
        return f"linears at {config.target_linear_speedup:g} times BF16's speed"
    of = "measured time" if config.budget == "measured" else "FLOPs"
    which = f"the forward GEMMs' {of}" if config.decides == "forward" else f"the linears' {of}"
    return f"at least {shares_text(config.target_fp4_fraction, '.1%')} of {which} in FP4"


def _refreshes(config: SnipConfig) -> str:
    if not needs_probe(config):
        return "none: the policy takes no probe"
    every = "no more" if config.refresh_every is None else f"then every {config.refresh_every} steps"
    return (
        f"at step {config.first_refresh}, {every}; a plan is applied {config.apply_delay} steps later; until then "
        f"{FORMATS[config.format_at_start].label}"
    )


def _unmeasured(backend: str) -> str:
    return "slower than BF16: the backend emulates" if BACKENDS[backend].is_emulation else "not measured"
