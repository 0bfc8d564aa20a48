"""What the plans of forks look like: which GEMMs they put into 4 bits, what refreshes change, how alike they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

from .documents import markdown
from .fork_lines import PLACES, Row, fork_key

# The format of each GEMM, layer by layer: forward, grad_input, grad_weight.
_Formats = tuple[str, ...]


@dataclass(frozen=True)
class _Plans:
    """Those of one fork."""

    made: Mapping[int, _Formats]
    """Step of the fork after which it came into force -> plan, in rising order. Where refreshes made plans, a line does
    not have the one that the fork began with."""
    end: int
    """Steps of the fork."""

    @property
    def all(self) -> list[_Formats]:
        return list(self.made.values())

    def after(self, step: int) -> _Formats:
        """Returns the plan in force then; not before the first one that is known."""
        return self.made[max(own for own in self.made if own <= step)]


_Forks = Mapping[tuple[object, ...], _Plans]


def plan_table(lines: Sequence[Row], pairs: Iterable[tuple[str, str]]) -> str:
    """Returns the tables of plans; "" if no contender has one.

    Args:
        lines: of one setting, or of several lengths of it; the longest line of each fork counts.
        pairs: contenders whose plans are compared on the same fork.
    """
    of = _plans_of(lines)
    if not of:
        return ""
    first = next(plans for forks in of.values() for plans in forks.values())
    count = len(first.all[0])
    heads = ["contender", "forks", "plans of a fork", *(f"{gemm} in 4 bits" for gemm in GEMMS)]
    heads += ["changed by a refresh", "last against first", "two forks"]
    rows = [[name, *_cells(forks)] for name, forks in of.items()]
    note = (
        "**Plans.** Mean over the plans of all forks, least to most in parentheses. Where plans are refreshed, these "
        "are the refreshed ones: lines do not have the one that a fork begins with. GEMMs count as one each, whatever "
        f"their FLOPs. Columns: the share of each kind in 4 bits; how many of all {count} a refresh changes; how many "
        "differ between the last and the first plan of a fork, and between two forks after the same step."
    )
    parts = [note, markdown(heads, rows)]
    compared = [(one, other) for one, other in dict.fromkeys(pairs) if one in of and other in of]
    rows = [[f"{one} against {other}", *cells] for one, other in compared if (cells := _against(of[one], of[other]))]
    if rows:
        parts.append("GEMMs that have another format on the same fork after the same step, of all and of each kind:")
        parts.append(markdown(["comparison", "forks", "all", *GEMMS], rows))
    return "\n\n".join(parts)


def _plans_of(lines: Iterable[Row]) -> dict[str, _Forks]:
    """Returns contender -> plans of its forks, of those that have plans of several formats."""
    found: dict[str, dict[tuple[object, ...], _Plans]] = {}
    for line in sorted(lines, key=lambda line: line["steps"]):
        made = {plan["step"]: plan for plan in line.get("plans", ())} or {0: line}
        count = max(len(plan["plan"] or "") for plan in made.values())
        if count:
            plans = _Plans({step: _formats(plan, count) for step, plan in made.items()}, line["steps"])
            found.setdefault(line["contender"], {})[fork_key(line)] = plans
    return found


def _formats(plan: Row, count: int) -> _Formats:
    """Returns the formats of so many GEMMs in the plan of a line, or in one of its `plans`."""
    names = list(plan["shares"])
    if plan["plan"] is None:  # all in one format
        return tuple(names * count)
    return tuple(names[PLACES.index(place)] for place in plan["plan"])


def _cells(forks: _Forks) -> list[str]:
    every = [plan for plans in forks.values() for plan in plans.all]
    changed = [_apart(one, other) for plans in forks.values() for one, other in pairwise(plans.all)]
    moved = [_apart(plans.all[0], plans.all[-1]) for plans in forks.values() if len(plans.made) > 1]
    between = [
        _apart(one.made[step], other.made[step])
        for one, other in combinations(forks.values(), 2)
        for step in one.made.keys() & other.made
    ]
    shares = [
        _spread([100 * _in_4_bits(plan[kind :: len(GEMMS)]) for plan in every], "%") for kind in range(len(GEMMS))
    ]
    least, *_, most = sorted([len(plans.made) for plans in forks.values()] * 2)
    return [
        str(len(forks)),
        str(least) if least == most else f"{least} to {most}",
        *shares,
        *map(_spread, (changed, moved, between)),
    ]


def _against(one: _Forks, other: _Forks) -> list[str]:
    """Returns the cells of a comparison; none if no fork is in both."""
    both = [(one[fork], other[fork]) for fork in one if fork in other]
    plans = [
        (mine.after(step), theirs.after(step))
        for mine, theirs in both
        for step in sorted(mine.made.keys() | theirs.made)
        if max(min(mine.made), min(theirs.made)) <= step < min(mine.end, theirs.end)
    ]
    if not plans:
        return []
    kinds = [[_apart(a[kind :: len(GEMMS)], b[kind :: len(GEMMS)]) for a, b in plans] for kind in range(len(GEMMS))]
    return [str(len(both)), *map(_spread, ([_apart(a, b) for a, b in plans], *kinds))]


def _apart(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns how many GEMMs have another format."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def _in_4_bits(formats: Sequence[str]) -> float:
    return sum(FORMATS[name].counts_as_fp4 for name in formats) / len(formats)


def _spread(values: Sequence[float], unit: str = "") -> str:
    """Returns mean, least and most; "-" without any."""
    if not values:
        return "-"
    least, most = min(values), max(values)
    if least == most:
        return f"{least:.0f}{unit}"
    return f"{np.mean(values):.1f}{unit} ({least:.0f} to {most:.0f})"
