"""The memory that a probe takes beyond the model, and the number of tokens that it may keep within a bound.

Counts everything that a probe keeps alive between passes: FP32 copies of weights, their gradients, and the samples of
all layers. Does not count the activations of the running pass, which is in FP32 (`probe_batch_tokens` says how many
tokens it runs on), nor what is computed of one layer at a time, before the passes and after them. `room` sees to it
that activations and copies of weights stay within bounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..config import POLICIES, SnipConfig
from ..layers.state import snip_linears
from ..numerics.gemms import TILE
from ..parallel.sharding import own_part
from ..text import WITHOUT_PROBE
from .passes import frozen_in_a_pass

logger = logging.getLogger(__name__)

_MIB = 2**20
_FP32 = 4  # bytes


def probe_memory(model: nn.Module, probes: int, tokens: int, is_noisy: bool = False) -> float:
    """Returns the MiB that `probe.run_probe` holds beyond the model at most, activations not counted.

    Args:
        model: a converted model, without wrappers. Every layer is taken to run once per pass.
        probes: number of probes, as in `ProbeSettings`.
        tokens: tokens kept per layer, with all rows that they have there.
        is_noisy: whether passes add noise in place of moving weights, as `ProbeSettings.noise` says.
    """
    noisy, probes = (2 * probes, 0) if is_noisy else (0, probes)
    layers = snip_linears(model)
    moved = {id(layer.weight) for layer in layers.values() if layer.weight.requires_grad and probes > 0}
    # As in `counted`; which of them the optimizer holds is not known here.
    moves_others = probes > 0 and not all(layer.weight.requires_grad for layer in layers.values())
    frozen = frozen_in_a_pass(model)
    total = 0
    for parameter in model.parameters():
        copied = parameter.is_floating_point() and parameter.dtype != torch.float32
        copied |= moves_others and parameter.is_floating_point() and parameter.requires_grad
        gets_gradient = parameter.is_floating_point() and id(parameter) not in frozen
        copies = 1 if id(parameter) in moved else copied + gets_gradient
        # The layers' own weights stay sharded.
        kept = own_part(parameter) if id(parameter) in moved else parameter
        total += _FP32 * kept.numel() * copies
    for buffer in model.buffers():
        total += buffer.numel() * (_FP32 if buffer.is_floating_point() else buffer.element_size())
    # At the end of a probe's second pass: X and G of both its sides; X, G and the derivatives of the probes before.
    # Of passes with noise: X and G of the last one, and without noise; the differences of those between.
    held = {0: 1, 1: 2}.get(probes, probes + 2) + noisy
    features = sum((layer.in_features + layer.out_features) * layer.rows_per_token for layer in layers.values())
    return (total + _FP32 * tokens * features * held) / _MIB


def adds_noise(config: SnipConfig) -> bool:
    """Returns True if the policy's probe adds noise in place of moving weights."""
    return POLICIES[config.policy].criterion.noise is not None


def bounded(config: SnipConfig, model: nn.Module) -> SnipConfig:
    """Returns the config with as many `probe_tokens` as `probe_memory_mib` allows, in whole runs of 128.

    Raises:
        ValueError: the bound is too small for 128 tokens.
    """
    bound = config.probe_memory_mib
    if bound is None:
        return config
    is_noisy = adds_noise(config)
    fixed, least = (probe_memory(model, config.probes, tokens, is_noisy) for tokens in (0, TILE))
    if least > bound:
        raise ValueError(
            f"probe_memory_mib={bound} is too small: 128 tokens per layer and the FP32 copies of this model's weights "
            f"take {math.ceil(least)} MiB ({math.ceil(fixed)} without the tokens). Raise it to at least "
            f"{math.ceil(least)}, set it to None, or use {WITHOUT_PROBE}."
        )
    fitting = int((bound - fixed) / (least - fixed)) * TILE
    if config.probe_tokens is not None and config.probe_tokens <= fitting:
        return config
    logger.info(
        "snip-hf: probe_memory_mib=%d lets the probe keep at most %d tokens per layer (probe_tokens=%s).",
        bound,
        fitting,
        config.probe_tokens,
    )
    return replace(config, probe_tokens=fitting)


def kept_tokens(config: SnipConfig, tokens: int, ranks: int = 1) -> int:
    """Returns how many tokens per layer a rank holds at most, of the tokens that its part of the probe runs on.

    With several ranks, each keeps its own part, and receives the others' parts for the layers that it owns.
    """
    if ranks > 1:
        own = tokens if config.probe_tokens is None else min(tokens, math.ceil(config.probe_tokens / ranks))
        return 2 * own
    if config.probe_tokens is None or tokens <= config.probe_tokens:
        return tokens
    return min(config.probe_tokens, tokens) // TILE * TILE


@contextmanager
def measured_peak(weight: Tensor) -> Iterator[list[float | None]]:
    """Gives a list that after the context holds its peak of CUDA memory, beyond what was allocated before, in MiB.

    Nothing is reset, so that the peak statistics of the program stay its own: where the process had reached a higher
    peak before, the context's own is not known and the list holds None. So it does where `weight` is not on CUDA.
    """
    peak: list[float | None] = [None]
    if weight.device.type != "cuda":
        yield peak
        return
    allocated, before = (f(weight.device) for f in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))
    yield peak
    after = torch.cuda.max_memory_allocated(weight.device)
    if after > before:
        peak[0] = (after - allocated) / _MIB
