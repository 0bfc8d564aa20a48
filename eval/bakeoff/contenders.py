"""A contender of a bake-off: the runs of one spec over its seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from .gaps import diverged, final_loss
from .lines import Row


@dataclass(frozen=True)
class Contender:
    """The runs of one spec over its seeds."""

    name: str
    """The label, and what else tells it from others of the same label, model and share."""
    runs: tuple[Row, ...]
    """Paired lines in the order of their seeds."""

    @property
    def spec(self) -> Row:
        """The spec of the first seed."""
        spec: Row = self.runs[0]["spec"]
        return spec

    @property
    def key(self) -> str:
        """What is the same for all seeds, and for no other contender: label and spec."""
        return contender_key(self.runs[0])

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(diverged(run) for run in self.runs)

    @property
    def fp4_fraction(self) -> float:
        """Attained share of the linear FLOPs in FP4, mean over seeds; the target need not be met exactly."""
        return self.mean_of(itemgetter("fp4_fraction")) or 0.0

    @property
    def share(self) -> float:
        """Target FP4 share, or what was attained where there is no target."""
        target = self.spec["share"]
        return self.fp4_fraction if target is None else float(target)

    def gaps(self, arithmetic: str = "plan") -> dict[int, float]:
        """Returns seed -> gap in percent, of the runs that have one."""
        gaps = {run["spec"]["seed"]: run["gap"][arithmetic] for run in self.runs}
        return {seed: gap for seed, gap in gaps.items() if gap is not None}

    def mean_gap(self, arithmetic: str = "plan") -> float | None:
        """Returns the mean gap over seeds in percent; None if no run has one."""
        return self.mean_of(lambda run: run["gap"][arithmetic])

    def losses(self) -> list[float]:
        """Returns the final validation losses of the runs that did not diverge."""
        return [loss for run in self.runs if (loss := final_loss(run)) is not None]

    def mean_of(self, value: Callable[[Row], float | None]) -> float | None:
        """Returns the mean of a figure over the runs that have it; None if none has."""
        values = [figure for figure in map(value, self.runs) if figure is not None]
        return float(np.mean(values)) if values else None


def contender_key(line: Row) -> str:
    spec = {name: value for name, value in line["spec"].items() if name != "seed"}
    return json.dumps([line["label"], spec], sort_keys=True)


def contenders(lines: Iterable[Row], shown: Iterable[str] = ()) -> list[Contender]:
    """Groups lines by spec without the seed, in the order in which they first come.

    Args:
        shown: fields of the spec that the caller shows beside the name. Others that differ between contenders of the
            same label, model and share become part of the name, so that no two are mistaken for one.

    Raises:
        ValueError: two runs have the same label, spec and seed.
    """
    groups: dict[str, list[Row]] = {}
    peers: dict[tuple[Any, ...], list[Row]] = {}
    for line in lines:
        spec = {name: value for name, value in line["spec"].items() if name != "seed"}
        groups.setdefault(contender_key(line), []).append(line)
        peers.setdefault((line["label"], spec["model"], spec["share"]), []).append(spec)
    result = []
    for runs in groups.values():
        spec = runs[0]["spec"]
        others = peers[runs[0]["label"], spec["model"], spec["share"]]
        names = dict.fromkeys(name for other in others for name in other)
        differing = [name for name in names if any(other.get(name) != others[0].get(name) for other in others)]
        parts = [f"{name} {spec.get(name)}" for name in differing if name not in shown]
        ordered = sorted(runs, key=lambda run: run["spec"]["seed"])
        for one, other in pairwise(ordered):
            if one["spec"]["seed"] == other["spec"]["seed"]:
                raise ValueError(
                    f"Runs {one['id']!r} and {other['id']!r} of {runs[0]['label']!r} have the same spec {one['spec']}; "
                    "expected different ones. Name what tells them apart in the spec, or report them apart."
                )
        result.append(Contender(", ".join([runs[0]["label"], *parts]), tuple(ordered)))
    return result
