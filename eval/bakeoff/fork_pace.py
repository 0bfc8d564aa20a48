"""What a recipe of forks asks for, in numbers: forks per contender, and the time that they take on a GPU."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .fork_recipe import ForkRecipe, ForkRun


@dataclass(frozen=True)
class Pace:
    """Seconds that forks took, by the lines of earlier ones; those that ran side by side shared them."""

    steps: Mapping[str, float]
    """Contender -> seconds of a step, median over its lines."""
    starts: Mapping[str, float]
    """Contender -> seconds of plan and evaluation, median over its lines."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Pace | None:
        """Returns the pace of lines; None without any."""
        steps: dict[str, list[float]] = {}
        starts: dict[str, list[float]] = {}
        for line in lines:
            seconds, beside = line["seconds"], line["processes_per_device"]
            steps.setdefault(line["contender"], []).append(seconds["training"] / line["steps"] / beside)
            starts.setdefault(line["contender"], []).append((seconds["plan"] + seconds["evaluation"]) / beside)
        if not steps:
            return None
        medians = [{name: statistics.median(own) for name, own in found.items()} for found in (steps, starts)]
        return cls(*medians)

    def fork(self, run: ForkRun) -> float:
        """Returns the seconds of a fork; one of a contender without lines takes the median of the others."""
        return self._of(self.starts, run.contender.name) + run.lengths[-1] * self._of(self.steps, run.contender.name)

    def base(self, recipe: ForkRecipe, seed: int) -> float:
        """Returns the seconds of a base's training."""
        points = max(fork.point for fork in recipe.forks if fork.base_seed == seed)
        return points * self._of(self.steps, recipe.base.format)

    @staticmethod
    def _of(medians: Mapping[str, float], name: str) -> float:
        return medians.get(name) or statistics.median(medians.values())


def overview(
    recipe: ForkRecipe, runs: Sequence[ForkRun], todo: Sequence[ForkRun], pace: Pace | None, in_full: bool
) -> str:
    """Returns how many lines there will be, how many there are, and what is left, as text.

    Args:
        recipe: that the runs are of.
        runs: all of them.
        todo: what is left of them.
        pace: of earlier forks; None: not known.
        in_full: with every contender that is left.
    """
    whole, left = (sum(len(run.ids) for run in found) for found in (runs, todo))
    per_length = Counter(steps for run in runs for steps in run.ids)
    parts = [f"{whole} lines, {whole - left} of them done, {left} to do"]
    parts += [f"  {count} of forks of {steps} steps" for steps, count in sorted(per_length.items())]
    if in_full:
        parts += _of_contenders(todo)
        parts += [f"impossible: {what}: {why}" for what, why in recipe.impossible.items()]
        parts += _too_late(recipe)
    if pace is None and todo and in_full:
        parts.append("no lines to go by for the time that it takes; --pace FILE")
    if pace is not None and todo:
        bases = {run.fork.base_seed for run in todo}
        forks = sum(map(pace.fork, todo)) / 60
        trained = sum(pace.base(recipe, seed) for seed in bases) / 60
        parts.append(
            f"about {forks:.1f} minutes of one GPU for {len(todo)} forks, and {trained:.1f} for {len(bases)} bases, by "
            "the pace of earlier lines"
        )
    return "\n".join(parts)


def _of_contenders(todo: Iterable[ForkRun]) -> list[str]:
    """Returns a line per contender, in the order in which they come first."""
    found: dict[str, Counter[int]] = {}
    for run in todo:
        found.setdefault(run.contender.name, Counter()).update(run.lengths)
    return [
        f"{name}: {', '.join(f'{count} of {steps} steps' for steps, count in sorted(own.items()))}"
        for name, own in found.items()
    ]


def _too_late(recipe: ForkRecipe) -> list[str]:
    """Returns which lengths do not fit into the schedule after which points."""
    lengths = sorted({steps for cell in recipe.cells for steps in cell.lengths})
    points = {fork.point: fork for fork in recipe.forks}
    return [
        f"left out: forks of {steps} steps after point {point}, beyond the schedule's {recipe.base.steps} steps"
        for point, fork in sorted(points.items())
        for steps in lengths
        if not recipe.fits(fork, steps)
    ]
