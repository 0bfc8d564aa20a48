"""The tables of forks: mean differences of contenders on the same forks, with their intervals and tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .documents import markdown
from .fork_lines import LOSSES, Row, by_contender, difference_of, fork_key, losses_of, origin
from .fork_statistics import DETECTION, Difference, holm
from .significance import SIGNIFICANCE

# Percent of the loss: the power of a test is given for this.
EFFECT = 0.1
NOT_SIGNIFICANT = "not significant"
_NOT_PAIRED = "Without a fork from the same weights that ended well for both"


@dataclass(frozen=True)
class Tested:
    """One comparison of a family."""

    one: str
    other: str
    found: dict[str, Difference]
    """Loss -> difference."""
    outcome: str
    """The loss that is tested."""
    p_holm: float | None
    """Of the outcome, after Holm's correction; None: not tested."""
    level: float
    """Of Holm's first step."""

    @property
    def main(self) -> Difference:
        """The difference that is tested."""
        return self.found[self.outcome]

    @property
    def reading(self) -> str:
        """What the test says: "higher" and "lower" are significant after Holm's correction."""
        if self.p_holm is None:
            return "not tested"
        if self.p_holm < SIGNIFICANCE:
            return "higher" if self.main.mean > 0 else "lower"
        return NOT_SIGNIFICANT


def tests_of(lines: Sequence[Row], pairs: Iterable[tuple[str, str]], outcome: str = "held_out_plan") -> list[Tested]:
    """Returns the comparisons of a family that have lines, with Holm's correction over those that can be tested."""
    of, losses = by_contender(lines), losses_of(lines)
    if outcome not in losses:
        raise ValueError(f"outcome={outcome!r} is not in all lines; expected one of {', '.join(losses)}.")
    there = [(one, other) for one, other in pairs if one in of and other in of]
    found = [{loss: difference_of(of[one], of[other], loss) for loss in losses} for one, other in there]
    ps = [own[outcome].p for own in found]
    level = SIGNIFICANCE / max(len(ps) - ps.count(None), 1)
    return [
        Tested(one, other, own, outcome, p_holm, level)
        for (one, other), own, p_holm in zip(there, found, holm(ps), strict=True)
    ]


def family_table(
    lines: Sequence[Row], family: str, pairs: Sequence[tuple[str, str]], outcome: str = "held_out_plan"
) -> str:
    """Returns the table of one family of comparisons."""
    found = tests_of(lines, pairs, outcome)
    there = {(test.one, test.other) for test in found}
    tested = [test for test in found if test.main.forks]
    missing = _left_out("Without lines", [pair for pair in pairs if pair not in there])
    missing += _left_out(_NOT_PAIRED, [(test.one, test.other) for test in found if not test.main.forks])
    if not tested:
        return " ".join([title(family), *missing])
    rows = [
        [
            f"{test.one} against {test.other}",
            str(test.main.forks),
            *(str(difference) for difference in test.found.values()),
            *map(figure, (test.main.deviation, test.main.between, test.main.error)),
            figure(test.main.detectable(test.level)),
            _count(test.main.forks_for(EFFECT, test.level)),
            *map(p_value, (test.main.p, test.p_holm)),
            test.reading,
        ]
        for test in tested
    ]
    heads = ["comparison", "forks", *(f"{LOSSES[loss]} (%)" for loss in tested[0].found)]
    heads += ["paired sd", "between bases", "standard error", "detectable (%)", f"forks for {EFFECT}%"]
    heads += ["p", "p, Holm", LOSSES[outcome]]
    parts = [_family_note(family, tested, outcome), markdown(heads, rows)]
    return "\n\n".join([*parts, *missing, *_by_point(lines, tested, outcome)])


def _left_out(why: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the sentence on comparisons that a table leaves out; none without any."""
    return [f"{why}: {'; '.join(f'{one} against {other}' for one, other in pairs)}."] if pairs else []


def title(family: str) -> str:
    """Returns what a table of a family begins with."""
    return f"**{family.replace('-', ' ').capitalize()}.**"


def _family_note(family: str, tested: Sequence[Tested], outcome: str) -> str:
    count = sum(test.p_holm is not None for test in tested)
    start = f"{title(family)} Differences in percent, mean ± half of the 95% interval (uncorrected)."
    if not count:
        return f"{start} Nothing is tested yet: a test needs two forks of both contenders."
    return (
        f"{start} Paired tests of the loss {LOSSES[outcome]!r}, with Holm's correction over {_tests(count)} of this "
        'table; all columns from "paired sd" on are of this loss. "Higher" and "lower" are significant: p < '
        f"{SIGNIFICANCE} after the correction. Forks are the units, and bases a random effect (mixed model; with one "
        'fork per base a paired t-test); "between bases" is that effect\'s standard deviation. Detectable: the '
        f"smallest true difference that the test would find with power {DETECTION}, with these forks and this paired "
        f"standard deviation, at p < {SIGNIFICANCE} / {count}, Holm's first step.{_powers(tested)} The forks that find "
        f"{EFFECT}% with power {DETECTION} are of the same test."
    )


def _tests(count: int) -> str:
    return "the one test" if count == 1 else f"the {count} tests"


def _powers(tested: Sequence[Tested]) -> str:
    """Returns the sentence on the power of the tests without a significant difference; empty if all have one."""
    powers = [test.main.power(EFFECT, test.level) or 0.0 for test in tested if test.reading == NOT_SIGNIFICANT]
    if not powers:
        return ""
    least, most = f"{min(powers):.2f}", f"{max(powers):.2f}"
    power = least if least == most else f"{least} to {most}"
    return f" Rows that are not significant do not exclude smaller differences; their power for {EFFECT}% is {power}."


def _by_point(lines: Sequence[Row], tested: Sequence[Tested], outcome: str) -> list[str]:
    """Returns the family's differences at each point where bases fork; none if there is one point."""
    points = sorted({line["fork"]["point"] for line in lines})
    if len(points) < 2:
        return []
    at = {point: by_contender(line for line in lines if line["fork"]["point"] == point) for point in points}
    rows = [
        [f"{test.one} against {test.other}"]
        + [str(difference_of(of.get(test.one, ()), of.get(test.other, ()), outcome)) for of in at.values()]
        for test in tested
    ]
    heads = ["comparison", *(f"after step {point} (%)" for point in points)]
    return [f"By the step at which the fork starts, {LOSSES[outcome]}:", markdown(heads, rows)]


def table(lines: Sequence[Row], against: str) -> str:
    """Returns the table of one setting's lines, contenders in the order in which they come first."""
    contenders, losses = by_contender(lines), losses_of(lines)
    if against not in contenders:
        raise ValueError(f"No line is of the contender {against!r}; there are {', '.join(contenders)}.")
    heads = ["contender", "share in 4 bits", "shares of FLOPs", "forks", *(f"{LOSSES[loss]} (%)" for loss in losses)]
    heads += ["paired sd", "standard error", "ms per step"]
    rows = [_cells(name, own, contenders[against], losses) for name, own in contenders.items()]
    when = f"{lines[0]['steps']} steps{_shift(lines)}"
    note = (
        f"Difference to `{against}` on the same fork: loss after {when}, mean ± half of "
        "the 95% interval (Student's t, bases as a random effect, uncorrected). Paired standard deviation and standard "
        "error are those of the held-out loss under the plan, in percentage points."
        f"{_unpaired_note(contenders, against)}\n\n{origin(lines)}"
    )
    return f"{note}\n\n{markdown(heads, rows)}"


def short_table(lines: Sequence[Row], names: Sequence[str], against: str, outcome: str, command: str) -> str:
    """Returns the table for the front page: intervals of some contenders against one; the families have the tests."""
    of = by_contender(lines)
    there = [name for name in names if name in of and name != against]
    if not there or against not in of:
        return f"No lines yet of {', '.join(name for name in names if name != against)} and {against} together."
    found = {name: difference_of(of[name], of[against], outcome) for name in there}
    shown = [name for name in there if found[name].forks or any(line["diverged"] for line in of[name])]
    rows = []
    for name in shown:
        share = np.mean([line["fp4_fraction"] for line in of[name]])
        figures = str(found[name].forks), str(found[name]), figure(found[name].detectable())
        rows.append([name, f"{share:.0%}", *figures])
    heads = ["contender", "share in 4 bits", "forks", f"to {against} (%)", "detectable (%)"]
    note = (
        f"Held-out loss ({LOSSES[outcome].split(', ')[1]}) after {lines[0]['steps']} steps against `{against}` on the "
        "same forks, mean ± half of the 95% interval, uncorrected. Detectable: the true difference that a test at p < "
        f"{SIGNIFICANCE}, uncorrected, would find with power {DETECTION}. "
        f"{origin([line for name in (*shown, against) for line in of[name]])}"
    )
    note += f" `{command}` writes this table." if command else ""
    missing = [name for name in there if name not in shown]
    note += f" Not on forks from the same weights: {', '.join(missing)}." if missing else ""
    return f"{markdown(heads, rows)}\n\n{note}"


def _cells(name: str, lines: Sequence[Row], others: Sequence[Row], losses: Sequence[str]) -> list[str]:
    found = {loss: difference_of(lines, others, loss) for loss in losses}
    main = found["held_out_plan"]
    diverged = sum(line["diverged"] for line in lines)
    unpaired = 0 if lines is others else len(lines) - diverged - main.forks
    blew_up = sum(line.get("blew_up", False) and not line["diverged"] for line in lines)
    counts = ((diverged, "diverged"), (blew_up, "blew up"), (unpaired, "unpaired"))
    notes = [f"{count} {what}" for count, what in counts if count]
    share = float(np.mean([line["fp4_fraction"] for line in lines]))
    step_ms = float(np.median([1e3 * line["seconds"]["training"] / line["steps"] for line in lines]))
    is_self = lines is others
    return [
        name,
        f"{share:.1%}",
        _shares(lines),
        str(len(lines) if is_self else main.forks) + (f" ({', '.join(notes)})" if notes else ""),
        *("0" if is_self else str(difference) for difference in found.values()),
        *("-" if is_self else figure(value) for value in (main.deviation, main.error)),
        f"{step_ms:.0f}",
    ]


def _unpaired_note(contenders: Mapping[str, Sequence[Row]], against: str) -> str:
    """Returns the sentence on forks that the contender of the differences has no line of; empty without any."""
    others = {fork_key(line) for line in contenders[against]}
    names = {line["fork"]["base_seed"] for own in contenders.values() for line in own if fork_key(line) not in others}
    if not names:
        return ""
    return f" Unpaired: forks that `{against}` has no line of (of base {', '.join(map(str, sorted(names)))})."


def _shift(lines: Sequence[Row]) -> str:
    shift = lines[0]["fork"].get("shift")
    return "" if shift is None else f", with the shift {shift['name']!r} after step {shift['after']} of the fork"


def _shares(lines: Sequence[Row]) -> str:
    """Returns each format's share of the linears' FLOPs, mean over forks; "-" where all GEMMs have the same format."""
    names = dict.fromkeys(name for line in lines for name in line["shares"])
    if len(names) < 2:
        return "-"
    return ", ".join(f"{name} {np.mean([line['shares'].get(name, 0.0) for line in lines]):.1%}" for name in names)


def figure(value: float | None) -> str:
    """Returns a figure as tables have it; "-" for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3f}"


def p_value(value: float | None) -> str:
    """Returns a p-value as tables have it."""
    return "< 0.001" if value is not None and value < 0.0005 else figure(value)


def _count(forks: int | None) -> str:
    return "-" if forks is None else str(forks)
