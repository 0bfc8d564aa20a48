"""The integer program of a 70B model: prices like measured ones, and what the solvers take for it.

    python benchmarks/scale_program.py prices --output benchmarks/results/scale_prices.jsonl
    python benchmarks/scale_program.py solve --output benchmarks/results/scale_program.jsonl

`prices` trains a small Llama on text and estimates its divergences. Of the default objective's prices it writes, per
GEMM, the mean and the standard deviation of their logarithms in FP4, and of the logarithm of FP8's price by FP4's.
`solve` draws the prices of 560 linears, three GEMMs each, from log-normal distributions with these parameters, and
solves the program with one stage and with 80, one block each. Formats: 2 (FP4, FP8) with 75% of the FLOPs in FP4, or 5
(two of 4 bits, two of 8, BF16) with a speed-up, where every GEMM has times of its own. A line per problem.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from shared import small_models, texts
from shared.json_lines import read_lines
from shared.origin import origin_of
from solver_time import BLOCK_FLOPS

from snip_hf import SnipConfig, convert_model, estimate_divergence
from snip_hf.estimation.pending import LAYER
from snip_hf.estimation.table import DivergenceTable
from snip_hf.numerics.formats import UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.planning.solver.solution import SolverError

PRICES = Path(__file__).parent / "results" / "scale_prices.jsonl"
BLOCKS = 80
SHARE = 0.75
SPEEDUP = 2.5
# Weight of dW^2 in the default objective.
OF_WEIGHT_DIVERGENCE = 0.1
# Option -> nominal rate and format whose price it has, times a factor of its own. Two formats of equal rate differ by
# `VARIANT`, and times of GEMMs by `OF_TIMES` (standard deviations of logarithms; ours, as in solver_time.py).
FIVE = {"bf16": (1.0, None), "8 bits, a": (2.0, "fp8"), "8 bits, b": (2.0, "fp8")} | {
    "4 bits, a": (4.0, "fp4"),
    "4 bits, b": (4.0, "fp4"),
}
VARIANT = 0.3
OF_TIMES = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prices", "solve"])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; lines are added")
    parser.add_argument("--steps", type=int, default=200, help="prices: of training (default 200)")
    parser.add_argument("--blocks", type=int, default=6, help="prices: of the small model (default 6)")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, BLOCKS])
    parser.add_argument("--formats", type=int, nargs="+", choices=[2, 5], default=[2, 5])
    parser.add_argument("--solvers", nargs="+", default=["cbc", "highs"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60, as in SnipConfig)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = origin_of("cpu")
    found = measured_prices(options.steps, options.blocks) if options.what == "prices" else solved(options)
    for line in found:
        print(json.dumps(line), flush=True)
        with options.output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**line, **source}) + "\n")


# ------------------------------------------------------------------------------------------------ prices


def measured_prices(steps: int, blocks: int) -> Iterator[dict[str, Any]]:
    """Yields a line per GEMM with the parameters of its prices, in a small Llama after some AdamW steps."""
    text = texts.load_text(None, "cpu")
    state = small_models.new_state("llama", "adamw", "cpu", seed=0, blocks=blocks, vocabulary=texts.VOCABULARY)
    state.train(text, steps)
    config = SnipConfig(start_format=UNQUANTIZED.name, loss_estimator="token-fisher")
    convert_model(state.model, config)
    table = estimate_divergence(state.model, text.batch(steps, 4), state.optimizer, config)
    prices = prices_of(table)
    for gemm in GEMMS:
        pairs = [(prices[layer, gemm, "fp4"], prices[layer, gemm, "fp8"]) for layer in layers_of(table)]
        # The grad_input of the first block's q, k and v reaches no other linear and costs nothing.
        above = [pair for pair in pairs if min(pair) > 0]
        logs = [math.log(high * len(pairs)) for high, _ in above]
        steps_down = [math.log(low / high) for high, low in above]
        yield {
            "gemm": gemm,
            "linears": len(pairs),
            "above_0": len(above),
            "mean": round(statistics.fmean(logs), 3),
            "deviation": round(statistics.stdev(logs), 3),
            "mean_of_fp8": round(statistics.fmean(steps_down), 3),
            "deviation_of_fp8": round(statistics.stdev(steps_down), 3),
            "steps": steps,
            "blocks": blocks,
        }


def layers_of(table: DivergenceTable) -> list[str]:
    return list(dict.fromkeys(row.layer for row in table.rows))


def prices_of(table: DivergenceTable) -> dict[tuple[str, str, str], float]:
    """Returns (layer, GEMM, format) -> price, as the default objective has it at granularity "gemm"."""
    rows = [row for row in table.rows if row.gemm != LAYER]
    first = [row for row in rows if row.format == SnipConfig().formats[0]]
    loss, weight = sum(row.loss_divergence for row in first), sum(row.weight_divergence**2 for row in first)
    return {
        (row.layer, row.gemm, row.format): row.loss_divergence / loss
        + OF_WEIGHT_DIVERGENCE * row.weight_divergence**2 / weight
        for row in rows
    }


# ------------------------------------------------------------------------------------------------ the program


def make_program(
    prices: Mapping[str, Mapping[str, float]], formats: int, stages: int, seed: int, **fields: Any
) -> dict[str, Any]:
    """The program of 80 blocks by GEMM, with prices drawn as log-normal.

    Args:
        prices: GEMM -> its line of `prices`.
        formats: 2 or 5.
        stages: equal runs of blocks, each with a constraint of its own.
        seed: of the draw.
        fields: solver and its settings.
    """
    draw = random.Random(f"{formats} {seed}")
    linears = BLOCKS * len(BLOCK_FLOPS)
    groups, stage_of, sizes = [], [], []
    for index, gemm in itertools.product(range(linears), GEMMS):
        line = prices[gemm]
        fp4 = math.exp(draw.gauss(line["mean"], line["deviation"])) / linears
        fp8 = fp4 * math.exp(draw.gauss(line["mean_of_fp8"], line["deviation_of_fp8"]))
        size = BLOCK_FLOPS[index % len(BLOCK_FLOPS)]
        if formats == 2:
            options = [("fp8", fp8, 0.0), ("fp4", fp4, 1.0)]
        else:
            size *= draw.lognormvariate(0.0, OF_TIMES)
            options = [_option(draw, name, {"fp4": fp4, "fp8": fp8}) for name in FIVE]
        groups.append((f"linear {index}:{gemm}", options))
        stage_of.append(index // len(BLOCK_FLOPS) * stages // BLOCKS)
        sizes.append(size)
    totals = [math.fsum(s for s, at in zip(sizes, stage_of, strict=True) if at == stage) for stage in range(stages)]
    made = [
        {
            "name": name,
            "options": [
                {"name": option, "cost": cost, "weight": gain * size / totals[stage]} for option, cost, gain in options
            ],
        }
        for (name, options), size, stage in zip(groups, sizes, stage_of, strict=True)
    ]
    minimum = SHARE if formats == 2 else 1 - 1 / SPEEDUP
    constraints = [
        {
            "name": f"stage {stage}",
            "groups": [group["name"] for group, at in zip(made, stage_of, strict=True) if at == stage],
            "minimum": minimum,
        }
        for stage in range(stages)
    ]
    return {"groups": made, "constraints": constraints, **fields}


def _option(draw: random.Random, name: str, prices: Mapping[str, float]) -> tuple[str, float, float]:
    """Returns name, cost and saving of one of five options."""
    nominal, fmt = FIVE[name]
    if fmt is None:
        return name, 0.0, 0.0
    rate = nominal * draw.uniform(0.7, 1.0)
    return name, prices[fmt] * draw.lognormvariate(0.0, VARIANT), 1 - 1 / rate


def solved(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a line per problem and solver."""
    prices = {line["gemm"]: line for line in read_lines(PRICES)}
    for formats, stages, seed, solver in itertools.product(
        options.formats, options.stages, range(options.seeds), options.solvers
    ):
        fields = {"solver": solver, "time_limit": options.time_limit, "relative_gap": SnipConfig().solver_gap}
        problem = make_program(prices, formats, stages, seed, **fields)
        line = {"formats": formats, "stages": stages, "seed": seed, "asked": solver, "groups": len(problem["groups"])}
        try:
            with SolverProcess.start(problem) as process:
                result = process.result()
        except SolverError as error:
            yield {**line, "error": str(error)}
            continue
        names = ("solver", "status", "seconds", "gap", "objective")
        yield {**line, **{name: getattr(result, name) for name in names}}


if __name__ == "__main__":
    main()
