"""What came out of a bake-off: its tables and figures in one folder, and in the Markdown files that quote them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import bakeoff_tables as tables
from bakeoff_figures import write_figures
from bakeoff_tables import Row

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
_MOST_IDS = 20


def write_report(
    lines: Iterable[Row],
    experiments: Mapping[str, Sequence[str]],
    folder: str | os.PathLike[str],
    docs: Iterable[str | os.PathLike[str]] | None = None,
) -> list[Path]:
    """Writes FOLDER/tables.md and the figures, and puts the tables into `docs` wherever those have markers for them.

    Args:
        lines: one JSON object per run; the last with an id wins.
        experiments: name -> ids of its runs, from the grid.
        docs: Markdown files with markers `<!-- bakeoff:NAME -->` and `<!-- /bakeoff:NAME -->`, where NAME is an
            experiment, or one of "runs", "beaten", "cost", "readme" and "origin".

    Returns: the files written.

    Raises:
        ValueError: a line of another schema version; a document without markers, or with a name that is none of these.
    """
    found = tables.latest(lines)
    experiments = {name: list(dict.fromkeys(ids)) for name, ids in experiments.items()}
    # Only the grid's own runs are paired: lines of another grid may differ in what a spec does not hold.
    inside = dict.fromkeys(key for ids in experiments.values() for key in ids)
    paired = tables.with_gaps(found[key] for key in inside if key in found)
    members = {name: [paired[key] for key in ids if key in paired] for name, ids in experiments.items()}
    runs = runs_table(members, experiments, len(found.keys() - inside.keys()))
    sections = {"runs": ("Runs", runs), **_sections(members)}
    marked = {Path(path): _marked_names(Path(path), sections) for path in docs or ()}
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.values())
    (out / "tables.md").write_text(f"# Bake-off\n\n{text}\n", encoding="utf-8")
    for path, names in marked.items():
        for name in names:
            replace_between(path, name, sections[name][1])
    return [out / "tables.md", *write_figures(members, out), *marked]


def _sections(members: Mapping[str, Sequence[Row]]) -> dict[str, tuple[str, str]]:
    """Returns name -> (title, Markdown), in the order of tables.md."""
    main = list({line["id"]: line for name in _MAIN for line in members.get(name, ())}.values())
    used = {line["id"]: line for lines in members.values() for line in lines}
    sections = {"readme": ("In short", tables.readme_table(main))}
    others = [name for name in members if name not in _SECTIONS]
    for name in [*(name for name in _SECTIONS if name in members), *others]:
        title, table = _SECTIONS.get(name, (name.capitalize(), tables.gap_table))
        sections[name] = (title, table(members[name]) if members[name] else "No run of this experiment has a line.")
    sections["beaten"] = ("What beats SNIP", tables.beaten_text(main))
    sections["cost"] = ("Memory and cost", tables.cost_table(main))
    sections["origin"] = ("Origin", origin_table(used.values()))
    return sections


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
        counts = (len(ids), len(present), sum(map(tables.diverged, members[name])), alone, len(missing))
        rows.append([name, *map(str, counts), listed or "-"])
    headings = ["experiment", "runs in the grid", "with a line", "diverged", "without BF16", "missing", "ids missing"]
    note = f"A run can be in several experiments. Lines of no experiment, left out below: {strangers}."
    return f"{note}\n\n{tables.markdown(headings, rows)}"


def origin_table(lines: Iterable[Row]) -> str:
    """Which code on which machine made the runs, and how many; one row per combination."""
    fields = ("commit", "device", "backend", "torch", "command")
    counts: dict[tuple[str, ...], int] = {}
    for line in lines:
        key = tuple(str(line[field] or "-") for field in fields)
        counts[key] = counts.get(key, 0) + 1
    return tables.markdown(["runs", *fields], [[str(count), *key] for key, count in counts.items()])


def replace_between(path: str | os.PathLike[str], marker: str, text: str) -> None:
    """Puts `text` between `<!-- bakeoff:MARKER -->` and `<!-- /bakeoff:MARKER -->`; the rest of the file stays.

    Raises:
        ValueError: not exactly one of each, or in the wrong order.
    """
    path = Path(path)
    content = path.read_text(encoding="utf-8")
    first, last = f"<!-- bakeoff:{marker} -->", f"<!-- /bakeoff:{marker} -->"
    if content.count(first) != 1 or content.count(last) != 1 or content.index(first) > content.index(last):
        raise ValueError(
            f"{path} has {content.count(first)} lines {first!r} and {content.count(last)} lines {last!r}; expected one "
            f"of each, in this order. Put them where the table {marker!r} belongs."
        )
    before, rest = content.split(first)
    after = rest.split(last)[1]
    path.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")


def _marked_names(path: Path, sections: Mapping[str, object]) -> list[str]:
    """Returns the names of the markers in a file."""
    names = re.findall(r"<!-- bakeoff:(\S+) -->", path.read_text(encoding="utf-8"))
    if not names:
        raise ValueError(f"{path} has no marker '<!-- bakeoff:NAME -->'; put one where a table belongs.")
    unknown = sorted(set(names) - sections.keys())
    if unknown:
        raise ValueError(f"{path} has markers for unknown tables {unknown}; expected some of {sorted(sections)}.")
    return list(dict.fromkeys(names))
