"""Trains models that transformers shards itself. Started by the tests in several processes, or called in one.

Arguments: a folder with the model in `model/`, which gets rank<N>.pt with {name: what became of the run}; names of
`SIZES` for loops, or with "trainer-" for runs of the Trainer, or with "compiled-" for loops with the default formats in
BF16, compiled and not; "ddp" for the Trainer's DDP; "one" for loops of each rank for itself, which come first; "nccl"
for GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from comparing import read_run
from configs import fp4_config
from devices import NCCL, Survivors, device, join, on_gpu, trainers_that_shard, trainers_that_split, without_others
from expert_models import CONFIGS
from loops import plan_of
from small import text, tiny_llama
from tiny_runs import SCHEDULE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from trainings import fsdp_groups
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from snip_hf import SnipCallback, SnipConfig, SnipController
from snip_hf.json_io import read_json, write_json_atomic
from snip_hf.parallel.sharding import own_part, whole

# Came with transformers 5.19.
HAS_EP_SIZE = "ep_size" in DistributedConfig.__dataclass_fields__
EXPERT_PARALLEL: dict[str, int] = {"ep_size": 2} if HAS_EP_SIZE else {"enable_expert_parallel": True}
SAVE = 2  # in the middle of the refresh of step 1, which is applied after step 3
STEPS = 6 if NCCL in sys.argv else 4  # on GPUs losses shall fall, too


class Redistributed(TensorParallelLayer):
    """Shares the tokens of a module's output among the ranks, or gathers them."""

    def __init__(self, before: Replicate | Shard, after: Replicate | Shard) -> None:
        self.layouts = before, after

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: Any) -> Tensor:
        before, after = self.layouts
        return DTensor.from_local(output, mesh, [before], run_check=False).redistribute(placements=[after]).to_local()


# transformers has no plan whose ranks have some tokens of a linear's input; users may write one.
SHARED, TOKENS = Replicate(), Shard(1)
BY_TOKENS = {
    "tokens_split": Redistributed(SHARED, TOKENS),
    "tokens_gathered": Redistributed(TOKENS, SHARED),
    "tokens_colwise": ColwiseParallel(input_layouts=TOKENS),
    "tokens_rowwise": RowwiseParallel(output_layouts=TOKENS),
}
for _name, _style in BY_TOKENS.items():
    ALL_PARALLEL_STYLES.register(_name, _style)
_IN_BLOCK = {
    **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), "colwise"),
    "self_attn.o_proj": "rowwise",
    "post_attention_layernorm": "tokens_split",
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "tokens_colwise"),
    "mlp.down_proj": "tokens_rowwise",
    "mlp": "tokens_gathered",
}
SIZES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp_size": 2},
    "offloaded": {"fsdp_size": 2, "fsdp_cpu_offload": True},
    "hsdp": {"fsdp_size": 2, "dp_replicate_size": 2},
    "tp": {"tp_size": 2},
    "tp-tokens": {"tp_size": 2, "tp_plan": {f"model.layers.*.{name}": style for name, style in _IN_BLOCK.items()}},
    "fsdp-tp": {"fsdp_size": 2, "tp_size": 2},
    "tp-ep": {"tp_size": 2, **EXPERT_PARALLEL},
    # Experts are spread over ranks with other data, too.
    "fsdp-ep": {"fsdp_size": 2, "ep_size": 2},
    "fsdp-tp-ep": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
}
PROBED = {"first_refresh": 1, "start_format": "bf16"}
"""Before the probe nothing is rounded, so that its table can be compared closely."""
UNIFORM = ("fp4", "fp8")
ONCE = ("tp-tokens", "fsdp-ep", "fsdp-tp")
"""Splits whose parts other splits have, too: their loops are not resumed, and no Trainer has them."""
COMPILED = {"formats": ("mxfp4", "fp8-delayed"), "backend": "auto"}
"""The default formats, on the kernels of the device."""
BY_TRAINER = fp4_config(**{**SCHEDULE, **PROBED}, target_fp4_fraction=0.5, backend="emulated")
TRAINS_SHARDED = hasattr(Trainer, "_defer_fsdp_gradient_reduction")
"""True from transformers 5.23 on, which shards in all these ways."""
WHY_NOT = (
    "transformers 5.17 has no dp_replicate_size and no ep_size, its Trainer puts models with an fsdp_size into DDP, "
    "which refuses them, and with a tp_size, too, from_pretrained fails on all but the first tp_size ranks"
)
ROWS, LENGTH = 4, 128  # of all ranks together; one tile, so that whole tiles are of one rank
# Of four rows, which two ranks can only share if they cut one. torch's ring attention in FP32 needs parts of 32 tokens.
THREE_ROWS = replace(BY_TRAINER, probe_batch_tokens=3 * LENGTH)


def save_model(folder: Path) -> None:
    """Saves a model whose halves are whole tiles of 128."""
    config = tiny_llama(hidden=256).config
    config.intermediate_size, config.num_key_value_heads = 512, 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / "model")


def save_mixture(folder: Path) -> None:
    """Saves a model of four experts, two for each token, all of whole tiles."""
    config = deepcopy(CONFIGS["qwen3-moe"])
    config.hidden_size = config.moe_intermediate_size = config.vocab_size = 256
    config.head_dim, config.num_key_value_heads = 64, 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")


def load(folder: Path, sizes: dict[str, Any], by_sdpa: bool = False) -> Any:
    """Loads the model, sharded if there are sizes. transformers puts a sharded model on the device of its mesh."""
    sharding = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    # The backward pass of "sdpa" on GPUs adds in no fixed order, and runs in FP32 are to be equal to the bit.
    attention = "eager" if on_gpu() and not by_sdpa else "sdpa"
    path = folder / "model"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention, **sharding)
    if sizes.get("fsdp_cpu_offload"):
        # transformers leaves the shards on the GPU, where FSDP2 refuses them.
        model.to("cpu")
        for module in model.modules():
            module._buffers.update({name: buffer.to(device()) for name, buffer in module._buffers.items()})
    return model if sizes else model.to(device())


def loop(
    folder: Path,
    name: str,
    sizes: dict[str, Any],
    resumes: bool = False,
    steps: int = STEPS,
    in_bf16: bool = False,
    is_compiled: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """Trains in a plain loop, on all ranks or in this process; the run that is not resumed saves.

    Args:
        in_bf16: under autocast.
        is_compiled: whether the decoder layers are compiled.
        config: changes of the configuration.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shards = 1 if name == "disagreeing" else sizes.get("tp_size", 1)
    model = load(folder, sizes, in_bf16)
    for layer in model.model.layers if is_compiled else ():
        layer.compile()
    # A large eps: Adam makes whole steps of gradients that differ in their last bits alone where both are tiny.
    # foreach, torch's default on CUDA, refuses the norms' tensors beside DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, foreach=False)
    chosen = fp4_config(
        **{**SCHEDULE, "target_fp4_fraction": 0.5, "probe_tokens": None, "backend": "emulated", **config}
    )
    controller = SnipController(model, optimizer, chosen, output_dir=folder / name, max_steps=steps)
    parts = [parameter.detach() for parameter in model.parameters()]
    saved = folder / f"{name}-rank{rank}"
    if resumes:
        state = torch.load(saved / "tensors.pt", weights_only=True)
        for part, value in zip(parts, state["weights"], strict=True):
            own_part(part).copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        controller.load_state_dict(read_json(saved / "snip.json"))
    losses = []
    while controller.step < steps:
        step, own = controller.step + 1, slice(rank // shards * ROWS * shards // ranks, None)
        rows = {key: value[own][: ROWS * shards // ranks] for key, value in text(ROWS, LENGTH, step).items()}
        batch = {key: value.to(device()) for key, value in rows.items()}
        controller.capture(batch)
        with torch.autocast(device().type, torch.bfloat16, enabled=in_bf16):
            loss = model(**batch).loss
        loss.backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(_mean(loss.detach()))
        if step == SAVE and not resumes:
            saved.mkdir(parents=True)
            weights = [own_part(part).clone() for part in parts]
            torch.save({"weights": weights, "optimizer": optimizer.state_dict()}, saved / "tensors.pt")
            write_json_atomic(saved / "snip.json", controller.state_dict())
    controller.close()
    return {"losses": losses, **_found(model, controller, folder / name)}


def by_trainer(
    folder: Path, name: str, sizes: dict[str, Any], config: SnipConfig | None = BY_TRAINER, **changes: Any
) -> dict[str, Any]:
    """Trains by the Trainer on all ranks, under DDP without sizes and changes, or in this process.

    Args:
        config: None: without SNIP.
        changes: of the `TrainingArguments`.
    """
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # an earlier Trainer's
    AcceleratorState._reset_state(reset_partial_state=True)
    # Ring attention is torch's.
    is_cut = getattr(changes.get("parallelism_config"), "cp_size", 1) > 1
    model = load(folder, sizes, is_cut or changes.get("bf16", False))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rows = text(64, LENGTH)["input_ids"]
    arguments: dict[str, Any] = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "per_device_train_batch_size": 4 * sizes.get("tp_size", 1) // ranks,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-4,  # as in `loop`
        "use_cpu": not on_gpu(),
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    callback = None if config is None else SnipCallback(config, keep_formats=True)
    data = [{"input_ids": row, "labels": row} for row in rows]
    # Accelerate neither splits nor shards on CPUs.
    with ExitStack() as stack:
        if not on_gpu():
            stack.enter_context(trainers_that_split())
        if not on_gpu() and "fsdp" in changes:
            stack.enter_context(trainers_that_shard())
        trainer = Trainer(
            model,
            TrainingArguments(str(folder / name), **arguments | changes),
            train_dataset=data,
            callbacks=[] if callback is None else [callback],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if callback is None:
        return {"losses": losses}
    assert callback.controller is not None
    return {"losses": losses, **_found(model, callback.controller, folder / name)}


def _found(model: nn.Module, controller: SnipController, folder: Path) -> dict[str, Any]:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return {
        "plan": plan_of(controller),
        "weights": {key: whole(value.detach()).clone() for key, value in model.named_parameters()},
        "backend": controller.backend,
        "coverage": controller.coverage and controller.coverage.to_dict(),
        "kinds": {type(parameter.data).__name__ for parameter in model.parameters()},
        "policies": {type(group.offload_policy).__name__ for group in fsdp_groups(model)},
        "tables": read_run(folder / "snip")[2] if is_first else {},
    }


def _refusal(folder: Path, sizes: dict[str, Any]) -> str:
    """Returns the error of ranks that split the model and see different rows."""
    try:
        loop(folder, "disagreeing", sizes)
    except ValueError as error:
        return str(error)
    return ""


def _mean(loss: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def one_process(folder: Path) -> dict[str, Any]:
    """Returns name -> what one process finds that trains on all rows. Each rank has a folder of its own for it."""
    own = f"one-{os.environ.get('RANK', 0)}"
    found = {fmt: loop(folder, f"{own}/{fmt}", {}, steps=2, policy=f"uniform-{fmt}") for fmt in UNIFORM}
    return {**found, "probed": loop(folder, f"{own}/probed", {}, **PROBED)}


def runs(folder: Path, name: str) -> dict[str, Callable[[], Any]]:
    """Returns name -> the run, for a word among the arguments."""
    if name == "ddp":
        return {name: lambda: by_trainer(folder, name, {})}
    sharding = name.removeprefix("trainer-").removeprefix("compiled-")
    sizes = SIZES[sharding]
    if name.startswith("trainer-"):
        return {name: lambda: by_trainer(folder, name, sizes)}
    if name.startswith("compiled-"):
        return {
            f"{how}-{sharding}": partial(
                loop, folder, f"{how}-{sharding}", sizes, in_bf16=True, is_compiled=how == "compiled", **COMPILED
            )
            for how in ("plain", "compiled")
        }
    found: dict[str, Callable[[], Any]] = {
        name: partial(loop, folder, name, sizes, **PROBED),
    }
    if name not in ONCE:
        found[f"{name}-resumed"] = partial(loop, folder, name, sizes, resumes=True, **PROBED)
    if "tp_size" in sizes or "ep_size" in sizes:
        found |= {fmt: partial(loop, folder, fmt, sizes, steps=2, policy=f"uniform-{fmt}") for fmt in UNIFORM}
    if "tp_size" in sizes:
        found["disagreeing"] = lambda: _refusal(folder, sizes)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    words = [word for word in sys.argv[2:] if word not in ("one", NCCL)]
    found = Survivors(folder, survives=NCCL in sys.argv)
    if "one" in sys.argv:
        with without_others(sys.argv):
            found.add("one", lambda: one_process(folder))
    join(sys.argv)
    for word in words:
        for name, train in runs(folder, word).items():
            found.add(name, train)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
