"""Part `gates`: silu(gate) * up and its gradients, computed and folded in one launch, against the copy rate."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from snip_hf.kernels.tensor_scaled import gated_operators, layouts, operators
from snip_hf.kernels.tensor_scaled.gated_operators import Operand
from snip_hf.kernels.tensor_scaled.records import Records, follow
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

from .kernels import copy_rate, timed_against
from .measuring import guarded, milliseconds, require_tensor_scaled, state_of
from .setting import Row

# Those in use come first.
FORWARD_TILES: tuple[operators.Tile, ...] = (
    gated_operators.TILES[0],
    (8, 64, 1, None),
    (8, 32, 1, None),
    (8, 128, 1, None),
    (8, 128, 2, None),
    (16, 64, 2, None),
)
BACKWARD_TILES: tuple[operators.Tile, ...] = (
    gated_operators.TILES[1],
    (8, 64, 2, 168),
    (8, 64, 2, None),
    (8, 32, 1, None),
    (8, 32, 2, None),
    (8, 32, 2, 96),
    (8, 64, 4, None),
    (8, 64, 4, 96),
    (8, 128, 4, 168),
)
# Of gate and up, in TinyLlama-1.1B and in the 8B shape.
CHANNELS = (5632, 14336)
_ACTIVATION, _GRADIENT = 0, 1  # in `gemms.OPERANDS`


def gates_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    require_tensor_scaled(options.device)
    rate = copy_rate(options.device)
    yield {"operand": "copy", "tb_per_s": rate * 1e-9}
    for channels in CHANNELS[:1] if options.quick else CHANNELS:
        for direction, tiles in (("forward", FORWARD_TILES), ("backward", BACKWARD_TILES)):
            for tile in tiles:
                identity = {"gate": direction, "rows": options.tokens, "columns": channels}
                identity |= {"tile": "x".join(str(part) for part in tile if part is not None)}
                yield from guarded(identity, partial(one_tile, rate, identity, tile, options), options)


def one_tile(rate: float, identity: Row, tile: operators.Tile, options: argparse.Namespace) -> Iterator[Row]:
    """Times one launch; rate: bytes per ms."""
    x = inputs(identity["rows"], identity["columns"], options.device)
    kept: list[Records] = []
    if identity["gate"] == "forward":
        operands = [settled(x[1], _ACTIVATION, (0, -1), kept)]
        call = partial(gated_operators.launch_forward, x[1], x[2], operands[0], tile)
        read = 2 * x[1].nbytes
    else:
        of_gate, of_up = (settled(x[1], _GRADIENT, (1, 2), kept) for _ in range(2))
        operands = [of_gate, of_up, settled(x[1], _ACTIVATION, (-1, 2), kept)]
        call = partial(gated_operators.launch_backward, x, operands, True, True, tile)
        read = 3 * x[1].nbytes
    written = sum(layout.nbytes for one in operands for layout in one.outputs)
    yield timed_against((read + written) / rate, milliseconds(call, options.device), "both")


def inputs(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a gradient, gate and up."""
    grad, gate, up = (torch.randn(rows, columns, device=device).to(torch.bfloat16) for _ in range(3))
    return grad, gate, up


def settled(like: Tensor, operand: int, gemms: tuple[int, int], kept: list[Records]) -> Operand:
    """Returns an operand in MXFP4 whose exponent is in force; its records are kept in a list, as those of a layer."""
    records, state = Records.new(like.device), state_of("mxfp4", like.device)
    operators.folded(like, state, records, operand, gemms)
    follow([records])
    records.note.take([FORMATS["mxfp4"]] * len(GEMMS))
    records.note.steps = 0  # no step in which blocks are counted
    kept.append(records)
    outputs = layouts.empty_layouts(like, *gemms)
    return Operand(state, (records.record, records.table), operand, gemms, operand == _GRADIENT, outputs)
