"""Speed at equal loss: what is left of a speed per step when the steps that make good a loss gap are added.

    python -m eval.equal_loss --docs docs/results-formats.md

A run whose loss ends g above BF16's (of the logarithm, that is, relative) needs the factor e^(g / s) in steps to end
level, where s is the slope: by how much the logarithm of the loss falls per logarithm of the steps. Slopes are those of
the BF16 runs at the end of their schedules, from the same lines as the gaps, and those of two published scaling laws at
7B parameters and 140B tokens. Speeds are of compiled models on an H200, which are not the models of the gaps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bakeoff.documents import markdown, replace_between, wrapped
from .bakeoff.fork_statistics import Difference

ROOT = Path(__file__).resolve().parents[1]
MARKER = "equal-loss:table"
FORKS_RECIPE = "recipes/forks-formats.yaml"
# The forks' training curve has means over so many steps, up to step 700.
FORK_STEPS = (612.5, 637.5, 662.5, 687.5)
# L = E + A / N^a + B / D^b: Hoffmann et al. 2022 (arXiv:2203.15556), approach 3, and the fit of Besiroglu et al. 2024
# (arXiv:2404.10102) to the same data.
LAWS = {"Hoffmann": (1.69, 406.4, 410.7, 0.34, 0.28), "Besiroglu": (1.8172, 482.01, 2085.43, 0.3478, 0.3658)}
PARAMETERS, TOKENS = 7e9, 140e9
USUAL = {"start_step": 0, "objective": "additive", "loss_weight": 1.0, "weight_weight": 1.0, "switching_cost": 0.0}
SHARES = (0.75, 0.8)
# Name of a model in the lines -> its parameters.
SIZES = {"30M": "30M", "120M": "124M"}
SHAPES = ("8B, 8 layers", "TinyLlama-1.1B")
SPEEDS = ("speed_trainer", "speed_mxfp4")
# Of the Trainer's runs in these lines, oldest first.
COMMITS = ("e38ca4d-dirty", "d00eed9", "b0d2509", "c78620b")


@dataclass(frozen=True)
class Gap:
    """Of a contender to BF16, natural logarithms of losses."""

    source: str
    contender: str
    gap: Difference
    slope: Difference
    speeds: dict[str, float]
    """Shape -> speed of a step by BF16's; of a plan of this kind."""


def law_slope(law: str) -> float:
    """Returns how much the logarithm of the loss falls per logarithm of the tokens, by a scaling law at 7B."""
    least, a, b, alpha, beta = LAWS[law]
    of_tokens = b / TOKENS**beta
    return beta * of_tokens / (least + a / PARAMETERS**alpha + of_tokens)


def more_steps(gap: Difference, slope: Difference) -> tuple[float, float, float]:
    """Returns the factor of steps that makes a gap good, and its 95% interval, both errors taken as independent."""
    ratio = gap.mean / slope.mean
    relative = slope.half_width / slope.mean if slope.forks > 1 else 0.0
    half = math.hypot(gap.half_width / slope.mean, ratio * relative)
    return math.exp(ratio), math.exp(ratio - half), math.exp(ratio + half)


# ------------------------------------------------------------------------------------------------ from the lines


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]


def measured_speeds() -> dict[str, dict[str, float]]:
    """Returns kind of plan -> shape -> speed of a step by BF16's, the newest one through the Trainer."""
    found: dict[str, dict[str, float]] = {}
    names = {"snip-hf 75%": "75%", "snip-hf 100%": "100%"}
    lines = [line for name in SPEEDS for line in read(f"benchmarks/results/{name}.jsonl")]
    for line in sorted((line for line in lines if line.get("recipe") in names), key=_age):
        found.setdefault(f"{line['formats'][0]} {names[line['recipe']]}", {})[line["model"]] = line["speedup"]
    return found


def _age(line: dict[str, Any]) -> int:
    return COMMITS.index(line["commit"])


def full_runs(speeds: dict[str, dict[str, float]]) -> Iterator[Gap]:
    """Yields the gaps of whole runs, by model: mean over shares of each seed."""
    runs = read("eval/results/bakeoff.jsonl")
    where = ("model", "seed", "learning_rate", "steps")
    bf16 = {tuple(run["spec"][name] for name in where): run for run in runs if run["spec"]["policy"] == "bf16"}
    for model in SIZES:
        slope = Difference.of([_end_slope(run) for key, run in bf16.items() if key[0] == model])
        for name, policy, kind in (("all FP4", "uniform-fp4", "fp4 100%"), ("SNIP by GEMM", "snip", "fp4 75%")):
            seeds: dict[int, list[float]] = {}
            for run in runs:
                spec = run["spec"]
                if spec["model"] != model or spec["policy"] != policy or tuple(spec[n] for n in where) not in bf16:
                    continue
                if policy == "snip" and not _is_usual(spec):
                    continue
                reference = bf16[tuple(spec[n] for n in where)]
                seeds.setdefault(spec["seed"], []).append(_log_ratio(run["loss"]["plan"], reference["loss"]["plan"]))
            gap = Difference.of([statistics.fmean(gaps) for gaps in seeds.values()])
            yield Gap(f"{SIZES[model]} from the start", name, gap, slope, speeds[kind])


def _is_usual(spec: dict[str, Any]) -> bool:
    usual = {**USUAL, "granularity": "gemm", "refresh_every": 250}
    return spec["share"] in SHARES and all(spec[name] == value for name, value in usual.items())


def _end_slope(run: dict[str, Any]) -> float:
    """The slope between the last two evaluations, where the learning rate decays to its end."""
    (before, high), (after, low) = run["validation_curve"][-2:]
    return _log_ratio(high, low) / math.log(after / before)


def forks(speeds: dict[str, dict[str, float]]) -> Iterator[Gap]:
    """Yields the gaps of forks of 100 steps."""
    lines = [line for line in read("eval/results/forks.jsonl") if FORKS_RECIPE in line["command"]]
    bf16 = {_fork(line): line for line in lines if line["contender"] == "bf16"}
    slope = Difference.of([_fork_slope(line["training_curve"]) for line in bf16.values()])
    snip = "snip {{{}}}, 3.2 times BF16 (ideal) by gemm"
    kinds = {
        "fp4": "fp4 100%",
        snip.format("fp4, fp8"): "fp4 75%",
        "mxfp4": "mxfp4 100%",
        snip.format("mxfp4, mxfp8"): "mxfp4 75%",
    }
    for contender, kind in kinds.items():
        gaps = [
            _log_ratio(line["loss"]["held_out_plan"], bf16[_fork(line)]["loss"]["held_out_plan"])
            for line in lines
            if line["contender"] == contender and _fork(line) in bf16
        ]
        yield Gap("forks, the last 100 of 700 steps", contender, Difference.of(gaps), slope, speeds[kind])


def _fork(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line["fork"].values())


def _fork_slope(curve: Sequence[float]) -> float:
    return -float(np.polyfit(np.log(FORK_STEPS), np.log(curve), 1)[0])


def _log_ratio(loss: float, reference: float) -> float:
    return math.log(loss / reference)


# ------------------------------------------------------------------------------------------------ the table


def section() -> str:
    """Returns the text between the markers."""
    speeds = measured_speeds()
    gaps = [*full_runs(speeds), *forks(speeds)]
    laws = [Difference.of([law_slope(law)]) for law in LAWS]
    rows = []
    for one in gaps:
        own = more_steps(one.gap, one.slope)
        by_law = [more_steps(one.gap, law) for law in laws]
        row = [one.source, one.contender, f"{100 * one.gap.mean:+.3f} ± {100 * one.gap.half_width:.3f}"]
        row += [f"{one.slope.mean:.3f} ± {one.slope.half_width:.3f}", _percent(own)]
        row += [" to ".join(f"{100 * (factor[0] - 1):+.1f}" for factor in by_law)]
        for shape in SHAPES:
            speed = one.speeds[shape]
            row += [f"{speed:.3f}", _at_equal_loss(speed, own), " to ".join(f"{speed / f[0]:.2f}" for f in by_law)]
        rows.append(row)
    columns = ["runs", "contender", "gap, %", "slope", "more steps, %", "the same by the laws, %"]
    columns += [f"{shape}: {what}" for shape in SHAPES for what in ("speed per step", "at equal loss", "by the laws")]
    slopes = ", ".join(f"{law_slope(law):.3f} ({law})" for law in LAWS)
    legend = (
        "Gap to BF16 (natural logarithm of the losses' ratio) and slope: mean ± half of the 95% interval over seeds or "
        "forks. More steps and speed at equal loss: value (95% interval, both errors as independent), not corrected "
        f"for the number of rows. The laws' slopes at 7B parameters and 140B tokens: {slopes}. Speeds beside "
        "{mxfp4, mxfp8} are those of {mxfp4, fp8-tensor}, since MXFP8 was not timed. Each speed is the newest through "
        "the Trainer ([tensor_scaled.md](tensor_scaled.md))."
    )
    return f"{wrapped(legend)}\n\n{markdown(columns, rows)}"


def _percent(factor: tuple[float, float, float]) -> str:
    value, low, high = (f"{100 * (one - 1):+.1f}" for one in factor)
    return f"{value} ({low} to {high})"


def _at_equal_loss(speed: float, factor: tuple[float, float, float]) -> str:
    value, low, high = factor
    return f"{speed / value:.3f} ({speed / high:.3f} to {speed / low:.3f})"


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
