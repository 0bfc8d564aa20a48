"""Times each solver on the integer program of a large model, and shows how close to the optimum it comes.

Random costs with the shape of measured divergences (log-normal, FP4 several times FP8), one group per linear layer,
FLOP shares as in Llama blocks (q, k, v, o, gate, up, down), the same FP4 share demanded of every stage.

    python benchmarks/solver_time.py
    python benchmarks/solver_time.py --groups 560 882 --stages 1 8 --solvers cbc highs greedy --seeds 3

With `--options` 3 to 5 the groups are GEMMs, three per linear, in BF16 and formats of 2 and 4 times its rate. What is
demanded of every stage is a speed-up. Rates are those of a table, or of every GEMM its own, as measured.

    python benchmarks/solver_time.py --groups 1680 --options 5 --speedup 2.5 --rates table measured
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.origin import origin_of

from snip_hf.planning.solver.process import SolverProcess
from snip_hf.planning.solver.solution import SolverError

# FLOPs of q, k, v, o, gate, up, down of a Llama-3 70B block, in units of hidden * hidden.
BLOCK_FLOPS = (1.0, 0.125, 0.125, 1.0, 3.5, 3.5, 3.5)
# Rates of the options relative to BF16, the most precise first, by their number.
RATES = {3: (1.0, 2.0, 4.0), 4: (1.0, 2.0, 2.0, 4.0), 5: (1.0, 2.0, 2.0, 4.0, 4.0)}


def make_problem(groups: int, stages: int, seed: int, target: float = 0.75, **fields: Any) -> dict[str, Any]:
    """A problem of `groups` linears in `stages` equal runs of layers; weights of a stage sum to 1."""
    draw = random.Random(f"{groups} {stages} {seed}")
    flops = [BLOCK_FLOPS[index % len(BLOCK_FLOPS)] for index in range(groups)]
    stage_of = [index * stages // groups for index in range(groups)]
    totals = [math.fsum(f for f, s in zip(flops, stage_of, strict=True) if s == stage) for stage in range(stages)]
    made = []
    for index in range(groups):
        fp8 = draw.lognormvariate(0.0, 1.0) / groups / 10
        fp4 = fp8 + draw.lognormvariate(0.0, 1.0) / groups
        weight = flops[index] / totals[stage_of[index]]
        options = [{"name": "fp8", "cost": fp8, "weight": 0.0}, {"name": "fp4", "cost": fp4, "weight": weight}]
        made.append({"name": f"linear {index}", "options": options})
    rows = [
        {
            "name": f"stage {stage}",
            "groups": [f"linear {index}" for index in range(groups) if stage_of[index] == stage],
            "minimum": target,
        }
        for stage in range(stages)
    ]
    return {"groups": made, "constraints": rows, **fields}


def make_speed_problem(
    gemms: int, stages: int, seed: int, options: int, speedup: float = 2.5, measured: bool = False, **fields: Any
) -> dict[str, Any]:
    """A problem of `gemms` GEMMs, three per linear, with BF16 and `options` - 1 formats, and a speed-up per stage.

    A weight is the time that an option saves, by the stage's time in BF16. `measured`: every GEMM has rates of its own.
    """
    draw = random.Random(f"{gemms} {stages} {seed} {options}")
    stage_of = [index * stages // gemms for index in range(gemms)]
    times = [BLOCK_FLOPS[index // 3 % len(BLOCK_FLOPS)] for index in range(gemms)]
    if measured:
        times = [time * draw.lognormvariate(0.0, 0.5) for time in times]
    totals = [math.fsum(t for t, s in zip(times, stage_of, strict=True) if s == stage) for stage in range(stages)]
    made = []
    for index in range(gemms):
        # Forward GEMMs do most of the damage.
        size = draw.lognormvariate(0.0, 1.0) * (10 if index % 3 == 0 else 1) / gemms
        choices = []
        for option, nominal in enumerate(RATES[options]):
            rate = nominal * draw.uniform(0.7, 1.0) if measured and nominal > 1 else nominal
            damage = 0.0 if nominal == 1 else size * (nominal / 4) ** 5 * draw.lognormvariate(0.0, 0.3)
            saved = times[index] / totals[stage_of[index]] * (1 - 1 / rate)
            choices.append({"name": f"option {option}", "cost": damage, "weight": saved})
        made.append({"name": f"GEMM {index}", "options": choices})
    rows = [
        {
            "name": f"stage {stage}",
            "groups": [f"GEMM {index}" for index in range(gemms) if stage_of[index] == stage],
            "minimum": 1 - 1 / speedup,
        }
        for stage in range(stages)
    ]
    return {"groups": made, "constraints": rows, **fields}


def main() -> None:
    """Prints one row per size and solver: median and largest seconds over the seeds, largest gap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[56, 560, 882, 45032])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--solvers", nargs="+", default=["cbc", "highs", "greedy", "auto"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--relative-gap", type=float, default=1e-4)
    parser.add_argument("--options", type=int, choices=[2, *RATES], default=2)
    parser.add_argument("--speedup", type=float, default=2.5, help="with more than two options")
    parser.add_argument("--rates", nargs="+", choices=["table", "measured"], default=["table"], help="as above")
    parser.add_argument("--output", type=Path, help="JSONL file; a line per seed is added")
    args = parser.parse_args()

    columns = ("groups", "stages", "rates", "solver", "answered by", "median s", "most s", "largest gap")
    print("{:>7} {:>6} {:>8} {:>7} {:>34} {:>9} {:>8} {:>12}".format(*columns))
    kinds = ["-"] if args.options == 2 else args.rates
    source = origin_of("cpu")
    for groups, stages, rates, solver in itertools.product(args.groups, args.stages, kinds, args.solvers):
        which = {"groups": groups, "stages": stages, "options": args.options, "rates": rates, "asked": solver}
        lines = list(_solved(args, groups, stages, rates, solver))
        print(f"{groups:7d} {stages:6d} {rates:>8} {solver:>7} {_row(lines)}", flush=True)
        if args.output:
            with args.output.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps({**which, **line, **source}) + "\n" for line in lines)


def _solved(args: argparse.Namespace, groups: int, stages: int, rates: str, solver: str) -> Iterator[dict[str, Any]]:
    """Solves one size by one solver for every seed; yields what the solver said, up to its first error."""
    fields = {"solver": solver, "time_limit": args.time_limit, "relative_gap": args.relative_gap}
    for seed in range(args.seeds):
        if args.options == 2:
            problem = make_problem(groups, stages, seed, args.target, **fields)
        else:
            timed = rates == "measured"
            problem = make_speed_problem(groups, stages, seed, args.options, args.speedup, timed, **fields)
        try:
            with SolverProcess.start(problem) as process:
                result = process.result()
        except SolverError as error:
            yield {"seed": seed, "error": str(error)}
            return
        yield {
            "seed": seed,
            "seconds": result.seconds,
            "gap": result.gap,
            "solver": result.solver,
            "status": result.status,
        }


def _row(lines: Sequence[dict[str, Any]]) -> str:
    """Returns what the table says of all seeds."""
    if "error" in lines[-1]:
        return str(lines[-1]["error"])
    seconds = [line["seconds"] for line in lines]
    gap = max(math.inf if line["gap"] is None else line["gap"] for line in lines)
    name = " ".join(sorted({f"{line['solver']}, {line['status']}" for line in lines}))
    return f"{name:>34} {statistics.median(seconds):9.3f} {max(seconds):8.3f} {gap:12.2e}"


if __name__ == "__main__":
    main()
