"""The Hopper backend's memory between passes: quantized weights, and inputs that tied layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import hopper
from ..backend import Layer
from .linear import TiedInput


@dataclass
class Cache:
    """What the backend knows of one layer."""

    device: str
    """Type of the device that the backend was chosen for; on another one the layer runs emulated."""
    high: tuple[bool, bool, bool]
    """Which GEMMs run in BF16. A Python constant: changing it triggers recompilation."""
    tied: TiedInput | None = None
    """Shared with the tied layers that take the same input; None: the input is quantized for this layer alone."""
    weights: tuple[Tensor, ...] = ()
    """The weight as `keep_quantized` quantized it last; empty: every pass quantizes what it needs."""
    weight_version: int = -1
    """torch's count of the weight's changes at that time."""


def keep_quantized(layers: Mapping[str, Layer], everything: bool = True) -> None:
    """Quantizes the weights of the layers that run on Hopper, for all passes until the next call.

    To be called whenever weights or formats have changed. Sharded weights are left to the passes.

    Args:
        layers: the layers.
        everything: False leaves out layers whose weight has not changed since the last call as far as torch knows
            (it does not see what fused optimizers do, nor what is written through `weight.data`).
    """
    for layer in layers.values():
        cache: Cache = layer.snip_cache
        weight, uses = layer.weight, tuple(not high for high in cache.high[:2])
        if type(weight) is not nn.Parameter or not any(uses):
            cache.weights = ()
            continue
        used = tuple(tensor.numel() > 0 for tensor in cache.weights[::2])
        if used != uses or cache.weights[0].device != weight.device:
            cache.weights = hopper.operators.quantize_weight(layer.matrix.detach(), layer.snip_state, *uses)
            for tensor in cache.weights:  # so that CUDA graphs read them where they are
                torch._dynamo.mark_static_address(tensor)
        elif everything or cache.weight_version != weight._version:
            hopper.operators.quantize_weight_into(layer.matrix.detach(), layer.snip_state, cache.weights)
        cache.weight_version = weight._version


def share_inputs(layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
    """Lets the layers of each group quantize a common input once, wherever they have the same formats."""
    for group in groups:
        tied = TiedInput(len(group))
        for name in group:
            layers[name].snip_cache.tied = tied
            layers[name].set_formats(layers[name].formats)


def forget_inputs(layers: Mapping[str, Layer]) -> None:
    """Lets go of the inputs that `share_inputs` made layers hold and that were not asked for to the end."""
    for layer in layers.values():
        if layer.snip_cache.tied is not None:
            layer.snip_cache.tied.forget()


def drop_quantized(layers: Mapping[str, Layer]) -> None:
    """Ends `keep_quantized` and `share_inputs`: every pass of every layer quantizes what it needs again."""
    for layer in layers.values():
        layer.snip_cache.weights, layer.snip_cache.tied = (), None
