"""Three linears of E4M3 operands around a gate, Y = (silu(X G^T) * (X U^T)) D^T, as one function.

The launch that computes silu(gate) * up, or its gradients, also encodes them: they exist only as E4M3. There are two
exceptions: if an operand's scales are unknown before it is read, or its blocks are counted in this step, that launch
writes it in BF16, and other launches encode it.

Legend: T tokens, I channels of X and Y, C channels of gate and up; x (..., I), weights of gate and up (C, I), of down
(I, C); T', C' are rounded up as in `operators`. Numerics are those of three linears (`linear`), with silu(gate) * up
and its gradients computed in FP32. torch.compile does not look into the operators, as in `operators`. On a GPU the
kernels of `gated_tiles` run, elsewhere torch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..launching import launch, relaunch
from ..linear import is_differentiated_again, refusal
from ..tensor_core import Layout, Quantized
from . import operators
from .linear import forward_product, grad_input_product
from .operators import (
    ACTIVATION,
    GRADIENT,
    Facts,
    Tile,
    empty_layouts,
    encode_operand,
    facts_of,
    multiply,
    one_layout,
    padded,
    parts_of,
)
from .reference import LayerTensors

if TYPE_CHECKING or find_spec("triton") is not None:
    from .gated_tiles import encode_gated_gradients_kernel, encode_gated_kernel

_FORWARD, _GRAD_INPUT, _GRAD_WEIGHT = range(3)  # in `gemms.GEMMS`
# For forward and backward: the fastest of those tried on an H200 (docs/log/2026-11.md). No thread spills
# registers on compute capability 9.0.
TILES: tuple[Tile, Tile] = ((8, 64, 2, None), (8, 32, 1, 168))
LAYERS = 3
"""Gate, up and down."""

_library = torch.library.Library("snip_hf", "FRAGMENT")
_library.define("encode_gated(Tensor gate, Tensor up, Tensor[] layer, bool counts) -> (Tensor, Tensor)")
_library.define(
    "encode_gated_gradients(Tensor grad, Tensor gate, Tensor up, Tensor[] layers, bool has_rows, bool counts) -> "
    "Tensor[]"
)


# ------------------------------------------------------------------------------------- operators


class Operand(NamedTuple):
    """The arguments of `operators.encode_into` for an operand of one layer, except its values."""

    layer: LayerTensors
    operand: int
    gemms: tuple[int, int]
    counts: bool
    outputs: Quantized

    @property
    def facts(self) -> Facts:
        """The host's knowledge of the operand, which is written in BF16 first if it needs scales."""
        return facts_of(self.layer[1], self.operand, self.gemms, self.counts)

    def encode(self, values: Tensor, by_kernel: bool) -> None:
        operators.encode_into(values, *self, by_kernel=by_kernel)


def activation_of(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up in BF16, computed in FP32."""
    gate_fp32 = gate.float()
    return (gate_fp32 * torch.sigmoid(gate_fp32) * up.float()).to(torch.bfloat16)


def gradients_of(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up from that of silu(gate) * up, in BF16, computed in FP32."""
    grad_fp32, gate_fp32 = grad.float(), gate.float()
    sigmoid = torch.sigmoid(gate_fp32)
    silu = gate_fp32 * sigmoid
    slope = silu * (1.0 - sigmoid) + sigmoid
    return (grad_fp32 * up.float() * slope).to(torch.bfloat16), (grad_fp32 * silu).to(torch.bfloat16)


def _by_kernel(x: Tensor) -> bool:
    return x.numel() > 0 and operators.runs_kernels(x)


def launch_forward(gate: Tensor, up: Tensor, one: Operand) -> Tensor | None:
    """Launches `encode_gated_kernel`; returns silu(gate) * up in BF16 if that is still to be encoded, else None."""
    facts = one.facts
    values = torch.empty_like(gate) if facts.needs_scales else None
    rows, parameters, *_ = one.outputs
    state, _, table = one.layer
    # If no values are written, any tensor fills the argument.
    tensors = gate, up, state, facts.row, table, parameters, rows, gate if values is None else values
    _launch(encode_gated_kernel, tensors, int(values is not None), gate.shape, (one.counts, facts.in_blocks), TILES[0])
    return values


def launch_backward(
    inputs: tuple[Tensor, Tensor, Tensor], operands: Sequence[Operand], has_rows: bool, counts: bool
) -> list[Tensor | None]:
    """Launches `encode_gated_gradients_kernel`; returns the BF16 values of operands that are still to be encoded.

    Args:
        inputs: the gradient of silu(gate) * up, gate and up.
        operands: the gradients of gate and up, and silu(gate) * up.
        has_rows: of the gradients.
        counts: True in a pass that is trained on.
    """
    _, gate, _ = inputs
    every = [one.facts for one in operands]
    values = [torch.empty_like(gate) if facts.needs_scales else None for facts in every]
    tensors = list(inputs)
    for one, facts, plain in zip(operands, every, values, strict=True):
        layouts = one.outputs if one.operand == GRADIENT else one.outputs[2:]
        ordered = [*layouts[1::2], *layouts[::2]]  # parameters first
        tensors += [one.layer[0], facts.row, *ordered, gate if plain is None else plain]
    tensors.append(operands[0].layer[2])
    bits = sum(1 << index for index, plain in enumerate(values) if plain is not None)
    flags = has_rows, counts, all(facts.in_blocks for facts in every)
    _launch(encode_gated_gradients_kernel, tensors, bits, gate.shape, flags, TILES[1])
    return values


def _launch(
    kernel: Any, tensors: Sequence[Tensor], plain: int, shape: torch.Size, flags: tuple[bool, ...], tile: Tile
) -> None:
    """Launches a kernel for operands (T, C). `plain` has a bit for each operand whose values it writes."""
    first, (runs, width, warps, registers) = tensors[0], tile
    key = kernel.fn, first.get_device(), first.dtype, shape, flags
    if relaunch(key, tensors, (plain,)):
        return
    tokens, channels = shape
    padded_tokens, padded_channels = padded(tokens), padded(channels)
    is_ragged = (padded_tokens, padded_channels) != (tokens, channels)
    launch(
        kernel,
        (parts_of(padded_channels, width), parts_of(padded_tokens, 4 * runs)),
        tensors,
        (tokens, channels, padded_tokens, padded_channels),
        (*flags, is_ragged, runs, width),
        (plain,),
        key,
        num_warps=warps,
        maxnreg=registers,
        enable_fp_fusion=True,  # if it could change a bit, the kernels fuse explicitly
    )


@torch.library.impl(_library, "encode_gated", "CompositeExplicitAutograd")
def _encode_gated(gate: Tensor, up: Tensor, layer: Sequence[Tensor], counts: bool) -> tuple[Tensor, Tensor]:
    gate, up, (state, record, table) = gate.contiguous(), up.contiguous(), layer
    layouts = one_layout(gate, _FORWARD, -1)
    one = Operand((state, record, table), ACTIVATION, (_FORWARD, -1), counts, layouts)
    if _by_kernel(gate):
        values = launch_forward(gate, up, one)
        if values is not None:
            one.encode(values, by_kernel=True)
    else:
        one.encode(activation_of(gate, up), by_kernel=False)
    return one.outputs[:2]


@torch.library.register_fake("snip_hf::encode_gated", lib=_library)
def _(gate: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_layouts(gate, _FORWARD, -1)[:2]


@torch.library.impl(_library, "encode_gated_gradients", "CompositeExplicitAutograd")
def _encode_gated_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, layers: Sequence[Tensor], has_rows: bool, counts: bool
) -> list[Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    *pairs, table = layers
    *own, down = [(state, record, table) for state, record in zip(pairs[::2], pairs[1::2], strict=True)]
    gemms = _GRAD_INPUT if has_rows else -1, _GRAD_WEIGHT
    operands = [Operand(layer, GRADIENT, gemms, counts, empty_layouts(gate, *gemms)) for layer in own]
    # The forward pass has already recorded the activation.
    last = Operand(down, ACTIVATION, (-1, _GRAD_WEIGHT), False, one_layout(gate, -1, _GRAD_WEIGHT))
    operands.append(last)
    if _by_kernel(gate):
        values = launch_backward((grad, gate, up), operands, has_rows, counts)
        for one, plain in zip(operands, values, strict=True):
            if plain is not None:
                one.encode(plain, by_kernel=True)
    else:
        for one, plain in zip(operands, (*gradients_of(grad, gate, up), activation_of(gate, up)), strict=True):
            one.encode(plain, by_kernel=False)
    return [*operands[0].outputs, *operands[1].outputs, *last.outputs[2:]]


@torch.library.register_fake("snip_hf::encode_gated_gradients", lib=_library)
def _(grad: Tensor, gate: Tensor, up: Tensor, layers: Any, has_rows: bool, counts: bool) -> list[Tensor]:
    layouts = [empty_layouts(gate, _GRAD_INPUT if has_rows else -1, _GRAD_WEIGHT) for _ in range(LAYERS - 1)]
    return [*layouts[0], *layouts[1], *empty_layouts(gate, -1, _GRAD_WEIGHT)[2:]]


encode_gated = torch.ops.snip_hf.encode_gated
"""Returns silu(gate) * up encoded for the forward GEMM, rows (T', C') E4M3 and their parameters.

Args:
    gate, up: (T, C), BF16.
    layer: state, record and table of the layer that multiplies with it.
    counts: True in a pass that is trained on.
"""
encode_gated_gradients = torch.ops.snip_hf.encode_gated_gradients
"""Returns the operands of the backward GEMMs: the gradients of gate and of up, and silu(gate) * up.

Args:
    grad: of silu(gate) * up, (T, C), BF16.
    gate, up: (T, C), BF16.
    layers: state and record of gate, of up and of down, then their common table.
    has_rows: True if gate and up have grad_input GEMMs.
    counts: True in a pass that is trained on.

Returns: rows, their parameters, columns (C', T') and their parameters of the gradient of gate; the same of up; the
    columns of silu(gate) * up and their parameters.
"""


# ------------------------------------------------------------------------------------- autograd


class GatedOptions(NamedTuple):
    """Python constants of a pass: changing one recompiles."""

    counts: bool
    """True in a pass that is trained on."""
    has_backward: bool
    has_grad_input: bool
    """True if the backward pass computes the gradient of x."""
    inputs: int
    """1: x is quantized once for gate and up; 2: once for each."""
    weight_layouts: tuple[int, ...]
    """Number of given layout tensors of each weight: four or none."""


class GatedGemms(torch.autograd.Function):
    """All nine GEMMs of gate, up and down, none of them in BF16.

    The columns of x, a byte per element, and gate and up in BF16 are saved for the backward pass.

    Args of forward:
        x: (..., I), BF16.
        up_x: the same for up, if x is cast from FP32: the gradients of both are then added in FP32, as those of two
            layers are. None if x is the input itself.
        gate_weight, up_weight, down_weight: the parameters themselves, FP32 or BF16; all are trained.
        table: of the records.
        options: Python constants of the pass.
        tensors: the states of the three layers; their records; x as `quantize_input` returns it, once, or once each for
            gate and up; the layouts of the kept weights, in the order of the layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_x: Tensor | None,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        table: Tensor,
        options: GatedOptions,
        *tensors: Tensor,
    ) -> Tensor:
        states, records, quantized = tensors[:LAYERS], tensors[LAYERS : 2 * LAYERS], tensors[2 * LAYERS :]
        weights, tokens = (gate_weight, up_weight, down_weight), x.numel() // x.shape[-1]
        of_gate, of_up = quantized[:4], quantized[4 * options.inputs - 4 : 4 * options.inputs]
        layers = [(state, record, table) for state, record in zip(states, records, strict=True)]
        kept = _split(quantized[4 * options.inputs :], options.weight_layouts)
        needs_x, counts = options.has_grad_input, options.counts
        gate, gate_kept = forward_product(of_gate[:2], weights[0], layers[0], kept[0], needs_x, counts, x.dtype, tokens)
        up, up_kept = forward_product(of_up[:2], weights[1], layers[1], kept[1], needs_x, counts, x.dtype, tokens)
        rows = encode_gated(gate, up, list(layers[2]), counts)
        y, down_kept = forward_product(
            rows, weights[2], layers[2], kept[2], options.has_backward, counts, x.dtype, tokens
        )
        # The states themselves: a compiled graph would copy them in the backward pass (`kept_for_backward`).
        columns = of_gate[2:] if options.inputs == 1 else (*of_gate[2:], *of_up[2:])
        layouts = [*gate_kept, *up_kept, *down_kept]
        ctx.save_for_backward(gate, up, table, *weights, *states, *records, *columns, *layouts)
        ctx.inputs, ctx.weight_layouts = options.inputs, (len(gate_kept), len(up_kept), len(down_kept))
        ctx.counts, ctx.x_shape = counts, x.shape
        result: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], down_weight.shape[0]])
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if is_differentiated_again():
            raise refusal()
        gate, up, table, *rest = ctx.saved_tensors
        weights, states, records = rest[:LAYERS], rest[LAYERS : 2 * LAYERS], rest[2 * LAYERS : 3 * LAYERS]
        columns, rest = rest[3 * LAYERS :][: 2 * ctx.inputs], rest[3 * LAYERS + 2 * ctx.inputs :]
        kept = _split(rest, ctx.weight_layouts)
        layers = [(state, record, table) for state, record in zip(states, records, strict=True)]
        counts, needs_x, tokens = ctx.counts, ctx.needs_input_grad[0], gate.shape[0]
        g = grad_output.reshape(tokens, weights[2].shape[0])
        output = encode_operand(g, *layers[2], GRADIENT, (1, 2), counts)
        grad = grad_input_product(output[:2], weights[2], layers[2], kept[2], counts, tokens, g.dtype)
        pairs = [tensor for state, record, _ in layers for tensor in (state, record)]
        encoded = encode_gated_gradients(grad, gate, up, [*pairs, table], needs_x, counts)
        of_gate, of_up, activation = encoded[:4], encoded[4:8], encoded[8:]
        grads_x: list[Tensor | None] = [None, None]
        if needs_x:
            products = [
                grad_input_product(one[:2], weight, layer, own, counts, tokens, g.dtype)
                for one, weight, layer, own in zip((of_gate, of_up), weights, layers, kept, strict=False)
            ]
            products = products if ctx.needs_input_grad[1] else [products[0] + products[1]]
            grads_x[: len(products)] = [product.view(ctx.x_shape) for product in products]
        operands = (of_gate[2:], columns[:2]), (of_up[2:], columns[-2:]), (output[2:], activation)
        grads = [
            _weight_gradient(*pair, weight, g.dtype, record)
            for pair, weight, record in zip(operands, weights, records, strict=True)
        ]
        return *grads_x, *grads, *[None] * (len(ctx.needs_input_grad) - 2 - LAYERS)


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Layout]:
    """Splits a sequence into consecutive parts of these lengths."""
    found = []
    for count in counts:
        found.append(tensors[:count])
        tensors = tensors[count:]
    return found


def _weight_gradient(left: Layout, right: Layout, weight: Tensor, dtype: torch.dtype, record: Tensor) -> Tensor:
    """Returns the gradient of a weight in the weight's precision, as `tensor_core_linear` does."""
    rows, columns = weight.shape
    summed = dtype if weight.dtype == dtype else torch.float32
    return multiply("grad_weight", left, right, (rows, columns), summed, record).to(weight.dtype)
