"""How differences of contenders change with the length of forks that are one training, measured on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .documents import markdown
from .fork_lines import LOSSES, Row, by_contender, difference_of, fork_key, losses_of, pairs
from .fork_statistics import DETECTION, Difference, holm
from .fork_tables import NOT_SIGNIFICANT, figure, p_value, title
from .significance import SIGNIFICANCE


@dataclass(frozen=True)
class Course:
    """One comparison of a family over the lengths of its forks."""

    one: str
    other: str
    at: dict[int, Difference]
    """Number of steps, rising -> difference of the outcome."""
    first: int
    last: int
    """Lengths between which the change is: the shortest, and the longest that two forks have that have the shortest."""
    change: dict[str, Difference]
    """Loss -> difference after `last` steps less that after `first`, on the same fork."""
    outcome: str
    """The loss that is tested."""
    p_holm: float
    """Of the change of the outcome, after Holm's correction."""
    level: float
    """Of Holm's first step."""

    @property
    def reading(self) -> str:
        """What the test says: "rises" and "falls" are significant after Holm's correction."""
        if self.p_holm >= SIGNIFICANCE:
            return NOT_SIGNIFICANT
        return "rises" if self.change[self.outcome].mean > 0 else "falls"


def courses_of(lines: Sequence[Row], family: Iterable[tuple[str, str]], outcome: str) -> list[Course]:
    """Returns the comparisons of which two forks have two lengths, with Holm's correction over them.

    Args:
        lines: of several lengths of one setting.
        family: pairs of contenders' names.
        outcome: the loss that is tested.
    """
    losses = losses_of(lines)
    found = [
        (one, other, ends, {loss: _change(lines, one, other, ends, loss) for loss in losses})
        for one, other in family
        if (ends := _ends(lines, one, other, outcome)) is not None
    ]
    ps = [change[outcome].p for *_, change in found]
    return [
        Course(one, other, _at(lines, one, other, outcome), *ends, change, outcome, p_holm, SIGNIFICANCE / len(found))
        for (one, other, ends, change), p_holm in zip(found, holm(ps), strict=True)
        if p_holm is not None  # two forks have one
    ]


def length_table(lines: Sequence[Row], family: str, courses: Sequence[Course]) -> str:
    """Returns the table of one family's courses; "" without any."""
    if not courses:
        return ""
    lengths = sorted({line["steps"] for line in lines})
    rows = []
    for course in courses:
        main = course.change[course.outcome]
        cells = [f"{course.one} against {course.other}"]
        cells += [str(course.at[steps]) if steps in course.at else "-" for steps in lengths]
        cells += [f"{course.first} to {course.last}", str(main.forks), *map(str, course.change.values())]
        cells += [*map(figure, (main.deviation, main.detectable(course.level))), *map(p_value, (main.p, course.p_holm))]
        rows.append([*cells, course.reading])
    heads = ["comparison", *(f"after {steps} (%)" for steps in lengths), "from, to", "forks"]
    heads += [f"change, {LOSSES[loss]} (%)" for loss in courses[0].change]
    heads += ["paired sd", "detectable (%)", "p", "p, Holm", "the difference"]
    outcome, count = LOSSES[courses[0].outcome], len(courses)
    note = (
        f"{title(f'{family} over lengths')} Lengths are steps of one training, measured on the way, on the same forks. "
        f"Differences of the loss {outcome!r} in percent, mean ± half of the 95% interval (uncorrected), after each "
        "length. Change: the difference after the last of two lengths less that after the first, fork by fork. Paired "
        f"tests of the change of {outcome!r}, with Holm's correction over {_changes(count)}; the columns from "
        f'"paired sd" on are of it. "Rises" and "falls" are significant: p < {SIGNIFICANCE} after the correction. '
        f"Detectable: the smallest true change that the test would find with power {DETECTION} at p < {SIGNIFICANCE} / "
        f"{count}."
    )
    return f"{note}\n\n{markdown(heads, rows)}"


def _changes(count: int) -> str:
    return "the one change" if count == 1 else f"{count} changes"


def _differences(lines: Iterable[Row], one: str, other: str, loss: str) -> dict[int, dict[tuple[object, ...], float]]:
    """Returns number of steps -> fork -> difference of two contenders."""
    of = by_contender(lines)
    found: dict[int, dict[tuple[object, ...], float]] = {}
    for steps in sorted({line["steps"] for line in of.get(one, ())}):
        own, others = ([line for line in of.get(name, ()) if line["steps"] == steps] for name in (one, other))
        found[steps] = {fork_key(line): value for line, value in pairs(own, others, loss)}
    return {steps: values for steps, values in found.items() if values}


def _ends(lines: Sequence[Row], one: str, other: str, loss: str) -> tuple[int, int] | None:
    """Returns `Course.first` and `last`; None if no two forks have two lengths."""
    found = _differences(lines, one, other, loss)
    if not found:
        return None
    first, *later = found
    last = [steps for steps in later if len(found[steps].keys() & found[first].keys()) > 1]
    return (first, last[-1]) if last else None


def _change(lines: Sequence[Row], one: str, other: str, ends: tuple[int, int], loss: str) -> Difference:
    found = _differences(lines, one, other, loss)
    first, last = (found[steps] for steps in ends)
    bases = {fork_key(line): line["fork"]["base_seed"] for line in lines}
    both = [fork for fork in last if fork in first]
    return Difference.of([last[fork] - first[fork] for fork in both], [bases[fork] for fork in both])


def _at(lines: Sequence[Row], one: str, other: str, loss: str) -> dict[int, Difference]:
    of = by_contender(lines)
    at = {
        steps: difference_of(*([line for line in of[name] if line["steps"] == steps] for name in (one, other)), loss)
        for steps in sorted({line["steps"] for line in lines})
    }
    return {steps: difference for steps, difference in at.items() if difference.forks}
