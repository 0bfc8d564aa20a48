"""Speed at equal loss: what is left of a speed per step when the steps that make good a loss gap are added.

    python -m eval.equal_loss --docs docs/results-formats.md

A run whose loss ends g above BF16's (of the logarithm, that is, relative) needs the factor e^(g / s) in steps to end
level, where s is the slope: by how much the logarithm of the loss falls per logarithm of the steps. Gaps are those of
forks with equal starts: whole trainings of 2,800 steps, and the last 100 steps of 700. Slopes are those of BF16 on the
same forks at the end of their schedules, and those of two published scaling laws at 7B parameters and 140B tokens.
Speeds are of compiled models on an H200, which are not the models of the gaps, and count refreshes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from .bakeoff.documents import markdown, replace_between, wrapped
from .bakeoff.fork_lines import fork_key
from .bakeoff.fork_statistics import Difference

ROOT = Path(__file__).resolve().parents[1]
MARKER = "equal-loss:table"
# Contender -> kind of plan whose speed was measured (4-bit format, and share of it), and steps from refresh to refresh.
WHOLE = {
    "fp4": ("fp4 100%", math.inf),
    "snip {fp4, fp8}, 75% by gemm, refresh_every 500, loss_estimator saliency": ("fp4 75%", 500),
    "snip {mxfp4, fp8-tensor}, 75% by gemm, refresh_every 500, loss_estimator saliency": ("mxfp4 75%", 500),
    "snip {fp4, fp8}, 75% by gemm, refresh_every 250": ("fp4 75%", 250),
    "backward-first {fp4, fp8}, 75% by gemm": ("fp4 75%", math.inf),
    "snip {fp4, fp8}, 75% by layer, refresh_every 250": ("fp4 75%", 250),
}
LAST = {
    "fp4": ("fp4 100%", math.inf),
    "snip {fp4, fp8}, 3.2 times BF16 (ideal) by gemm": ("fp4 75%", math.inf),
    "mxfp4": ("mxfp4 100%", math.inf),
    "snip {mxfp4, mxfp8}, 3.2 times BF16 (ideal) by gemm": ("mxfp4 75%", math.inf),
}
# The whole trainings' losses were measured after these steps of the forks; the slope is that between the last two.
LENGTHS = (700, 1400, 2100, 2700)
# The short forks' training curve has means over so many steps, up to step 700.
FORK_STEPS = (612.5, 637.5, 662.5, 687.5)
# L = E + A / N^a + B / D^b: Hoffmann et al. 2022 (arXiv:2203.15556), approach 3, and the fit of Besiroglu et al. 2024
# (arXiv:2404.10102) to the same data.
LAWS = {"Hoffmann": (1.69, 406.4, 410.7, 0.34, 0.28), "Besiroglu": (1.8172, 482.01, 2085.43, 0.3478, 0.3658)}
PARAMETERS, TOKENS = 7e9, 140e9
SHAPES = ("8B, 8 layers", "TinyLlama-1.1B")
# The Trainer's runs, oldest first.
SPEEDS = "benchmarks/results/speed_trainer.jsonl"


@dataclass(frozen=True)
class Gaps:
    """Of a contender to BF16: natural logarithms of ratios of losses."""

    runs: str
    contender: str
    gaps: list[float]
    """One per fork."""
    slopes: list[float]
    """Of BF16 on the same forks."""
    speeds: dict[str, float]
    """Shape -> speed by BF16's, of a plan of this kind, with its refreshes."""


@dataclass(frozen=True)
class Measured:
    """What a run took, against BF16."""

    speed: float
    """Of a step without a refresh."""
    refresh: float
    """What a refresh adds, in BF16 steps."""

    def with_refreshes(self, every: float) -> float:
        """Returns the speed with a refresh every so many steps."""
        return 1 / (1 / self.speed + self.refresh / every)


def law_slope(law: str) -> float:
    """Returns how much the logarithm of the loss falls per logarithm of the tokens, by a scaling law at 7B."""
    least, a, b, alpha, beta = LAWS[law]
    of_tokens = b / TOKENS**beta
    return float(beta * of_tokens / (least + a / PARAMETERS**alpha + of_tokens))


def more_steps(gaps: Sequence[float], slopes: Sequence[float]) -> tuple[float, float, float]:
    """Returns the factor of steps that makes the gap good, and its 95% interval over the forks.

    The factor's logarithm is the ratio r of the two means. Fieller's interval has all r at which the mean of the paired
    differences gap - r slope is not significantly different from 0 (Student's t), so that it is not symmetric.

    Args:
        gaps: one per fork.
        slopes: those of the same forks; equal ones have no error.

    Raises:
        ValueError: if the slope itself is not significantly different from 0; the interval would have no end.
    """
    gap, slope = float(np.mean(gaps)), float(np.mean(slopes))
    covariances = np.cov(gaps, slopes) * student_t.ppf(0.975, len(gaps) - 1) ** 2 / len(gaps)
    # gap^2 - 2 r gap slope + r^2 slope^2 <= what the covariances give, a quadratic inequality in r.
    square, middle, rest = slope**2 - covariances[1, 1], gap * slope - covariances[0, 1], gap**2 - covariances[0, 0]
    if square <= 0:
        raise ValueError(f"The slopes have a mean of {slope:.3g}, which is not significantly different from 0.")
    half = math.sqrt(max(middle**2 - square * rest, 0.0))
    return math.exp(gap / slope), math.exp((middle - half) / square), math.exp((middle + half) / square)


# ------------------------------------------------------------------------------------------------ from the lines


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]


def measured_speeds() -> dict[str, dict[str, Measured]]:
    """Returns kind of plan -> shape -> what its newest run through the Trainer took."""
    found: dict[str, dict[str, Measured]] = {}
    names = {"snip-hf 75%": "75%", "snip-hf 100%": "100%"}
    for line in read(SPEEDS):
        if line.get("recipe") in names:
            kind = f"{line['formats'][0]} {names[line['recipe']]}"
            found.setdefault(kind, {})[line["model"]] = Measured(line["speedup"], line["refresh_steps"])
    return found


def whole_trainings(speeds: Mapping[str, dict[str, Measured]]) -> Iterator[Gaps]:
    """Yields the gaps of forks that train from step 100 to step 2,800, the last one of their schedule."""
    lines = read("eval/results/forks-longer.jsonl")
    last = [line for line in lines if line["steps"] == LENGTHS[-1]]
    return gaps_of("30M, steps 101 to 2,800 of 2,800", last, slopes_between(lines, *LENGTHS[-2:]), WHOLE, speeds)


def last_steps(speeds: Mapping[str, dict[str, Measured]]) -> Iterator[Gaps]:
    """Yields the gaps of forks of 100 steps."""
    lines = read("eval/results/forks.jsonl")
    slopes = {fork_key(line): curve_slope(line["training_curve"]) for line in lines if line["contender"] == "bf16"}
    return gaps_of("30M, steps 601 to 700 of 700", lines, slopes, LAST, speeds)


def gaps_of(
    runs: str,
    lines: Sequence[dict[str, Any]],
    slopes: Mapping[tuple[Any, ...], float],
    kinds: Mapping[str, tuple[str, float]],
    speeds: Mapping[str, dict[str, Measured]],
) -> Iterator[Gaps]:
    """Yields the gaps of contenders, each on the forks that BF16 has too."""
    bf16 = {fork_key(line): line["loss"]["held_out_plan"] for line in lines if line["contender"] == "bf16"}
    for contender, (kind, every) in kinds.items():
        own = {fork_key(line): line["loss"]["held_out_plan"] for line in lines if line["contender"] == contender}
        both = [fork for fork in own if fork in bf16]
        gaps = [math.log(own[fork] / bf16[fork]) for fork in both]
        own_speeds = {shape: measured.with_refreshes(every) for shape, measured in speeds[kind].items()}
        yield Gaps(runs, contender, gaps, [slopes[fork] for fork in both], own_speeds)


def slopes_between(lines: Sequence[dict[str, Any]], before: int, after: int) -> dict[tuple[Any, ...], float]:
    """Returns fork -> slope of BF16's held-out loss between two lengths."""
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for line in sorted(lines, key=lambda line: line["steps"]):
        if line["contender"] == "bf16" and line["steps"] in (before, after):
            place = math.log(line["fork"]["point"] + line["steps"]), math.log(line["loss"]["held_out_plan"])
            found.setdefault(fork_key(line), []).append(place)
    return {fork: (high - low) / (last - first) for fork, ((first, high), (last, low)) in found.items()}


def curve_slope(curve: Sequence[float]) -> float:
    """Returns the slope of a short fork's training loss."""
    return -float(np.polyfit(np.log(FORK_STEPS), np.log(curve), 1)[0])


# ------------------------------------------------------------------------------------------------ the table


def section() -> str:
    """Returns the text between the markers."""
    speeds = measured_speeds()
    rows = [_row(one) for one in (*whole_trainings(speeds), *last_steps(speeds))]
    columns = ["runs", "contender", "forks", "gap, %", "slope", "more steps, %", "the same by the laws, %"]
    columns += [
        f"{shape}: {what}" for shape in SHAPES for what in ("speed with refreshes", "at equal loss", "by the laws")
    ]
    slopes = ", ".join(f"{law_slope(law):.3f} ({law})" for law in LAWS)
    legend = (
        "Gap to BF16 (natural logarithm of the losses' ratio) and slope: mean ± half of the 95% interval over forks. "
        "More steps and speed at equal loss: value (95% interval over the forks, paired: Fieller's interval of gap / "
        "slope), not corrected for the number of rows. Slope: of BF16 on the same forks, of the held-out loss between "
        "steps 2,200 and 2,800, and of the training loss over the last 100 of 700 steps. The laws' slopes at 7B "
        f"parameters and 140B tokens: {slopes}. Speeds: one run each on an H200, the newest through the Trainer, whose "
        "error is in no interval ([lines](../benchmarks/results/speed_trainer.jsonl)), 75% for all plans of that "
        "share, with the refreshes that a contender's name has. {fp4, fp8}: `hopper` kernels, commit e38ca4d. {mxfp4, "
        "mxfp8}: {mxfp4, fp8-tensor}, commit c78620b, since MXFP8 was not timed ([tensor_scaled.md](tensor_scaled.md))."
    )
    return f"{wrapped(legend)}\n\n{markdown(columns, rows)}"


def _row(one: Gaps) -> list[str]:
    own = more_steps(one.gaps, one.slopes)
    by_law = [more_steps(one.gaps, [law_slope(law)] * len(one.gaps)) for law in LAWS]
    gap, slope = Difference.of([100 * gap for gap in one.gaps]), Difference.of(one.slopes)
    row = [one.runs, one.contender, str(gap.forks), str(gap), str(slope).removeprefix("+"), _percent(own)]
    row.append("; ".join(map(_percent, by_law)))
    for shape in SHAPES:
        speed = one.speeds[shape]
        row += [f"{speed:.3f}", _at_equal_loss(speed, own), "; ".join(_at_equal_loss(speed, law) for law in by_law)]
    return row


def _percent(factor: tuple[float, float, float]) -> str:
    value, low, high = (f"{100 * (one - 1):+.1f}" for one in factor)
    return f"{value} ({low} to {high})"


def _at_equal_loss(speed: float, factor: tuple[float, float, float]) -> str:
    value, low, high = factor
    return f"{speed / value:.2f} ({speed / high:.2f} to {speed / low:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help=f"page with the marker {MARKER}; without it the table is printed")
    options = parser.parse_args()
    if options.docs:
        replace_between(options.docs, MARKER, section())
    else:
        print(section())


if __name__ == "__main__":
    main()
