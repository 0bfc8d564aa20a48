"""Trains what `CASES` names, one after the other, on all ranks. Started by the tests in several processes.

Arguments: a folder, for rank<N>.pt with {name: what `train` found}; the name of a group of `CASES`; "nccl" for GPUs.
What every step of a run begins with is read from states.pt, if the folder has one: {name: states as `train` takes
them}.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from devices import NCCL, join
from rank_cases import CASES
from trainings import train
from wrapped_models import counted_on_ranks, states_under_ddp, unreduced_gradients


def main() -> None:
    folder, group = Path(sys.argv[1]), sys.argv[2]
    if NCCL in sys.argv:
        join(sys.argv)
    states = torch.load(folder / "states.pt", weights_only=True) if (folder / "states.pt").exists() else {}
    found = {name: asdict(train(training, folder / name, states.get(name))) for name, training in CASES[group].items()}
    if group == "two":
        found["gradients"] = {fmt: unreduced_gradients(fmt) for fmt in ("fp8", "fp4")}
        found["states"] = {order: states_under_ddp(order) for order in ("before", "after")}
        found["wrapped"] = counted_on_ranks()
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
