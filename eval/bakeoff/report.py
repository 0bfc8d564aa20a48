"""What came out of a bake-off: its tables and figures in one folder, and in the Markdown files that quote them.

The tables of single experiments are those of `tables`; those over the whole bake-off are here.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np

from snip_hf.numerics.formats import FORMATS, UNQUANTIZED

from . import tables
from .contenders import Contender, contenders
from .documents import markdown, marked_names, replace_between, wrapped
from .figures import write_figures
from .gaps import diverged, with_gaps
from .linear_model import GapModel
from .lines import Row, latest
from .ranking import beating_snip, pooled_comparisons, static_beating_refreshed
from .significance import LEAST_PAIRS, SIGNIFICANCE, Comparison
from .tables import by_spec, number, over_run_cell, percent, seeds_cell, share_cell, share_name

# Experiment -> its title and table. One that is not listed gets the table of gaps under its own name.
_SECTIONS: dict[str, tuple[str, Callable[[Iterable[Row]], str]]] = {
    "shares": ("Gap to BF16", tables.gap_table),
    "sizes": ("Gap to BF16 at the larger size", tables.gap_table),
    "objective": ("Objective and granularity", tables.objective_table),
    "frequency": ("Refresh frequency and drift of plans", tables.frequency_table),
    "continued": ("Continued training", tables.continued_table),
    "stability": ("Stability", tables.stability_table),
    "downstream": ("Downstream tasks", tables.downstream_table),
}
# The tables that come from the runs of these experiments together.
_MAIN = ("shares", "sizes")
# How many ids of missing runs are written out.
_MOST_IDS = 3
# How many differences within noise are written out.
_MOST_NAMED = 8
# The target FP4 share that costs are given for, and those of the short table.
_MAIN_SHARE = 0.75
_README_SHARES = (0.75, 0.80)


def write_report(
    lines: Iterable[Row],
    experiments: Mapping[str, Sequence[str]],
    folder: str | os.PathLike[str],
    docs: Iterable[str | os.PathLike[str]] | None = None,
    prefix: str = "bakeoff",
) -> list[Path]:
    """Writes FOLDER/tables.md and the figures, and puts the tables into `docs` wherever those have markers for them.

    Args:
        lines: one JSON object per run; the last with an id wins.
        experiments: name -> ids of its runs, from the grid.
        docs: Markdown files with markers `<!-- PREFIX:NAME -->` and `<!-- /PREFIX:NAME -->`, where NAME is an
            experiment, or one of "runs", "readme", "reading", "pooled", "beaten", "cost" and "origin".
        prefix: the grid's name, so that several grids may fill one document; markers of other prefixes stay.

    Returns: the files written.

    Raises:
        ValueError: a line of another schema version; a document without markers of this prefix, or with another name.
    """
    found = latest(lines)
    experiments = {name: list(dict.fromkeys(ids)) for name, ids in experiments.items()}
    # Only the grid's own runs are paired: lines of another grid may differ in what a spec does not hold.
    inside = dict.fromkeys(key for ids in experiments.values() for key in ids)
    paired = with_gaps(found[key] for key in inside if key in found)
    members = {name: [paired[key] for key in ids if key in paired] for name, ids in experiments.items()}
    runs = runs_table(members, experiments, len(found.keys() - inside.keys()))
    sections = {"runs": ("Runs", runs), **_sections(members)}
    sections = {name: (title, wrapped(body)) for name, (title, body) in sections.items()}
    marked = {Path(path): marked_names(Path(path), prefix, sections) for path in docs or ()}
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.values())
    (out / "tables.md").write_text(f"# Bake-off\n\n{text}\n", encoding="utf-8")
    for path, names in marked.items():
        for name in names:
            replace_between(path, f"{prefix}:{name}", sections[name][1])
    return [out / "tables.md", *write_figures(members, out), *marked]


def _sections(members: Mapping[str, Sequence[Row]]) -> dict[str, tuple[str, str]]:
    """Returns name -> (title, Markdown), in the order of tables.md."""
    main = list({line["id"]: line for name in _MAIN for line in members.get(name, ())}.values())
    used = {line["id"]: line for lines in members.values() for line in lines}
    sections = {"readme": ("In short", readme_table(main)), "reading": ("How to read the tables", tables.READING)}
    others = [name for name in members if name not in _SECTIONS]
    for name in [*(name for name in _SECTIONS if name in members), *others]:
        title, table = _SECTIONS.get(name, (name.capitalize(), tables.gap_table))
        sections[name] = (title, table(members[name]) if members[name] else "No run of this experiment has a line.")
    sections["pooled"] = ("SNIP against each policy, all shares together", pooled_table(main))
    sections["beaten"] = ("What beats SNIP", beaten_text(main))
    sections["cost"] = ("Memory and cost", cost_table(main))
    sections["origin"] = ("Origin", origin_table(used.values()))
    return sections


def readme_table(lines: Iterable[Row]) -> str:
    """The short table: a row per contender with enough seeds, its gaps at 75% and 80%, commit and command."""
    lines = [line for line in lines if line["spec"]["policy"] != "bf16"]
    chosen = [line for line in lines if any(_is_share(line, share) for share in _README_SHARES)]
    gap_model = GapModel(lines)
    models = [model for (model,), _ in by_spec(lines, ("model",))]
    cells: dict[str, dict[tuple[str, float], Contender]] = {}
    for point in contenders(chosen):
        share = next(share for share in _README_SHARES if _is_share(point.runs[0], share))
        cells.setdefault(point.name, {})[point.spec["model"], share] = point
    cells = {name: own for name, own in cells.items() if any(len(one.gaps()) >= LEAST_PAIRS for one in own.values())}
    filled = {column for own in cells.values() for column in own}
    columns = [(model, share) for model in models for share in _README_SHARES if (model, share) in filled]
    order = sorted(cells, key=lambda name: _by_first_gap([cells[name].get(column) for column in columns], gap_model))
    uniform = contenders(line for line in lines if line["spec"]["share"] is None)
    for point in sorted(uniform, key=lambda point: point.fp4_fraction):
        name = f"{point.name} ({share_name(point.share)} FP4)"
        cells.setdefault(name, {}).update({(point.spec["model"], share): point for share in _README_SHARES})
        order += [name] * (name not in order)
    rows = []
    for name in order:
        own = cells[name]
        runs = [run for point in own.values() for run in point.runs]
        row = [name, *(_short_gap(own.get(column)) for column in columns)]
        row += [_unique(f"`{_short(run['commit'])}`" for run in runs), _unique(f"`{run['command']}`" for run in runs)]
        rows.append(row)
    headings = ["contender", *(f"{model}, {share_name(share)}" for model, share in columns), "commit", "command"]
    note = (
        "Gap to BF16's final validation loss at each model and target FP4 share: mean ± standard deviation over seeds "
        f"(number of seeds). Contenders with at least {LEAST_PAIRS} seeds in a column, in the order of their adjusted "
        "gaps (the seeds' effects taken out) in the first column, those without one there by the next; uniform ones "
        "have no target, the same value in all columns of a model, and come last."
    )
    return f"{markdown(headings, rows)}\n\n{note}"


def _by_first_gap(points: Sequence[Contender | None], model: GapModel) -> tuple[int, float]:
    """Returns the first column that has a gap, and the gap there."""
    gaps = ((place, model.gap(point)) for place, point in enumerate(points) if point is not None)
    return next(((place, gap) for place, gap in gaps if gap is not None), (len(points), math.inf))


def _short_gap(point: Contender | None) -> str:
    if point is None or not point.gaps():
        return "-" if point is None or not point.diverged else f"{point.diverged} diverged"
    gaps = list(point.gaps().values())
    spread = f" ± {np.std(gaps, ddof=1):.2f}" if len(gaps) > 1 else ""
    return f"{percent(float(np.mean(gaps)))}{spread} ({seeds_cell(point)})"


def _is_share(line: Row, share: float) -> bool:
    return line["spec"]["share"] is not None and math.isclose(line["spec"]["share"], share)


def pooled_table(lines: Iterable[Row]) -> str:
    """SNIP against each other contender over all target shares, for more pairs than one share has."""
    note = (
        "Difference: the policy's gap under `plan` minus SNIP's, in percentage points, over all models, target shares "
        "and seeds that both have; mean ± standard deviation (n - 1). Two-sided paired t-test (scipy.stats.ttest_rel) "
        f"with at least {LEAST_PAIRS} pairs, no correction for the number of comparisons; it takes pairs of one seed "
        "at several shares for independent."
    )
    rows: list[list[str]] = []
    few: dict[str, list[str]] = {}
    for snip, label, comparison in pooled_comparisons(lines):
        if comparison.p is None:
            few.setdefault(snip, []).append(f"{label} {comparison.difference:+.2f} ({comparison.pairs})")
            continue
        verdict = comparison.verdict("SNIP lower", "SNIP higher")
        difference = f"{comparison.difference:+.2f} ± {comparison.deviation:.2f}"
        rows.append([snip, label, difference, str(comparison.pairs), verdict])
    if not rows and not few:
        return "No policy has a model, share and seed that SNIP has."
    parts = [note, *[markdown(["SNIP", "against", "difference", "pairs", "verdict"], rows)] * bool(rows)]
    rest = "; ".join(f"from {snip}: {', '.join(texts)}" for snip, texts in few.items())
    parts += [f"Not tested, with fewer than {LEAST_PAIRS} pairs, difference (pairs) {rest}."] * bool(few)
    return "\n\n".join(parts)


def beaten_text(lines: Iterable[Row]) -> str:
    """Lists the points below SNIP beyond noise at the same or a higher share, and sums up those within noise."""
    lines = list(lines)
    test = f"(contrast of adjusted gaps, two-sided t-test, p < {SIGNIFICANCE}, uncorrected)"
    beaten = _found("Points that beat SNIP, refreshed or static,", test, beating_snip(lines))
    static = _found("Points of static SNIP that beat refreshed SNIP", test, static_beating_refreshed(lines))
    return f"{beaten}\n\n{static}"


def _found(what: str, test: str, entries: Sequence[tuple[Contender, Contender, Comparison]]) -> str:
    sure = [entry for entry in entries if entry[2].beyond_noise]
    unsure = [entry for entry in entries if not entry[2].beyond_noise and entry[2].p is not None]
    untested = len(entries) - len(sure) - len(unsure)
    parts = [f"{what} beyond noise at the same or a higher target share {test}: {len(sure) or 'none'}."]
    parts += ["\n".join(f"- {_beaten(*entry)}" for entry in sure)] * bool(sure)
    if unsure:
        named = "; ".join(_beaten(*entry) for entry in unsure[:_MOST_NAMED])
        largest = "the largest differences: " * (len(unsure) > _MOST_NAMED)
        parts.append(f"Lower, within noise: {len(unsure)} pairs of points; {largest}{named}.")
    parts += [f"Lower, but with no degree of freedom for a test: {untested} pairs of points."] * bool(untested)
    return "\n\n".join(parts)


def _beaten(point: Contender, other: Contender, contrast: Comparison) -> str:
    return (
        f"{point.spec['model']}: {point.name} at {share_name(point.share)} against {other.name} at "
        f"{share_name(other.share)}: {contrast.difference:+.2f} points, {contrast.verdict()}"
    )


def cost_table(lines: Iterable[Row]) -> str:
    """Time and memory at the target share of 75%, as measured; the linears' time on hardware with FP4, as modelled."""
    note = (
        "Contenders with a target FP4 share of 75% or none; means over seeds. Refresh in steps: its seconds over those "
        "of a step. The last two columns before the machine are a model, not a measurement: time of the linears' GEMMs "
        "alone under the plan of the end, with share f of their FLOPs in FP4 and the rest in FP8, every GEMM at peak "
        "rate, FP8 at twice BF16's rate and FP4 at twice FP8's, quantization and refreshes free: (1 - f) + f / 2 of "
        "FP8's time and (1 - f) / 2 + f / 4 of BF16's. Where processes shared a device (last column), the times of "
        "steps and what is reckoned from them say nothing about a run alone and are left out (-), and the seconds per "
        "refresh were taken beside the other processes."
    )
    headings = ["model", "contender", "target share", "FP4 share", "FP4 share over the run", "step ms", "tokens/s"]
    headings += ["peak MiB", "refreshes", "s per refresh", "refresh in steps", "refreshes' share of run"]
    headings += ["of FP8's time", "of BF16's time", "measured on"]
    rows = []
    shown = [line for line in lines if line["spec"]["share"] is None or _is_share(line, _MAIN_SHARE)]
    for (model, share), members in by_spec(shown, ("model", "share")):
        for contender in contenders(members):
            row = [model, contender.name, share_name(share), percent(100 * contender.fp4_fraction, sign=False)]
            row.append(over_run_cell(contender))
            for name, digits in (("step_ms", 1), ("tokens_per_second", 0)):
                row.append(number(contender.mean_of(_if_alone(itemgetter(name))), digits))
            row.append(number(contender.mean_of(itemgetter("peak_mib")), 0))
            rows.append([*row, *_refresh_cells(contender), *_modelled(contender), _machine(contender)])
    return note + "\n\n" + markdown(headings, rows)


def _if_alone(value: Callable[[Row], float | None]) -> Callable[[Row], float | None]:
    """Returns the figure of a run that had its device for itself, and None for others."""
    return lambda run: value(run) if run["processes_per_device"] == 1 else None


def _refresh_cells(contender: Contender) -> list[str]:
    def seconds(run: Row) -> float | None:
        return float(np.mean(run["refresh_seconds"])) if run["refresh_seconds"] else None

    def steps(run: Row) -> float | None:
        mean = seconds(run)
        return None if mean is None or not run["step_ms"] else 1000 * mean / run["step_ms"]

    def part(run: Row) -> float | None:
        return sum(run["refresh_seconds"]) / run["seconds"] if run["seconds"] else None

    count = contender.mean_of(lambda run: len(run["refresh_seconds"]))
    cells = [number(count, 1), number(contender.mean_of(seconds), 2)]
    cells.append(number(contender.mean_of(_if_alone(steps)), 1))
    return [*cells, share_cell(contender.mean_of(_if_alone(part)))]


def modelled_times(line: Row) -> tuple[float, float] | None:
    """Returns the linears' modelled time relative to all FP8 and to all BF16; None if shares are not known.

    A line without `shares` has only FP4 and FP8, or some GEMMs in BF16, whose share it does not say.
    """
    shares = line.get("shares")
    if shares is None:
        formats = set(line["plans"][-1]["formats"]) if line["plans"] else {"b"}
        if formats != {"b"} and "b" in formats:
            return None
        fraction = line["fp4_fraction"]
        shares = {UNQUANTIZED.name: 1.0} if formats == {"b"} else {"fp4": fraction, "fp8": 1 - fraction}
    time = sum(share / FORMATS[name].speed for name, share in shares.items())
    return time, time * UNQUANTIZED.speed


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


def _short(commit: str | None) -> str:
    """Returns "0123456-dirty" for a full hash with "-dirty"."""
    name, dash, rest = (commit or "unknown").partition("-")
    return name[:7] + dash + rest


def runs_table(members: Mapping[str, Sequence[Row]], experiments: Mapping[str, Sequence[str]], strangers: int) -> str:
    """Counts the runs of each experiment: in the grid, with a line, diverged, without a BF16 run, and missing (ids).

    Args:
        members: experiment -> its paired lines.
        experiments: experiment -> the ids of all its runs.
        strangers: number of lines whose id is in no experiment.
    """
    rows = []
    for name, ids in experiments.items():
        present = {line["id"] for line in members[name]}
        missing = [key for key in ids if key not in present]
        alone = sum(line["bf16"] is None for line in members[name])
        listed = ", ".join(f"`{key}`" for key in missing[:_MOST_IDS]) + ", ..." * (len(missing) > _MOST_IDS)
        counts = (len(ids), len(present), sum(map(diverged, members[name])), alone, len(missing))
        rows.append([name, *map(str, counts), listed or "-"])
    headings = ["experiment", "runs in the grid", "with a line", "diverged", "without BF16", "missing", "ids missing"]
    note = f"A run can be in several experiments. Lines of no experiment, left out below: {strangers}."
    return f"{note}\n\n{markdown(headings, rows)}"


def origin_table(lines: Iterable[Row]) -> str:
    """Which code on which machine made the runs, and how many; one row per combination."""
    fields = ("commit", "device", "backend", "torch")
    found = Counter(
        (*(str(line[field] or "-") for field in fields), f"`{line['command']}`" if line["command"] else "-")
        for line in lines
    )
    return markdown(["runs", *fields, "command"], [[str(count), *key] for key, count in found.items()])
