"""The check between two refreshes whether the ranking of the layers has moved, so that the plan is refreshed early."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..parallel.ranks import RankError, describe
from ..planning.drift import rank_correlation, ranking
from ..records.event_writer import EventWriter
from ..records.events import DriftCheck
from .micro_batches import StepWatch
from .plans import PlanInForce
from .step_probe import StepProbe


class DriftDetector:
    """Compares the ranking of a step with that of the probe that the plan in force was made from.

    Args:
        in_force: the plan.
        probe: measures the step, in one cheap pass.
        events: are told of each check.
        clock: seconds, for that event.
        log: is told what a check finds, and what it fails of.
    """

    def __init__(
        self,
        in_force: PlanInForce,
        probe: StepProbe,
        events: EventWriter,
        clock: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        self._in_force = in_force
        self._probe = probe
        self._events = events
        self._clock = clock
        self._log = log

    def finds_drift(self, step: int, watch: StepWatch | None) -> bool:
        """Returns True if the plan is to be refreshed at this step."""
        self._probe.note(f"at the check of step {step}")
        began = self._clock()
        correlation, reason = None, None
        try:
            table = self._probe.divergences(step, self._probe.ready(watch), probes=0)
            correlation = rank_correlation(self._in_force.ranking, ranking(self._in_force.setting, table))
        except RankError:
            raise
        except Exception as error:  # as for a refresh: it costs the check and nothing else
            reason = describe(error)
            self._log.warning("snip-hf: the check of step %d failed, the plan in force stays: %s", step, reason)
        threshold = self._in_force.setting.config.refresh_on_drift
        drifted = correlation is not None and threshold is not None and correlation < threshold
        if drifted:
            self._log.info("snip-hf: the ranking has moved by step %d (%.3f): refreshing early.", step, correlation)
        seconds = self._clock() - began
        self._events.add(
            DriftCheck(step=step, correlation=correlation, refresh=drifted, reason=reason, seconds=seconds)
        )
        return drifted
