"""The calls of an own training loop: which of them a step lacks, said once each."""

from __future__ import annotations

import logging


class CallOrder:
    """Warns of a loop that leaves out `before_optimizer_step` or `after_step`, as soon as a step shows it.

    Args:
        needs_probe: whether the policy probes; without a probe, `before_optimizer_step` has nothing to do.
        log: gets the warnings.
    """

    def __init__(self, needs_probe: bool, log: logging.Logger) -> None:
        self._needs_probe = needs_probe
        self._log = log
        self._begun: int | None = None
        """The step of `before_optimizer_step`, until it ends."""
        self._said: set[str] = set()

    def begin(self, step: int) -> None:
        """Notes a call of `before_optimizer_step`."""
        if self._begun is not None:
            self._say(
                "snip-hf: before_optimizer_step(%d) was called before after_step(%d): plans are neither made nor "
                "applied in time. Call after_step(step) after each optimizer step.",
                step,
                self._begun,
            )
        self._begun = step

    def end(self, step: int) -> None:
        """Notes a call of `after_step`."""
        if self._begun is None and self._needs_probe:
            self._say(
                "snip-hf: after_step(%d) was called without before_optimizer_step(%d): no plan can be made. Call "
                "before_optimizer_step(step) before each optimizer step, once the gradients are complete and clipped.",
                step,
                step,
            )
        self._begun = None

    def _say(self, message: str, *values: int) -> None:
        if message not in self._said:
            self._said.add(message)
            self._log.warning(message, *values)
