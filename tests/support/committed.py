"""Pages and lines of results as they are committed, for tests that compare the two."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import binomtest

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import Row, by_contender, difference_of, fork_key, pairs
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_statistics import Difference

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results"
# Of `forks-longer.yaml`: what `SnipConfig` does at 75%.
DEFAULT = "snip {fp4, fp8}, 75% by gemm, refresh_every 500, loss_estimator saliency"


@cache
def text_of(page: str) -> str:
    """A page without the tables that reports write into it, each run of white space as one space.

    A figure of such a table would stand in for one that the prose has wrong.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    return " ".join(re.sub(r"<!-- (forks\S*) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL).split())


@cache
def prose_of(page: str) -> str:
    """As `text_of`, without any table."""
    rows = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return " ".join(" ".join(row for row in rows if not row.startswith(("|", "<!--"))).split())


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]


def shown(test: fork_tables.Tested) -> str:
    """A difference with the detectable one, bold if it is significant."""
    difference = f"**{test.main}**" if test.reading != fork_tables.NOT_SIGNIFICANT else str(test.main)
    return f"{difference} ({test.main.detectable(test.level):.3f})"


def row_of(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def share_of(count: int, forks: int) -> str:
    """A count with its Clopper-Pearson interval."""
    found = binomtest(count, forks).proportion_ci(method="exact")
    return f"{100 * found.low:.0f} to {100 * found.high:.0f}%"


def detectable_of(test: fork_tables.Tested) -> float:
    """The smallest true difference that a test would find with power 0.8."""
    found = test.main.detectable(test.level)
    assert found is not None
    return found


def recipe_of(name: str) -> Path:
    """The recipe of forks with this name."""
    return ROOT / "recipes" / f"forks-{name}.yaml"


def difference_among(lines: Iterable[Row], one: str, other: str, point: int | None = None) -> Difference:
    """The difference of two contenders among lines, of forks that start at this step of the base."""
    found = by_contender(line for line in lines if point in (None, line["fork"]["point"]))
    return difference_of(found[one], found[other], "held_out_plan")


def averaged(settings: Iterable[tuple[Sequence[Row], Sequence[Row]]], loss: str = "held_out_plan") -> Difference:
    """The mean over the forks that have all settings of a difference that is averaged over them.

    Args:
        settings: of each, the lines of one contender and of another.
        loss: whose difference.
    """
    found: dict[tuple[Any, ...], list[float]] = {}
    of_settings = [pairs(ours, theirs, loss) for ours, theirs in settings]
    for line, value in chain(*of_settings):
        found.setdefault(fork_key(line), []).append(value)
    whole = {key: values for key, values in found.items() if len(values) == len(of_settings)}
    return Difference.of([fmean(values) for values in whole.values()], [key[0] for key in whole])


def check_report(
    folder: Path, *names: str, page: str | None = None, against: str | None = None, figures: str | None = None
) -> None:
    """Makes a committed report once more from its lines, and its tables in a copy of their page.

    Args:
        folder: for the copy.
        names: of the recipe, which the report has too, and of others whose lines it takes.
        page: that has tables of the report; None: none has.
        against: the contender that differences are to; None: as without the option.
        figures: the folder that the command names.
    """
    recipe, report = recipe_of(names[0]), RESULTS / f"forks-{names[0]}.md"
    lines = [RESULTS / f"forks-{name}.jsonl" for name in names]
    command = ["python", "-m", "eval.bakeoff.forks", "report", *(str(path.relative_to(ROOT)) for path in lines)]
    command += ["--recipe", str(recipe.relative_to(ROOT))] + (["--against", against] if against else [])
    command += ["--output", str(report.relative_to(ROOT))] + (["--docs", page] if page else [])
    command += ["--figures", figures] if figures else []
    others = {"against": against} if against else {}
    copies = [Path(shutil.copy(ROOT / page, folder))] if page else []
    text = write_report(
        lines, None, Asked.by(load_recipe(recipe), recipe, command=shlex.join(command), **others), copies
    )
    assert text == report.read_text(encoding="utf-8")
    for copy in copies:
        assert page and copy.read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")
