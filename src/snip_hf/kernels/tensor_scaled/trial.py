"""Trials of the backend's kernels on a device, for layers of one matrix and of several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch import Tensor

from ...numerics.formats import FORMATS, NumberFormat
from ...numerics.gemms import CONTRACTIONS, GEMMS, OPERANDS
from ..trials import fault_of, operands, products_of
from . import operators
from .encoding import BLOCK, encoding_of, has_one_scale, is_delayed
from .exponents import Records
from .operators import BY_COLUMNS, BY_ROWS, OVER_TOKENS, multiply_grouped
from .slots import Slots, slots_of

_GROUPED_CAPABILITY = (9, 0)
# Tokens of each matrix, and tokens without one; I and O of each matrix.
_TOKENS, _OF_NONE = (70, 0, 200), 26
_SIZE = (2 * BLOCK, 3 * BLOCK)
_GEMMS = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}


@cache
def fault(name: str, device: torch.device) -> str | None:
    """Returns why a format's GEMMs fail on a device, None if they pass. Takes seconds for each format, once."""
    from .backend import TENSOR_SCALED  # which imports this module

    given = FORMATS[name], device
    products = partial(products_of, TENSOR_SCALED, operands(*given))
    return fault_of(__name__, *given, partial(_encoded, *given), products)


def _encoded(format: NumberFormat, device: torch.device, by_kernel: bool | None) -> dict[str, tuple[Tensor, ...]]:
    given = operands(format, device)
    found: dict[str, tuple[Tensor, ...]] = {}
    for gemm, pair in CONTRACTIONS.items():
        for operand, contracts in pair:
            gemms = (GEMMS.index(gemm), -1) if contracts == 1 else (-1, GEMMS.index(gemm))
            records, x = Records.new(device), given.by_name[operand]
            arguments = x, given.state, records.record, records.table, OPERANDS.index(operand), gemms, True
            layouts = operators.encode(*arguments, by_kernel=by_kernel)
            found[f"{operand} of {gemm}"] = layouts[:2] if contracts == 1 else layouts[2:]
    return found


@cache
def grouped_fault(device: torch.device) -> str | None:
    """Returns why a CUDA device cannot run grouped FP8 products, None if it can. Takes seconds, once."""
    capability = torch.cuda.get_device_capability(device)
    if capability != _GROUPED_CAPABILITY:
        needed, own = (".".join(map(str, one)) for one in (_GROUPED_CAPABILITY, capability))
        return f"torch's grouped FP8 products need compute capability {needed}, the GPU has {own}"
    # One format of each kind.
    for is_kind in (encoding_of, has_one_scale, is_delayed):
        format = next(filter(is_kind, FORMATS.values()))
        given = format, device
        encode, products = partial(encoded_matrices, *given), partial(_grouped_products, *given)
        found = fault_of(f"{__name__}.grouped", *given, encode, products)
        if found is not None:
            return found
    return None


def encoded_matrices(
    format: NumberFormat, device: torch.device, by_kernel: bool | None
) -> dict[str, tuple[Tensor, ...]]:
    """Returns operand -> its rows, columns and scales."""
    tokens, matrices = sum(_TOKENS) + _OF_NONE, len(_TOKENS)
    in_features, out_features = _SIZE
    given = operands(format, device, (tokens, in_features, out_features * matrices))
    gradient = operands(format, device, (tokens, in_features, out_features)).grad_output
    blocks, records = _slots(device).blocks, Records.new(device)
    values = {"activation": (given.x, blocks), "gradient": (gradient, blocks), "weight": (given.weight, None)}
    found: dict[str, tuple[Tensor, ...]] = {}
    for operand, gemms in _GEMMS.items():
        x, own_blocks = values[operand]
        arguments = x, given.state, records.record, records.table, OPERANDS.index(operand), gemms, True
        found[operand] = operators.encode(*arguments, None, matrices, own_blocks, by_kernel)
    return found


def _grouped_products(format: NumberFormat, device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields each GEMM with its products and the CPU's products of the same operands."""
    own = encoded_matrices(format, device, None)
    ends = _slots(device).padded_ends
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
        yield gemm, got[used], expected[used]


def _slots(device: torch.device) -> Slots:
    return slots_of(torch.tensor(_TOKENS, device=device).cumsum(0), sum(_TOKENS) + _OF_NONE)
