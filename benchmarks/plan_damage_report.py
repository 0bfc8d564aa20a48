r"""What a plan costs after many steps, and which one-step figure ranks that cost best: the analysis.

    python benchmarks/plan_damage_report.py runs/plan_damage.jsonl --output plan_damage.md

Reads what `plan_damage.py` wrote. Damage after K steps: held-out loss of an arm, less that of the unquantized run of
the same repeat, mean over repeats. Tables give Spearman's rank correlation with 90% bootstrap intervals over the arms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plan_damage_arms import PLAN_KINDS, available, costs
from scipy.stats import rankdata
from shared.json_lines import read_lines

from snip_hf.estimation.pending import LAYER
from snip_hf.numerics.gemms import GEMMS

Array = NDArray[np.float64]
# Measure -> how the tables call it.
MEASURES = {
    "loss_high": "held-out loss in high precision",
    "loss_plan": "held-out loss under the plan",
    "distance": "weight distance",
}
# Measured one-step figures, as if they were objectives: what estimates without error would reach.
MEASURED = {
    "measured loss": "one_step_loss",
    "measured weight": "one_step_weight",
    "measured held-out loss": "rise",
}
POOLS: dict[str, tuple[str, ...]] = {
    "single layers": ("layer",),
    "single GEMMs": ("gemm",),
    "random layer plans": ("random-layer",),
    "random GEMM plans": ("random-gemm",),
    "all plans at 75%": PLAN_KINDS,
}
# Whose groups are whole layers.
BY_LAYER = ("single layers", "random layer plans")


@dataclass
class Case:
    """One run of `plan_damage.py`."""

    name: str
    rows: list[dict[str, Any]]
    arms: dict[str, dict[str, Any]]
    lines: dict[tuple[str, int, int], dict[str, Any]]
    """(arm, repeat, K) -> line; an arm that another one stands for has the other one's."""
    origin: str = ""

    @classmethod
    def load(cls, path: Path) -> Case:
        document = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        arms = {arm["name"]: arm for arm in document["arms"]}
        lines = {(line["arm"], line["repeat"], line["k"]): line for line in read_lines(path)}
        for arm in arms.values():
            for (name, repeat, k), line in list(lines.items()) if arm["same_as"] else ():
                if name == arm["same_as"]:
                    lines[arm["name"], repeat, k] = line
        options = document["options"]
        name = ", ".join(f"{key} {options[key]}" for key in ("family", "optimizer", "hidden", "blocks", "rows", "step"))
        source = document["origin"]
        origin = f"Commit {source['commit']}, {source['machine']}, torch {source['torch']}, seed {options['seed']}:"
        return cls(name, document["table"], arms, lines, f"{origin}\n\n    {source['command']}")

    @property
    def repeats(self) -> list[int]:
        return sorted({repeat for _, repeat, _ in self.lines})

    @property
    def horizons(self) -> list[int]:
        return sorted({k for _, _, k in self.lines if k > 0})

    def damages(self, arm: str, k: int, measure: str) -> dict[int, float]:
        """Returns repeat -> damage, where the arm and the unquantized run were measured; infinite where it broke."""
        result = {}
        for repeat in self.repeats:
            line, base = self.lines.get((arm, repeat, k)), self.lines.get(("bf16", repeat, k))
            if line is None or base is None or line.get(measure) is None:
                continue
            damage = line[measure] - (0.0 if measure == "distance" else base[measure])
            result[repeat] = damage if math.isfinite(damage) else math.inf
        return result

    def damage(self, arm: str, k: int, measure: str) -> float | None:
        found = self.damages(arm, k, measure)
        return sum(found.values()) / len(found) if found else None

    def table(self, arms: Sequence[str], k: int, measure: str) -> tuple[list[str], Array]:
        """Returns the damages (arms, repeats) of those arms that were measured in all of these repeats.

        As many of the first repeats as give the most numbers: means over different repeats could not be compared.
        """
        found = {arm: self.damages(arm, k, measure) for arm in arms}
        best: tuple[list[str], Array] = [], np.empty((0, 0))
        for count in range(1, len(self.repeats) + 1):
            taken = self.repeats[:count]
            kept = [arm for arm in arms if found[arm].keys() >= set(taken)]
            if len(kept) * count > best[1].size:
                best = kept, np.array([[found[arm][repeat] for repeat in taken] for arm in kept])
        return best

    def one_step(self, arm: str, figure: str) -> float | None:
        """Returns a measured one-step figure of a whole arm."""
        if figure == "rise":
            return self.damage(arm, 0, "loss_plan")
        value = self.lines.get((arm, 0, 0), {}).get(figure)
        return None if value is None else float(value)

    def of_kinds(self, kinds: Sequence[str]) -> list[str]:
        """Returns the arms of some kinds; one that another stands for counts as that one."""
        return [name for name, arm in self.arms.items() if arm["kind"] in kinds and not arm["same_as"]]

    def summed(self, prices: Mapping[tuple[str, str, str], float], arm: str, by_layer: bool) -> float:
        """Returns the sum of an objective over an arm's groups; what is unquantized costs nothing."""
        total = 0.0
        for layer, formats in self.arms[arm]["assignment"].items():
            groups = {LAYER: formats["forward"]} if by_layer and len(set(formats.values())) == 1 else formats
            total += sum(prices.get((layer, gemm, fmt), 0.0) for gemm, fmt in groups.items() if fmt != "bf16")
        return total

    def predictors(self, names: Sequence[str], by_layer: bool) -> dict[str, Array]:
        """Returns objective or measured one-step figure -> a number per arm (NaN where it was not measured)."""
        result = {}
        for objective in available(self.rows):
            prices = costs(self.rows, objective)
            result[objective] = np.array([self.summed(prices, name, by_layer) for name in names])
        for label, figure in MEASURED.items():
            values = [self.one_step(name, figure) for name in names]
            result[label] = np.array([np.nan if value is None else value for value in values])
        return result


# ------------------------------------------------------------------------------------------------ statistics


def spearman(a: Array, b: Array) -> float:
    """Returns Spearman's rho of two vectors, NaN where one is constant."""
    return float(_rho(a[None], b[None])[0])


def _rho(a: Array, b: Array) -> Array:
    """Returns Spearman's rho of each row of a (B, n) with the same row of b."""
    left, right = rankdata(a, axis=1), rankdata(b, axis=1)
    left, right = left - left.mean(1, keepdims=True), right - right.mean(1, keepdims=True)
    size = np.sqrt((left**2).sum(1) * (right**2).sum(1))
    products: Array = (left * right).sum(1)
    return np.where(size > 0, products / np.where(size > 0, size, 1.0), np.nan)


def correlation(a: Array, b: Array, samples: int = 1000) -> str:
    """Returns Spearman's rho with the 5% and 95% quantiles over bootstrap samples of the pairs, as text."""
    known = ~(np.isnan(a) | np.isnan(b))
    a, b = a[known], b[known]
    if len(a) < 4 or np.ptp(rankdata(a)) == 0:
        return "-"
    drawn = np.random.default_rng(0).integers(0, len(a), (samples, len(a)))
    low, high = np.nanquantile(_rho(a[drawn], b[drawn]), (0.05, 0.95))
    return f"{spearman(a, b):.2f} ({low:.2f} to {high:.2f})"


def reliability(table: Array) -> str:
    """Returns how well the mean of a table's columns (arms, repeats) repeats itself, as text.

    The mean Spearman's rho of two repeats, by Spearman-Brown's formula.
    """
    count = table.shape[1]
    if count < 2:
        return "-"
    mean = float(np.mean([spearman(table[:, i], table[:, j]) for i in range(count) for j in range(i)]))
    return f"{count * mean / (1 + (count - 1) * mean) if mean > 0 else mean:.2f}"


# ------------------------------------------------------------------------------------------------ the tables


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def summary(case: Case, k: int) -> str | None:
    """Returns a row per objective, a column per pool and measure: its rank correlation with the damage."""
    head, columns = [f"K = {k}"], {}
    for pool, measure in itertools.product(POOLS, MEASURES):
        names = case.of_kinds(POOLS[pool])
        kept, table = case.table(names, k, measure)
        if len(kept) < 4:
            continue
        head.append(f"{pool}: {measure.replace('_', ' ')} ({len(kept)} x {table.shape[1]})")
        predictors = case.predictors(kept, pool in BY_LAYER)
        columns[head[-1]] = {"reliability": reliability(table)} | {
            label: correlation(predictor, table.mean(1)).partition(" ")[0] for label, predictor in predictors.items()
        }
    labels = list(next(iter(columns.values()), {}))
    return markdown(head, [[label, *(column[label] for column in columns.values())] for label in labels])


def ranking(case: Case, pool: str, measure: str) -> str | None:
    """Returns a row per objective, a column per K: its rank correlation with the damage over the arms of a pool."""
    names = case.of_kinds(POOLS[pool])
    predictors = case.predictors(names, pool in BY_LAYER)
    head = [f"{pool}: {MEASURES[measure]}"]
    rows = [["reliability"], *([label] for label in predictors)]
    for k in case.horizons:
        kept, table = case.table(names, k, measure)
        if len(kept) < 4:
            continue
        indices = [names.index(name) for name in kept]
        head.append(f"K = {k} ({len(kept)} x {table.shape[1]})")
        for row, predictor in zip(rows, (None, *predictors.values()), strict=True):
            row.append(reliability(table) if predictor is None else correlation(predictor[indices], table.mean(1)))
    return markdown(head, rows) if len(head) > 1 else None


def regrets(case: Case, granularity: str, measure: str) -> str | None:
    """Returns a row per plan that is not random: its rank among the random plans of its granularity, and its regret."""
    randoms = case.of_kinds((f"random-{granularity}",))
    plans = [
        name
        for name, arm in case.arms.items()
        if arm["kind"] in ("program", "rule") and arm["granularity"] == granularity
    ]
    rows = []
    for name in plans:
        row = [name]
        for k in case.horizons:
            own = case.damages(name, k, measure)
            others = [found for found in (case.damages(r, k, measure) for r in randoms) if found.keys() >= own.keys()]
            if not own or not others:
                row.append("-")
                continue
            mine = np.mean(list(own.values()))
            theirs = np.array([np.mean([found[repeat] for repeat in own]) for found in others])
            rank = 1 + int((theirs < mine).sum())
            row.append(f"{rank} of {len(theirs) + 1}; {1000 * mine:.1f} ({1000 * (mine - theirs.min()):+.1f})")
        rows.append(row)
    best = ["best, median random plan"]
    for k in case.horizons:
        values = [value for value in (case.damage(r, k, measure) for r in randoms) if value is not None]
        best.append(f"{1000 * min(values):.1f}, {1000 * float(np.median(values)):.1f}" if values else "-")
    if not rows or all(cell == "-" for cell in best[1:]):
        return None
    return markdown([f"{granularity} plans: {MEASURES[measure]}", *(f"K = {k}" for k in case.horizons)], [*rows, best])


def orientation(case: Case) -> str:
    """Returns the damages of the arms that are no search's result, in thousandths of the loss's unit."""
    rows = []
    for name in case.of_kinds(("reference", "rule", "gemm-kind")):
        values = [case.damage(name, k, measure) for measure in ("loss_high", "loss_plan") for k in case.horizons]
        rows.append([name, *("-" if value is None else f"{1000 * value:.1f}" for value in values)])
    head = [f"{word}, K = {k}" for word in ("high precision", "plan") for k in case.horizons]
    return markdown(["damage, 1/1000", *head], rows)


def one_step(case: Case) -> str | None:
    """Returns the rank correlation of the summed objectives with the measured one-step damage of random plans."""
    pools = [pool for pool in POOLS if "plans" in pool and len(case.of_kinds(POOLS[pool])) >= 4]
    if not pools:
        return None
    cells: dict[str, list[str]] = {}
    for pool in pools:
        names = case.of_kinds(POOLS[pool])
        predictors = case.predictors(names, pool in BY_LAYER)
        for objective in available(case.rows):
            cells.setdefault(objective, [])
            cells[objective] += [correlation(predictors[objective], predictors[label]) for label in MEASURED]
    head = [f"{pool}: {label}" for pool in pools for label in MEASURED]
    return markdown(["objective", *head], [[name, *row] for name, row in cells.items()])


def additivity(case: Case) -> str | None:
    """Returns how sums of single damages agree with jointly measured ones: R^2 over plans, and median joint / sum."""
    quantities = {
        "weight": lambda arm: case.one_step(arm, "one_step_weight"),
        "weight^2": lambda arm: _square(case.one_step(arm, "one_step_weight")),
        "loss": lambda arm: case.one_step(arm, "one_step_loss"),
        "held-out loss, K = 0": lambda arm: case.damage(arm, 0, "loss_plan"),
        **{
            f"{word}, K = {k} (FP4 alone)": lambda arm, k=k, measure=measure: case.damage(arm, k, measure)
            for measure, word in (("loss_high", "loss"), ("loss_plan", "loss under the plan"), ("distance", "distance"))
            for k in case.horizons
        },
        **{
            f"distance^2, K = {k} (FP4 alone)": lambda arm, k=k: _square(case.damage(arm, k, "distance"))
            for k in case.horizons
        },
    }
    rows = []
    for granularity in ("layer", "gemm"):
        kinds = {"25": "share-25", "50": "share-50", "75": f"random-{granularity}", "100": "share-100"}
        shares = {
            share: [
                name for name, arm in case.arms.items() if arm["kind"] == kind and arm["granularity"] == granularity
            ]
            for share, kind in kinds.items()
        }
        for label, quantity in quantities.items():
            row, fp4_alone = [f"{granularity}: {label}"], "FP4 alone" in label
            for names in shares.values():
                pairs = [
                    (_sum_of_singles(case, name, granularity, quantity, fp4_alone), quantity(name)) for name in names
                ]
                known = np.array([pair for pair in pairs if None not in pair], dtype=np.float64)
                row.append(_agreement(known))
            if any(cell != "-" for cell in row[1:]):
                rows.append(row)
    return markdown(["sum of single damages", *(f"{share}% in FP4" for share in shares)], rows) if rows else None


def _square(value: float | None) -> float | None:
    return None if value is None else value**2


def _sum_of_singles(case: Case, arm: str, granularity: str, quantity: Any, fp4_alone: bool) -> float | None:
    """Returns the sum over an arm's groups of their damages when quantized alone, None where one was not measured."""
    total = 0.0
    for layer, formats in case.arms[arm]["assignment"].items():
        groups = {"": formats["forward"]} if granularity == "layer" else {f":{gemm}": formats[gemm] for gemm in GEMMS}
        for group, fmt in groups.items():
            if fmt == "bf16" or (fmt == "fp8" and fp4_alone):
                continue
            value = quantity(f"{granularity}{'-fp8' if fmt == 'fp8' else ''}:{layer}{group}")
            if value is None:
                return None
            total += value
    return total


def _agreement(pairs: Array) -> str:
    """Returns "R^2; median of joint / sum" of (sum, joint) rows; R^2 is the squared Pearson correlation."""
    if len(pairs) == 0:
        return "-"
    ratio = f"{np.median(pairs[:, 1] / pairs[:, 0]):.2f}"
    if len(pairs) < 4 or np.ptp(pairs[:, 0]) == 0 or np.ptp(pairs[:, 1]) == 0:
        return f"-; {ratio}"
    return f"{np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1] ** 2:.2f}; {ratio}"


def report(case: Case, k: int, details: bool) -> str:
    """Returns one case's tables."""
    k = max((horizon for horizon in case.horizons if horizon <= k), default=min(case.horizons))
    parts: list[tuple[str, list[str | None]]] = [
        ("Damage of uniform formats, rules and GEMM kinds", [orientation(case)]),
        (
            "Rank correlation of the one-step figures with the damage after K steps (arms x repeats; a perfect "
            "predictor reaches about the square root of the reliability)",
            [summary(case, k), *(ranking(case, pool, measure) for pool in POOLS for measure in MEASURES if details)],
        ),
        (
            "Plans against random plans: rank; damage in 1/1000 (less that of the best random plan)",
            [regrets(case, granularity, measure) for granularity in ("layer", "gemm") for measure in MEASURES],
        ),
        (
            "Rank correlation of the summed objectives with the measured one-step damage of whole plans",
            [one_step(case)],
        ),
        ("Additivity: R^2; median of joint damage / sum", [additivity(case)]),
    ]
    text = f"## {case.name}, {len(case.repeats)} repeats\n\n{case.origin}\n"
    for title, tables in parts:
        if any(tables):
            text += f"\n### {title}\n\n" + "\n".join(table for table in tables if table)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help=".jsonl files of plan_damage.py, with their .json beside")
    parser.add_argument("--output", type=Path, help="Markdown file; default: standard output")
    parser.add_argument("--k", type=int, default=100, help="horizon of the summary (default 100)")
    parser.add_argument("--details", action="store_true", help="also every horizon, with bootstrap intervals")
    options = parser.parse_args()
    text = "\n".join(report(Case.load(path), options.k, options.details) for path in options.files)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
