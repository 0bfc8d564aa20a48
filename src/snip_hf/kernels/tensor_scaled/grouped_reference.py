"""What the kernels of `grouped_tiles` and torch's grouped FP8 product do, with torch's operations, matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...numerics.gemms import GEMMS
from ...numerics.random_streams import matrix_keys
from . import reference
from .folding import BLOCK, SCALE
from .places import FIRST, MATRIX, OFFSET, TOKENS


def fold(
    x: Tensor,
    blocks: Tensor | None,
    layer: Sequence[Tensor],
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    outputs: Sequence[Tensor],
) -> None:
    """As `grouped_operators.fold_grouped_into`."""
    state, record, table = layer
    matrices = max(outputs[1].shape[0], outputs[3].shape[0])
    keys = matrix_keys(int(state[len(GEMMS)]) % 2**64, matrices)
    for output in outputs:
        output.view(torch.uint8).zero_()
    for matrix, tokens, start in _matrices(x, blocks, matrices):
        own = state.clone()
        own[len(GEMMS)] = keys[matrix] - 2**64 if keys[matrix] >= 2**63 else keys[matrix]
        count = tokens.stop - tokens.start
        rows = x[tokens] if count else x.new_zeros(1, x.shape[1])  # which has a scale, too
        layouts = reference.fold(rows, own, record, table, operand, gemms, counts)
        places = slice(start, start + count)
        for index, layout in enumerate(layouts):
            if layout is not None:
                output, scales = outputs[2 * index : 2 * index + 2]
                target, values = (output, layout[0]) if index == 0 else (output.t(), layout[0].t())
                target[places].copy_(values[:count])
                scales[matrix] = layout[1][SCALE]


def _matrices(x: Tensor, blocks: Tensor | None, matrices: int) -> Iterator[tuple[int, slice, int]]:
    """Yields each matrix with its tokens and its first place."""
    if blocks is None:
        height = x.shape[0] // matrices
        for matrix in range(matrices):
            yield matrix, slice(matrix * height, (matrix + 1) * height), matrix * height
        return
    for block, row in enumerate(blocks.tolist()):
        if row[OFFSET] == 0:
            yield row[MATRIX], slice(row[FIRST], row[FIRST] + row[TOKENS]), block * BLOCK


def product(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, ends: Tensor) -> Tensor:
    """Returns products with FP32 sums: of left (P, K) and right (E, K, N), (P, N) with zeros behind the last end; or of
    left (M, P) and right (P, N), (E, M, N). BF16."""
    stops = ends.tolist()
    parts = [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    factors = (left_scales * right_scales).tolist()
    with torch.autocast(left.device.type, enabled=False):
        a, b = left.to(torch.float32), right.to(torch.float32)
        if right.dim() == 2:
            products = [(a[:, part] @ b[part]) * factor for part, factor in zip(parts, factors, strict=True)]
            return torch.stack(products).to(torch.bfloat16)
        found = a.new_zeros(a.shape[0], b.shape[2])
        for matrix, (part, factor) in enumerate(zip(parts, factors, strict=True)):
            found[part] = (a[part] @ b[matrix]) * factor
    return found.to(torch.bfloat16)
