"""What a run cannot be launched under, and how the model is found inside what a launcher wrapped around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from .config import SnipConfig
from .distributed import Processes, Ranks
from .linear import STATE
from .policies import needs_probe
from .zero import check_deepspeed, deepspeed_engine

# How long a rank may wait for the others while the first one waits for the solver, beyond the solver's own limit.
_SOLVER_GRACE = 60.0


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose stages this process holds some of, for `SnipController`.

    `run` is called on all processes of the pipeline at once and runs one batch, as `SnipController.capture` got it,
    forward and backward through all stages. It returns the loss whose gradient it ran back, on at least one process,
    and None on the others. With several chunks per batch their losses must add up to the batch's mean loss.
    """

    run: Callable[[Mapping[str, Any]], Tensor | float | None]
    group: dist.ProcessGroup | None = None
    """The processes of one pipeline; None: all."""
    data: dist.ProcessGroup | None = None
    """The processes with the same stages and other data; None: this one alone."""


class ModelParts(nn.Module):
    """Several modules as one whose parameters keep the names that they have there."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(f"snip_part_{index}", part)
        self.config = next((part.config for part in parts if hasattr(part, "config")), None)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Returns the parts of `ModelParts`, none of a whole model."""
    return list(model.children()) if isinstance(model, ModelParts) else []


def check_launch(config: SnipConfig, accelerator: Any) -> None:
    """Refuses what this version cannot run under.

    Raises:
        ValueError: FP8 or FP16 mixed precision; FSDP version 1, offloading, a stage of DeepSpeed that partitions
            weights, tensor or context parallelism, or Megatron-LM with a policy that needs a probe.
    """
    if accelerator is None:
        return
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "mixed_precision='fp8' would convert the linears a second time; snip-hf does the FP8 itself. Use 'bf16' "
            "or 'no'."
        )
    if not needs_probe(config):
        return
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed_precision='fp16' scales the gradients that the probe needs; use 'bf16' or 'no'.")
    plugin = getattr(getattr(accelerator, "state", accelerator), "deepspeed_plugin", None)
    if plugin is not None:
        check_deepspeed(plugin.deepspeed_config)
    reason = _unsupported(accelerator)
    if reason is not None:
        raise ValueError(
            f"policy={config.policy!r} cannot probe a model under {reason}, or use a policy that needs no probe, such "
            "as a plan file or policy='layer-position'."
        )


def _unsupported(accelerator: Any) -> str | None:
    """Returns what the probe cannot work under, and what to use instead."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    state = getattr(accelerator, "state", accelerator)
    parallelism = getattr(state, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallelism is not None and getattr(parallelism, f"{name}_size", 1) > 1:
            return f"{name}_size={getattr(parallelism, f'{name}_size')}: its ranks hold parts of the activations; use 1"
    if kind == "FSDP":
        plugin = state.fsdp_plugin
        if getattr(plugin, "fsdp_version", 1) != 2:
            return "FSDP version 1, which flattens the weights; use version 2 (fsdp_version: 2)"
        # Without offloading accelerate's plugin has a policy too, one that does nothing.
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            return "FSDP2 with offloading to the CPU; turn fsdp_offload_params off"
    if kind == "MEGATRON_LM":
        return "Megatron-LM; use FSDP2 (fsdp_version: 2)"
    return None


def find_processes(config: SnipConfig, pipeline: Pipeline | None) -> Processes:
    """Returns the processes of this run, as `torch.distributed` has them. Collective."""
    timeout = config.rank_timeout + config.solver_time_limit + _SOLVER_GRACE
    everyone = Ranks.of_all(timeout)
    if pipeline is None:
        return Processes(data=everyone, everyone=everyone)
    stages = everyone if pipeline.group is None else Ranks(pipeline.group, timeout)
    data = Ranks() if pipeline.data is None else Ranks(pipeline.data, timeout)
    if stages.size * data.size != everyone.size:
        raise ValueError(
            f"The pipeline has {stages.size} processes and the data {data.size}, but the run has {everyone.size}; "
            "expected their product. Give Pipeline(group=..., data=...) the process groups of this rank."
        )
    return Processes(data=data, pipeline=stages, everyone=everyone, run=pipeline.run)


def keep_states_apart(models: Sequence[nn.Module]) -> None:
    """Tells DDP, where it wraps a model already, not to give the first rank's layer states to the others."""
    for wrapper in (module for model in models for module in model.modules()):
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            names = (name for name, _ in wrapper.module.named_buffers())
            wrapper.parameters_to_ignore.update(name for name in names if name.endswith(f".{STATE}"))


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the model inside wrappers of DDP, DeepSpeed and torch.compile.

    Raises:
        ValueError: it is in `nn.DataParallel`.
    """
    while True:
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                "nn.DataParallel copies the model in every step, and the plan with it; start one process per GPU with "
                "`accelerate launch`, or show one GPU only (CUDA_VISIBLE_DEVICES=0)."
            )
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (isinstance(model, nn.parallel.DistributedDataParallel) or deepspeed_engine(model)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
