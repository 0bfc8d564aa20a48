"""The preparation of a run before its first step: processes, swapped layers, FLOPs, measured costs and backend."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import nn

from ..config import AUTO_TIES, SnipConfig
from ..costs.flops import Work, linear_flops
from ..costs.gemm_timing import read_times
from ..costs.measured_cost import MeasuredCost, describe_cost, measure_cost
from ..estimation.shared_inputs import usual_ties
from ..kernels.backend import BACKENDS, Backend, why_emulated
from ..layers.convert import convert_model
from ..layers.layer import SnipLayer
from ..layers.selection import skip_reasons
from ..layers.state import block_of, pack_states, set_rank
from ..parallel.pipeline_ranks import Pipeline
from ..parallel.ranks import Attempt, Processes, Ranks
from ..planning.checked_tables import read_measured
from ..planning.checked_values import MAX_TEXT
from ..policies.setting import Setting
from ..policies.stages import find_stages
from ..policies.ties import check_ties
from ..text import printable
from .checks import check_pipeline
from .plans import formats_in_use


def find_processes(config: SnipConfig, pipeline: Pipeline | None, grace: float) -> Processes:
    """Returns the processes of this run, as `torch.distributed` has them. Collective.

    Args:
        config: its `solver_time_limit` bounds how long a rank waits for the others.
        pipeline: says which processes hold which parts of the model; None: all hold the whole of it.
        grace: seconds added to that bound, in which the first rank ends a solver that is late.
    """
    timeout = config.solver_time_limit + grace
    everyone = Ranks.of_all(timeout)
    if pipeline is None:
        return Processes(data=everyone, everyone=everyone)
    stages = everyone if pipeline.group is None else Ranks(pipeline.group, timeout)
    data = Ranks() if pipeline.data is None else Ranks(pipeline.data, timeout)
    check_pipeline(stages, data, everyone)
    return Processes(data=data, pipeline=stages, everyone=everyone, run=pipeline.run)


def swap(model: nn.Module, config: SnipConfig, pipeline: Ranks) -> None:
    """Swaps the layers of the model, or of the parts of it that this rank of a pipeline holds.

    Raises:
        ValueError: as `convert_model`; a name in `skip_modules` or `include_modules` may match on any rank.
    """
    names = skip_reasons(model, config)
    given = config.skip_modules, config.include_modules
    own = {pattern: any(fnmatchcase(name, pattern) for name in names) for pattern in chain(*given)}
    everywhere = pipeline.gather(own)
    # What matches on another rank alone is no mistake here.
    asked = {pattern for pattern in own if own[pattern] or not any(found[pattern] for found in everywhere)}
    skipped, included = (tuple(one for one in patterns if one in asked) for patterns in given)
    convert_model(model, replace(config, skip_modules=skipped, include_modules=included))


def flops_of_all(model: nn.Module, pipeline: Ranks) -> dict[str, dict[str, float]]:
    """Returns `linear_flops` of the layers of all stages of a pipeline, in the order of the model's blocks."""
    found = linear_flops(model)
    if pipeline.size == 1:
        return found
    merged = {layer: row for part in pipeline.gather(found) for layer, row in part.items()}
    numbers = {layer: int((re.findall(r"\d+", block_of(layer)) or [0])[-1]) for layer in merged}
    return {layer: merged[layer] for layer in sorted(merged, key=numbers.__getitem__)}


def find_setting(model: nn.Module, config: SnipConfig, pipeline: Ranks) -> Setting:
    """Returns what the policy is told of the model.

    Raises:
        ValueError: stages or ties that do not fit the model, or a file of times that cannot be read.
    """
    flops = flops_of_all(model, pipeline)
    if config.ties == AUTO_TIES:  # as long as no probe has seen them
        config = replace(config, ties=usual_ties(flops))
    setting = Setting(config, flops, find_stages(list(flops), config))
    check_ties(setting)
    if config.timing_file is not None:
        folder = os.path.dirname(os.path.abspath(config.timing_file))
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"timing_file={config.timing_file!r}: {folder} does not exist; create it first.")
        read_times(os.path.abspath(config.timing_file))  # What is wrong with it comes out now and not at a refresh.
    return setting


def name_of(model: nn.Module) -> str:
    """Returns the name that a model was loaded by, as plans and records show it, or that of its class."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    # It may be a path, of which any character may be a part.
    return printable(name, MAX_TEXT) or type(model).__name__.removeprefix("FSDP")


def cost_of_all(
    model: nn.Module, tokens: int, backend: str, config: SnipConfig, flops: Work, processes: Processes, log: Any
) -> MeasuredCost:
    """Times the GEMMs of all layers in `flops`, as `measured_cost.measure_cost` does.

    One rank measures for all that hold the same layers, since each would find other times.
    """
    began = time.perf_counter()
    found, attempt = None, Attempt()
    with attempt:
        is_first = processes.everyone.is_first
        found = processes.data.by_first(
            lambda: measure_cost(
                model, tokens, backend, config.timing_file, formats=config.formats, is_first=is_first
            ).to_dict()
        )
    processes.everyone.agree(attempt.error)
    parts = [read_measured(part) for part in processes.pipeline.gather(found)]
    seconds = {layer: row for part in parts for layer, row in part.seconds.items()}
    measured = replace(parts[0], seconds={layer: seconds[layer] for layer in flops})
    taken = time.perf_counter() - began
    log.info("snip-hf: measured the GEMMs in %.1f s. %s", taken, describe_cost(flops, measured))
    if BACKENDS[backend].is_emulation:
        log.warning("snip-hf: the emulated backend was timed: quantized formats have the times of their emulation.")
    return measured


def use_backend(
    layers: Mapping[str, SnipLayer],
    backend: Backend,
    data: Ranks,
    mixed_precision: str | None,
    config: SnipConfig,
    log: logging.Logger,
) -> None:
    """Tells the layers which kernels to run and which rank they are on, and the log what that means."""
    weight = next(iter(layers.values())).weight
    for layer in layers.values():
        layer.snip_backend.release({"": layer})  # what a run before that was not closed may have left
        layer.use_backend(backend)
    left: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if (reason := layer.refused_by(backend)) is not None:
            left.setdefault(reason, []).append(name)
    pack_states(layers)
    set_rank(layers, data.rank, data.size)
    asked = config.backend != "auto"
    warns, text = backend.notice(weight, mixed_precision, asked)
    if warns:
        log.warning("snip-hf: %s", text)
    elif backend.is_emulation:
        lacks = None if asked else why_emulated(weight.device, formats_in_use(config))
        reason = lacks or f"asked for by backend={backend.name!r}"
        log.info("snip-hf: backend %s: %s (%s).", backend.name, text, reason)
    else:
        log.info("snip-hf: backend %s: %s", backend.name, text)
    for reason, names in left.items():
        log.warning(
            "snip-hf: %s: %d layers, such as %s, run emulated, slower than BF16. Name them in skip_modules to keep "
            "them in high precision.",
            reason,
            len(names),
            names[0],
        )
