"""Writes the files of a run that never took place, for the tests of reports."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

Assignment = dict[str, dict[str, str]]
KINDS = ("self_attn.q_proj", "mlp.down_proj")


def random_assignments(count: int, blocks: int = 3, granularity: str = "gemm", seed: int = 0) -> list[Assignment]:
    rng = random.Random(seed)

    def formats() -> dict[str, str]:
        picked = [rng.choice(("fp8", "fp4")) for _ in GEMMS]
        return dict(zip(GEMMS, picked if granularity == "gemm" else picked[:1] * 3, strict=True))

    return [{f"model.layers.{b}.{k}": formats() for b in range(blocks) for k in KINDS} for _ in range(count)]


def write_run(folder: Path, assignments: list[Assignment], kept: tuple[int, ...] = (), every: int = 100) -> None:
    """A run under assignments[0] at the start and assignments[i] after step `every * i + 10`, but for those kept."""
    snip = folder / "snip"
    snip.mkdir(parents=True)
    layers = list(assignments[0])
    flops = {layer: dict.fromkeys(GEMMS, 1.0 + row % 2) for row, layer in enumerate(layers)}
    config = {"policy": "snip", "formats": ["fp4", "fp8"], "ties": [], "granularity": "gemm"}
    config |= {"target_fp4_fraction": 0.5, "first_refresh": every}
    start = {"event": "start", "schema_version": 1, "step": 0, "config": config, "plan": assignments[0], "flops": flops}
    lines: list[dict[str, Any]] = [{**start, "stages": [layers], "model_name": "tiny"}]
    now = assignments[0]
    for index, new in list(enumerate(assignments))[1:]:
        applied = index not in kept
        cells = [
            (layer, gemm) for layer in layers for gemm in GEMMS if applied and now[layer][gemm] != new[layer][gemm]
        ]
        lines.append(
            {
                "event": "refresh",
                "step": every * index,
                "applied_step": every * index + 10 if applied else None,
                "decided_step": every * index + 10,
                "status": "applied" if applied else "kept",
                "reason": None if applied else "The solver [cbc] was killed after 60 s.",
                "fp4_fraction": 0.5,
                "stage_fp4_fractions": [0.5],
                "changes": {f"{layer}:{gemm}": [now[layer][gemm], new[layer][gemm]] for layer, gemm in cells},
                "layers_changed": len({layer for layer, _ in cells}),
                "objective": 12.345678 if applied else None,
                "bound": 12.3,
                "gap": 0.00367 if applied else None,
                "solver": "cbc",
                "solver_version": "2.10",
                "seconds": {"probe": 1.25, "divergence": 0.5, "solver": 3.0, "waited": 0.0},
                "loss": 4.0,
                "divergence": {},
            }
        )
        now = new if applied else now
    (snip / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    PrecisionPlan(now, flops, (tuple(layers),), PlanProvenance(step=0, policy="snip")).save(snip / "plan.json")


def write_divergence(folder: Path, step: int, values: dict[tuple[str, str], tuple[float, float]]) -> None:
    columns = ["layer", "gemm", "format", "loss_divergence", "weight_divergence", "flops"]
    rows = [
        [layer, gemm, name, loss, weight, 1.0]
        for (layer, gemm), (loss, weight) in values.items()
        for name, loss, weight in (("fp4", loss, weight), ("fp8", loss / 100, weight / 10))
    ]
    document = {"schema_version": 1, "step": step, "loss": 4.0, "columns": columns, "rows": rows}
    (folder / "snip" / f"divergence-{step}.json").write_text(json.dumps(document))


def write_losses(path: Path, steps: int) -> None:
    """Training losses 10 - step / 100 at every tenth step, validation losses 20 - step / 100 at every fiftieth."""
    log: list[dict[str, float]] = []
    for step in range(10, steps + 1, 10):
        log.append({"step": step, "loss": 10 - step / 100, "grad_norm": 1.0})
        if step % 50 == 0:
            log.append({"step": step, "eval_loss": 20 - step / 100, "eval_runtime": 1.0})
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"global_step": steps, "log_history": log}))
