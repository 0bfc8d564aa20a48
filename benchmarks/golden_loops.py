"""Trainings of the golden record in plain loops, on two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from golden_trainings import COMMON, VOCABULARY, files_of, llama, note_plan, weights_of
from torch import nn

from snip_hf import SnipConfig, SnipController

FOLDER = Path(__file__).resolve().parent


def with_ranks(case: str) -> Callable[[Path], dict[str, Any]]:
    """Returns a function that runs a case of `RANKS` on two processes."""

    def run(folder: Path) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        command = [sys.executable, str(FOLDER / "golden_record.py"), "rank", case, str(folder)]
        running = [
            subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        codes = [process.wait(timeout=600) for process in running]
        if any(codes):
            raise RuntimeError(f"The ranks of {case!r} ended with exit codes {codes}; their errors are above.")
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        return {"ranks": ranks, **files_of(folder)}

    return run


def two_ddp_ranks(folder: Path) -> dict[str, Any]:
    """Trains in a plain loop with accumulation and clipping."""
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = SnipConfig(**{**COMMON, "granularity": "gemm", "probe_tokens": None})
    controller = SnipController(model, optimizer, config, output_dir=folder)
    torch.manual_seed(7 + rank)
    losses: list[float] = []
    plans: list[dict[str, Any]] = []
    for step in range(1, 13):
        for part in range(2):
            tokens = torch.randint(0, VOCABULARY, (2, 128), generator=torch.Generator().manual_seed(100 * step + part))
            batch = {"input_ids": tokens[rank : rank + 1], "labels": tokens[rank : rank + 1]}
            controller.capture(batch)
            loss = model(**batch).loss
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        note_plan(plans, step, controller.plan)
    controller.close()
    return {"losses": losses, "plans": plans, "weights": weights_of(model.module)}


def pipeline(folder: Path) -> dict[str, Any]:
    """Trains the pipeline of the recipe: four stages on two processes."""
    sys.path.insert(0, str(FOLDER.parent / "recipes"))
    import pipeline as recipe

    training = recipe.Training(4, 4, torch.device("cpu"))
    optimizer = torch.optim.SGD([weight for part in training.parts for weight in part.parameters()], lr=0.1)
    changes = {"stages": 4, "target_fp4_fraction": 0.5, "probe_tokens": None, "probe_batch_tokens": None}
    controller = SnipController(
        training.parts,
        optimizer,
        SnipConfig(**{**COMMON, **changes}),
        output_dir=folder,
        pipeline=recipe.Pipeline(training.run),
    )
    losses: list[float | None] = []
    plans: list[dict[str, Any]] = []
    for step in range(1, 9):
        tokens = torch.randint(64, (4, 128), generator=torch.Generator().manual_seed(step)).cumsum(1) % 251
        batch = {"input_ids": tokens, "labels": tokens}
        controller.capture(batch)
        loss = training.run(batch)
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(None if loss is None else float(loss))
        note_plan(plans, step, controller.plan)
    controller.close()
    return {"losses": losses, "plans": plans, "weights": weights_of(nn.ModuleList(training.parts))}


RANKS = {"two DDP ranks": two_ddp_ranks, "pipeline": pipeline}


def run_rank(case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = RANKS[case](folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
