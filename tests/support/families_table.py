"""The table of docs/models.md: what of each family a plan covers. Run as a program, it writes the table anew.

PYTHONPATH=src:tests/support python tests/support/families_table.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from causal_families import DENSE, EXPERTS, FAMILIES, HYBRID, batch, build, class_of

from snip_hf import coverage

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->"
OTHERS_BEGIN, OTHERS_END = "<!-- others -->\n", "<!-- /others -->"
GROUPS = {"Dense": DENSE, "With convolutions, linear attention or state spaces": HYBRID, "With experts": EXPERTS}
# The kind says enough of these.
_ROUTER = "router"
# A family of which all is covered, or all but one router: as a line of the table, and as the page lists it.
_LINE = re.compile(r"\| `([\w-]+)` \| `(\w+)` \| ([\d.]+)% \| (?:-|`([\w.]+)` ([\d.]+)% \(router\)) \|\n")
_LISTED = re.compile(r"`([\w-]+)`\s\(`(\w+)`(?:,\s`([\w.]+)`\s([\d.]+)%)?\)")
_HEADER = "| model type | class | covered | not covered |\n|---|---|---|---|\n"
_WELL = 0.95
# Smaller shares of the FLOPs are not named.
_LEAST = 0.0005


def row(family: str) -> str:
    """The family's line of the table."""
    found = coverage(build(family), batch())
    left = [
        f"`{_short(one.name)}` {one.share:.1%} ({_ROUTER if one.kind == _ROUTER else one.reason})"
        for one in found.uncovered
        if one.share >= _LEAST
    ]
    return f"| `{family}` | `{class_of(family)}` | {found.share:.1%} | {'; '.join(left) or '-'} |\n"


def documented() -> dict[str, str]:
    """Family -> its line, as `row` makes it, of what the page says."""
    part = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = [*map(_line, _LISTED.finditer(part)), *part.splitlines(keepends=True)]
    return {name: line for line in lines for name in shares(line)}


def shares(text: str) -> dict[str, float]:
    """Family -> share covered, 0..1, as a table has it."""
    return {name: float(share) / 100 for name, share in re.findall(r"^\| `([\w-]+)` \| .* \| ([\d.]+)% \|", text, re.M)}


def versions() -> tuple[str, ...]:
    """The versions of transformers that the page names, the last one being that of its names."""
    found = re.search(r"Checked with\s+transformers ([\d.,\s and]+\d)", PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return tuple(re.findall(r"\d[\d.]*\d", found[1]))


def names_without_a_row() -> set[str]:
    """Names of the mapping that the page lists with the reason why they have no row."""
    part = PAGE.read_text(encoding="utf-8").split(OTHERS_BEGIN)[1].split(OTHERS_END)[0]
    return set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\|[^|]*\|", part, re.M))))


def table(rows: Mapping[str, str]) -> str:
    """The tables of the page, of family -> its line."""
    parts = []
    for title, group in GROUPS.items():
        known = {family: rows[family] for family in sorted(group) if family in rows}
        lists: dict[str, list[str]] = {"Fully covered": [], "Covered except for the router": []}
        for line in known.values():
            if listed := _listed(line):
                lists["Covered except for the router" if "%" in listed else "Fully covered"].append(listed)
        texts = [_wrapped(f"{kind}: {', '.join(names)}.") for kind, names in lists.items() if names]
        others = "".join(line for line in known.values() if not _listed(line))
        parts.append("\n\n".join([f"**{title}**", *texts, _HEADER + others]))
    found = shares("".join(rows.values()))
    well = sum(share >= _WELL for share in found.values())
    return f"\n{well} of {len(found)} families have at least {_WELL:.0%}.\n\n" + "\n".join(parts) + "\n"


def _listed(line: str) -> str:
    """A family as the page lists it; empty for one that needs a line of the table."""
    found = _LINE.fullmatch(line)
    if found is None or round(float(found[3]) + float(found[5] or 0), 1) != 100:
        return ""
    router = f", `{found[4]}` {found[5]}%" if found[4] else ""
    return f"`{found[1]}` (`{found[2]}`{router})"


def _line(listed: re.Match[str]) -> str:
    left = f"`{listed[3]}` {listed[4]}% ({_ROUTER})" if listed[3] else "-"
    return f"| `{listed[1]}` | `{listed[2]}` | {100 - float(listed[4] or 0):.1f}% | {left} |\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _short(name: str) -> str:
    """The name of a module or parameter within its block."""
    return name.rpartition("*.")[2]


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(
        before + BEGIN + table({family: row(family) for family in FAMILIES}) + END + rest.split(END)[1],
        encoding="utf-8",
    )
