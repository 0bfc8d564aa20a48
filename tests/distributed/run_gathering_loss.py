"""Trains with a probed loss that gathers over the ranks, and fails on rank 1 in the probe of step 2. Started by a test.

Arguments: a folder, for rank<N>.json with {scenario: what became of it}; "shards" for the one scenario that ends the
run, in which FSDP2 alone gathers; "nccl" for GPUs, on which only the scenarios of `ON_GPUS` run.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from devices import NCCL, join
from loops import CONFIG, Loop, history
from run_faults import LAYER, Keeping
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from snip_hf.layers.state import snip_linears

STEPS = 8
# Refreshes at steps 2 and 6, applied after steps 4 and 8; or at step 6 only.
WITH = replace(CONFIG, solver_time_limit=30.0)
WITHOUT_FIRST = replace(WITH, first_refresh=6)
MEMORY = "CUDA out of memory (simulated)"
TIMEOUT = 10.0  # seconds, of training's process group
WRAPPERS = ("ddp", "fsdp2")
# Places in which rank 1 fails.
PLACES = ("before it gathers", "between two", "in the backward pass", "where the loss catches errors")
FAILING = [*(f"ddp {place}" for place in PLACES), "fsdp2 before it gathers", "fsdp2 in the backward pass"]
# The last one is that of collectives in autograd's own threads.
ON_GPUS = (
    *["ddp without first", "fsdp2 without first", "ddp between two", "fsdp2 before it gathers"],
    *["ddp in the backward pass", "fsdp2 in the backward pass"],
)


class GatheringLoop(Loop):
    """Its loss is the mean over the ranks' sequences, which gradients flow back through."""

    place: str | None = None

    def capture(self, batch: dict[str, Tensor]) -> None:
        self.controller.capture(batch, self._loss)

    def _loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        # FSDP2 has gathered nothing yet: its layers do so one by one.
        self._fail("before it gathers")
        loss: Tensor = model(**batch).loss
        figures = [torch.empty_like(loss) for _ in range(self.ranks)]
        if self.place == "where the loss catches errors":
            try:
                dist.all_gather(figures, loss.detach())
            except Exception:
                logging.getLogger("test").info("caught")
        else:
            dist.all_gather(figures, loss.detach())
        self._fail("between two", "where the loss catches errors")
        dist.all_gather_object([None] * self.ranks, {"loss": float(loss.detach())})
        loss.register_hook(lambda gradient: self._fail("in the backward pass"))
        return all_reduce(loss) / self.ranks

    def _fail(self, *places: str) -> None:
        if self.rank == 1 and self.at == 2 and self.place in places:
            raise torch.OutOfMemoryError(MEMORY)


def train(folder: Path, prepare: Callable[[GatheringLoop], None], first: bool, wrapper: str) -> dict[str, Any]:
    messages: list[str] = []
    handler = Keeping(messages)
    logging.getLogger("snip_hf").addHandler(handler)
    own = folder / f"rank{dist.get_rank()}"
    loop = GatheringLoop(own, WITH if first else WITHOUT_FIRST, wrapper)
    prepare(loop)
    began = time.monotonic()
    loop.run(STEPS).controller.close()
    seconds = time.monotonic() - began
    logging.getLogger("snip_hf").removeHandler(handler)
    lines = history(own) if loop.rank == 0 else []
    return {"losses": loop.losses, "plans": loop.plans, "history": lines, "messages": messages, "seconds": seconds}


def end(folder: Path) -> None:
    """Notes when rank 1 warns and when the run ends: the loss is the model's, and rank 1 fails in its pass."""
    join(sys.argv, TIMEOUT)
    messages: list[str] = []
    logging.getLogger("snip_hf").addHandler(Keeping(messages))
    loop = Loop(folder / f"rank{dist.get_rank()}", WITH, "fsdp2").run(1)
    began = time.monotonic()

    def fail(*args: Any) -> None:
        if loop.rank == 1 and snip_linears(loop.bare)[LAYER].snip_recorder is not None:
            raise torch.OutOfMemoryError(MEMORY)

    loop.bare.get_submodule(LAYER).register_forward_pre_hook(lambda module, args: fail() or args)
    try:
        loop.run(2)
        ended = None
    except Exception as error:
        ended = type(error).__name__
    found = {"ended": ended, "messages": messages, "seconds": time.monotonic() - began}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if "shards" in sys.argv:
        return end(folder)
    join(sys.argv)
    everything = [f"{wrapper} {what}" for wrapper in WRAPPERS for what in (None, "without first")] + FAILING
    found = {}
    for name in ON_GPUS if NCCL in sys.argv else everything:
        wrapper, place = name.split(maxsplit=1)
        found[name] = train(
            folder / name.replace(" ", "-"),
            lambda loop, place=place: setattr(loop, "place", place),
            place != "without first",
            wrapper,
        )
        # At once: on a GPU the ranks of a later one may not come to their end.
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
