"""The tables of files of forks: mean differences of contenders on the same forks, with their intervals and tests.

A difference is 100 * (loss / loss of the other - 1), in percent. The unit is the fork.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.json_lines import read_lines

from .documents import markdown, marked_names, replace_between, wrapped
from .fork_statistics import DETECTION, Difference, holm
from .fork_workers import SCHEMA_VERSION
from .significance import SIGNIFICANCE

Row = dict[str, Any]

LOSSES = {"held_out_plan": "held out, plan", "held_out_high_precision": "held out, BF16", "train": "training"}
# Percent of the loss: the power of a test is given for this.
EFFECT = 0.1
# Family -> pairs of contenders' names.
Families = Mapping[str, Sequence[tuple[str, str]]]


def read_forks(paths: Iterable[Path]) -> list[Row]:
    """Returns the lines of files, the last one of each id.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: a line of another schema version.
    """
    found: dict[str, Row] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected the lines that `run` wrote.")
        for line in read_lines(path):
            if line.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(
                    f"{path}: the line {line.get('id')!r} has schema_version {line.get('schema_version')!r}, expected "
                    f"{SCHEMA_VERSION}. Use the report of the commit that wrote it ({line.get('commit')!r})."
                )
            found[line["id"]] = line
    return list(found.values())


def differences(lines: Iterable[Row], others: Iterable[Row], loss: str) -> list[float]:
    """Returns the paired differences of two contenders, in percent, over the forks that ended well for both."""
    theirs = {_fork_key(line): line["loss"][loss] for line in others if not line["diverged"]}
    pairs = ((line["loss"][loss], theirs.get(_fork_key(line))) for line in lines if not line["diverged"])
    return [100 * (own / other - 1) for own, other in pairs if other is not None]


def write_report(
    paths: Sequence[Path],
    output: Path | None,
    against: str = "bf16",
    families: Families | None = None,
    docs: Sequence[Path] = (),
) -> str:
    """Writes the tables of each setting (text, model, base, length of forks) and returns the text, in Markdown.

    Args:
        paths: files of lines.
        output: the file to write the text into; None: none.
        against: name of the contender that differences are taken to in the first table.
        families: comparisons to test; those of contenders without a line are left out and named.
        docs: Markdown files whose tables between `<!-- forks:NAME -->` and `<!-- /forks:NAME -->` are renewed; NAME
            is "all" (the first table) or a family's.

    Raises:
        FileNotFoundError, ValueError: as `read_forks`; no line is of `against`; `docs` with lines of several settings,
            or with markers of other names.
    """
    settings: dict[str, list[Row]] = {}
    for line in read_forks(paths):
        settings.setdefault(line["setting"], []).append(line)
    if docs and len(settings) != 1:
        raise ValueError(f"--docs: the lines are of {len(settings)} settings; expected one, so give their files apart.")
    found = [_sections(lines, against, families or {}) for lines in settings.values()]
    text = "\n\n".join(body for sections in found for body in sections.values()) + "\n"
    marked = {path: marked_names(path, "forks", found[0]) for path in docs}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    for path, names in marked.items():
        for name in names:
            replace_between(path, f"forks:{name}", found[0][name])
    return text


def _sections(lines: Sequence[Row], against: str, families: Families) -> dict[str, str]:
    """Returns name -> Markdown of one setting's lines."""
    tables = {family: family_table(lines, family, pairs) for family, pairs in families.items()}
    return {name: wrapped(text) for name, text in ({"all": table(lines, against)} | tables).items()}


def family_table(lines: Sequence[Row], family: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Returns the table of one family of comparisons, with Holm's correction over those that can be tested."""
    of = _by_contender(lines)
    missing = [f"{one} against {other}" for one, other in pairs if one not in of or other not in of]
    if len(missing) == len(pairs):
        return "No lines yet."
    tested = [(one, other) for one, other in pairs if one in of and other in of]
    found = [{loss: Difference.of(differences(of[one], of[other], loss)) for loss in LOSSES} for one, other in tested]
    ps = [own["held_out_plan"].p for own in found]
    corrected = holm(ps)
    tests = len(ps) - ps.count(None)
    level = SIGNIFICANCE / max(tests, 1)
    rows = [
        [
            f"{one} against {other}",
            str(own["held_out_plan"].forks),
            *(str(difference) for difference in own.values()),
            _figure(own["held_out_plan"].deviation),
            _figure(own["held_out_plan"].error),
            _figure(own["held_out_plan"].detectable(level)),
            _figure(p),
            _figure(p_holm),
            _reading(own["held_out_plan"], p_holm, level),
        ]
        for (one, other), own, p, p_holm in zip(tested, found, ps, corrected, strict=True)
    ]
    losses = [f"{label} (%)" for label in LOSSES.values()]
    heads = ["comparison", "forks", *losses, "paired sd", "standard error", "detectable (%)"]
    heads += ["p", "p, Holm", "held out, plan"]
    note = (
        f"**{family.replace('-', ' ').capitalize()}.** Differences in percent, mean ± half of the 95% interval "
        "(uncorrected). Paired t-tests of the held-out loss under the plan; Holm's correction over the "
        f"{tests} tests of this table. Detectable: the smallest true difference that the test would find with power "
        f"{DETECTION}, with these forks and this paired standard deviation, at p < {SIGNIFICANCE} / {tests}, Holm's "
        f"first step. Smaller differences may well be there where two are not told apart. The power for {EFFECT}% is "
        "that of the same test."
    )
    parts = [note, markdown(heads, rows)]
    parts += [f"Without lines: {'; '.join(missing)}."] * bool(missing)
    return "\n\n".join(parts)


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3f}"


def _reading(difference: Difference, p: float | None, level: float) -> str:
    """Returns what the test says, and where it finds nothing, how often it would find a true difference of `EFFECT`."""
    power = difference.power(EFFECT, level)
    if p is None or power is None:
        return "not tested"
    if p < SIGNIFICANCE:
        return "higher" if difference.mean > 0 else "lower"
    return f"not told apart (power for {EFFECT}%: {power:.2f})"


def _by_contender(lines: Iterable[Row]) -> dict[str, list[Row]]:
    """Groups lines by contender, in the order in which they come first."""
    contenders: dict[str, list[Row]] = {}
    for line in lines:
        contenders.setdefault(line["contender"], []).append(line)
    return contenders


def table(lines: Sequence[Row], against: str) -> str:
    """Returns the table of one setting's lines, contenders in the order in which they come first."""
    contenders = _by_contender(lines)
    if against not in contenders:
        raise ValueError(f"No line is of the contender {against!r}; there are {', '.join(contenders)}.")
    losses = [f"{label} (%)" for label in LOSSES.values()]
    heads = ["contender", "share in 4 bits", "shares of FLOPs", "forks", *losses, "paired sd", "standard error"]
    heads += ["ms per step"]
    rows = [_cells(name, own, contenders[against]) for name, own in contenders.items()]
    note = (
        f"Difference to `{against}` on the same fork: loss after {lines[0]['steps']} steps, mean ± half of the 95% "
        "interval (Student's t, uncorrected). Paired standard deviation and standard error are those of the held-out "
        f"loss under the plan, in percentage points.\n\n{_origin(lines)}"
    )
    return f"{note}\n\n{markdown(heads, rows)}"


def _cells(name: str, lines: Sequence[Row], others: Sequence[Row]) -> list[str]:
    found = {loss: Difference.of(differences(lines, others, loss)) for loss in LOSSES}
    main = found["held_out_plan"]
    diverged = sum(line["diverged"] for line in lines)
    unpaired = 0 if lines is others else len(lines) - diverged - main.forks
    notes = [f"{count} {what}" for count, what in ((diverged, "diverged"), (unpaired, "unpaired")) if count]
    share = float(np.mean([line["fp4_fraction"] for line in lines]))
    step_ms = float(np.median([1e3 * line["seconds"]["training"] / line["steps"] for line in lines]))
    is_self = lines is others
    return [
        name,
        f"{share:.1%}",
        _shares(lines),
        str(len(lines) if is_self else main.forks) + (f" ({', '.join(notes)})" if notes else ""),
        *("0" if is_self else str(difference) for difference in found.values()),
        *("-" if is_self else _figure(figure) for figure in (main.deviation, main.error)),
        f"{step_ms:.0f}",
    ]


def _shares(lines: Sequence[Row]) -> str:
    """Returns each format's share of the linears' FLOPs, mean over forks; "-" where all GEMMs have the same format."""
    names = dict.fromkeys(name for line in lines for name in line["shares"])
    if len(names) < 2:
        return "-"
    return ", ".join(f"{name} {np.mean([line['shares'].get(name, 0.0) for line in lines]):.1%}" for name in names)


def _origin(lines: Sequence[Row]) -> str:
    """Says how many forks there are, and where they ran."""
    forks = {_fork_key(line) for line in lines}
    bases = {line["fork"]["base_seed"] for line in lines}
    machines, commits = (sorted({str(line[key]) for line in lines}) for key in ("machine", "commit"))
    return f"{len(forks)} forks of {len(bases)} bases; {', '.join(machines)}; commit {', '.join(commits)}."


def _fork_key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what two lines have in common if they are of one fork: the very weights of its start, and the code."""
    fork = line["fork"]
    return fork["base_seed"], fork["point"], fork["data_seed"], line["state"], line["commit"]
