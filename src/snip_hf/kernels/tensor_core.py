"""The common part of backends on FP8 tensor cores: caches of layers between passes, inputs that tied layers share, and
one pass of a layer. Each backend supplies the encoding and the products (`Kernels`).

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I). GEMMs are numbered as in `gemms.GEMMS`;
number -1 leaves a layout out, and empty tensors come back for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..numerics.formats import NumberFormat, format_of_code
from ..numerics.gemms import GEMMS
from .backend import Backend, Layer
from .checkpointing import compile_checkpoints
from .emulated import EMULATED
from .linear import Gradients, kept_for_backward, linear_function

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows of an operand and their scales, and its columns and theirs. Of a weight: for the forward and for grad_input."""
Layout = Sequence[Tensor]
"""One layout of an operand and its scales."""


@dataclass
class Cache:
    """State of one layer."""

    device: str
    """Type of the device that the backend was chosen for; on another one the layer runs emulated."""
    high: tuple[bool, bool, bool]
    """Which GEMMs run in BF16. A Python constant: changing it recompiles."""
    tied: TiedInput | None = None
    """Shared with the tied layers that take the same input; None: the input is quantized for this layer only."""
    weights: tuple[Tensor, ...] = ()
    """The weight as last quantized by `before_pass`; empty: every pass quantizes it."""
    weight_version: int = -1
    """torch's count of the weight's changes at that time."""
    records: Any = None
    """Further state of the backend."""


class TiedInput:
    """The quantized input of tied layers that have the same input (q, k and v; gate and up), quantized once for all.

    If their formats differ, `parted` is True and each layer quantizes for itself. The tensor is held until all layers
    have asked for it.
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

    def set_formats(self, layer: int, formats: tuple[int, ...]) -> None:
        """Updates a layer's formats of the GEMMs that read the input."""
        self._formats[layer] = formats
        self.parted = len(set(self._formats.values())) > 1

    def forget(self) -> None:
        """Drops a tensor that some layer has not asked for: it was not called, or the pass failed."""
        self._source = self._quantized = None

    def quantized(self, source: Tensor, gemms: tuple[int, int], quantize: Callable[[], Quantized]) -> Quantized:
        """Returns `source` quantized for these GEMMs; calls `quantize` for the first layer that asks."""
        quantized, version = self._quantized, _version(source)
        # The order matters: torch.compile guards every compared value, and `_gemms` changes after the first pass.
        if quantized is None or self._source is not source or (self._gemms, self._version) != (gemms, version):
            quantized = quantize()
            self._source, self._version, self._gemms = source, version, gemms
            self._quantized, self._waiting = quantized, self._layers
        self._waiting -= 1
        if self._waiting == 0:
            self.forget()
        return quantized


def _version(tensor: Tensor) -> int:
    """Returns torch's count of the writes to a tensor; 0 if it has none, and in a graph, which cannot read it."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


class PassOptions(NamedTuple):
    """Python constants of a pass: changing one recompiles."""

    high: tuple[bool, bool, bool]
    """Which GEMMs run in BF16."""
    keeps_x: bool
    """True if the backward pass will compute the weight's gradient."""
    counts: bool
    """True in a pass that may be trained on."""
    has_grad_input: bool
    """True if the backward pass will compute the gradient of x."""
    layer_tensors: int
    """Number of tensors that describe the layer."""


class Pass(NamedTuple):
    """One pass of a layer through its kernels."""

    weight: Tensor
    """The layer's weight."""
    layer: Layout
    """Tensors that describe the layer, its state first."""
    options: PassOptions
    tokens: int
    """T"""


class Kernels(ABC):
    """The encoding and the products of a backend. Here x and gradients are (T, *)."""

    @abstractmethod
    def forward(self, given: Pass, x: Layout, bias: Tensor | None, weights: Layout) -> tuple[Tensor, Layout]:
        """Returns x @ weight^T + bias, (T, O), BF16, and the weight's layout for grad_input, or nothing.

        Args:
            given: the pass.
            x: rows of x.
            bias: of the layer.
            weights: both layouts of the weight, or nothing.
        """

    @abstractmethod
    def gradient(self, given: Pass, grad_output: Tensor, gemms: tuple[int, int]) -> Quantized:
        """Returns the output gradient quantized for the grad_input and the grad_weight GEMM."""

    @abstractmethod
    def grad_input(self, given: Pass, grad: Layout, by_input: Layout) -> Tensor:
        """Returns grad @ weight, (T, I), BF16; `by_input`: the weight's layout for it, or nothing."""

    @abstractmethod
    def grad_weight(self, given: Pass, grad: Layout, x: Layout, dtype: torch.dtype) -> Tensor:
        """Returns grad^T @ x, in the weight's layout."""

    def late_columns(self, given: Pass, x: Tensor, grad: Tensor, after: Tensor) -> Layout:
        """Returns the columns of x for grad_weight, if the forward pass has not quantized them."""
        raise NotImplementedError

    # In BF16.

    def high_forward(self, given: Pass, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, given.weight.to(x.dtype), bias)

    def high_grad_input(self, given: Pass, grad: Tensor) -> Tensor:
        return grad @ given.weight.to(grad.dtype)

    def high_grad_weight(self, given: Pass, grad: Tensor, x: Tensor) -> Tensor:
        return grad.t() @ x

    def bias_gradient(self, given: Pass, grad: Tensor) -> Tensor:
        return grad.sum(0)


def tensor_core_linear(kernels: Kernels) -> Any:
    """Returns the autograd function (x, weight, bias, options, *tensors) -> Y on a backend's kernels.

    It saves the quantized x for the backward pass, one byte per element; or x itself if grad_weight runs in BF16. If x
    has no columns, a compiled graph recomputes x from tensors that other operations save anyway: norms, activation
    functions and attention save their own inputs or outputs.

    `tensors` are those of the layer; then x as `quantize_input` returns it, for the GEMMs that are not high; then both
    layouts of the weight with their scales, or nothing if each pass quantizes the weight.
    """

    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, options: PassOptions, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        count = options.layer_tensors
        layer, rows, columns = tensors[:count], tensors[count : count + 2], tensors[count + 2 : count + 4]
        weights = tensors[count + 4 :]
        by_input = weights[2:]
        given = Pass(weight, layer, options, x.numel() // x.shape[-1])
        if options.high[0]:
            y = kernels.high_forward(given, x.reshape(-1, x.shape[-1]), bias)
        else:
            y, by_input = kernels.forward(given, rows, bias, weights)
        kept_x = x if options.keeps_x and (options.high[2] or columns[0].numel() == 0) else None
        return y, (kept_x, kept_for_backward(layer[0]), *layer[1:], *columns, *by_input)

    def backward(
        grad: Tensor, weight: Tensor, options: PassOptions, saved: Sequence[Any], needs: tuple[bool, bool, bool]
    ) -> Gradients:
        count = options.layer_tensors
        x, layer, x_columns, by_input = saved[0], saved[1 : count + 1], saved[count + 1 : count + 3], saved[count + 3 :]
        needs_x, needs_weight, needs_bias = needs
        _, high_input, high_weight = options.high
        gemms = 1 if needs_x and not high_input else -1, 2 if needs_weight and not high_weight else -1
        given = Pass(weight, layer, options, grad.shape[0])
        quantized = kernels.gradient(given, grad, gemms)
        grad_x = grad_weight = None
        if needs_x and high_input:
            grad_x = kernels.high_grad_input(given, grad)
        elif needs_x:
            grad_x = kernels.grad_input(given, quantized[:2], by_input)
        if needs_weight and high_weight:
            grad_weight = kernels.high_grad_weight(given, grad, x.reshape(-1, x.shape[-1]))
        elif needs_weight:
            if x_columns[0].numel() == 0 and grad.numel() > 0:
                x_columns = kernels.late_columns(given, x, grad, quantized[3])
            # In the parameter's own precision: rounding FP32 sums to BF16 first would gain nothing.
            dtype = grad.dtype if weight.dtype == grad.dtype else torch.float32
            grad_weight = kernels.grad_weight(given, quantized[2:], x_columns, dtype)
        return grad_x, grad_weight, kernels.bias_gradient(given, grad) if needs_bias else None

    return linear_function(forward, backward)


def with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """Returns a product plus a bias in BF16. A product that gets a bias is FP32, as in emulation."""
    return product if bias is None else (product + bias).to(torch.bfloat16)


class TensorCoreBackend(Backend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    recompiles_for_bf16 = True
    quantizes_late = False
    """True if the backward pass quantizes the input of a compiled linear for grad_weight, provided that no other linear
    shares the input and in_features >= out_features. torch.compile then recomputes the input from tensors that
    activations and attention save anyway."""

    @abstractmethod
    def quantize_input(self, x: Tensor, tensors: Layout, gemms: tuple[int, int]) -> Quantized:
        """Returns x (..., I) quantized for the forward and the grad_weight GEMM."""

    @abstractmethod
    def quantize_weight(self, layer: Layer, forward: bool, grad_input: bool) -> Quantized:
        """Returns the layer's weight quantized for the GEMMs that need it."""

    @abstractmethod
    def quantize_weight_into(self, layer: Layer, outputs: Sequence[Tensor]) -> None:
        """Quantizes like `quantize_weight`, but overwrites the tensors it returned; skips empty ones."""

    @abstractmethod
    def three_gemms(self, *arguments: Any) -> Tensor:
        """Calls the autograd function that `tensor_core_linear` made for this backend."""

    def tensors_of(self, layer: Layer, x: Tensor, ends: Tensor | None) -> Layout:
        """Returns the tensors that describe the layer to `Kernels`, its state first."""
        return (layer.snip_state,)

    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        cache: Cache = layer.snip_cache
        if x.dtype != torch.bfloat16 or x.device.type != cache.device:
            return EMULATED.forward(layer, input, x, bias, ends)
        high, weight = cache.high, layer.matrix
        if all(high) and ends is None:
            return functional.linear(x, weight.to(x.dtype), bias)
        has_backward = torch.is_grad_enabled()
        keeps_x = has_backward and layer.weight.requires_grad
        # Tied layers save one layout for all of them, and would each quantize it in the backward pass.
        is_untied = cache.tied is None and torch.compiler.is_compiling()
        is_late = self.quantizes_late and is_untied and ends is None and weight.shape[1] >= weight.shape[0]
        gemms = -1 if high[0] else 0, 2 if keeps_x and not high[2] and not is_late else -1
        tensors = self.tensors_of(layer, x, ends)
        quantized = self.shared_input(layer, input, x, tensors, gemms)
        options = PassOptions(high, keeps_x, has_backward, has_backward and x.requires_grad, len(tensors))
        return self.three_gemms(x, weight, bias, options, *tensors, *quantized, *weights_of(layer))

    def shared_input(
        self, layer: Layer, input: Tensor, x: Tensor, tensors: Layout, gemms: tuple[int, int]
    ) -> Quantized:
        """Returns x quantized for the forward and the grad_weight GEMM, once for all layers that share `input`."""
        cache: Cache = layer.snip_cache
        quantize = partial(self.quantize_input, x, tensors, gemms)
        if cache.tied is None or cache.tied.parted:
            return quantize()
        return cache.tied.quantized(input, gemms, quantize)

    def attach(self, layer: Layer) -> None:
        layer.snip_cache = Cache(layer.snip_state.device.type, (False, False, False))
        self.note_formats(layer, [format_of_code(code) for code in layer.snip_state[: len(GEMMS)].tolist()])

    def cache_of_copy(self, layer: Layer) -> Cache:
        return Cache(layer.snip_cache.device, layer.snip_cache.high)

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        cache: Cache = layer.snip_cache
        forward, grad_input, grad_weight = (not format.is_quantized for format in formats)
        cache.high = (forward, grad_input, grad_weight)
        cache.weight_version = -1  # the kept weight is in other formats
        if cache.tied is not None:
            cache.tied.set_formats(id(layer), (formats[0].code, formats[2].code))

    def share_inputs(self, layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
        """Lets the layers of each group quantize a common input once while they have the same formats."""
        compile_checkpoints()
        for group in groups:
            tied = TiedInput(len(group))
            for name in group:
                layers[name].snip_cache.tied = tied
                layers[name].set_formats(layers[name].formats)

    def before_pass(self, layers: Mapping[str, Layer], everything: bool = True) -> None:
        """Quantizes the weights of the layers for all passes until the next call.

        Call it whenever weights or formats have changed. Passes quantize sharded weights themselves.
        """
        for layer in layers.values():
            cache: Cache = layer.snip_cache
            weight, uses = layer.weight, tuple(not high for high in cache.high[:2])
            if type(weight) is not nn.Parameter or not any(uses):
                cache.weights = ()
                continue
            used = tuple(tensor.numel() > 0 for tensor in cache.weights[::2])
            if used != uses or cache.weights[0].device != weight.device:
                cache.weights = self.quantize_weight(layer, *uses)
                for tensor in cache.weights:  # so that CUDA graphs read the same addresses
                    torch._dynamo.mark_static_address(tensor)
            elif everything or cache.weight_version != weight._version:
                self.quantize_weight_into(layer, cache.weights)
            cache.weight_version = weight._version

    def after_step(self, layers: Mapping[str, Layer]) -> None:
        """Drops shared inputs that some layer did not ask for."""
        for layer in layers.values():
            if layer.snip_cache.tied is not None:
                layer.snip_cache.tied.forget()

    def release(self, layers: Mapping[str, Layer]) -> None:
        """Undoes `before_pass` and `share_inputs`: every pass of every layer quantizes its operands again."""
        for layer in layers.values():
            layer.snip_cache.weights, layer.snip_cache.tied = (), None


def weights_of(layer: Layer) -> tuple[Tensor, ...]:
    """Returns the kept layouts of the layer's weight if the current pass may read them, else ()."""
    return layer.snip_cache.weights if reads_kept_weight(layer) else ()


def reads_kept_weight(layer: Layer) -> bool:
    """Returns True if the current pass may read the weight as `before_pass` quantized it.

    Only passes that are trained on may: before evaluation, and generation in training mode, weights may have changed
    unnoticed.
    """
    is_kept = torch.compiler.is_compiling() or layer.snip_cache.weight_version == layer.weight._version
    return layer.training and torch.is_grad_enabled() and is_kept
