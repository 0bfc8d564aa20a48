"""Prints how a launch configuration compiles a Trainer's model: `accelerate launch --config_file FILE THIS DIR`.

On CPUs, accelerate never shards by itself, so this does what FSDP2's configuration asks for.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from small import tiny_llama
from tiny_runs import SCHEDULE, arguments, data
from torch import nn
from torch._dynamo.utils import counters
from transformers import Trainer, trainer

from snip_hf import SnipCallback, SnipConfig


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def sharding_on_cpus(**settings: Any) -> Accelerator:
    found = Accelerator(**settings)
    found.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # of the environment
    found.state.fsdp_plugin.set_mixed_precision(found.mixed_precision)
    PartialState().distributed_type = found.state.distributed_type = DistributedType.FSDP
    return found


def train(folder: Path) -> dict[str, Any]:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not torch.cuda.is_available():
        vars(trainer)["Accelerator"] = sharding_on_cpus
    config = SnipConfig(formats=("fp4", "fp8"), **SCHEDULE)
    args = arguments(folder, max_steps=5, use_cpu=not torch.cuda.is_available())
    callback = SnipCallback(config)
    run = Trainer(tiny_llama(hidden=32), args, train_dataset=data(), callbacks=[callback])
    run.train()
    wrapped = run.model_wrapped
    layers = next(module for module in wrapped.modules() if isinstance(module, nn.ModuleList))
    return {
        "layers": [is_compiled(layer) for layer in layers],
        "whole": is_compiled(wrapped),
        "wrapper": type(wrapped).__name__,
        "graphs": counters["stats"]["unique_graphs"],
        "processes": args.world_size,
        "steps": run.state.global_step,
        "said": callback.controller.compiled,
    }


if __name__ == "__main__":
    found = train(Path(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print("FOUND", json.dumps(found), flush=True)
