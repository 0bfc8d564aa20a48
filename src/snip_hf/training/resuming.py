"""Saving and continuing a run: what its parts put into a state, and how they go on from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import SnipConfig
from ..policies.registry import needs_probe
from ..policies.ties import names_of
from ..records.event_writer import EventWriter
from ..records.interventions import Retarget
from .assembly import RunParts
from .checkpoint import CountedState, SavedState
from .guard import Guard
from .schedule import Schedule


@dataclass(frozen=True)
class Resuming:
    """Saves the parts of one run, and lets them continue from what was saved."""

    run: RunParts
    schedule: Schedule
    events: EventWriter
    log: logging.Logger

    def state(self, config: SnipConfig, step: int, guard: Guard | None) -> dict[str, Any]:
        """Returns JSON data from which a run under `config` goes on after this step."""
        run, schedule = self.run, self.schedule
        counted = None if run.coverage.is_due else CountedState(run.coverage.found)
        more: dict[str, Any] = {"kernels": run.layers.state_dict(), "counted": counted}
        more["postponed"] = schedule.postponed
        more["guard"] = {} if guard is None else guard.state()
        in_force, pending = run.in_force, run.refresher.pending
        more["ties"] = names_of(in_force.setting.config)
        return SavedState(config.to_dict(), step, in_force.plan, pending, schedule.last_probe, **more).to_dict()

    def restore(self, saved: SavedState, config: SnipConfig, guard: Guard | None) -> None:
        """Puts the parts into a saved state. The record loses what came after it, which is about to happen again."""
        run, folder = self.run, self.events.folder
        run.layers.load_state_dict(saved.kernels)
        run.in_force.resume(saved.plan, saved.step)
        if saved.counted is not None:
            run.coverage.restore(saved.counted.coverage)
        run.refresher.stop()
        if saved.ties is not None:
            run.refresher.tie(saved.ties)
        self.schedule.last_probe, self.schedule.postponed = saved.last_probe, saved.postponed
        run.layers.set_step(saved.step + 1, 0)
        targets = saved.other_targets(config)
        pending = None if targets else saved.pending
        folder.cut(saved.step, None if saved.pending is None else saved.pending.step, run.in_force.start(saved.step))
        run.in_force.save()
        if pending is not None:
            run.refresher.resume(pending, saved.step)
        if targets:
            self._take_target(targets, saved, config)
        if guard is not None:
            guard.restore(saved.guard)

    def _take_target(self, targets: Mapping[str, tuple[Any, Any]], saved: SavedState, config: SnipConfig) -> None:
        """Goes on under another target: what was measured stays, and the next step refreshes if one before it did."""
        step = saved.step + 1
        self.events.add(Retarget(step=step, fields=targets))
        if not needs_probe(config):
            what = "the policy makes its plan once more"
            self.run.in_force.retarget(step)
        elif saved.last_probe is None:
            what = "the first refresh meets it"
        else:
            what = f"step {step} refreshes the plan for it"
            self.schedule.postponed = step
        if saved.pending is not None:
            what = f"{what}; the refresh of step {saved.pending.step}, whose plan was for the old one, is left out"
        changed = "; ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in targets.items())
        self.log.info("snip-hf: resumed with another target: %s. From here on %s.", changed, what)
