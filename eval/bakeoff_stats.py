"""How far behind BF16 does each contender of a bake-off end, is the difference noise, and how do plans move?

A line is one run's JSON object as eval/bakeoff.py writes it. `with_gaps` pairs each with its BF16 run; everything else
here takes lines so paired. A contender is the runs of one spec over its seeds. Gaps are in percent of BF16's loss.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

Row = dict[str, Any]

ARITHMETICS = ("plan", "high_precision")
# Two-sided. No correction for the number of comparisons: the tables say so.
SIGNIFICANCE = 0.05
# Fewer pairs (seeds, for one contender against another) are not tested.
LEAST_PAIRS = 3
SCHEMA_VERSION = 1
PAIRED_BY = ("model", "seed", "learning_rate", "steps")
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
    """One set of gaps against another over what both have."""

    pairs: int
    difference: float
    """Mean of the one minus the other, in percentage points; NaN without a pair."""
    deviation: float
    """Standard deviation of the differences (n - 1); NaN with fewer than 2 pairs."""
    p: float | None
    """Of the two-sided paired t-test; None with fewer than LEAST_PAIRS pairs."""

    @property
    def beyond_noise(self) -> bool:
        """Tells whether the test rejects that the one and the other are the same."""
        return self.p is not None and self.p < SIGNIFICANCE

    def verdict(self, above: str = "worse", below: str = "better", unit: str = "seed") -> str:
        """Returns `above`, `below` or "within noise", with p; the number of pairs if there were too few to test."""
        if self.p is None:
            return f"{self.pairs} {unit}{'s' * (self.pairs != 1)}"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        return f"{(above if self.difference > 0 else below) if self.beyond_noise else 'within noise'} ({p})"


@dataclass(frozen=True)
class Noise:
    """How far one run's gap lies from what its contender and its seed explain."""

    deviation: float
    """Residual standard deviation, in percentage points."""
    contenders: int
    seeds: int


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
    """Tells whether the run has no finite final loss under its own arithmetic."""
    return final_loss(line) is None


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
        groups.setdefault(json.dumps([line["label"], spec], sort_keys=True), []).append(line)
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


def compare(first: Mapping[Any, float], second: Mapping[Any, float]) -> Comparison:
    """Compares gaps, `first` minus `second`, over the keys that both have."""
    keys = [key for key in first if key in second]
    ours, theirs = (np.array([gaps[key] for key in keys]) for gaps in (first, second))
    differences = ours - theirs
    mean = float(differences.mean()) if keys else math.nan
    deviation = float(differences.std(ddof=1)) if len(keys) > 1 else math.nan
    if len(keys) < LEAST_PAIRS:
        p = None
    elif np.ptp(differences) <= 1e-12 * abs(mean):  # The t statistic would be 0 / 0 or infinite.
        p = 1.0 if mean == 0 else 0.0
    else:
        p = float(ttest_rel(ours, theirs).pvalue)
    return Comparison(len(keys), mean, deviation, p)


def pooled_comparisons(lines: Iterable[Row]) -> list[tuple[str, str, Comparison]]:
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


def run_noise(group: Iterable[Contender]) -> Noise | None:
    """Estimates one run's noise by a two-way layout without interaction: contender effects and seed effects removed.

    Of the complete blocks made of the n seeds that most contenders have and all contenders with these seeds, n = 2,
    3, ..., the one with the most degrees of freedom, (contenders - 1) (seeds - 1), is taken.

    Returns: None without a block of at least 2 contenders and 2 seeds.
    """
    gaps = [contender.gaps() for contender in group]
    counts = Counter(seed for own in gaps for seed in own)
    seeds = sorted(counts, key=lambda seed: (-counts[seed], seed))
    best, most = None, 0
    for number in range(2, len(seeds) + 1):
        chosen = seeds[:number]
        block = [[own[seed] for seed in chosen] for own in gaps if own.keys() >= set(chosen)]
        freedom = (len(block) - 1) * (number - 1)
        if freedom > most:
            best, most = np.array(block), freedom
    if best is None:
        return None
    residuals = best - best.mean(axis=0) - best.mean(axis=1, keepdims=True) + best.mean()
    return Noise(float(np.sqrt((residuals**2).sum() / most)), *best.shape)


def ranking(group: Iterable[Contender]) -> list[Contender]:
    """Orders contenders by their mean gap under the plan; those with a diverged run after the others."""

    def key(contender: Contender) -> tuple[bool, float]:
        mean = contender.mean_gap()
        return contender.diverged > 0, math.inf if mean is None else mean

    return sorted(group, key=key)


def best_of(group: Sequence[Contender]) -> Contender | None:
    """Returns the contender that others are compared with; None if all diverged.

    That is the first of the ranking that never diverged and has seeds enough for a test, if any has.
    """
    whole = [contender for contender in ranking(group) if not contender.diverged and contender.gaps()]
    tested = [contender for contender in whole if len(contender.gaps()) >= LEAST_PAIRS]
    return next(iter(tested or whole), None)


def beating_snip(lines: Iterable[Row]) -> list[tuple[Contender, Contender, Comparison]]:
    """Returns (contender, SNIP point, comparison) wherever another policy has the lower gap at no lower a share.

    Shares are targets, or what was attained where there is none. Compare `beyond_noise` to tell luck from lead.
    """
    points = [point for point in contenders(lines) if point.spec["policy"] != "bf16" and point.gaps()]
    snip = [point for point in points if point.spec["policy"] == "snip"]
    found = []
    for point in (point for point in points if point.spec["policy"] != "snip"):
        for other in snip:
            if point.spec["model"] == other.spec["model"] and point.share >= other.share:
                comparison = compare(point.gaps(), other.gaps())
                if comparison.difference < 0:
                    found.append((point, other, comparison))
    return found


def decided_plans(line: Row) -> list[str]:
    """Returns the formats strings of the plans in force, from the first that has FP4 in it: before that is warm-up."""
    formats = [plan["formats"] for plan in line["plans"]]
    first = next((index for index, text in enumerate(formats) if "4" in text), len(formats))
    return formats[first:]


def hamming(one: str, other: str) -> float:
    """Returns the share of (layer, GEMM) pairs whose formats differ, each pair counted the same.

    Raises:
        ValueError: the strings have different lengths.
    """
    return sum(a != b for a, b in zip(one, other, strict=True)) / len(one)


def changed_per_refresh(line: Row) -> float | None:
    """Returns the mean share of pairs that a refresh after the first changed; None if there was none after it."""
    plans, later = decided_plans(line), len(line["refresh_seconds"]) - 1
    return None if later < 1 else sum(map(hamming, plans, plans[1:])) / later


def total_drift(line: Row) -> float | None:
    """Returns the share of pairs in which the last plan differs from the first; None without a plan with FP4."""
    plans = decided_plans(line)
    return hamming(plans[0], plans[-1]) if plans else None
