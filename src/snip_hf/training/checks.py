"""Checks of a run: unsupported settings at the start, and the order of a training loop's calls.

Each error gives the value, the expectation and the remedy. The checks run in this order:

1. `check_trainer` and `check_launch`, before anything is built: the Trainer's arguments, Accelerate's settings.
2. `check_equal`: one configuration on all ranks.
3. `check_model` and `check_parts`, once the layers are swapped: models that the probe cannot run.
4. `check_alike`, once the first plan is made: the same layers, attention, plans and lengths of training on all ranks.

Checks of a single part are in that part: fields in `SnipConfig`, layers in `layers.convert`, optimizers in
`optimizers.response`, backends in `kernels.backend`, a saved state in `checkpoint`. In mid-run, `StepCalls` refuses
calls out of order, and `SwappedLayers.check` refuses a model whose layers were replaced, which costs only a refresh.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..estimation.attention import attention_of, check_attention
from ..layers.layer import SnipLayer
from ..layers.state import plain_name, snip_linears
from ..optimizers.deepspeed_zero import check_deepspeed
from ..parallel.context_parallel import context_mesh
from ..parallel.ranks import Processes, Ranks
from ..parallel.sharding import is_fully_sharded, is_sharded
from ..parallel.tensor_parallel import split_of, tensor_mesh
from ..parallel.zero3 import has_partitions
from ..planning.plan import PrecisionPlan
from ..policies.registry import policy_of
from ..text import WITHOUT_PROBE
from .gradients import LATE

# Fields that do not decide the course of a run: they may differ on resume, and between ranks.
_FREE = ("solver_time_limit", "backend", "timing_file")
# Linears whose output features are whole heads of their module's `head_dim`.
_BY_HEADS = ("q_proj", "k_proj", "v_proj")
# Matches the name of a layer that belongs to one of several experts.
_EXPERT = re.compile(r"experts?\.\d+(\.|$)")


def deciding_fields(config: SnipConfig) -> dict[str, Any]:
    """Returns the fields that decide the course of a run."""
    return {name: value for name, value in config.to_dict().items() if name not in _FREE}


def differences(config: SnipConfig, other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the deciding fields in which a configuration differs from another one, given as a dict."""
    return [name for name, value in deciding_fields(config).items() if other.get(name) != value]


def check_equal(values: Mapping[str, Any], ranks: Ranks) -> None:
    """Refuses JSON data about a run that is not the same on all ranks. Collective.

    Raises:
        ValueError: names another rank and an entry, on all ranks.
    """
    digests = ranks.gather(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    data = ranks.gather(dict(values))
    first, theirs = data[0], data[other]
    name = next(name for name in {**first, **theirs} if first.get(name) != theirs.get(name))
    raise ValueError(
        f"Rank {other} differs from rank 0: {name} is {theirs.get(name, 'missing')} on rank {other} and "
        f"{first.get(name, 'missing')} on rank 0. Expected the same config, model, plan and max_steps on all ranks."
    )


def check_alike(
    model: nn.Module, layers: Mapping[str, SnipLayer], plan: PrecisionPlan, max_steps: int | None, processes: Processes
) -> None:
    """Refuses ranks with different swapped layers, attention, first plans or lengths of training, as `check_equal`."""
    with processes.everyone.together():  # stages of a pipeline have different layers
        sizes = {name: f"{layer.out_features}x{layer.in_features}" for name, layer in layers.items()}
        states = {name: "trained" if layer.weight.requires_grad else "frozen" for name, layer in layers.items()}
        check_equal({name: f"{size}, {states[name]}" for name, size in sizes.items()}, processes.data)
    attention = attention_of(model) if processes.pipeline.size == 1 else None
    values = {"max_steps": max_steps, "attn_implementation": attention}
    check_equal({**formats_of(plan), **values}, processes.everyone)


def formats_of(plan: PrecisionPlan) -> dict[str, str]:
    """Returns layer -> formats of a plan, for `check_equal`."""
    return {layer: "/".join(row.values()) for layer, row in plan.assignment.items()}


def check_trainer(args: Any) -> None:
    """Raises ValueError if a `transformers.Trainer` with these `TrainingArguments` would use nn.DataParallel."""
    if args.n_gpu > 1 and args.parallel_mode.value == "not_distributed":
        raise ValueError(
            f"The Trainer would put the model into nn.DataParallel on {args.n_gpu} GPUs, which copies the plan in "
            "every step. Start one process per GPU with `accelerate launch`, or make only one GPU visible "
            "(CUDA_VISIBLE_DEVICES=0)."
        )


def check_launch(config: SnipConfig, accelerator: Any) -> None:
    """Refuses launches that this version does not support.

    Raises:
        ValueError: FP8 mixed precision; a guard under DeepSpeed; and with a policy that needs a probe FSDP version 1,
            DeepSpeed that partitions nothing, FP16 under FSDP2, an `sp_size`, or Megatron-LM.
    """
    if accelerator is None:
        return
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "mixed_precision='fp8' would convert the linears a second time; snip-hf handles FP8 itself. Use 'bf16' "
            "or 'no'."
        )
    plugin = getattr(getattr(accelerator, "state", accelerator), "deepspeed_plugin", None)
    if plugin is not None:
        check_guard(config, is_deepspeed=True)
    if not policy_of(config).needs_probe:
        return
    if plugin is not None:
        check_deepspeed(plugin.deepspeed_config)
    reason = _unsupported(accelerator)
    if reason is not None:
        raise ValueError(
            f"policy={config.policy!r} cannot probe a model under {reason}, or use a plan file or {WITHOUT_PROBE}."
        )


def check_guard(config: SnipConfig, is_deepspeed: bool) -> None:
    """Raises ValueError for a guard under DeepSpeed."""
    if config.guard != "off" and is_deepspeed:
        raise ValueError(
            f"guard={config.guard!r} cannot work under DeepSpeed, which clips, steps and zeroes the gradients inside "
            "the backward pass. Set guard='off', or use FSDP2 (fsdp_version: 2) or DDP."
        )


def _unsupported(accelerator: Any) -> str | None:
    """Returns the setting that the probe cannot work under, with an alternative; None if there is none."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    state = getattr(accelerator, "state", accelerator)
    parallelism = getattr(state, "parallelism_config", None)
    # check_model looks at tensor and context parallelism.
    size = getattr(parallelism, "sp_size", 1)
    if size > 1:
        return f"sp_size={size}: its ranks hold parts of the activations; use cp_size"
    if kind == "FSDP":
        if getattr(state.fsdp_plugin, "fsdp_version", 1) != 2:
            return "FSDP version 1, which flattens the weights; use version 2 (fsdp_version: 2)"
        if accelerator.mixed_precision == "fp16":
            return "FSDP2 with mixed_precision='fp16', whose loss scale it does not know; use 'bf16', or DDP"
    if kind == "MEGATRON_LM":
        return "Megatron-LM; use FSDP2 (fsdp_version: 2)"
    return None


def check_model(model: nn.Module, accelerator: Any = None) -> None:
    """Refuses a model that the probe cannot run.

    Args:
        model: converted, without wrappers.
        accelerator: the Accelerate object of the loop, if there is one; it may have a `tp_size` or `cp_size`.

    Raises:
        ValueError: an attention that does not support FP32 and cannot be switched, FSDP version 1, tensor parallelism
            by anything but transformers, context parallelism with another attention than "sdpa", or an
            `expert_gathered_apart`.
    """
    parts = [name for name, layer in snip_linears(model).items() if is_sharded(layer.weight)]
    parallelism = getattr(getattr(accelerator, "state", accelerator), "parallelism_config", None)
    tp_sizes = [getattr(holder, "tp_size", None) or 1 for holder in (model, parallelism)]
    is_split = max(tp_sizes) > 1 or (parts and not is_fully_sharded(model))
    if is_split and tensor_mesh([model]) is None:
        raise ValueError(
            f"The model is tensor-parallel ({parts[0] if parts else 'tp_size is above 1'}), but not by transformers: "
            "its ranks hold parts of the activations, which the probe cannot put together. Load it by "
            "from_pretrained(..., distributed_config=DistributedConfig(tp_size=...)), use FSDP2 or DDP, or "
            f"{WITHOUT_PROBE}."
        )
    attention = attention_of(model)
    if context_mesh(accelerator) is not None and attention not in ("sdpa", None):
        raise ValueError(
            f"Context parallelism (cp_size) works with attn_implementation='sdpa', but the model has {attention!r}. "
            f"Load it with 'sdpa', or use {WITHOUT_PROBE}."
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "The model is in FSDP version 1, which flattens the weights. Use version 2 (torch's fully_shard), or "
            f"{WITHOUT_PROBE}."
        )
    expert = expert_gathered_apart(model)
    if expert is not None:
        raise ValueError(
            f"The expert {expert!r} is a layer of its own whose weight FSDP2 or ZeRO-3 shards. The probe gathers a "
            "weight when its layer runs, but the ranks run different experts. Name the experts in skip_modules, use "
            f"DDP or ZeRO-2, or use {WITHOUT_PROBE}."
        )
    check_attention(model)


def expert_gathered_apart(model: nn.Module) -> str | None:
    """Returns the name of a swapped expert that is a layer of its own in a model in shards; None if there is none.

    A pass that gathers each weight when its layer runs is impossible then: ranks run different experts, so they would
    gather different weights at once.
    """
    if not (is_fully_sharded(model) or has_partitions(model)):
        return None
    return next(filter(_EXPERT.search, snip_linears(model)), None)


def check_split(model: nn.Module, layers: Mapping[str, SnipLayer]) -> None:
    """Refuses parts of a model that cannot train.

    Raises:
        ValueError: transformers' pipelines, under which each rank has other layers; or tensor parallelism with parts of
            unequal size or of cut heads, on which attention fails in transformers.
    """
    sizes = getattr(getattr(model, "config", None), "distributed_config", None)
    if (getattr(sizes, "pp_size", None) or 1) > 1:
        raise ValueError(
            "The model is pipeline-parallel (pp_size), so each rank knows only some of its layers. Load it with "
            "tp_size, fsdp_size or dp_replicate_size instead, or run stages by torch.distributed.pipelining and give "
            "SnipController(..., pipeline=Pipeline(run))."
        )
    modules = {plain_name(name): module for name, module in model.named_modules()}
    for name, layer in layers.items():
        split = split_of(layer)
        if split is None:
            continue
        count, what = layer.in_features if split.is_by_inputs else layer.out_features, "features"
        attention, _, projection = name.rpartition(".")
        width = getattr(modules.get(attention), "head_dim", None)
        if projection in _BY_HEADS and isinstance(width, int) and count % width == 0:
            count, what = count // width, "heads" if count > width else "head"
        if count % split.mesh.size():
            raise ValueError(
                f"tp_size={split.mesh.size()} does not divide the {count} {what} of layer {name!r} that it splits. "
                "Load the model with a tp_size that divides them."
            )


def check_same_batch(batch: Mapping[str, Any], processes: Processes) -> None:
    """Refuses ranks that split one model's weights among them and see different micro-batches. Collective.

    Args:
        batch: the inputs of this rank's micro-batch.
        processes: those of the run; nothing is compared without tensor parallelism.

    Raises:
        ValueError: on all ranks.
    """
    if processes.tensor.size == 1:
        return
    digest = hashlib.sha256()
    for name, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            held = value.detach().to("cpu").contiguous()
            digest.update(f"{name} {held.dtype} {list(held.shape)}".encode())
            digest.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
    with processes.everyone.together():
        if len(set(processes.tensor.gather(digest.hexdigest(), "a micro-batch"))) > 1:
            raise ValueError(
                f"The {processes.tensor.size} ranks that split each weight among them (tp_size) got different "
                "micro-batches; expected the same one on all of them: sample the data by "
                f"torch.distributed.get_rank() // {processes.tensor.size}."
            )


def check_parts(parts: Iterable[nn.Module]) -> None:
    """Raises ValueError if a pipeline's weights are not FP32: activations would not fit the buffers between stages."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise ValueError(
                    f"The pipeline's parameter {name!r} is {parameter.dtype}; the probe runs its passes in FP32 and "
                    f"needs stages with FP32 weights, without autocast. Use these, or {WITHOUT_PROBE}."
                )


class StepCalls:
    """Checks that the calls of a training loop come once per optimizer step, in order.

    With an Accelerator, calls while it accumulates gradients do not count, and the numbers that the loop passes are not
    used: they may be those of micro-batches.

    Args:
        accelerator: the Accelerate object of the loop, if there is one.
        reads_gradients: whether a probe or the guard does; otherwise, `before_optimizer_step` has little to do.
        log: gets each warning once.
    """

    def __init__(self, accelerator: Any, reads_gradients: bool, log: logging.Logger) -> None:
        self._accelerator = accelerator if hasattr(accelerator, "sync_gradients") else None
        self._reads_gradients = reads_gradients
        self._log = log
        self._warned: set[str] = set()
        self.is_begun = False
        """True between `before_optimizer_step` and `after_step`."""
        self.is_closed = False

    def count(self, call: str, step: Any, done: int) -> bool:
        """Returns True if a call with the number `step`, after `done` optimizer steps, belongs to an optimizer step.

        Raises:
            ValueError: `step` is not the next number, or the step before has not ended.
            TypeError: `step` is not an integer.
        """
        self.check_open(call)
        if self._accelerator is not None and not self._accelerator.sync_gradients:
            return False
        if self.is_begun and call == "before_optimizer_step":
            raise ValueError(
                f"{call} was called again without after_step, so no plan would ever be applied: call after_step(step) "
                "after each optimizer step."
            )
        if self._accelerator is None and index(step) != done + 1:
            raise ValueError(
                f"{call} got the step {index(step)} after {done} optimizer steps, expected {done + 1}: count optimizer "
                "steps, from 1 and without gaps, not micro-batches (to continue after step N without a saved state, "
                "set controller.step = N first)."
            )
        return True

    def check_open(self, call: str) -> None:
        """Raises ValueError if the controller has been closed."""
        if self.is_closed:
            raise ValueError(f"{call} was called after close(). Build a new SnipController to continue.")

    def begin(self, is_late: bool) -> None:
        """Records a call of `before_optimizer_step`; `is_late` if the optimizer has already taken its step."""
        self.is_begun = True
        if is_late:
            self._warn_once(LATE)

    def end(self) -> None:
        """Records a call of `after_step`."""
        if not self.is_begun and self._reads_gradients:
            self._warn_once(
                "after_step was called without before_optimizer_step: no plan can be made, and a guard sees nothing. "
                "Call before_optimizer_step(step) before each optimizer step, once the gradients are complete and "
                "clipped."
            )
        self.is_begun = False

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._log.warning("snip-hf: %s", message)
