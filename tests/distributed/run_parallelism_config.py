"""Trains by the Trainer under Accelerate's `ParallelismConfig`. Started by the tests in several processes.

Arguments: a folder with the model in `model/`, which gets rank<N>.pt with {name: what became of the run}; names of
`RUNS` or `OF_FOUR`; "nccl" for GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import ParallelismConfig
from configs import fp4_config
from devices import NCCL, Survivors, join
from run_distributed_config import BY_TRAINER, COMPILED, by_trainer

SHARDS = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
OFFLOADS = {**SHARDS, "fsdp_config": {**SHARDS["fsdp_config"], "cpu_offload": True}}
RULE = fp4_config(policy="layer-position", target_fp4_fraction=0.5, **COMPILED)


def context() -> dict[str, Any]:
    """Returns the arguments of a Trainer whose ranks have half of every row each."""
    return {
        **SHARDS,
        "bf16": True,
        "per_device_train_batch_size": 4,
        "parallelism_config": ParallelismConfig(cp_size=2),
    }


def refusal(train: Callable[..., Any]) -> str:
    """Returns the error of a run that is refused, "" if it is not."""
    try:
        train()
    except ValueError as error:
        return str(error)
    return ""


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
    "cp-refused": lambda folder, name: refusal(partial(by_trainer, folder, name, {}, BY_TRAINER, **context())),
    "cp-plain": lambda folder, name: by_trainer(folder, name, {}, None, **context()),
    "cp-rule": lambda folder, name: by_trainer(folder, name, {}, RULE, **context()),
}
OF_FOUR: dict[str, Callable[[Path, str], Any]] = {"replicated": replicated}
"""Runs of four processes."""


def main() -> None:
    folder = Path(sys.argv[1])
    join(sys.argv, offloads=True)
    found = Survivors(folder, survives=NCCL in sys.argv)
    for name in sys.argv[2:]:
        if name != NCCL:
            found.add(name, lambda name=name: (RUNS | OF_FOUR)[name](folder, name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
