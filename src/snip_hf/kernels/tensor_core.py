"""What backends on FP8 tensor cores share: what is kept of a layer between passes, inputs that tied layers share, and
the choice of what is quantized when. The kernels themselves are the backends' own.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I). GEMMs are numbered as in `gemms.GEMMS`;
number -1 leaves a layout out, and empty tensors come back for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.formats import NumberFormat, format_of_code
from ..numerics.gemms import GEMMS
from .backend import Backend, Layer
from .emulated import EMULATED

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows of an operand and their scales, and its columns and theirs. Of a weight: for the forward and for grad_input."""


@dataclass
class Cache:
    """What a backend knows of one layer."""

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
    own: Any = None
    """What else the backend keeps."""


class TiedInput:
    """The quantized input of tied layers that take the same tensor (q, k and v; gate and up), quantized once for all.

    As long as their formats are the same: `parted` says when they are not, and each layer quantizes for itself. The
    tensor is held until as many layers have asked for it as there are.
    """

    def __init__(self, layers: int) -> None:
        self.parted = False
        self._formats: dict[int, tuple[int, ...]] = {}
        self._layers = layers
        self._waiting = 0
        self._source: Tensor | None = None
        self._version = 0
        self._gemms = (-1, -1)
        self._quantized: Quantized | None = None

    def note(self, layer: int, formats: tuple[int, ...]) -> None:
        """Takes notice of a layer's formats of the GEMMs that read the input, whenever they are set."""
        self._formats[layer] = formats
        self.parted = len(set(self._formats.values())) > 1

    def forget(self) -> None:
        """Lets go of a tensor that some layer has not asked for: it was not called, or the pass failed."""
        self._source = self._quantized = None

    def quantized(self, source: Tensor, gemms: tuple[int, int], quantize: Callable[[], Quantized]) -> Quantized:
        """Returns what `quantize` makes of `source` for these GEMMs, or made of it when another layer asked."""
        quantized, version = self._quantized, _version(source)
        # In this order: torch.compile guards what is compared, and `_gemms` changes after the first pass.
        if quantized is None or self._source is not source or (self._gemms, self._version) != (gemms, version):
            quantized = quantize()
            self._source, self._version, self._gemms = source, version, gemms
            self._quantized, self._waiting = quantized, self._layers
        self._waiting -= 1
        if self._waiting == 0:
            self.forget()
        return quantized


def _version(tensor: Tensor) -> int:
    """Returns torch's count of the writes to a tensor; 0 where there is none, and in a graph, which cannot read it."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


class TensorCoreBackend(Backend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    recompiles_for_bf16 = True
    quantizes_late = False
    """Whether the input of a compiled linear is quantized for grad_weight in the backward pass, if the linear shares it
    with no other and has as many inputs as outputs or more. torch.compile then computes the input again from what
    activations and attention save anyway."""

    @abstractmethod
    def quantize_input(self, layer: Layer, x: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
        """Returns x (..., I) quantized for the forward and the grad_weight GEMM."""

    @abstractmethod
    def quantize_weight(self, layer: Layer, forward: bool, grad_input: bool) -> Quantized:
        """Returns the layer's weight quantized for the GEMMs that need it."""

    @abstractmethod
    def quantize_weight_into(self, layer: Layer, outputs: Sequence[Tensor]) -> None:
        """As `quantize_weight`, into the tensors that it gave; an empty one is left out."""

    @abstractmethod
    def three_gemms(
        self, layer: Layer, x: Tensor, bias: Tensor | None, keeps_x: bool, inputs: Quantized, weights: Sequence[Tensor]
    ) -> Tensor:
        """Returns x @ matrix^T + bias, differentiable.

        Args:
            layer: gives the weight, the state, and which GEMMs are high.
            x: (..., I), BF16.
            bias: (O), BF16, or None.
            keeps_x: whether the backward pass will compute the weight's gradient.
            inputs: x quantized for the GEMMs that are not high.
            weights: both layouts of the weight with their scales, if they are kept, or nothing.
        """

    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, casts: bool) -> Tensor:
        cache: Cache = layer.snip_cache
        if x.dtype != torch.bfloat16 or x.device.type != cache.device:
            return EMULATED.forward(layer, input, x, bias, casts)
        high = cache.high
        if all(high):
            return torch.nn.functional.linear(x, layer.matrix.to(x.dtype), bias)
        keeps_x = torch.is_grad_enabled() and layer.weight.requires_grad
        # Tied layers save one layout for all of them, and would each quantize it in the backward pass.
        out_features, in_features = layer.matrix.shape
        is_alone = cache.tied is None and torch.compiler.is_compiling()
        is_late = self.quantizes_late and is_alone and in_features >= out_features
        gemms = -1 if high[0] else 0, 2 if keeps_x and not high[2] and not is_late else -1
        quantized = self.shared_input(layer, input, x, gemms)
        return self.three_gemms(layer, x, bias, keeps_x, quantized, weights_of(layer))

    def shared_input(self, layer: Layer, input: Tensor, x: Tensor, gemms: tuple[int, int]) -> Quantized:
        """Returns x quantized for the forward and the grad_weight GEMM, for all layers that `input` is tied by."""
        cache: Cache = layer.snip_cache
        quantize = partial(self.quantize_input, layer, x, *gemms)
        if cache.tied is None or cache.tied.parted:
            return quantize()
        return cache.tied.quantized(input, gemms, quantize)

    def attach(self, layer: Layer) -> None:
        layer.snip_cache = Cache(layer.weight.device.type, (False, False, False))
        self.note_formats(layer, [format_of_code(code) for code in layer.snip_state[: len(GEMMS)].tolist()])

    def cache_of_copy(self, layer: Layer) -> Cache:
        return Cache(layer.snip_cache.device, layer.snip_cache.high)

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        cache: Cache = layer.snip_cache
        forward, grad_input, grad_weight = (not format.is_quantized for format in formats)
        cache.high = (forward, grad_input, grad_weight)
        cache.weight_version = -1  # what is kept of the weight is in other formats
        if cache.tied is not None:
            cache.tied.note(id(layer), (formats[0].code, formats[2].code))

    def share_inputs(self, layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
        share_inputs(layers, groups)

    def before_pass(self, layers: Mapping[str, Layer], everything: bool) -> None:
        keep_quantized(layers, everything)

    def after_step(self, layers: Mapping[str, Layer]) -> None:
        forget_inputs(layers)

    def release(self, layers: Mapping[str, Layer]) -> None:
        drop_quantized(layers)


def weights_of(layer: Layer) -> tuple[Tensor, ...]:
    """Returns what is kept of the layer's weight, if the pass that begins may read it.

    Evaluation, and generation in training mode, may follow a change of the weights that nobody told of; a pass that is
    trained on does not.
    """
    cache: Cache = layer.snip_cache
    is_kept = torch.compiler.is_compiling() or cache.weight_version == layer.weight._version
    return cache.weights if layer.training and torch.is_grad_enabled() and is_kept else ()


def keep_quantized(layers: Mapping[str, Layer], everything: bool = True) -> None:
    """Quantizes the weights of the layers by their backend, for all passes until the next call.

    To be called whenever weights or formats have changed. Sharded weights are left to the passes.

    Args:
        layers: the layers.
        everything: False leaves out layers whose weight has not changed since the last call as far as torch knows
            (it does not see what fused optimizers do, nor what is written through `weight.data`).
    """
    for layer in layers.values():
        cache: Cache = layer.snip_cache
        backend: Any = layer.snip_backend
        weight, uses = layer.weight, tuple(not high for high in cache.high[:2])
        if type(weight) is not nn.Parameter or not any(uses):
            cache.weights = ()
            continue
        used = tuple(tensor.numel() > 0 for tensor in cache.weights[::2])
        if used != uses or cache.weights[0].device != weight.device:
            cache.weights = backend.quantize_weight(layer, *uses)
            for tensor in cache.weights:  # so that CUDA graphs read them where they are
                torch._dynamo.mark_static_address(tensor)
        elif everything or cache.weight_version != weight._version:
            backend.quantize_weight_into(layer, cache.weights)
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
