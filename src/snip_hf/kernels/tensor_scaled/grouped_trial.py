"""The trial that a GPU must pass before layers of several matrices run on it: the bytes of grouped operands against the
reference, and their products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch import Tensor

from ...numerics.formats import FORMATS
from ...numerics.gemms import OPERANDS
from ..trials import deviation, fault_of, operands
from .folding import BLOCK, fold_of, has_one_scale
from .grouped_operators import BY_COLUMNS, BY_ROWS, OVER_TOKENS, folded, multiply_grouped
from .places import Places, places_of
from .records import Records

_CAPABILITY = (9, 0)
# Tokens of each matrix, and of none.
_TOKENS, _OF_NONE = (70, 0, 200), 26
# I and O of each matrix.
_SIZE = (2 * BLOCK, 3 * BLOCK)
_GEMMS = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}


@cache
def fault(device: torch.device) -> str | None:
    """Returns why a CUDA device runs no grouped FP8 products, None if it does. Takes some seconds, once."""
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        needed, own = (".".join(map(str, one)) for one in (_CAPABILITY, capability))
        return f"torch's grouped FP8 products need compute capability {needed}, the GPU has {own}"
    # One format that folds, and one with an FP32 scale: the first of each.
    for is_kind in (fold_of, has_one_scale):
        format = next(filter(is_kind, FORMATS.values()))
        arguments = format.name, device
        found = fault_of(__name__, format, device, partial(other_bytes, *arguments), partial(errors, *arguments))
        if found is not None:
            return found
    return None


def other_bytes(name: str, device: torch.device) -> list[str]:
    """Returns the operands that the device's kernels fold to other bytes than torch's operations do."""
    found, expected = (_folded(name, device, by_kernel) for by_kernel in (True, False))
    return [
        operand
        for operand in OPERANDS
        if not all(torch.equal(a.float(), b.float()) for a, b in zip(found[operand], expected[operand], strict=True))
    ]


def errors(name: str, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yields each GEMM with the deviation of its products from those of the same operands on the CPU."""
    own = _folded(name, device, True)
    ends = _places(device).padded_ends
    x, grad_output, weight = own["activation"], own["gradient"], own["weight"]
    for gemm, left, right, kind in (
        ("forward", x[:2], weight[:2], BY_ROWS),
        ("grad_input", grad_output[:2], weight[2:], BY_COLUMNS),
        ("grad_weight", grad_output[2:], x[2:], OVER_TOKENS),
    ):
        got = multiply_grouped(gemm, left, right, ends, kind, None).cpu()
        on_host = [part.cpu() for part in left], [part.cpu() for part in right]
        expected = multiply_grouped(gemm, *on_host, ends.cpu(), kind, None)
        used = slice(None) if kind == OVER_TOKENS else slice(int(ends[-1]))
        yield gemm, deviation(got[used], expected[used])


def _folded(name: str, device: torch.device, by_kernel: bool) -> dict[str, tuple[Tensor, ...]]:
    """Returns operand -> its rows, columns and scales."""
    tokens, matrices = sum(_TOKENS) + _OF_NONE, len(_TOKENS)
    in_features, out_features = _SIZE
    given = operands(FORMATS[name], device, (tokens, in_features, out_features * matrices))
    gradient = operands(FORMATS[name], device, (tokens, in_features, out_features)).grad_output
    blocks, own = _places(device).blocks, Records.new(device)
    of = {"activation": (given.x, blocks), "gradient": (gradient, blocks), "weight": (given.weight, None)}
    return {
        operand: folded(*of[operand], given.state, own, OPERANDS.index(operand), matrices, gemms, by_kernel)
        for operand, gemms in _GEMMS.items()
    }


def _places(device: torch.device) -> Places:
    return places_of(torch.tensor(_TOKENS, device=device).cumsum(0), sum(_TOKENS) + _OF_NONE)
