"""Slots of the tokens of a grouped layer, arranged so that a block starts at each matrix's first token.

Legend: S tokens of all matrices, E matrices. Each matrix gets slots for its tokens, a multiple of 32 and at least 32,
one matrix after the other. Encoded operands have rows for all slots: P = 32 * B, an upper bound that the host knows.
Slots without a token hold zeros. So every block of 32 belongs to one matrix. FP8 products use the ends of the slots,
since they accept neither an empty matrix if tokens are contracted, nor a group whose end is not a multiple of 16.

Everything is computed on the device by functions that torch.compile can trace: the host never waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .encoding import BLOCK

# Fields of a row of `Slots.blocks`.
MATRIX, FIRST, ROWS, OFFSET, TOKENS = range(5)
BLOCK_FIELDS = 5


class Slots(NamedTuple):
    """The slots of sorted tokens."""

    ends: Tensor
    """Matrix -> end of its tokens, (E,), int32."""
    padded_ends: Tensor
    """Matrix -> end of its slots, (E,), int32."""
    blocks: Tensor
    """Block of 32 slots -> its matrix, the token in its first slot, its number of tokens, the index of the first one
    among the matrix's tokens, and the matrix's number of tokens; (B, 5), int64."""
    slot: Tensor
    """Token -> its slot, (S,), int64."""
    matrix: Tensor
    """Token -> its matrix, (S,), int64; E for a token without one."""

    def finished(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns results of all tokens (S, *) plus the bias (E, *) of each one's matrix; zeros if it has none."""
        matrices = self.ends.shape[0]
        if bias is not None:
            y = y + bias[self.matrix.clamp(max=matrices - 1)]
        return torch.where((self.matrix < matrices)[:, None], y, 0)


def slots_of(ends: Tensor, tokens: int) -> Slots:
    """Returns the slots of tokens that are sorted by matrix, those of matrix e up to ends[e] (E,)."""
    count = ends.shape[0]
    own = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = ((own + (BLOCK - 1)) // BLOCK).clamp(min=1) * BLOCK
    padded_ends = padded.cumsum(0)
    first, start = ends - own, padded_ends - padded
    row = torch.arange(tokens // BLOCK + count, device=ends.device) * BLOCK
    # Blocks after the last matrix's are assigned to it, without tokens.
    matrix = torch.searchsorted(padded_ends, row, right=True).clamp(max=count - 1)
    offset = row - start[matrix]
    rows = (own[matrix] - offset).clamp(0, BLOCK)
    blocks = torch.stack([matrix, first[matrix] + offset, rows, offset, own[matrix]], 1)
    token = torch.arange(tokens, device=ends.device)
    of_token = torch.searchsorted(ends, token, right=True)
    some = of_token.clamp(max=count - 1)
    slot = token - first[some] + start[some]
    return Slots(ends.to(torch.int32), padded_ends.to(torch.int32), blocks, slot, of_token)
