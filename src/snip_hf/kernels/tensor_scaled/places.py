"""Where the tokens of each matrix of a grouped layer go, so that blocks begin anew at each one's first token.

Legend: S tokens of all matrices, E matrices. Each matrix gets places for its tokens, a multiple of 32 and at least 32,
one matrix's behind the other's. What is folded has rows for all places: P = 32 * B, an upper bound that the host knows.
Places without a token hold zeros. So all blocks of 32 are one matrix's, and FP8 products, which take no empty matrix
where tokens are contracted, and no group whose end is not a multiple of 16, run on the ends of the places.

All is computed on the device, by functions of torch that torch.compile sees: nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .folding import BLOCK

# Places in a row of `Places.blocks`.
MATRIX, FIRST, ROWS, OFFSET, TOKENS = range(5)
BLOCK_FIELDS = 5


class Places(NamedTuple):
    """Where tokens go."""

    ends: Tensor
    """Matrix -> where its tokens end, (E,), int32."""
    padded_ends: Tensor
    """Matrix -> where its places end, (E,), int32."""
    blocks: Tensor
    """Block of 32 places -> its matrix, the token in its first place, how many it has, which of the matrix's tokens
    the first one is, and how many tokens the matrix has; (B, 5), int64."""
    place: Tensor
    """Token -> its place, (S,), int64."""
    matrix: Tensor
    """Token -> its matrix, (S,), int64; E for one that belongs to none."""


def places_of(ends: Tensor, tokens: int) -> Places:
    """Returns the places of so many tokens, sorted by matrix, those of matrix e up to ends[e] (E,)."""
    count = ends.shape[0]
    own = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = ((own + (BLOCK - 1)) // BLOCK).clamp(min=1) * BLOCK
    padded_ends = padded.cumsum(0)
    first, start = ends - own, padded_ends - padded
    row = torch.arange(tokens // BLOCK + count, device=ends.device) * BLOCK
    # Blocks behind the last matrix's are counted to it, and have no tokens.
    matrix = torch.searchsorted(padded_ends, row, right=True).clamp(max=count - 1)
    offset = row - start[matrix]
    rows = (own[matrix] - offset).clamp(0, BLOCK)
    blocks = torch.stack([matrix, first[matrix] + offset, rows, offset, own[matrix]], 1)
    token = torch.arange(tokens, device=ends.device)
    of_token = torch.searchsorted(ends, token, right=True)
    some = of_token.clamp(max=count - 1)
    place = token - first[some] + start[some]
    return Places(ends.to(torch.int32), padded_ends.to(torch.int32), blocks, place, of_token)
