"""Trains a tiny Llama by the Trainer under DeepSpeed's ZeRO-2 and ZeRO-3. Started by the tests in several processes.

Arguments: a folder, for rank<N>.pt with {run: what `train` returns}, and for the folder of each run; "nccl" for GPUs,
on which fewer runs are made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import expert_models
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from configs import fp4_config
from devices import NCCL, Survivors, join, on_gpu
from models import built
from tiny_runs import FAST, arguments, prepare
from torch import nn
from transformers import LlamaConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from snip_hf import SnipConfig
from snip_hf.parallel.sharding import unwrap, whole
from snip_hf.parallel.zero3 import partitions_as_shards

STEPS, SAVED = 6, 4
# The 45 rows of some weights do not divide among two ranks.
MODEL = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4, pad_token_id=None
)
# Refreshes at steps 1 and 4, applied after steps 2 and 5; the state is saved between probe and plan of the second.
# Until the first plan nothing is rounded.
CONFIG = fp4_config(
    start_format="bf16",
    first_refresh=1,
    refresh_every=3,
    apply_delay=1,
    target_fp4_fraction=0.7,
    backend="emulated",
    **FAST,
)
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
OF_GRADIENTS = replace(CONFIG, objective="gradients")
RULE = fp4_config(policy="layer-position", target_fp4_fraction=0.7)


def train(
    folder: Path,
    stage: int,
    config: SnipConfig | None,
    resume: Path | None = None,
    in_parts: bool = False,
    build: Callable[[], nn.Module] = lambda: built(MODEL),
    zero: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Returns losses, plan, coverage and the last weights.

    Args:
        folder: of the run.
        stage: of ZeRO.
        config: None: without SNIP.
        resume: a checkpoint.
        in_parts: whether the model is built in parts, as `from_pretrained` loads it, with other random numbers.
        build: returns the model.
        zero: further settings of ZeRO.
        changes: of the `TrainingArguments`.
    """
    AcceleratorState._reset_state(reset_partial_state=False)
    unset_hf_deepspeed_config()
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **(zero or {})},
        "zero_force_ds_cpu_optimizer": False,
    }
    # A large eps: Adam makes whole steps of gradients that differ in their last bits where both are tiny.
    options: dict[str, Any] = {
        "use_cpu": not on_gpu(),
        "max_steps": STEPS,
        "warmup_steps": 0,
        "adam_epsilon": 1e-4,
        "gradient_accumulation_steps": 2,
    }
    options |= changes | {"deepspeed": settings}
    asks = arguments(folder, **options) if in_parts else None  # while it exists, models are built in parts
    model = build()
    assert hasattr(model.lm_head.weight, "ds_tensor") == in_parts
    run = prepare(folder, config, model=model, **options)
    run.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    del asks
    bare = unwrap(run.trainer.model_wrapped)
    with partitions_as_shards(bare):
        weights = {name: whole(weight.detach()).clone() for name, weight in bare.named_parameters()}
    found: dict[str, Any] = {"losses": dict(run.losses), "weights": weights}
    if run.callback is not None:
        controller = run.callback.controller
        assert controller is not None
        found["plan"] = {name: dict(row) for name, row in controller.plan.assignment.items()}
        found["coverage"] = controller.coverage and controller.coverage.to_dict()
    return found


def experts() -> nn.Module:
    """A mixture of experts whose first block is frozen."""
    model = expert_models.build("qwen3-moe")
    model.model.layers[0].requires_grad_(False)
    return model


ON_GPUS = ("plain", "zero2", "zero3", "resumed", "rule", "in parts")


def main() -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if NCCL in sys.argv:
        join(sys.argv)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in zero_worker.py
        # Left alone, Accelerate takes each of DeepSpeed's processes on CPUs for the only one.
        PartialState(backend="gloo")
    folder = Path(sys.argv[1])
    saving = {"save_strategy": "steps", "save_steps": SAVED}
    runs: dict[str, Callable[[], Any]] = {
        "plain": partial(train, folder / "plain", 3, None),
        "zero2": partial(train, folder / "zero2", 2, CONFIG),
        "zero3": partial(train, folder / "zero3", 3, CONFIG, **saving),
        "resumed": partial(train, folder / "resumed", 3, CONFIG, folder / "zero3" / f"checkpoint-{SAVED}"),
        "in parts": partial(train, folder / "parts", 3, CONFIG, in_parts=True, max_steps=3),
        "experts": partial(train, folder / "experts", 2, CONFIG, build=experts, max_steps=2),
        "experts, offloaded": partial(
            train, folder / "offloaded", 3, CONFIG, build=experts, zero=OFFLOADED, max_steps=2
        ),
        "gradients2": partial(train, folder / "gradients2", 2, OF_GRADIENTS, max_steps=2),
        "gradients3": partial(train, folder / "gradients3", 3, OF_GRADIENTS, max_steps=2),
        "rule": partial(train, folder / "rule", 3, RULE, max_steps=2),
    }
    found = Survivors(folder, survives=NCCL in sys.argv)
    for name in ON_GPUS if NCCL in sys.argv else runs:
        found.add(name, runs[name])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
