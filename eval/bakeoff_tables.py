"""How far behind BF16 does each contender of a bake-off end, and is the difference noise? Numbers, and Markdown tables.

A line is one run's JSON object as eval/bakeoff.py writes it. `with_gaps` pairs each with its BF16 run; everything else
here takes lines so paired. A contender is the runs of one spec over its seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
LEAST_SEEDS = 3
SCHEMA_VERSION = 1
_PAIRED_BY = ("model", "seed", "learning_rate", "steps")
_README_SHARES = (0.75, 0.80)

TEST_NOTE = (
    "Gap: 100 (loss / BF16 loss - 1), final validation losses, each run against the BF16 run of the same model, seed, "
    "learning rate and steps; mean ± standard deviation over seeds (n - 1). `plan`: both losses under the arithmetic "
    "that was trained in; `high precision`: unquantized. Ranked by the mean under `plan`; contenders with a diverged "
    "run come last, and diverged runs are counted but in no mean. Against the best: two-sided paired t-test "
    f"(scipy.stats.ttest_rel) of the gaps under `plan` over the common seeds, if there are at least {LEAST_SEEDS}; "
    f"within noise if p >= {SIGNIFICANCE}. The best has the lowest mean among contenders that never diverged (with at "
    f"least {LEAST_SEEDS} seeds, if any has); no correction for the number of comparisons."
)


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

    def gaps(self, arithmetic: str = "plan") -> dict[int, float]:
        """Returns seed -> gap in percent, of the runs that have one."""
        gaps = {run["spec"]["seed"]: run["gap"][arithmetic] for run in self.runs}
        return {seed: gap for seed, gap in gaps.items() if gap is not None}

    def mean_gap(self, arithmetic: str = "plan") -> float | None:
        """Returns the mean gap over seeds in percent; None if no run has one."""
        return self.mean_of(lambda run: run["gap"][arithmetic])

    def mean_of(self, value: Callable[[Row], float | None]) -> float | None:
        """Returns the mean of a figure over the runs that have it; None if none has."""
        values = [figure for figure in map(value, self.runs) if figure is not None]
        return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class Comparison:
    """One contender against another over their common seeds."""

    seeds: int
    difference: float
    """Mean gap of the one minus the other's, in percentage points; NaN without a common seed."""
    p: float | None
    """Of the two-sided paired t-test; None with fewer than LEAST_SEEDS common seeds."""

    @property
    def beyond_noise(self) -> bool:
        return self.p is not None and self.p < SIGNIFICANCE

    def __str__(self) -> str:
        if self.p is None:
            return f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        verdict = ("worse" if self.difference > 0 else "better") if self.beyond_noise else "within noise"
        return f"{verdict} ({p})"


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
    return tuple(line["spec"][name] for name in _PAIRED_BY)


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


def compare(one: Contender, other: Contender) -> Comparison:
    """Compares the gaps under the plan over the common seeds."""
    first, second = one.gaps(), other.gaps()
    seeds = sorted(first.keys() & second.keys())
    differences = np.array([first[seed] - second[seed] for seed in seeds])
    mean = float(differences.mean()) if seeds else math.nan
    if len(seeds) < LEAST_SEEDS:
        return Comparison(len(seeds), mean, None)
    if np.ptp(differences) <= 1e-12 * abs(mean):  # The t statistic would be 0 / 0 or infinite.
        return Comparison(len(seeds), mean, 1.0 if mean == 0 else 0.0)
    p = ttest_rel([first[seed] for seed in seeds], [second[seed] for seed in seeds]).pvalue
    return Comparison(len(seeds), mean, float(p))


def ranking(group: Iterable[Contender]) -> list[Contender]:
    """Orders contenders by their mean gap under the plan; those with a diverged run after the others."""

    def key(contender: Contender) -> tuple[bool, float]:
        mean = contender.mean_gap()
        return contender.diverged > 0, math.inf if mean is None else mean

    return sorted(group, key=key)


def best_of(group: Sequence[Contender]) -> Contender | None:
    """Returns the contender that others are compared with, as TEST_NOTE describes it; None if all diverged."""
    whole = [contender for contender in ranking(group) if not contender.diverged and contender.gaps()]
    tested = [contender for contender in whole if len(contender.gaps()) >= LEAST_SEEDS]
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
            if point.spec["model"] == other.spec["model"] and _share(point) >= _share(other):
                comparison = compare(point, other)
                if comparison.difference < 0:
                    found.append((point, other, comparison))
    return found


def _share(point: Contender) -> float:
    share = point.spec["share"]
    return point.fp4_fraction if share is None else float(share)


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


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; bars inside cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def percent(value: float | None, sign: bool = True) -> str:
    """Returns two decimals and, for gaps, the sign; "-" for None."""
    return "-" if value is None else f"{value:{'+' if sign else ''}.2f}%"


def share_name(share: float | None) -> str:
    """Returns "75%" for 0.75, and "-" where there is no target."""
    return "-" if share is None else f"{100 * share:.4g}%"


def gap_cell(contender: Contender, arithmetic: str = "plan") -> str:
    """Returns mean ± standard deviation over seeds; "diverged" if all runs did, "-" if BF16 runs are missing."""
    gaps = list(contender.gaps(arithmetic).values())
    if not gaps:
        return "diverged" if contender.diverged == len(contender.runs) else "-"
    return percent(float(np.mean(gaps))) + (f" ± {np.std(gaps, ddof=1):.2f}%" if len(gaps) > 1 else "")


def seeds_cell(contender: Contender) -> str:
    """Returns the number of runs in the mean, and of those that are not."""
    unpaired = len(contender.runs) - contender.diverged - len(contender.gaps())
    parts = [str(len(contender.gaps()))]
    parts += [f"{contender.diverged} diverged"] * (contender.diverged > 0)
    return " + ".join(parts + [f"{unpaired} without BF16"] * (unpaired > 0))


def _each_seed(contender: Contender, arithmetic: str) -> str:
    def cell(run: Row) -> str:
        gap = run["gap"][arithmetic]
        if gap is None:
            return "diverged" if diverged(run) else "no BF16"
        return percent(gap)

    return ", ".join(f"{run['spec']['seed']}: {cell(run)}" for run in contender.runs)


def _loss_cell(contender: Contender) -> str:
    losses = [loss for run in contender.runs if (loss := final_loss(run)) is not None]
    if not losses:
        return "diverged"
    return f"{np.mean(losses):.4f}" + (f" ± {np.std(losses, ddof=1):.4f}" if len(losses) > 1 else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _sections(lines: Iterable[Row], by: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Yields (values of the spec's fields, lines) in ascending order; None last."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for line in lines:
        groups.setdefault(tuple(line["spec"][name] for name in by), []).append(line)
    order = {"model": lambda group: group[0].get("parameters") or 0}
    for values in sorted(
        groups,
        key=lambda values: [
            (value is None, order[name](groups[values]) if name in order else value or 0)
            for name, value in zip(by, values, strict=True)
        ],
    ):
        yield values, groups[values]


def _heading(by: Sequence[str], values: Sequence[Any]) -> str:
    names = {"share": lambda share: "no target share" if share is None else f"target FP4 share {share_name(share)}"}
    other = (names[name](value) if name in names else f"{name} {value}" for name, value in zip(by, values, strict=True))
    return "**" + ", ".join(other) + "**"


def _ranked(
    lines: Iterable[Row],
    by: Sequence[str] = ("model", "share"),
    columns: Mapping[str, Callable[[Contender], str]] | None = None,
) -> str:
    """One table per combination of the spec's fields in `by`; `columns` (heading -> cell) come after the name."""
    columns = columns or {}
    lines = list(lines)
    parts = [TEST_NOTE, bf16_spread(lines)]
    headings = ["rank", "contender", *columns, "FP4 share", "loss", "gap, plan", "gap, high precision", "seeds"]
    headings += ["against the best", "each seed, plan", "each seed, high precision"]
    for values, members in _sections((line for line in lines if line["spec"]["policy"] != "bf16"), by):
        group = ranking(contenders(members, shown=[*by, *columns]))
        best = best_of(group)
        rows = []
        for rank, contender in enumerate(group, 1):
            row = [str(rank), contender.name, *(cell(contender) for cell in columns.values())]
            row += [percent(100 * contender.fp4_fraction, sign=False), _loss_cell(contender)]
            row += [gap_cell(contender, arithmetic) for arithmetic in ARITHMETICS]
            row += [seeds_cell(contender), _against(contender, best)]
            rows.append(row + [_each_seed(contender, arithmetic) for arithmetic in ARITHMETICS])
        parts += [_heading(by, values), markdown(headings, rows)]
    return "\n\n".join(parts)


def _against(contender: Contender, best: Contender | None) -> str:
    if contender.spec["share"] is None:
        return "reference"
    if best is None or not contender.gaps():
        return "-"
    return "best" if contender is best else str(compare(contender, best))


def bf16_spread(lines: Iterable[Row]) -> str:
    """Returns a sentence: how far BF16 runs that differ in their seed only end from each other, in percent."""
    baselines = {line["bf16"]["id"]: line["bf16"] for line in lines if line["bf16"] is not None}
    parts = []
    for values, runs in _sections(baselines.values(), ("model", "learning_rate", "steps")):
        losses = {run["spec"]["seed"]: loss for run in runs if (loss := final_loss(run)) is not None}
        lost = f", {sum(map(diverged, runs))} diverged" * any(map(diverged, runs))
        place = f"{values[0]} (learning rate {values[1]:g}, {values[2]} steps)"
        if len(losses) > 1:
            spread = np.std(list(losses.values()), ddof=1)
            mean = np.mean(list(losses.values()))
            parts.append(f"{place} {100 * spread / mean:.2f}% of {mean:.4f} over {len(losses)} seeds{lost}")
        else:
            parts.append(f"{place} unknown, {len(losses)} seed{'s' * (len(losses) != 1)}{lost}")
    return "Standard deviation of BF16's own loss over seeds: " + ("; ".join(parts) or "no BF16 run") + "."


def _field(name: str, missing: str = "-") -> Callable[[Contender], str]:
    return lambda contender: missing if contender.spec[name] is None else str(contender.spec[name])


def gap_table(lines: Iterable[Row]) -> str:
    """The contenders ranked at each model and share."""
    return _ranked(lines)


def objective_table(lines: Iterable[Row]) -> str:
    """The objective's form, weights and granularity, ranked at each model and share."""
    fields = ("objective", "loss_weight", "weight_weight", "granularity")
    return _ranked(lines, columns={name: _field(name) for name in fields})


def continued_table(lines: Iterable[Row]) -> str:
    """Quantization that starts late, in training that goes on: ranked at each model, share and first step."""
    return _ranked(lines, by=("model", "share", "start_step"))


def frequency_table(lines: Iterable[Row]) -> str:
    """How often the plan is made anew, and how far it moves."""

    def refreshes(contender: Contender) -> str:
        return _number(contender.mean_of(lambda run: len(run["refresh_seconds"])), 1)

    def changed(contender: Contender) -> str:
        return _share_cell(contender.mean_of(changed_per_refresh))

    def drift(contender: Contender) -> str:
        return _share_cell(contender.mean_of(total_drift))

    columns = {
        "refresh_every": _field("refresh_every", missing="once"),
        "switching_cost": _field("switching_cost"),
        "refreshes": refreshes,
        "changed per refresh": changed,
        "first to last plan": drift,
    }
    note = (
        "Refreshes: mean over seeds. Changed per refresh: share of (layer, GEMM) pairs, each counted the same, that "
        "differ between consecutive plans (Hamming distance), mean over the refreshes after the first; a refresh that "
        "kept the plan changed none. First to last plan: the same between the first plan with FP4 and the last."
    )
    return note + "\n\n" + _ranked(lines, columns=columns)


def _share_cell(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def stability_table(lines: Iterable[Row]) -> str:
    """Learning rates up to where training breaks; BF16 is a contender here."""
    parts = [
        "Multiple: of the smallest learning rate tried at this model. Spikes: of the training loss, per seed. Loss: "
        "final validation loss under the plan, mean ± standard deviation over the seeds that did not diverge."
    ]
    headings = ["learning rate", "multiple", "contender", "target share", "runs", "diverged", "spikes", "loss", "gap"]
    for (model,), members in _sections(lines, ("model",)):
        smallest = min(line["spec"]["learning_rate"] for line in members)
        group = contenders(members, shown=["learning_rate"])
        rows = []
        for contender in sorted(group, key=lambda one: (one.spec["learning_rate"], one.diverged, _mean_loss(one))):
            rate = contender.spec["learning_rate"]
            row = [f"{rate:g}", f"{rate / smallest:.3g}", contender.name, share_name(contender.spec["share"])]
            row += [str(len(contender.runs)), str(contender.diverged)]
            row += [", ".join(str(run["spikes"]) for run in contender.runs), _loss_cell(contender)]
            rows.append([*row, gap_cell(contender)])
        parts += [_heading(("model",), (model,)), markdown(headings, rows)]
    return "\n\n".join(parts)


def _mean_loss(contender: Contender) -> float:
    mean = contender.mean_of(final_loss)
    return math.inf if mean is None else mean


def downstream_table(lines: Iterable[Row]) -> str:
    """Benchmarks of the final weights, ranked by the loss, which tells contenders apart with far less noise."""
    parts = [
        "Ranked by the final validation loss. Scores: mean over seeds ± mean standard error of a run; seeds are scored "
        "on the same documents, so more of them do not shrink it. One metric per task: accuracy if there is one."
    ]
    for (model,), members in _sections(lines, ("model",)):
        tasks = _tasks(members)
        rows = [["-", "chance", "-", "-", "-", "-", *(_number(chance, 4) for chance in tasks.values())]]
        for rank, contender in enumerate(sorted(contenders(members), key=_mean_loss), 1):
            scored = sum(bool(run.get("benchmarks")) for run in contender.runs)
            row = [str(rank), contender.name, share_name(contender.spec["share"]), _loss_cell(contender)]
            row += [gap_cell(contender), f"{scored} of {len(contender.runs)}"]
            rows.append(row + [_score_cell(contender, *key) for key in tasks])
        names = [f"{task} ({metric})" for task, metric in tasks]
        headings = ["rank", "contender", "target share", "loss", "gap", "runs scored", *names]
        parts += [_heading(("model",), (model,)), _near_chance(members, tasks), markdown(headings, rows)]
    return "\n\n".join(parts)


def _tasks(lines: Iterable[Row]) -> dict[tuple[str, str], float | None]:
    """Returns (task, its main metric) -> chance; without the members of groups."""
    found: dict[tuple[str, str], float | None] = {}
    for line in lines:
        for row in line.get("benchmarks") or ():
            if row["group"] is None:
                metric = "acc" if "acc" in row["metrics"] else next(iter(row["metrics"]))
                found.setdefault((row["task"], metric), row["chance"] if metric == "acc" else None)
    return found


def _score(runs: Iterable[Row], task: str, metric: str) -> tuple[float | None, float | None]:
    """Returns the means over runs of the score and of its standard error; None where no run has it."""
    rows = [row for run in runs for row in run.get("benchmarks") or () if row["task"] == task]
    found = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
    means = []
    for field in ("value", "stderr"):
        values = [entry[field] for entry in found if entry[field] is not None]
        means.append(float(np.mean(values)) if values else None)
    return means[0], means[1]


def _score_cell(contender: Contender, task: str, metric: str) -> str:
    value, error = _score(contender.runs, task, metric)
    return _number(value, 4) + ("" if value is None or error is None else f" ± {error:.4f}")


def _near_chance(lines: Iterable[Row], tasks: Mapping[tuple[str, str], float | None]) -> str:
    """Says in words on which tasks BF16 itself cannot be told from guessing."""
    bf16 = [line for line in lines if line["spec"]["policy"] == "bf16" and line.get("benchmarks")]
    if not bf16:
        return "No BF16 run was scored, so nothing can be said about chance."
    near, clear = [], []
    for (task, metric), chance in tasks.items():
        value, error = _score(bf16, task, metric)
        if chance is not None and value is not None and error is not None:
            (near if abs(value - chance) <= 2 * error else clear).append(task)
    return (
        f"BF16 is within 2 standard errors of chance on: {', '.join(near) or 'no task'}; there a score says nothing of "
        f"the arithmetic. Farther from chance on: {', '.join(clear) or 'no task'}."
    )


def cost_table(lines: Iterable[Row]) -> str:
    """Time and memory as measured, and the linears' time on hardware with FP4 as modelled."""
    note = (
        "Means over seeds. Refresh in steps: its seconds over those of a step. The last two columns are a model, not a "
        "measurement: time of the linears' GEMMs alone under the plan of the end, with share f of their FLOPs in FP4 "
        "and the rest in FP8, every GEMM at peak rate, FP8 at twice BF16's rate and FP4 at twice FP8's, quantization "
        "and refreshes free: (1 - f) + f / 2 of FP8's time and (1 - f) / 2 + f / 4 of BF16's."
    )
    headings = ["model", "contender", "target share", "FP4 share", "step ms", "tokens/s", "peak MiB", "refreshes"]
    headings += ["s per refresh", "refresh in steps", "refreshes' share of run"]
    headings += ["of FP8's time", "of BF16's time", "measured on"]
    rows = []
    for (model, share), members in _sections(lines, ("model", "share")):
        for contender in contenders(members):
            row = [model, contender.name, share_name(share), percent(100 * contender.fp4_fraction, sign=False)]
            for name, digits in (("step_ms", 1), ("tokens_per_second", 0), ("peak_mib", 0)):
                row.append(_number(contender.mean_of(itemgetter(name)), digits))
            rows.append([*row, *_refresh_cells(contender), *_modelled(contender), _machine(contender)])
    return note + "\n\n" + markdown(headings, rows)


def _refresh_cells(contender: Contender) -> list[str]:
    def seconds(run: Row) -> float | None:
        return float(np.mean(run["refresh_seconds"])) if run["refresh_seconds"] else None

    def steps(run: Row) -> float | None:
        mean = seconds(run)
        return None if mean is None or not run["step_ms"] else 1000 * mean / run["step_ms"]

    count = contender.mean_of(lambda run: len(run["refresh_seconds"]))
    part = contender.mean_of(lambda run: sum(run["refresh_seconds"]) / run["seconds"] if run["seconds"] else None)
    cells = [_number(count, 1), _number(contender.mean_of(seconds), 2), _number(contender.mean_of(steps), 1)]
    return [*cells, _share_cell(part)]


def modelled_times(line: Row) -> tuple[float, float] | None:
    """Returns the linears' modelled time relative to all FP8 and to all BF16; None if some, not all, are in BF16."""
    formats = set(line["plans"][-1]["formats"]) if line["plans"] else {"b"}
    if formats == {"b"}:
        return 2.0, 1.0
    if "b" in formats:
        return None
    fraction = line["fp4_fraction"]
    return (1 - fraction) + fraction / 2, (1 - fraction) / 2 + fraction / 4


def _modelled(contender: Contender) -> list[str]:
    times = [modelled_times(run) for run in contender.runs]
    known = [time for time in times if time is not None]
    return [f"{mean:.3f}" for mean in np.mean(known, axis=0)] if known else ["-", "-"]


def _machine(contender: Contender) -> str:
    return _unique(
        f"{run['device']}, {run['backend'] or 'torch'}, {run['processes_per_device']} per device"
        for run in contender.runs
    )


def _unique(texts: Iterable[str]) -> str:
    return "<br>".join(dict.fromkeys(texts))


def readme_table(lines: Iterable[Row]) -> str:
    """The short table: contenders at 75% and 80% at each model, with the commit and the command of their runs."""
    headings = ["model", "target share", "contender", "gap to BF16", "seeds", "FP4 share", "commit", "command"]
    rows = []
    for (model, share), members in _sections(lines, ("model", "share")):
        if share is None or not any(math.isclose(share, wanted) for wanted in _README_SHARES):
            continue
        for contender in ranking(contenders(members)):
            row = [model, share_name(share), contender.name, gap_cell(contender), seeds_cell(contender)]
            row += [percent(100 * contender.fp4_fraction, sign=False)]
            commits = _unique(f"`{_short(run['commit'])}`" for run in contender.runs)
            rows.append([*row, commits, _unique(f"`{run['command']}`" for run in contender.runs)])
    return markdown(headings, rows)


def _short(commit: str | None) -> str:
    """Returns "0123456-dirty" for a full hash with "-dirty"."""
    name, dash, rest = (commit or "unknown").partition("-")
    return name[:7] + dash + rest


def beaten_text(lines: Iterable[Row]) -> str:
    """Lists the points that beat SNIP beyond noise at the same or a higher share, and those too few seeds decide."""
    found = beating_snip(lines)
    sure = [entry for entry in found if entry[2].beyond_noise]
    untested = [entry for entry in found if entry[2].p is None]
    test = f"(two-sided paired t-test, p < {SIGNIFICANCE}, at least {LEAST_SEEDS} common seeds, uncorrected)"
    parts = [f"Points that beat SNIP beyond noise at the same or a higher target share {test}: {len(sure) or 'none'}."]
    parts += ["\n".join(map(_beaten_line, sure))] * bool(sure)
    if untested:
        parts.append(f"Lower, but with too few common seeds for a test: {len(untested)}.")
        parts.append("\n".join(map(_beaten_line, untested)))
    return "\n\n".join(parts)


def _beaten_line(entry: tuple[Contender, Contender, Comparison]) -> str:
    point, other, comparison = entry
    return (
        f"- {point.spec['model']}: {point.name} at {share_name(_share(point))} against {other.name} at "
        f"{share_name(_share(other))}: {comparison.difference:+.2f} points, {comparison}"
    )
