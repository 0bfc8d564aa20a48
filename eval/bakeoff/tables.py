"""One Markdown table per experiment: which contender ends nearest to BF16, and whether by more than noise.

Tables take paired lines (`gaps.with_gaps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .contenders import Contender, contenders
from .documents import markdown
from .gaps import ARITHMETICS, LAYOUT_BY, diverged, final_loss
from .linear_model import GapModel, Layout
from .lines import Row
from .plans import changed_per_refresh, fp4_over_run, total_drift
from .ranking import best_of, ranking
from .significance import LEAST_PAIRS, SIGNIFICANCE

READING = (
    "Gap: 100 (loss / BF16 loss - 1), final validation losses, each run against the BF16 run of the same model, seed, "
    "learning rate and steps; mean ± standard deviation over seeds (n - 1). `plan`: both losses under the arithmetic "
    "that was trained in; `high precision`: unquantized. Adjusted gap ± standard error: seeds differ by more than "
    "contenders do and not every contender has every seed, so one linear model, gap under `plan` = effect of the "
    "contender at its share + effect of the seed + noise, is fitted by ordinary least squares to all runs of the table "
    "that have a target share, per model, learning rate and steps; the adjusted gap is the contender's effect plus the "
    "mean effect of all seeds, each weighted the same. Its error is that for these seeds and BF16 runs. The model "
    "takes the noise for the same in all contenders, and the seed's effect too (no interaction). Ranked by the "
    "adjusted gap; contenders with a diverged run come last, and diverged runs are counted but in no mean. Against the "
    "best: the model's contrast of the two contenders, two-sided t-test with the residual degrees of freedom, also for "
    f'contenders with one seed; within noise if p >= {SIGNIFICANCE}, "-" where nothing is left to estimate the noise '
    f"from. The best has the lowest adjusted gap among contenders that never diverged (with at least {LEAST_PAIRS} "
    "seeds, if any has). There is no correction for the number of comparisons, and the best of many owes part of its "
    "place to luck, so that tests against it find too many worse. FP4 share: of the linears' FLOPs under the plan in "
    "force at the end. FP4 share over the run: mean over the optimizer steps since quantization started; policies "
    "that probe the model train in FP8 until their first plan is in force, rules have theirs from the first step."
)


def percent(value: float | None, sign: bool = True) -> str:
    """Returns two decimals and, for gaps, the sign; "-" for None."""
    return "-" if value is None else f"{value:{'+' if sign else ''}.2f}%"


def adjusted_cell(contender: Contender, model: GapModel) -> str:
    """Returns the adjusted gap ± its standard error, as far as the model has them; "-" for None."""
    value, error = model.adjusted(contender) or (None, None)
    return percent(value) + ("" if error is None else f" ± {error:.2f}%")


def over_run_cell(contender: Contender) -> str:
    """Returns the FP4 share over the run, mean over seeds; "-" if no run's is known."""
    share = contender.mean_of(fp4_over_run)
    return percent(None if share is None else 100 * share, sign=False)


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


def loss_cell(contender: Contender) -> str:
    """Returns mean ± standard deviation of the final losses; "diverged" if all runs did."""
    losses = contender.losses()
    if not losses:
        return "diverged"
    return f"{np.mean(losses):.4f}" + (f" ± {np.std(losses, ddof=1):.4f}" if len(losses) > 1 else "")


def _seed_cell(run: Row) -> str:
    gap = run["gap"]["plan"]
    text = percent(gap) if gap is not None else "diverged" if diverged(run) else "no BF16"
    return f"{run['spec']['seed']}: {text}"


def number(value: float | None, digits: int) -> str:
    """Returns the number with separated thousands; "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def by_spec(lines: Iterable[Row], by: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
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
    model = GapModel(lines)
    parts = [noise_text(lines, model)]
    headings = ["rank", "contender", *columns, "FP4 share", "FP4 share over the run", "loss", "adjusted gap"]
    headings += ["gap, plan", "gap, high precision", "seeds", "against the best", "each seed, plan"]
    for values, members in by_spec((line for line in lines if line["spec"]["policy"] != "bf16"), by):
        group = ranking(contenders(members, shown=[*by, *columns]), model)
        best = best_of(group)
        rows = []
        for rank, contender in enumerate(group, 1):
            row = [str(rank), contender.name, *(cell(contender) for cell in columns.values())]
            row += [percent(100 * contender.fp4_fraction, sign=False), over_run_cell(contender), loss_cell(contender)]
            row += [adjusted_cell(contender, model)]
            row += [gap_cell(contender, arithmetic) for arithmetic in ARITHMETICS]
            row += [seeds_cell(contender), _against(contender, best, model)]
            rows.append([*row, ", ".join(map(_seed_cell, contender.runs))])
        parts += [_heading(by, values), markdown(headings, rows)]
    return "\n\n".join(parts)


def _against(contender: Contender, best: Contender | None, model: GapModel) -> str:
    if contender.spec["share"] is None:
        return "reference"
    if contender is best:
        return "best"
    contrast = None if best is None else model.compare(contender, best)
    return "-" if contrast is None else contrast.verdict()


def noise_text(lines: Iterable[Row], model: GapModel) -> str:
    """Says per model and learning rate how noisy one run's gap is, and how far BF16's own losses lie apart."""
    return "\n".join(
        "- {}, learning rate {:g}, {} steps. ".format(*values)
        + f"{_noise(model.layouts.get(values))} {_bf16_spread(members)}"
        for values, members in by_spec(lines, LAYOUT_BY)
    )


def _noise(layout: Layout | None) -> str:
    if layout is None or layout.deviation is None:
        return "Noise of one run: unknown, no degree of freedom is left beside the effects of contenders and seeds."
    return (
        f"Noise of one run: residual standard deviation {layout.deviation:.2f}% with {layout.freedom} degrees of "
        f"freedom ({layout.runs} runs of {len(layout.contenders)} contenders over {len(layout.seeds)} seeds), so the "
        f"difference of two means over 3 seeds each has a standard error of {layout.deviation * math.sqrt(2 / 3):.2f}%"
        "; a gap to BF16 has the noise of BF16's own run on top."
    )


def _bf16_spread(lines: Iterable[Row]) -> str:
    """How far BF16 runs that differ in their seed only end from each other, in percent."""
    runs = list({line["bf16"]["id"]: line["bf16"] for line in lines if line["bf16"] is not None}.values())
    losses = {run["spec"]["seed"]: loss for run in runs if (loss := final_loss(run)) is not None}
    lost = f", {sum(map(diverged, runs))} diverged" * any(map(diverged, runs))
    if len(losses) < 2:
        return f"Spread of BF16's own loss: unknown, {len(losses)} seed{'s' * (len(losses) != 1)}{lost}."
    spread, mean = np.std(list(losses.values()), ddof=1), np.mean(list(losses.values()))
    return (
        f"Standard deviation of BF16's own loss: {100 * spread / mean:.2f}% of {mean:.4f} over {len(losses)} "
        f"seeds{lost}."
    )


def _field(name: str, missing: str = "-") -> Callable[[Contender], str]:
    return lambda contender: missing if contender.spec[name] is None else str(contender.spec[name])


def gap_table(lines: Iterable[Row]) -> str:
    """The contenders ranked at each model and share."""
    return _ranked(lines)


def objective_table(lines: Iterable[Row]) -> str:
    """The objective's form, weights and granularity, ranked at each model and share."""
    fields = ("objective", "loss_divergence_factor", "weight_divergence_factor", "granularity")
    return _ranked(lines, columns={name: _field(name) for name in fields})


def continued_table(lines: Iterable[Row]) -> str:
    """Quantization that starts late, in training that goes on: ranked at each model, share and first step."""
    return _ranked(lines, by=("model", "share", "start_step"))


def frequency_table(lines: Iterable[Row]) -> str:
    """How often the plan is made anew, and how far it moves."""
    columns = {
        "refresh_every": _field("refresh_every", missing="once"),
        "switching_cost": _field("switching_cost"),
        "refreshes": lambda contender: number(contender.mean_of(lambda run: len(run["refresh_seconds"])), 1),
        "changed per refresh": lambda contender: share_cell(contender.mean_of(changed_per_refresh)),
        "first to last plan": lambda contender: share_cell(contender.mean_of(total_drift)),
    }
    note = (
        "Refreshes: mean over seeds. Changed per refresh: share of (layer, GEMM) pairs, each counted the same, that "
        "differ between consecutive plans (Hamming distance), mean over the refreshes after the first; a refresh that "
        "kept the plan changed none. First to last plan: the same between the first plan with FP4 and the last."
    )
    return note + "\n\n" + _ranked(lines, columns=columns)


def share_cell(share: float | None) -> str:
    """Returns "12.5%" for 0.125; "-" for None."""
    return "-" if share is None else f"{share:.1%}"


def stability_table(lines: Iterable[Row]) -> str:
    """Learning rates up to where training breaks; BF16 is a contender here."""
    parts = [
        "Multiple: of the smallest learning rate tried at this model. Spikes: of the training loss, per seed. Loss: "
        "final validation loss under the plan, mean ± standard deviation over the seeds that did not diverge."
    ]
    headings = ["learning rate", "multiple", "contender", "target share", "runs", "diverged", "spikes", "loss", "gap"]
    for (model,), members in by_spec(lines, ("model",)):
        smallest = min(line["spec"]["learning_rate"] for line in members)
        group = contenders(members, shown=["learning_rate"])
        rows = []
        for contender in sorted(group, key=lambda one: (one.spec["learning_rate"], one.diverged, _mean_loss(one))):
            rate = contender.spec["learning_rate"]
            row = [f"{rate:g}", f"{rate / smallest:.3g}", contender.name, share_name(contender.spec["share"])]
            row += [str(len(contender.runs)), str(contender.diverged)]
            row += [", ".join(str(run["spikes"]) for run in contender.runs), loss_cell(contender)]
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
    for (model,), members in by_spec(lines, ("model",)):
        tasks = _tasks(members)
        rows = [["-", "chance", "-", "-", "-", "-", *(number(chance, 4) for chance in tasks.values())]]
        for rank, contender in enumerate(sorted(contenders(members), key=_mean_loss), 1):
            scored = sum(bool(run.get("benchmarks")) for run in contender.runs)
            row = [str(rank), contender.name, share_name(contender.spec["share"]), loss_cell(contender)]
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
    return number(value, 4) + ("" if value is None or error is None else f" ± {error:.4f}")


def _near_chance(lines: Iterable[Row], tasks: Mapping[tuple[str, str], float | None]) -> str:
    """Says in words on which tasks BF16 itself is above, below or near guessing."""
    bf16 = [line for line in lines if line["spec"]["policy"] == "bf16" and line.get("benchmarks")]
    if not bf16:
        return "No BF16 run was scored, so nothing can be said about chance."
    places: dict[str, list[str]] = {"above": [], "below": [], "near": []}
    for (task, metric), chance in tasks.items():
        value, error = _score(bf16, task, metric)
        if chance is not None and value is not None and error is not None:
            far = abs(value - chance) > 2 * error
            places[("above" if value > chance else "below") if far else "near"].append(task)
    above, below, near = (", ".join(names) or "no task" for names in places.values())
    return (
        f"BF16 is above chance by more than 2 standard errors on: {above}. Within 2 standard errors of chance on: "
        f"{near}. Below chance by more than 2 standard errors on: {below}; there the score shows a habit, not "
        "knowledge: `acc` compares sums of log-probabilities, so a tiny model prefers short answers, or one letter."
    )
