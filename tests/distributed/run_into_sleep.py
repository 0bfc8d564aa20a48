"""Lets one rank sleep for ever in the middle of a refresh, and notes what becomes of the other.

Arguments: a folder, for rank<N>.json with the error and its time; the rank that sleeps; one of `PLACES`, where it does.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from configs import fp4_config
from small import text, tiny_llama

from snip_hf import SnipController
from snip_hf.estimation import divergence
from snip_hf.parallel.ranks import RankError, Ranks
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.training.refresh import Solving

PLACES: dict[str, tuple[Any, str]] = {
    "probe": (divergence, "run_probe"),
    "exchange": (Ranks, "all_to_all"),
    "solver": (SolverProcess, "result"),
}


def sleep(*args: Any, **kwargs: Any) -> None:
    threading.Event().wait()


def main() -> None:
    folder, sleeper, where = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = tiny_llama(hidden=32, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = fp4_config(first_refresh=1, apply_delay=0, solver_time_limit=4.0)
    controller = SnipController(model, optimizer, config, solving=Solving(rank_grace=2.0))
    batch = text(2, 128, rank)
    controller.capture(batch)
    model(**batch).loss.backward()
    if rank == sleeper:
        setattr(*PLACES[where], sleep)
    dist.barrier()
    began = time.monotonic()
    try:
        controller.before_optimizer_step(1)
        optimizer.step()
        controller.after_step(1)
    except RankError as error:
        found = {"seconds": time.monotonic() - began, "error": str(error)}
        (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
