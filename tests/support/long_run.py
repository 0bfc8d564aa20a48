"""The files of a long run of a deep model that never took place, for the size of its report and the time it takes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from configs import fp4_config

from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
EVERY = 200
COLUMNS = ("layer", "gemm", "format", "loss_divergence", "weight_divergence", "flops")


def write_long_run(folder: Path, blocks: int = 80, refreshes: int = 100, seed: int = 0, stages: int = 4) -> None:
    """A run by GEMM, refreshed every 200 steps: a tenth of its GEMMs change each time, every tenth refresh is kept."""
    rng = random.Random(seed)
    layers = [f"model.layers.{block}.{kind}" for block in range(blocks) for kind in KINDS]
    config = fp4_config(granularity="gemm", target_fp4_fraction=0.5, refresh_every=EVERY, stages=stages)
    plan = {layer: {gemm: rng.choice(("fp8", "fp4")) for gemm in GEMMS} for layer in layers}
    per_stage = len(layers) // stages
    start: dict[str, Any] = {
        "event": "start",
        "step": 0,
        "config": config.to_dict(),
        "plan": {layer: dict(row) for layer, row in plan.items()},
        "flops": {layer: dict.fromkeys(GEMMS, 1e8) for layer in layers},
        "stages": [layers[i * per_stage : (i + 1) * per_stage] for i in range(stages)],
        "model_name": "a deep model",
    }
    lines = [start]
    (folder / "snip").mkdir(parents=True)
    for number in range(1, refreshes + 1):
        step = number * EVERY
        _write_divergences(folder, step, layers, rng)
        lines.append(_refresh(number, plan, rng, stages))
    PrecisionPlan(plan, start["flops"], start["stages"], PlanProvenance(step=0, policy="snip")).save(
        folder / "snip" / "plan.json"
    )
    (folder / "snip" / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write_losses(folder / "trainer_state.json", (refreshes + 1) * EVERY, rng)


def _refresh(number: int, plan: dict[str, dict[str, str]], rng: random.Random, stages: int) -> dict[str, Any]:
    """The line of a refresh; the plan is changed by it."""
    changes = {}
    if is_applied := number % 10 > 0:
        for layer, gemm in ((layer, gemm) for layer in plan for gemm in GEMMS):
            if rng.random() < 0.1:
                old, new = plan[layer][gemm], "fp8" if plan[layer][gemm] == "fp4" else "fp4"
                plan[layer][gemm], changes[f"{layer}:{gemm}"] = new, [old, new]
    step = number * EVERY
    return {
        "event": "refresh",
        "step": step,
        "applied_step": step + 10 if is_applied else None,
        "decided_step": step + 10,
        "status": "applied" if is_applied else "kept",
        "reason": None if is_applied else "The solver (cbc) was killed after 60 s.",
        "fp4_fraction": 0.5 + rng.random() / 100,
        "stage_fp4_fractions": [0.5 + rng.random() / 50 for _ in range(stages)],
        "changes": changes,
        "layers_changed": len({cell.rpartition(":")[0] for cell in changes}),
        "objective": 3 + rng.random() if is_applied else None,
        "bound": 3.0 if is_applied else None,
        "gap": rng.random() / 1000 if is_applied else None,
        "solver": "cbc" if is_applied else None,
        "solver_version": "mip 2.0.0" if is_applied else None,
        "seconds": {"probe": 20 + rng.random(), "solver": 5 + 3 * rng.random(), "waited": 0.0},
        "loss": 3.0,
    }


def _write_divergences(folder: Path, step: int, layers: list[str], rng: random.Random) -> None:
    rows = []
    for depth, layer in enumerate(layers):
        for gemm in (*GEMMS, "layer"):
            size = 1e-6 * (2 + depth % 7) * (1 + depth / len(layers)) * (1 + 1000 / step)
            loss = 0.0 if gemm in ("grad_input", "grad_weight") else size * rng.uniform(0.5, 2)
            weight = 100 * size * rng.uniform(0.5, 2)
            rows += [[layer, gemm, "fp4", loss, weight, 1e8], [layer, gemm, "fp8", loss / 50, weight / 20, 1e8]]
    document = {"schema_version": 2, "step": step, "loss": 3.0, "columns": COLUMNS, "rows": rows}
    (folder / "snip" / f"divergence-{step}.json").write_text(json.dumps(document))


def _write_losses(path: Path, steps: int, rng: random.Random) -> None:
    log: list[dict[str, float]] = []
    for step in range(10, steps + 1, 10):
        loss = 2.2 + 8 * step**-0.4 + rng.gauss(0, 0.03)
        log.append({"step": step, "loss": loss})
        if step % 500 == 0:
            log.append({"step": step, "eval_loss": loss + 0.05})
    path.write_text(json.dumps({"global_step": steps, "log_history": log}))
