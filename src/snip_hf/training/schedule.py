"""The schedule of a run: the optimizer steps at which it refreshes the plan."""

from __future__ import annotations

import logging

from ..config import SnipConfig
from ..policies.registry import policy_of


class Schedule:
    """Decides from the step number only, so that all ranks decide the same.

    Args:
        config: of the run.
        max_steps: the last optimizer step, if it is known.
        log: gets refreshes that are put off, and runs that are too short for one.
    """

    def __init__(self, config: SnipConfig, max_steps: int | None, log: logging.Logger) -> None:
        self.max_steps = max_steps
        self.last_probe: int | None = None
        """The step of the last refresh."""
        self.postponed: int | None = None
        """The step to which a refresh was put off, until it is taken."""
        self._config = config
        self._needs_probe = policy_of(config).needs_probe
        self._log = log

    def refreshes(self, step: int, is_planned: bool) -> bool:
        """Returns True if this step refreshes, counted from the last probe.

        Args:
            step: the optimizer step, from 1.
            is_planned: whether a plan for this step's target was made from a probe, or is about to be.
        """
        return self._is_scheduled(step, is_planned) and not self._is_too_late(step)

    def reads_findings(self, step: int) -> bool:
        """Returns True if a run without probes logs what its kernels found, which others do when they refresh."""
        every = self._config.refresh_every
        return not self._needs_probe and every is not None and step % every == 0

    def note_probe(self, step: int) -> None:
        """Notes the step of a refresh."""
        self.last_probe, self.postponed = step, None

    def postpone(self, step: int, reason: str) -> None:
        """Puts the refresh of this step off to the next one."""
        if self.postponed is None:
            self._log.info("snip-hf: the refresh of step %d waits for the next step: %s.", step, reason)
        self.postponed = step + 1
        if self.last_probe is None:
            self.warn_if_too_late(self.postponed)

    @property
    def first_refresh(self) -> int:
        """The step of the first probe."""
        return self._config.first_refresh_in(self.max_steps)

    def warn_if_too_late(self, step: int) -> None:
        """Warns if training ends before the plan of a refresh at this step could be applied."""
        if self._needs_probe and self._is_too_late(step):
            self._log.warning(
                "snip-hf: training ends at step %d, before the plan of a refresh at step %d would be applied after "
                "step %d: the plan in force stays. Train longer, or lower first_refresh or apply_delay.",
                self.max_steps,
                step,
                step + self._config.apply_delay,
            )

    def _is_scheduled(self, step: int, is_planned: bool) -> bool:
        config, last = self._config, self.last_probe
        if last is None and step < self.first_refresh:
            return False
        if self.postponed is not None:
            return step >= self.postponed
        if last is None:  # a resumed run may begin after its first refresh
            return self._needs_probe
        # A new target is for the time after the last probe's plan was applied.
        if step >= last + config.apply_delay and config.target_at(step) != config.target_at(last):
            return True
        every = config.refresh_every
        if every is None:
            if is_planned:
                return False
            every = self.first_refresh
        return (step - last) % every == 0

    def _is_too_late(self, step: int) -> bool:
        """Returns True if training ends before the plan of a refresh at this step could be applied."""
        return self.max_steps is not None and step + self._config.apply_delay > self.max_steps
