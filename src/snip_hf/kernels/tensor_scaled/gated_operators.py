"""The operators of gated MLPs: silu(gate) * up and its gradients, folded in the launch that computes them.

torch.compile does not look into them, as in `operators`. Operands whose scales are not known before they are read, or
whose blocks are to be counted in this step, are written in BF16 by that launch and folded by others. On a GPU the
kernels of `gated_tiles` run, elsewhere torch's operations.

Legend: T tokens, C channels of gate and up; T', C' rounded up as in `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..launching import is_elsewhere, launch, relaunch
from ..tensor_core import Quantized
from . import operators
from .layouts import empty_layouts, one_layout, padded, parts_of
from .notes import note_of
from .operators import Tile, needs_scales

if TYPE_CHECKING or find_spec("triton") is not None:
    from .gated_tiles import fold_gated_gradients_kernel, fold_gated_kernel

_ACTIVATION, _GRADIENT = 0, 1  # in `gemms.OPERANDS`
_FORWARD, _GRAD_INPUT, _GRAD_WEIGHT = range(3)  # in `gemms.GEMMS`
# As `operators.TILES`: of forward and of backward, the fastest of those tried on an H200 (docs/log.md). No thread
# spills its registers on compute capability 9.0.
TILES: tuple[Tile, Tile] = ((8, 64, 2, None), (8, 32, 1, 168))
LAYERS = 3
"""Gate, up and down."""

_library = torch.library.Library("snip_hf", "FRAGMENT")
_library.define("fold_gated(Tensor gate, Tensor up, Tensor table, Tensor[] layer, bool counts) -> (Tensor, Tensor)")
_library.define(
    "fold_gated_gradients(Tensor grad, Tensor gate, Tensor up, Tensor table, Tensor[] layers, bool has_rows, "
    "bool counts) -> Tensor[]"
)


class Operand(NamedTuple):
    """What is folded for one layer: the arguments of `fold_into` but for the operand itself."""

    state: Tensor
    tensors: tuple[Tensor, Tensor]
    """Record and table."""
    operand: int
    gemms: tuple[int, int]
    counts: bool
    outputs: Quantized

    @property
    def row(self) -> Tensor:
        """Of the record."""
        note = note_of(self.tensors[0])
        return self.tensors[0][self.operand] if note is None else note.rows[self.operand]

    @property
    def is_plain(self) -> bool:
        """Whether it is written in BF16 first."""
        return needs_scales(self.tensors[0], self.operand, self.gemms, self.counts)

    def fold(self, values: Tensor, by_kernel: bool) -> None:
        operators.fold_into(values, *self[:-1], self.outputs, by_kernel)


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


def folded_gated(
    gate: Tensor, up: Tensor, table: Tensor, layer: Sequence[Tensor], counts: bool, by_kernel: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `fold_gated` by the kernels or by torch; None leaves the choice to the device."""
    state, record = layer
    gemms = _FORWARD, -1
    one = Operand(state, (record, table), _ACTIVATION, gemms, counts, one_layout(gate, *gemms))
    if _by_kernel(gate, by_kernel):
        if is_elsewhere(gate):  # Triton launches on the current device
            with torch.cuda.device_of(gate):
                return folded_gated(gate, up, table, layer, counts, by_kernel)
        values = launch_forward(gate, up, one)
        if values is not None:
            one.fold(values, by_kernel=True)
    else:
        one.fold(activation_of(gate, up), by_kernel=False)
    return one.outputs[:2]


def folded_gated_gradients(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    table: Tensor,
    layers: Sequence[Tensor],
    how: tuple[bool, bool],
    by_kernel: bool | None = None,
) -> list[Tensor]:
    """Returns `fold_gated_gradients`; `how`: its `has_rows` and `counts`."""
    has_rows, counts = how
    gemms = _GRAD_INPUT if has_rows else -1, _GRAD_WEIGHT
    states, records = layers[::2], layers[1::2]
    operands = [
        Operand(state, (record, table), _GRADIENT, gemms, counts, empty_layouts(gate, *gemms))
        for state, record in zip(states[:-1], records[:-1], strict=True)
    ]
    # Forward has taken note of the activation.
    gemms = -1, _GRAD_WEIGHT
    last = Operand(states[-1], (records[-1], table), _ACTIVATION, gemms, False, one_layout(gate, *gemms))
    operands.append(last)
    if _by_kernel(gate, by_kernel):
        if is_elsewhere(gate):
            with torch.cuda.device_of(gate):
                return folded_gated_gradients(grad, gate, up, table, layers, how, by_kernel)
        values = launch_backward((grad, gate, up), operands, has_rows, counts)
        for one, of_one in zip(operands, values, strict=True):
            if of_one is not None:
                one.fold(of_one, by_kernel=True)
    else:
        for one, of_one in zip(operands, (*gradients_of(grad, gate, up), activation_of(gate, up)), strict=True):
            one.fold(of_one, by_kernel=False)
    return [*operands[0].outputs, *operands[1].outputs, *last.outputs[2:]]


def _by_kernel(x: Tensor, by_kernel: bool | None) -> bool:
    return x.numel() > 0 and (operators.runs_kernels(x) if by_kernel is None else by_kernel)


def _sizes(x: Tensor, tile: Tile) -> tuple[tuple[int, int], tuple[int, ...], bool]:
    """Returns the grid of programs, the numbers that kernels take, and whether tiles go beyond the operand."""
    tokens, channels = x.shape
    padded_tokens, padded_channels = padded(tokens), padded(channels)
    grid = parts_of(padded_channels, tile[1]), parts_of(padded_tokens, 4 * tile[0])
    numbers = tokens, channels, padded_tokens, padded_channels
    return grid, numbers, (padded_tokens, padded_channels) != (tokens, channels)


def launch_forward(gate: Tensor, up: Tensor, one: Operand, tile: Tile | None = None) -> Tensor | None:
    """Launches `fold_gated_kernel`; returns silu(gate) * up in BF16 if that is still to be folded, else None."""
    runs, width, warps, registers = tile = tile or TILES[0]
    values = torch.empty_like(gate) if one.is_plain else None
    rows, parameters, *_ = one.outputs
    # An operand that is folded writes no values: any tensor does.
    tensors = gate, up, one.state, one.row, one.tensors[1], parameters, rows, gate if values is None else values
    free = (int(values is not None),)
    key = fold_gated_kernel.fn, gate.get_device(), gate.dtype, gate.shape, one.counts, tile
    if relaunch(key, tensors, free):
        return values
    grid, numbers, is_ragged = _sizes(gate, tile)
    launch(
        fold_gated_kernel,
        grid,
        tensors,
        numbers,
        (one.counts, is_ragged, runs, width),
        free,
        key,
        num_warps=warps,
        maxnreg=registers,
        enable_fp_fusion=True,  # where it could change a bit, the kernels fuse by themselves
    )
    return values


def launch_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    operands: Sequence[Operand],
    has_rows: bool,
    counts: bool,
    tile: Tile | None = None,
) -> list[Tensor | None]:
    """Launches `fold_gated_gradients_kernel`; returns the values in BF16 of operands that are still to be folded.

    Args:
        inputs: the gradient of silu(gate) * up, gate and up.
        operands: the gradients of gate and up, and silu(gate) * up.
        has_rows: of the gradients.
        counts: whether the pass is trained on.
        tile: None: the fastest known.
    """
    runs, width, warps, registers = tile = tile or TILES[1]
    grad, gate, _ = inputs
    values = [torch.empty_like(gate) if one.is_plain else None for one in operands]
    tensors = list(inputs)
    for one, of_one in zip(operands, values, strict=True):
        layouts = one.outputs if one.operand == _GRADIENT else one.outputs[2:]
        ordered = [*layouts[1::2], *layouts[::2]]  # parameters first
        tensors += [one.state, one.row, *ordered, gate if of_one is None else of_one]
    tensors.append(operands[0].tensors[1])
    free = (sum(1 << index for index, of_one in enumerate(values) if of_one is not None),)
    key = fold_gated_gradients_kernel.fn, gate.get_device(), grad.dtype, gate.shape, has_rows, counts, tile
    if relaunch(key, tensors, free):
        return values
    grid, numbers, is_ragged = _sizes(gate, tile)
    launch(
        fold_gated_gradients_kernel,
        grid,
        tensors,
        numbers,
        (has_rows, counts, is_ragged, runs, width),
        free,
        key,
        num_warps=warps,
        maxnreg=registers,
        enable_fp_fusion=True,  # where it could change a bit, the kernels fuse by themselves
    )
    return values


@torch.library.impl(_library, "fold_gated", "CompositeExplicitAutograd")
def _fold_gated(
    gate: Tensor, up: Tensor, table: Tensor, layer: Sequence[Tensor], counts: bool
) -> tuple[Tensor, Tensor]:
    return folded_gated(gate.contiguous(), up.contiguous(), table, layer, counts)


@torch.library.register_fake("snip_hf::fold_gated", lib=_library)
def _(gate: Tensor, up: Tensor, table: Tensor, layer: Sequence[Tensor], counts: bool) -> tuple[Tensor, Tensor]:
    return empty_layouts(gate, _FORWARD, -1)[:2]


@torch.library.impl(_library, "fold_gated_gradients", "CompositeExplicitAutograd")
def _fold_gated_gradients(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    table: Tensor,
    layers: Sequence[Tensor],
    has_rows: bool,
    counts: bool,
) -> list[Tensor]:
    inputs = grad.contiguous(), gate.contiguous(), up.contiguous()
    return folded_gated_gradients(*inputs, table, layers, (has_rows, counts))


@torch.library.register_fake("snip_hf::fold_gated_gradients", lib=_library)
def _(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    table: Tensor,
    layers: Sequence[Tensor],
    has_rows: bool,
    counts: bool,
) -> list[Tensor]:
    layouts = [empty_layouts(gate, _GRAD_INPUT if has_rows else -1, _GRAD_WEIGHT) for _ in range(LAYERS - 1)]
    return [*layouts[0], *layouts[1], *empty_layouts(gate, -1, _GRAD_WEIGHT)[2:]]


fold_gated = torch.ops.snip_hf.fold_gated
"""Returns silu(gate) * up folded for the forward GEMM, rows (T', C') E4M3 and their parameters.

Args:
    gate, up: (T, C), BF16.
    table: of the records.
    layer: state and record of the layer that multiplies with it.
    counts: whether the pass is trained on.
"""
fold_gated_gradients = torch.ops.snip_hf.fold_gated_gradients
"""Returns, of the gradient of gate, of that of up, and of silu(gate) * up, what the GEMMs of the backward pass read.

Args:
    grad: of silu(gate) * up, (T, C), BF16.
    gate, up: (T, C), BF16.
    table: of the records.
    layers: state and record of the layers gate, up and down.
    has_rows: whether there are grad_input GEMMs of gate and up.
    counts: whether the pass is trained on.

Returns: rows, their parameters, columns (C', T') and their parameters of the gradient of gate; likewise of up; columns
    of silu(gate) * up and theirs.
"""
