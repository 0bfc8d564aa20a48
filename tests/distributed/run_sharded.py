"""Makes the runs of run_distributed_config.py and run_parallelism_config.py. Started by the tests in several processes,
in which one follows another, since each start takes seconds.

Arguments: a folder with folders that have a model in `model/`, which gets rank<N>.pt with {folder/name: what became of
the run}; words "folder/name", of run_parallelism_config.py in `accelerate/`, or else of run_distributed_config.py.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import run_distributed_config
import run_parallelism_config
import torch
import torch.distributed as dist
from devices import join

ACCELERATE = "accelerate"


def main() -> None:
    path = Path(sys.argv[1])
    join(sys.argv)
    found: dict[str, Any] = {}
    for word in sys.argv[2:]:
        part, name = word.split("/")
        folder = path / part
        if part == ACCELERATE:
            train = {**run_parallelism_config.RUNS, **run_parallelism_config.OF_FOUR}[name]
            runs = {name: partial(train, folder, name)}
        else:
            runs = run_distributed_config.runs(folder, name)
        for name, run in runs.items():
            print(f"{part}/{name}", flush=True)
            found[f"{part}/{name}"] = run()
    torch.save(found, path / f"rank{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
