"""Who is ahead of whom: contenders in order, and the points that beat SNIP."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from .contenders import Contender, contenders
from .gaps import PAIRED_BY
from .linear_model import GapModel
from .lines import Row
from .significance import LEAST_PAIRS, Comparison, PairedComparison, compare

SNIP_LABELS = ("snip, gemm", "snip, layer")


def pooled_comparisons(lines: Iterable[Row]) -> list[tuple[str, str, PairedComparison]]:
    """Compares each label's gaps with SNIP's of the same formats over all common models, target shares and seeds.

    Returns: (SNIP's label, other label, comparison of the other minus SNIP), highest difference first. Of several runs
        with one label, share and seed the mean counts.
    """
    runs: dict[str, dict[Hashable, list[float]]] = {}
    formats: dict[str, Any] = {}
    for line in lines:
        spec, gap = line["spec"], line["gap"]["plan"]
        if spec["share"] is not None and gap is not None:
            key = tuple(spec[name] for name in (*PAIRED_BY, "share", "start_step"))
            runs.setdefault(line["label"], {}).setdefault(key, []).append(gap)
            formats[line["label"]] = spec.get("formats")
    gaps = {label: {key: float(np.mean(values)) for key, values in own.items()} for label, own in runs.items()}
    found = []
    for snip in sorted(label for label in gaps if label.partition(", {")[0] in SNIP_LABELS):
        others = [label for label in gaps if label != snip and formats[label] == formats[snip]]
        entries = [(snip, label, compare(gaps[label], gaps[snip])) for label in others]
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
