"""The assembly of a run: checks model and optimizer, swaps the layers, and builds what the controller drives."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ..config import AUTO_TIES, POLICIES, SnipConfig
from ..kernels.backend import select_backend
from ..layers.convert import keep_states_apart
from ..layers.state import snip_linears
from ..parallel.pipeline_ranks import ModelParts, parts_of
from ..parallel.ranks import Processes
from ..parallel.wrappers import deepspeed_engine, unwrap
from ..planning.solver.process import check_solver
from ..policies.notices import notices
from ..policies.registry import aims_at_share, needs_probe, weighs_updates
from ..policies.setting import Setting
from ..policies.target import check_attainable
from ..records.event_writer import EventWriter
from .checks import check_guard, check_model, check_parts
from .coverage_check import CoverageCheck
from .gradients import GradientSource, find_source, warn_if_unscaled
from .liger import keep_out_of_graphs
from .plans import PlanInForce, first_plan, formats_in_use
from .preparation import cost_of_all, find_setting, name_of
from .refresh import Refresher, Solving
from .run_messages import RunMessages
from .step_probe import StepProbe
from .swapped_layers import SwappedLayers


@dataclass(frozen=True)
class RunParts:
    """The parts of one run."""

    config: SnipConfig
    """With what it leaves to be found in the model."""
    model: nn.Module
    """Without wrappers, or the parts of it that this process holds."""
    backend: str
    """Name of the backend in use."""
    layers: SwappedLayers
    source: GradientSource
    probe: StepProbe
    in_force: PlanInForce
    refresher: Refresher
    coverage: CoverageCheck
    messages: RunMessages


def assemble(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    accelerator: Any,
    config: SnipConfig,
    processes: Processes,
    events: EventWriter,
    solving: Solving,
    log: logging.Logger,
) -> RunParts:
    """Builds the parts of a run and puts its first plan in force. Collective.

    Args:
        model: as `SnipController` takes it.
        optimizer: as above.
        accelerator: as above.
        config: as above.
        processes: those of the run.
        events: the run's.
        solving: how programs are solved.
        log: gets what this rank has to say.

    Raises:
        ValueError, TypeError, NotImplementedError, KeyError: anything that cannot work.
    """
    bare = unwrap(model) if isinstance(model, nn.Module) else ModelParts([unwrap(part) for part in model])
    check_guard(config, is_deepspeed=deepspeed_engine(model, accelerator) is not None)
    source = find_source(needs_probe(config), optimizer, model, accelerator)
    kernels = select_backend(config.backend, next(bare.parameters()).device, formats_in_use(config))
    for text in notices(config, kernels.recompiles_for_bf16):
        log.warning("snip-hf: %s", text)
    solver = processes.everyone.by_first(lambda: check_solver(config, log)) if needs_probe(config) else config.solver
    layers = SwappedLayers(bare, config, processes, kernels, getattr(accelerator, "mixed_precision", None), log)
    keep_out_of_graphs(bare, log)
    warn_if_unscaled(optimizer, accelerator, next(bare.parameters()).device, log)
    keep_states_apart([model] if isinstance(model, nn.Module) else model)
    _check_for_probe(bare, config, source, log)
    setting = find_setting(bare, config, processes.pipeline)
    in_force = _first_in_force(bare, kernels.name, setting, processes, events, log)
    probe = StepProbe(bare, config, setting.flops, layers, source, processes)
    refresher = Refresher(in_force, probe, events, solving, log, solver, finds_ties=config.ties == AUTO_TIES)
    coverage = CoverageCheck(bare, in_force, processes, events, log, accelerator)
    messages = RunMessages(config, kernels.name, log)
    events.add_tracker(messages.note)
    return RunParts(config, bare, kernels.name, layers, source, probe, in_force, refresher, coverage, messages)


def _check_for_probe(model: nn.Module, config: SnipConfig, source: GradientSource, log: logging.Logger) -> None:
    """Refuses what cannot be probed."""
    if not needs_probe(config):
        return
    source.check()
    check_model(model)
    check_parts(parts_of(model))
    layers = snip_linears(model)
    POLICIES[config.policy].criterion.check_layers(layers, source.trains())
    is_frozen = not any(layer.weight.requires_grad for layer in layers.values())
    if config.probes == 1 and weighs_updates(config) and is_frozen:
        log.info(
            "snip-hf: the swapped weights are frozen. What is trained beside them has few parameters, so that weight "
            "divergences along one random direction are noisy, though they rank layers much alike. "
            "SnipConfig(probes=4) is nearer to the truth and costs six passes more per refresh (docs/adapters.md)."
        )


def _first_in_force(
    model: nn.Module, backend: str, setting: Setting, processes: Processes, events: EventWriter, log: logging.Logger
) -> PlanInForce:
    """Makes the first plan, takes the folder for the run, and gives the plan to the layers."""
    config, flops = setting.config, setting.flops
    # The file where it is now: training may change to another folder.
    path = None if config.timing_file is None else os.path.abspath(config.timing_file)
    timed = replace(config, timing_file=path)
    measure = partial(cost_of_all, model, backend=backend, config=timed, flops=flops, processes=processes, log=log)
    # A rule decides now. A speed-up that cannot be reached is to be refused before training, where tokens are known.
    decides_by_time = aims_at_share(config) and (not needs_probe(config) or config.target_linear_speedup is not None)
    if config.timing_tokens is not None and decides_by_time:
        setting = replace(setting, measured=measure(config.timing_tokens))
        check_attainable(setting, config.formats)
    name = name_of(model)
    plan = first_plan(setting, name)
    events.folder.hold()
    in_force = PlanInForce(plan, setting, model, name, events, measure, log)
    in_force.apply()
    return in_force
