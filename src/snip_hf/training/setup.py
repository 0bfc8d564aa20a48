"""The setup of a run: checks model and optimizer, swaps the layers, and builds the parts that the controller drives."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from ..config import POLICIES, SnipConfig
from ..costs.flops import Work, linear_flops
from ..costs.timing import MeasuredCost, describe_cost, measure_cost, read_times
from ..estimation.attention import foreign_attention
from ..estimation.ties import usual_ties
from ..kernels.backend import BACKENDS, select_backend
from ..layers.convert import keep_states_apart
from ..layers.state import block_number, blocks_of, snip_linears
from ..optimizers.deepspeed_zero import find_zero
from ..parallel.context_parallel import context_mesh
from ..parallel.pipeline import ModelParts, Pipeline, parts_of
from ..parallel.ranks import Processes, Ranks
from ..parallel.sharding import compute_device, deepspeed_engine, unwrap
from ..parallel.tensor_parallel import tensor_mesh
from ..planning.solver.process import check_solver
from ..policies.registry import config_warnings, policy_of
from ..policies.setting import Setting, check_ties, find_stages
from ..policies.target import check_attainable
from ..records.run_folder import RunRecord
from .checks import check_guard, check_model, check_parts, check_split
from .coverage import CoverageCounter
from .gradients import GradientSource, ZeroGradients
from .guard import Guard, StepMeter
from .messages import RunMessages
from .plan_in_force import PlanInForce, first_plan, formats_in_use
from .refresh import Refresher
from .schedule import Schedule
from .swapped_layers import SwappedLayers

# Seconds that a rank waits for the others beyond the solver's time limit before training ends with an error.
RANK_GRACE = 660.0
FIRST_SAFE_TORCH = "2.13"
"""The first version whose torch.compile runs Liger's norms correctly."""
_LIGER = "liger_kernel"
_ROTARY = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class RunParts:
    """The parts of one run."""

    config: SnipConfig
    model: nn.Module
    """Without wrappers, or the parts of it that this process holds."""
    backend: str
    """Name of the backend in use."""
    schedule: Schedule
    record: RunRecord
    layers: SwappedLayers
    source: GradientSource
    in_force: PlanInForce
    refresher: Refresher
    coverage: CoverageCounter
    guard: Guard | None
    messages: RunMessages


def find_processes(
    model: nn.Module | Sequence[nn.Module], config: SnipConfig, pipeline: Pipeline | None, accelerator: Any = None
) -> Processes:
    """Returns the processes of this run, as `torch.distributed` has them. Collective.

    Args:
        model: as `SnipController` takes it.
        config: its `solver_time_limit` bounds how long a rank waits for the others.
        pipeline: the process groups of a pipeline; None: every process holds the whole model.
        accelerator: the Accelerate object of the loop, if there is one.

    Raises:
        ValueError: the process groups of a pipeline do not cover all processes.
    """
    timeout = config.solver_time_limit + RANK_GRACE
    everyone = Ranks.of_all(timeout)
    mesh, context = tensor_mesh([model] if isinstance(model, nn.Module) else model), context_mesh(accelerator)
    if pipeline is None and mesh is not None:
        data = everyone.alike(mesh.get_local_rank())
        return Processes(data=data, tensor=Ranks(mesh.get_group(), timeout), context=context, everyone=everyone)
    if pipeline is None:
        return Processes(data=everyone, context=context, everyone=everyone)
    stages = everyone if pipeline.group is None else Ranks(pipeline.group, timeout)
    data = Ranks() if pipeline.data is None else Ranks(pipeline.data, timeout)
    if stages.size * data.size != everyone.size:
        raise ValueError(
            f"The pipeline has {stages.size} processes and the data {data.size}, but the run has {everyone.size}; "
            "expected their product. Give Pipeline(group=..., data=...) the process groups of this rank."
        )
    return Processes(data=data, pipeline=stages, everyone=everyone, run=pipeline.run)


def set_up(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    accelerator: Any,
    config: SnipConfig,
    processes: Processes,
    schedule: Schedule,
    record: RunRecord,
) -> RunParts:
    """Builds the parts of a run and puts its first plan in force. Collective.

    Args:
        model, optimizer, accelerator, config: as `SnipController` takes them.
        processes: those of the run.
        schedule: of refreshes.
        record: of the run.

    Raises:
        ValueError, TypeError, NotImplementedError, KeyError: anything that cannot work.
    """
    log = record.log
    bare = unwrap(model) if isinstance(model, nn.Module) else ModelParts([unwrap(part) for part in model])
    check_guard(config, is_deepspeed=deepspeed_engine(model, accelerator) is not None)
    probes = policy_of(config).needs_probe
    zero = find_zero(optimizer, model, accelerator) if probes else None
    source = GradientSource(optimizer, accelerator) if zero is None else ZeroGradients(optimizer, zero)
    backend = select_backend(config.backend, compute_device(next(bare.parameters())), formats_in_use(config))
    for text in config_warnings(config, backend.recompiles_for_bf16):
        log.warning("snip-hf: %s", text)
    solver = processes.everyone.by_first(lambda: check_solver(config, log)) if probes else config.solver
    layers = SwappedLayers(bare, config, processes, backend, getattr(accelerator, "mixed_precision", None), log)
    check_split(bare, layers.present)
    keep_liger_out_of_graphs(bare, log)
    keep_states_apart([model] if isinstance(model, nn.Module) else model)
    if probes:
        source.check()
        check_model(bare, accelerator)
        check_parts(parts_of(bare))
        POLICIES[config.policy].criterion.check_layers(snip_linears(bare), source.trains())
        if warning := foreign_attention(bare):
            log.warning("snip-hf: %s", warning)
    setting = find_setting(bare, config, processes.pipeline)
    in_force = _first_in_force(bare, backend.name, setting, processes, record)
    refresher = Refresher(bare, in_force, layers, source, processes, record, solver)
    coverage = CoverageCounter(bare, in_force, processes, record, accelerator)
    guard = None
    if config.guard != "off":
        meter = StepMeter(bare, source.scaling, processes)
        guard = Guard(meter, in_force, refresher, schedule, processes, record)
    messages = RunMessages(config, backend.name, log)
    record.add_tracker(messages.note)
    parts = layers, source, in_force, refresher, coverage, guard, messages
    return RunParts(config, bare, backend.name, schedule, record, *parts)


def _first_in_force(
    model: nn.Module, backend: str, setting: Setting, processes: Processes, record: RunRecord
) -> PlanInForce:
    """Makes the first plan, takes the folder for the run, and gives the plan to the layers."""
    config = setting.config
    measure = partial(
        cost_of_all, model, backend=backend, config=config, flops=setting.flops, processes=processes, log=record.log
    )
    # A rule decides now. An unreachable speed-up is refused before training if the number of tokens is known.
    policy = policy_of(config)
    decides_now = policy.aims_at_share and (not policy.needs_probe or config.target_linear_speedup is not None)
    if config.timing_tokens is not None and decides_now:
        setting = replace(setting, measured=measure(config.timing_tokens))
        check_attainable(setting, config.formats)
    name = name_of(model)
    plan = first_plan(setting, name)
    record.hold()
    in_force = PlanInForce(plan, setting, model, name, record, measure)
    in_force.apply()
    return in_force


def flops_of_all(model: nn.Module, pipeline: Ranks) -> dict[str, dict[str, float]]:
    """Returns `linear_flops` of the layers of all stages of a pipeline, in the order of the model's blocks."""
    flops = linear_flops(model)
    if pipeline.size == 1:
        return flops
    merged = {layer: row for part in pipeline.gather(flops) for layer, row in part.items()}
    blocks = blocks_of(list(merged))
    return {layer: merged[layer] for layer in sorted(merged, key=lambda layer: block_number(blocks[layer]) or 0)}


def find_setting(model: nn.Module, config: SnipConfig, pipeline: Ranks) -> Setting:
    """Returns the policy's view of the model.

    Raises:
        ValueError: stages or ties that do not fit the model, or an unreadable file of times.
    """
    flops = flops_of_all(model, pipeline)
    setting = Setting(config, flops, find_stages(list(flops), config), found_ties=usual_ties(flops))
    check_ties(setting)
    if config.timing_file is not None:
        read_times(config.timing_file)  # a damaged file is refused now and not at a refresh
    return setting


def name_of(model: nn.Module) -> str:
    """Returns the name that a model was loaded by, or that of its class, for plans and records."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return name or type(model).__name__.removeprefix("FSDP")


def cost_of_all(
    model: nn.Module, tokens: int, backend: str, config: SnipConfig, flops: Work, processes: Processes, log: Any
) -> MeasuredCost:
    """Times the GEMMs of all layers in `flops`, as `costs.timing.measure_cost` does.

    One rank measures for all that hold the same layers, since each would get other times. GEMMs that tensor parallelism
    splits are timed whole, and experts as if each rank had all of them.
    """
    began = time.perf_counter()
    with processes.everyone.together():
        is_first = processes.everyone.is_first
        holders = processes.data if processes.pipeline.size > 1 else processes.everyone
        cost = holders.by_first(
            lambda: measure_cost(model, tokens, backend, config.timing_file, formats=config.formats, is_first=is_first)
        )
    parts: list[MeasuredCost] = processes.pipeline.gather(cost)
    seconds = {layer: row for part in parts for layer, row in part.seconds.items()}
    measured = replace(parts[0], seconds={layer: seconds[layer] for layer in flops})
    taken = time.perf_counter() - began
    log.info("snip-hf: measured the GEMMs in %.1f s. %s", taken, describe_cost(flops, measured))
    if BACKENDS[backend].is_emulation:
        log.warning("snip-hf: the emulated backend was timed: quantized formats have the times of their emulation.")
    return measured


def keep_liger_out_of_graphs(model: nn.Module, log: logging.Logger) -> int:
    """Makes torch.compile call Liger's norms and rotary embedding instead of tracing them; returns their number.

    Before 2.13, torch.compile cannot analyse Liger's kernels and assumes that they write to every argument. Inductor
    then reuses the memory of a norm's weight, and of the rotary embedding's cosines, in the backward pass
    (docs/hopper.md).

    Args:
        model: without wrappers, before its first compiled pass.
        log: gets a line if there are any.
    """
    if _LIGER not in sys.modules or TorchVersion(torch.__version__) >= FIRST_SAFE_TORCH:
        return 0
    # Liger's MLPs, which have children, pass their kernels nothing that outlives the graph.
    norms = [module for module in model.modules() if not any(module.children()) and _is_traced_liger(module.forward)]
    for norm in norms:
        function = norm.forward.__func__  # type: ignore[attr-defined]
        norm.forward = MethodType(torch.compiler.disable(function), norm)
    files = {name: sys.modules[name] for name in {type(module).__module__ for module in model.modules()}}
    rotary = [file for file in files.values() if _is_traced_liger(getattr(file, _ROTARY, None))]
    for file in rotary:
        setattr(file, _ROTARY, torch.compiler.disable(getattr(file, _ROTARY)))
    if norms or rotary:
        log.info(
            "snip-hf: Liger's norms and rotary embedding run outside compiled graphs, since torch %s would corrupt "
            "their weights inside (from torch %s on it does not). Without Liger compiled training was faster "
            "(docs/hopper.md).",
            torch.__version__,
            FIRST_SAFE_TORCH,
        )
    return len(norms) + len(rotary)


def _is_traced_liger(function: object) -> bool:
    """Returns True for a function of Liger's that torch.compile would trace."""
    is_out = getattr(function, "_torchdynamo_disable", False)
    return not is_out and str(getattr(function, "__module__", "")).startswith(f"{_LIGER}.")
