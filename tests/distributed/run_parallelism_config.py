"""Trains by the Trainer under Accelerate's `ParallelismConfig`. Started by the tests in several processes.

Arguments: a folder with the model in `model/`, which gets rank<N>.pt with {name: what became of the run}, "one" of each
rank by itself; names of `RUNS` or `OF_FOUR`; "nccl" for GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from comparing import read_run
from configs import fp4_config
from devices import NCCL, Survivors, context_parallelism, device, join, on_gpu, without_others
from loops import LENGTH, ROWS, Loop
from run_distributed_config import COMPILED, PROBED, SAVE, STEPS, THREE_ROWS, by_trainer
from small import text
from tiny_runs import SCHEDULE
from torch import Tensor, nn

SHARDS = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
OFFLOADS = {**SHARDS, "fsdp_config": {**SHARDS["fsdp_config"], "cpu_offload": True}}
RULE = fp4_config(policy="layer-position", target_fp4_fraction=0.5, **COMPILED)
IN_LOOP = fp4_config(
    **{**SCHEDULE, **PROBED}, target_fp4_fraction=0.5, probe_batch_tokens=3 * LENGTH, backend="emulated"
)


def context(in_bf16: bool = True, **sizes: int) -> dict[str, Any]:
    """Returns the arguments of a Trainer whose ranks have halves of rows."""
    return {
        **SHARDS,
        "bf16": in_bf16,
        "per_device_train_batch_size": 8 // dist.get_world_size(),
        "parallelism_config": ParallelismConfig(cp_size=2, **sizes),
    }


class ContextLoop(Loop):
    """Trains on parts of rows, of which the first rank has no label in the rows that are probed. The controller is
    called inside the context that cuts them and makes them whole again."""

    def _take_step(self, step: int) -> None:
        rows = text(ROWS, LENGTH, step)
        labels = rows["labels"].clone()
        labels[0], labels[1, : LENGTH // 2 + 1] = -100, -100
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        cut = {**rows, "labels": labels, "shift_labels": shifted, "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}
        cut = {name: value.clone().to(device()) for name, value in cut.items()}
        # The mean of the ranks' losses is then that of all labels.
        self._batch = {**cut, "num_items_in_batch": (shifted != -100).sum().to(device()) / self.ranks}
        # torch has no ring attention for CPUs.
        ring = context_parallelism() if self.ranks > 1 and not on_gpu() else nullcontext()
        with ring, self.accelerator.maybe_context_parallel(list(cut.values()), [1] * len(cut)):
            super()._take_step(step)
        assert cut["input_ids"].shape == (ROWS, LENGTH)

    def batch(self, step: int) -> dict[str, Tensor]:
        return self._batch


def in_context(folder: Path, name: str, resumes: bool = False) -> dict[str, Any]:
    """Trains in a loop; the run that is not resumed saves."""
    wrapper = "context" if dist.is_initialized() else "ddp"
    run = ContextLoop(folder / name, IN_LOOP, wrapper, seed=int(resumes), in_bf16=on_gpu())
    saved = folder / "saved-in-context"
    if resumes:
        run.load(saved, "accelerate")
    else:
        run.run(SAVE).save(saved)
    found = run.run(STEPS).close()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return {
        "losses": list(found["losses"].values()),
        "plan": found["plans"][STEPS],
        "weights": found["weights"],
        "tables": read_run(folder / name / "snip")[2] if is_first and not resumes else {},
    }


def dp_shard(folder: Path, name: str) -> Any:
    return by_trainer(folder, name, {}, parallelism_config=ParallelismConfig(dp_shard_size=2), **SHARDS)


def replicated(folder: Path, name: str) -> Any:
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return by_trainer(folder, name, {}, parallelism_config=sizes, **SHARDS)


def tp(folder: Path, name: str) -> Any:
    return by_trainer(folder, name, {"tp_size": 2}, parallelism_config=ParallelismConfig(tp_size=2))


RUNS: dict[str, Callable[[Path, str], Any]] = {
    "ddp": lambda folder, name: by_trainer(folder, name, {}),
    "dp-shard": dp_shard,
    "tp": tp,
    "sharded": lambda folder, name: by_trainer(folder, name, {}, **SHARDS),
    "offloaded": lambda folder, name: by_trainer(folder, name, {}, **OFFLOADS),
    "sharded-rule": lambda folder, name: by_trainer(folder, name, {}, RULE, bf16=True, **SHARDS),
    "offloaded-rule": lambda folder, name: by_trainer(folder, name, {}, RULE, bf16=True, **OFFLOADS),
    "cp": lambda folder, name: by_trainer(folder, name, {}, THREE_ROWS, **context(in_bf16=False)),
    "cp-loop": in_context,
    "cp-loop-resumed": lambda folder, name: in_context(folder, name, resumes=True),
    "cp-plain": lambda folder, name: by_trainer(folder, name, {}, None, **context()),
    "cp-rule": lambda folder, name: by_trainer(folder, name, {}, RULE, **context()),
}
OF_FOUR: dict[str, Callable[[Path, str], Any]] = {
    "replicated": replicated,
    "cp-shard": lambda folder, name: by_trainer(folder, name, {}, **context(in_bf16=False, dp_shard_size=2)),
}
"""Runs of four processes."""


def main() -> None:
    folder = Path(sys.argv[1])
    found = Survivors(folder, survives=NCCL in sys.argv)
    with without_others(sys.argv):
        found.add("one", lambda: by_trainer(folder, f"one-{os.environ['RANK']}", {}, THREE_ROWS))
    join(sys.argv, offloads=True)
    for name in sys.argv[2:]:
        if name != NCCL:
            found.add(name, lambda name=name: (RUNS | OF_FOUR)[name](folder, name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
