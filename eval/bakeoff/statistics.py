"""How far behind BF16 does each contender of a bake-off end, and is what lies between two of them noise?

A line is one run's JSON object as eval/bakeoff.py writes it. `with_gaps` pairs each with its BF16 run; everything else
here takes lines so paired. A contender is the runs of one spec over its seeds. Gaps are in percent of BF16's loss.
Contenders have different seeds, and seeds differ by more than contenders do: `GapModel` takes the seeds' effects out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from scipy.stats import t as student_t
from scipy.stats import ttest_rel

Row = dict[str, Any]

ARITHMETICS = ("plan", "high_precision")
# Two-sided. No correction for the number of comparisons: the tables say so.
SIGNIFICANCE = 0.05
# Fewer seeds are not enough for the best or for the short table, fewer pairs not for a paired test.
LEAST_PAIRS = 3
SCHEMA_VERSION = 1
LAYOUT_BY = ("model", "learning_rate", "steps")
PAIRED_BY = (*LAYOUT_BY, "seed")
# Percentage points. Losses have six decimals: what is smaller is rounding.
_TINY = 1e-9
SNIP_LABELS = ("snip, gemm", "snip, layer")


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
        return _contender_key(self.runs[0])

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


@dataclass(frozen=True)
class Comparison:
    """One against another."""

    difference: float
    """The one minus the other, in percentage points; NaN without a pair."""
    p: float | None
    """Two-sided, uncorrected; None if there is too little to test."""

    @property
    def beyond_noise(self) -> bool:
        """Returns True if the test rejects that the one and the other are the same."""
        return self.p is not None and self.p < SIGNIFICANCE

    def verdict(self, above: str = "worse", below: str = "better") -> str:
        """Returns `above`, `below` or "within noise", with p; "-" without a test."""
        if self.p is None:
            return "-"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        return f"{(above if self.difference > 0 else below) if self.beyond_noise else 'within noise'} ({p})"


@dataclass(frozen=True)
class PairedComparison(Comparison):
    """Mean difference over what both have, with the p of the paired t-test if there are LEAST_PAIRS pairs."""

    pairs: int
    deviation: float
    """Standard deviation of the differences (n - 1); NaN with fewer than 2 pairs."""


@dataclass(frozen=True)
class Layout:
    """Least squares of gap = effect of the contender + effect of the seed + noise, for runs that differ in these two.

    C contenders and S seeds have C + S effects, of which only contrasts and sums of a contender's and a seed's effect
    are determined, and these only if the layout is connected.
    """

    contenders: tuple[str, ...]
    """Their keys."""
    seeds: tuple[int, ...]
    runs: int
    effects: np.ndarray
    """(C + S,), in percentage points."""
    covariance: np.ndarray
    """(C + S, C + S), of the effects for noise of variance 1."""
    freedom: int
    """Residual degrees of freedom."""
    deviation: float | None
    """Residual standard deviation, the noise of one run, in percentage points; None without degrees of freedom."""
    connected: bool
    """Whether every contender can be compared with every other through common seeds."""

    @classmethod
    def fit(cls, runs: Sequence[Row]) -> Layout:
        """Fits runs that all have a gap."""
        keys = tuple(dict.fromkeys(map(_contender_key, runs)))
        seeds = tuple(sorted({run["spec"]["seed"] for run in runs}))
        gaps = np.array([run["gap"]["plan"] for run in runs])
        rows = [
            [_contender_key(run) == key for key in keys] + [run["spec"]["seed"] == seed for seed in seeds]
            for run in runs
        ]
        design = np.array(rows, dtype=float)
        inverse, rank = np.linalg.pinv(design), int(np.linalg.matrix_rank(design))
        effects, freedom = inverse @ gaps, len(runs) - rank
        squares = float(((gaps - design @ effects) ** 2).sum())
        deviation = math.sqrt(squares / freedom) if freedom else None
        connected = rank == len(keys) + len(seeds) - 1  # Each separate part costs one rank more.
        return cls(keys, seeds, len(runs), effects, inverse @ inverse.T, freedom, deviation, connected)

    def combination(self, weights: np.ndarray) -> tuple[float, float | None]:
        """Returns the weighted sum of effects and its standard error, None without degrees of freedom."""
        spread = math.sqrt(max(float(weights @ self.covariance @ weights), 0.0))
        return float(weights @ self.effects), None if self.deviation is None else self.deviation * spread

    def unit(self, key: str) -> np.ndarray:
        """Returns weights that pick one contender's effect."""
        return np.array([float(own == key) for own in self.contenders] + [0.0] * len(self.seeds))


class GapModel:
    """The layouts of lines, one per LAYOUT_BY, over the runs that have a target share and a gap under the plan."""

    def __init__(self, lines: Iterable[Row]) -> None:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for line in lines:
            if line["spec"]["share"] is not None and line["gap"]["plan"] is not None:
                groups.setdefault(tuple(line["spec"][name] for name in LAYOUT_BY), []).append(line)
        self.layouts = {values: Layout.fit(runs) for values, runs in groups.items()}

    def _connected(self, *points: Contender) -> Layout | None:
        """Returns the layout in which all points can be estimated."""
        found = [self.layouts.get(tuple(point.spec[name] for name in LAYOUT_BY)) for point in points]
        layout = found[0]
        if layout is None or not layout.connected or any(other is not layout for other in found):
            return None
        return layout if all(point.key in layout.contenders for point in points) else None

    def adjusted(self, point: Contender) -> tuple[float, float | None] | None:
        """Returns the gap that all seeds of the layout, weighted equally, would give, and its standard error.

        Returns: None outside a connected layout; no error without degrees of freedom.
        """
        layout = self._connected(point)
        if layout is None:
            return None
        weights = layout.unit(point.key)
        weights[len(layout.contenders) :] = 1 / len(layout.seeds)
        return layout.combination(weights)

    def gap(self, point: Contender) -> float | None:
        """Returns the adjusted gap; where there is none, the mean over seeds."""
        adjusted = self.adjusted(point)
        return point.mean_gap() if adjusted is None else adjusted[0]

    def compare(self, one: Contender, other: Contender) -> Comparison | None:
        """Returns the contrast, `one` minus `other`, with its t-test; None if they are not in one connected layout."""
        layout = self._connected(one, other)
        if layout is None:
            return None
        difference, error = layout.combination(layout.unit(one.key) - layout.unit(other.key))
        if error is None:
            p = None
        elif error < _TINY:
            p = float(abs(difference) < _TINY)
        else:
            p = float(2 * student_t.sf(abs(difference) / error, layout.freedom))
        return Comparison(difference, p)


def latest(lines: Iterable[Row]) -> dict[str, Row]:
    """Returns id -> line, the last one of each id.

    Raises:
        ValueError: a line is of another schema version.
    """
    found = {}
    for line in lines:
        if line.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"The line of run {line.get('id')!r} has schema_version {line.get('schema_version')!r}, expected "
                f"{SCHEMA_VERSION}. Use the report of the commit that wrote it ({line.get('commit')!r})."
            )
        found[line["id"]] = line
    return found


def with_gaps(lines: Iterable[Row]) -> dict[str, Row]:
    """Returns id -> copy of the last line, with `bf16` (the paired BF16 line or None) and `gap` (percent or None).

    A BF16 run does not depend on start_step, share or policy options: of several that pair, the one whose spec agrees
    most with the run's is taken.
    """
    found = latest(lines)
    baselines: dict[tuple[Any, ...], list[Row]] = {}
    for line in found.values():
        if line["spec"]["policy"] == "bf16":
            baselines.setdefault(_pair_key(line), []).append(line)
    return {key: _with_gap(line, baselines.get(_pair_key(line), [])) for key, line in found.items()}


def _pair_key(line: Row) -> tuple[Any, ...]:
    return tuple(line["spec"][name] for name in PAIRED_BY)


def _with_gap(line: Row, baselines: Sequence[Row]) -> Row:
    spec = line["spec"]

    def agreement(baseline: Row) -> int:
        return sum(baseline["spec"].get(name) == value for name, value in spec.items())

    bf16 = max(baselines, key=agreement, default=None)
    gaps: dict[str, float | None] = {}
    for arithmetic in ARITHMETICS:
        loss, base = final_loss(line, arithmetic), None if bf16 is None else final_loss(bf16, arithmetic)
        gaps[arithmetic] = None if loss is None or base is None else 100 * (loss / base - 1)
    return {**line, "bf16": bf16, "gap": gaps}


def final_loss(line: Row, arithmetic: str = "plan") -> float | None:
    """Returns the final validation loss; None for a run that diverged."""
    loss = (line["loss"] or {}).get(arithmetic)
    return None if line["diverged"] or loss is None or not math.isfinite(loss) else float(loss)


def diverged(line: Row) -> bool:
    """Returns True if the run has no finite final loss under its own arithmetic."""
    return final_loss(line) is None


def _contender_key(line: Row) -> str:
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
        groups.setdefault(_contender_key(line), []).append(line)
        peers.setdefault((line["label"], spec["model"], spec["share"]), []).append(spec)
    result = []
    for runs in groups.values():
        spec = runs[0]["spec"]
        others = peers[runs[0]["label"], spec["model"], spec["share"]]
        differing = [name for name in others[0] if any(other.get(name) != others[0][name] for other in others)]
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


def compare(first: Mapping[Any, float], second: Mapping[Any, float]) -> PairedComparison:
    """Compares gaps, `first` minus `second`, over the keys that both have."""
    keys = [key for key in first if key in second]
    ours, theirs = (np.array([gaps[key] for key in keys]) for gaps in (first, second))
    differences = ours - theirs
    mean = float(differences.mean()) if keys else math.nan
    deviation = float(differences.std(ddof=1)) if len(keys) > 1 else math.nan
    if len(keys) < LEAST_PAIRS:
        p = None
    elif deviation < _TINY:  # The t statistic would be 0 / 0 or infinite.
        p = float(abs(mean) < _TINY)
    else:
        p = float(ttest_rel(ours, theirs).pvalue)
    return PairedComparison(mean, p, len(keys), deviation)


def pooled_comparisons(lines: Iterable[Row]) -> list[tuple[str, str, PairedComparison]]:
    """Compares each label's gaps with those of each of SNIP_LABELS over all common models, target shares and seeds.

    Returns: (SNIP's label, other label, comparison of the other minus SNIP), highest difference first. Of several runs
        with one label, share and seed the mean counts.
    """
    runs: dict[str, dict[Hashable, list[float]]] = {}
    for line in lines:
        spec, gap = line["spec"], line["gap"]["plan"]
        if spec["share"] is not None and gap is not None:
            key = tuple(spec[name] for name in (*PAIRED_BY, "share", "start_step"))
            runs.setdefault(line["label"], {}).setdefault(key, []).append(gap)
    gaps = {label: {key: float(np.mean(values)) for key, values in own.items()} for label, own in runs.items()}
    found = []
    for snip in (label for label in SNIP_LABELS if label in gaps):
        entries = [(snip, label, compare(own, gaps[snip])) for label, own in gaps.items() if label != snip]
        found += sorted((entry for entry in entries if entry[2].pairs), key=lambda entry: -entry[2].difference)
    return found


def ranking(group: Iterable[Contender], model: GapModel) -> list[Contender]:
    """Orders contenders by their adjusted gap (or mean, see `GapModel.gap`); those with a diverged run come last."""

    def key(contender: Contender) -> tuple[bool, float]:
        gap = model.gap(contender)
        return contender.diverged > 0, math.inf if gap is None else gap

    return sorted(group, key=key)


def best_of(ranked: Iterable[Contender]) -> Contender | None:
    """Returns the contender of a ranking that others are compared with; None if all diverged.

    That is the first that never diverged and has at least LEAST_PAIRS seeds, if any has.
    """
    whole = [contender for contender in ranked if not contender.diverged and contender.gaps()]
    return next((one for one in whole if len(one.gaps()) >= LEAST_PAIRS), next(iter(whole), None))


def beating_snip(lines: Iterable[Row]) -> list[tuple[Contender, Contender, Comparison]]:
    """Returns (point, SNIP point, contrast) wherever another policy has the lower adjusted gap at no lower a target.

    SNIP points are those with refreshes and those with one plan ("static snip"). Largest difference first; compare
    `beyond_noise` to tell luck from lead.
    """
    return _lower(lines, lambda spec: spec["policy"] != "snip", lambda spec: spec["policy"] == "snip")


def static_beating_refreshed(lines: Iterable[Row]) -> list[tuple[Contender, Contender, Comparison]]:
    """Returns the same for SNIP whose plan is made once against SNIP with refreshes."""
    return _lower(lines, lambda spec: _is_snip(spec, static=True), lambda spec: _is_snip(spec, static=False))


def _is_snip(spec: Row, static: bool) -> bool:
    return bool(spec["policy"] == "snip" and (spec["refresh_every"] is None) == static)


def _lower(
    lines: Iterable[Row], one: Callable[[Row], bool], other: Callable[[Row], bool]
) -> list[tuple[Contender, Contender, Comparison]]:
    lines = list(lines)
    model, points = GapModel(lines), contenders(lines)
    found = []
    for point in (point for point in points if one(point.spec)):
        for rival in (rival for rival in points if other(rival.spec) and point.share >= rival.share):
            contrast = model.compare(point, rival)
            if contrast is not None and contrast.difference < 0:
                found.append((point, rival, contrast))
    return sorted(found, key=lambda entry: entry[2].difference)
