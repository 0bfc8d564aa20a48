"""The report of files of forks: tables and figures per length of forks, also in the documents that quote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .documents import marked_names, replace_between, wrapped
from .fork_figures import write_family_figure, write_length_figure
from .fork_lengths import courses_of, length_table
from .fork_lines import Row, read_forks
from .fork_plans import plan_table
from .fork_recipe import ForkRecipe
from .fork_score_table import has_scores, score_table
from .fork_tables import family_table, short_table, table, tests_of

# Family -> pairs of contenders' names.
Families = Mapping[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a report shows."""

    against: str = "bf16"
    """Name of the contender that differences are taken to in the first and in the short table."""
    families: Families = field(default_factory=dict)
    """Comparisons to test; those of contenders without a line are left out and named."""
    families_after: Callable[[int], Families] | None = None
    """Number of steps -> comparisons of forks of that length; None: all of `families`."""
    readme: Sequence[str] = ()
    """Contenders of the short table; none: no such table."""
    outcome: str = "held_out_plan"
    """The loss that is tested."""
    over_lengths: bool = False
    """Whether lengths are of one training, measured on the way, so that their differences are compared."""
    prefix: str = "forks"
    """Of the markers in documents, and of the names of figures."""
    command: str = ""
    """What to type for the tables again, as the short one says."""

    @classmethod
    def by(cls, recipe: ForkRecipe, path: Path, **others: str) -> Asked:
        """Returns what the recipe in a file asks for."""
        named = {"families": recipe.comparisons, "readme": recipe.readme, "outcome": recipe.outcome}
        lengths = {steps for cell in recipe.cells for steps in cell.lengths}

        def families_after(steps: int) -> Families:
            # Lines of a length that the recipe no longer has are of another version of it.
            return recipe.comparisons_after(steps) if steps in lengths else recipe.comparisons

        return cls(
            prefix=path.stem,
            families_after=families_after,
            over_lengths=not recipe.cools_down and len(lengths) > 1,
            **named,
            **others,
        )

    def families_of(self, lines: Sequence[Row]) -> Families:
        """Returns the comparisons to test in one setting's lines."""
        return self.families if self.families_after is None else self.families_after(lines[0]["steps"])


def write_report(
    paths: Sequence[Path],
    output: Path | None,
    asked: Asked | None = None,
    docs: Sequence[Path] = (),
    figures: Path | None = None,
) -> str:
    """Writes the tables of each setting (text, model, base, length and shift of forks) and returns them, in Markdown.

    Args:
        paths: files of lines.
        output: the file to write the text into; None: none.
        asked: what it shows; None: the first table.
        docs: Markdown files whose tables between `<!-- PREFIX:NAME -->` and `<!-- /PREFIX:NAME -->` are renewed; NAME
            is "all" (the first table), "readme" (the short one), "scores" or a family's. With forks of several lengths,
            "-" and the length follow, and with a shift "-" and its name. Lengths of one training have "FAMILY-lengths",
            on how differences change with the length, and "plans", with a shift followed by its name too.
        figures: folder for a figure of each family; None: none.

    Raises:
        FileNotFoundError, ValueError: as `read_forks`; no line is of `against`; `docs` or `figures` with lines of
            several settings of one length; `docs` with markers of other names.
    """
    asked = asked or Asked()
    settings: dict[str, list[Row]] = {}
    for line in sorted(read_forks(paths), key=lambda line: line["steps"]):
        settings.setdefault(line["setting"], []).append(line)
    ends = _ends([lines[0] for lines in settings.values()])
    if (docs or figures) and len(set(ends)) < len(ends):
        raise ValueError(
            f"--docs, --figures: the lines are of {len(ends)} settings, several of them of the same length and shift; "
            "expected one of each, so give their files apart."
        )
    sections: dict[str, str] = {}
    bodies: list[str] = []
    for end, lines in zip(ends, settings.values(), strict=True):
        found = _sections(lines, asked)
        bodies += found.values()
        sections |= {f"{name}{end}": body for name, body in found.items()}
        if figures is not None:
            for family, pairs in asked.families_of(lines).items():
                path = figures / f"{asked.prefix}-{family}{end}.png"
                write_family_figure(tests_of(lines, pairs, asked.outcome), lines[0]["steps"], path)
    if asked.over_lengths and len(set(ends)) == len(ends):
        sections |= (found := _sections_over_lengths(list(settings.values()), asked, figures))
        bodies += found.values()
    text = "\n\n".join(bodies) + "\n"
    marked = {path: marked_names(path, asked.prefix, sections) for path in docs}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    for path, names in marked.items():
        for name in names:
            replace_between(path, f"{asked.prefix}:{name}", sections[name])
    return text


def _ends(lines: Sequence[Row]) -> list[str]:
    """Returns what follows the names of each setting's tables: length and shift, where there are several."""
    steps = [f"-{line['steps']}" for line in lines]
    shifts = [line["fork"].get("shift") for line in lines]
    several = len(set(steps)) > 1
    return [
        (length if several else "") + (f"-{shift['name']}" if shift else "")
        for length, shift in zip(steps, shifts, strict=True)
    ]


def _sections_over_lengths(settings: Sequence[list[Row]], asked: Asked, figures: Path | None) -> dict[str, str]:
    """Returns name -> Markdown of the lengths of each training; with a folder, writes a figure of each family."""
    trainings: dict[str, list[Row]] = {}
    for lines in settings:
        shift = lines[0]["fork"].get("shift")
        trainings.setdefault(f"-{shift['name']}" if shift else "", []).extend(lines)
    found = {}
    for end, lines in trainings.items():
        for family, pairs in asked.families.items():
            courses = courses_of(lines, pairs, asked.outcome)
            found[f"{family}-lengths{end}"] = length_table(lines, family, courses)
            if figures is not None:
                write_length_figure(courses, figures / f"{asked.prefix}-{family}-lengths{end}.png")
        every = [pair for pairs in asked.families.values() for pair in pairs]
        found[f"plans{end}"] = plan_table(lines, every)
    return {name: wrapped(text) for name, text in found.items() if text}


def _sections(lines: Sequence[Row], asked: Asked) -> dict[str, str]:
    """Returns name -> Markdown of one setting's lines."""
    found = {"all": table(lines, asked.against)}
    families = asked.families_of(lines)
    found |= {family: family_table(lines, family, pairs, asked.outcome) for family, pairs in families.items()}
    if asked.readme:
        found["readme"] = short_table(lines, asked.readme, asked.against, asked.outcome, asked.command)
    if has_scores(lines):
        pairs = dict.fromkeys(pair for pairs in families.values() for pair in pairs)
        found["scores"] = score_table(lines, list(pairs))
    return {name: wrapped(text) for name, text in found.items()}
