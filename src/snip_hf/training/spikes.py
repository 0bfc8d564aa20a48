"""What a spike is: a figure far above its last healthy values. And when several are a failure of training.

The rule and its defaults are those of OLMo-core's optimizers that skip steps (allenai/OLMo-core, `SkipStepOptimizer`:
128 steps, 6 standard deviations; https://github.com/allenai/OLMo-core), with three changes of ours: a value that is a
spike, or not finite, does not count towards what later ones are compared with, and the deviation is at least a tenth of
the mean, since a run that is nearly constant would make anything a spike. And a rise that lasts is no failure: after
`guard_patience` spikes of a figure without a healthy value among them, later ones are compared with those.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from ..config import SnipConfig

# Standard deviations above the mean at which a value is a spike.
SPIKE = 6.0
# Healthy steps that a spike is compared with.
WINDOW = 128
# Of the mean. With 6 deviations, a spike is at least 1.6 times the mean.
_LEAST_DEVIATION = 0.1


@dataclass(frozen=True)
class Finding:
    """What is wrong with a step."""

    figure: str
    """"loss" or "gradient norm"."""
    value: float
    limit: float | None
    """None: the value is not finite."""

    @property
    def is_finite(self) -> bool:
        return self.limit is not None

    @property
    def reason(self) -> str:
        if self.limit is None:
            return f"the {self.figure} is {self.value}"
        return f"the {self.figure} {self.value:.4g} is above {self.limit:.4g}, what a healthy step may have"


@dataclass
class Health:
    """The health of a run, as it is saved with it."""

    config: SnipConfig
    recent: dict[str, deque[float]] = field(default_factory=dict)
    """Figure -> its last healthy values."""
    risen: dict[str, list[float]] = field(default_factory=dict)
    """Figure -> its spikes since its last healthy value, which become the level if they last."""
    failures: int = 0
    """Alarms in a row."""
    alarmed: int | None = None
    """The step of the last one; None: there was none, or it is long ago."""

    def look(self, step: int, figures: Mapping[str, float | None]) -> Finding | None:
        """Returns what is wrong with a step, if anything is, and takes over what is healthy.

        Args:
            step: from 1.
            figures: name -> value; None: it is not known.
        """
        known = {name: value for name, value in figures.items() if value is not None}
        for name, value in known.items():
            if not math.isfinite(value):
                return Finding(name, value, None)
        found = None
        for name, value in known.items():
            limit = self.limit(name)
            if limit is not None and value > limit:
                found = found or Finding(name, value, limit)
                self._note_rise(name, value)
            else:
                self.risen.pop(name, None)
                self._of(name).append(value)
        return None if self.holds(step) else found

    def limit(self, name: str) -> float | None:
        """Returns the value above which a figure is a spike; None: too little is known yet."""
        values = self._of(name)
        if len(values) < min(WINDOW // 2, self.config.guard_patience):
            return None
        mean = fmean(values)
        return mean + SPIKE * max(pstdev(values, mean), _LEAST_DEVIATION * abs(mean))

    def _note_rise(self, name: str, value: float) -> None:
        """Takes spikes for the level once there are `guard_patience` of them in a row."""
        risen = self.risen.setdefault(name, [])
        risen.append(value)
        if len(risen) >= self.config.guard_patience:
            values = self._of(name)
            values.clear()
            values.extend(self.risen.pop(name))

    def holds(self, step: int) -> bool:
        """Returns True while formats that an alarm raised have their time: spikes are then no alarms of their own."""
        return self.alarmed is not None and step <= self.alarmed + self.config.guard_patience

    def note_alarm(self, step: int) -> None:
        self.failures, self.alarmed = self.failures + 1, step

    def note_calm(self, step: int) -> None:
        """Forgets the alarms of long ago."""
        if self.alarmed is not None and step > self.alarmed + 2 * self.config.guard_patience:
            self.failures, self.alarmed = 0, None

    def to_dict(self) -> dict[str, Any]:
        return {
            "recent": {name: list(values) for name, values in self.recent.items()},
            "risen": {name: list(values) for name, values in self.risen.items()},
            "failures": self.failures,
            "alarmed": self.alarmed,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `to_dict` gave, as `read_guard` returns it; nothing of an empty state."""
        self.failures, self.alarmed = saved.get("failures", 0), saved.get("alarmed")
        self.recent, self.risen = {}, {name: list(values) for name, values in saved.get("risen", {}).items()}
        for name, values in saved.get("recent", {}).items():
            self._of(name).extend(values)

    def _of(self, name: str) -> deque[float]:
        return self.recent.setdefault(name, deque(maxlen=WINDOW))


def read_guard(saved: Any) -> dict[str, Any]:
    """Returns the part of a state that is the guard's, checked.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    found = dict(saved)
    if not found:
        return {}
    for name in ("failures", "alarmed"):
        value = found.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"guard.{name} is {value!r}")
    for part in ("recent", "risen"):
        values = {str(name): [float(value) for value in row] for name, row in found[part].items()}
        if not all(math.isfinite(value) for row in values.values() for value in row):
            raise ValueError(f"guard.{part} has a value that is not finite")
        found[part] = values
    return found
