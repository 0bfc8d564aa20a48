"""How long does each solver take for the integer program of a large model, and how close does it come?

Random costs with the shape of measured divergences (log-normal, FP4 several times FP8), one group per linear layer,
FLOP shares as in Llama blocks (q, k, v, o, gate, up, down), the same FP4 share demanded of every stage.

    python benchmarks/solver_time.py
    python benchmarks/solver_time.py --groups 560 882 --stages 1 8 --solvers cbc highs greedy --seeds 3
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from typing import Any

from snip_hf.planning.solver.process import SolverProcess
from snip_hf.planning.solver.solution import SolverError

# FLOPs of q, k, v, o, gate, up, down of a Llama-3 70B block, in units of hidden * hidden.
BLOCK_FLOPS = (1.0, 0.125, 0.125, 1.0, 3.5, 3.5, 3.5)


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


def main() -> None:
    """Print one row per size and solver: median and largest seconds over the seeds, largest gap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[56, 560, 882, 45032])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--solvers", nargs="+", default=["cbc", "highs", "greedy", "auto"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--relative-gap", type=float, default=1e-4)
    args = parser.parse_args()

    columns = ("groups", "stages", "solver", "answered by", "median s", "most s", "largest gap")
    print("{:>7} {:>6} {:>7} {:>34} {:>9} {:>8} {:>12}".format(*columns))
    for groups in args.groups:
        for stages in args.stages:
            for solver in args.solvers:
                fields = {"solver": solver, "time_limit": args.time_limit, "relative_gap": args.relative_gap}
                row = f"{groups:7d} {stages:6d} {solver:>7}"
                try:
                    results = []
                    for seed in range(args.seeds):
                        with SolverProcess.start(make_problem(groups, stages, seed, args.target, **fields)) as process:
                            results.append(process.result())
                except SolverError as error:
                    print(f"{row} {error}", flush=True)
                    continue
                seconds = [result.seconds for result in results]
                gap = max(math.inf if result.gap is None else result.gap for result in results)
                name = " ".join(sorted({f"{result.solver}, {result.status}" for result in results}))
                print(f"{row} {name:>34} {statistics.median(seconds):9.3f} {max(seconds):8.3f} {gap:12.2e}", flush=True)


if __name__ == "__main__":
    main()
