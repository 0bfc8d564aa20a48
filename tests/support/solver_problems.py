"""Problems for the solver: one that is solved by hand, and programs with the shape of a large model."""

from __future__ import annotations

import math
import random
from typing import Any

# FLOPs of q, k, v, o, gate, up, down of a Llama-3 70B block, in units of hidden * hidden.
BLOCK_FLOPS = (1.0, 0.125, 0.125, 1.0, 3.5, 3.5, 3.5)
# Rates of the options relative to BF16, the most precise first, by the number of options.
RATES = {3: (1.0, 2.0, 4.0), 4: (1.0, 2.0, 2.0, 4.0), 5: (1.0, 2.0, 2.0, 4.0, 4.0)}


def make_problem(**fields: Any) -> dict[str, Any]:
    def group(name: str, cost: float) -> dict[str, Any]:
        options = [{"name": "fp8", "cost": 1.0, "weight": 0.0}, {"name": "fp4", "cost": cost, "weight": 0.5}]
        return {"name": name, "options": options}

    constraints = [{"name": "stage 0", "groups": None, "minimum": 0.5}]
    return {"groups": [group("a", 4.0), group("b", 3.0)], "constraints": constraints, **fields}


def make_speed_problem(
    gemms: int, stages: int, seed: int, options: int, speedup: float = 2.5, measured: bool = False, **fields: Any
) -> dict[str, Any]:
    """Returns a program of `gemms` GEMMs that can run in BF16 or in `options` - 1 formats, with a speed-up per stage.

    An option's weight is the share of the stage's BF16 time that it saves. With `measured` each GEMM has its own rates.
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
