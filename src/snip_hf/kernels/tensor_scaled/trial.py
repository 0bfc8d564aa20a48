"""Trials of the backend's kernels on a device, for layers of one matrix and of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from ...numerics.formats import FORMATS
from ...numerics.gemms import OPERANDS
from ..trials import Operands, fault_of, operands, products_of
from . import operators
from .encoding import BLOCK, encoding_of, has_one_scale, is_delayed
from .exponents import Records
from .operators import BY_COLUMNS, BY_ROWS, OVER_TOKENS, multiply_grouped
from .slots import Slots, slots_of

_GROUPED_CAPABILITY = (9, 0)
# Tokens of each matrix, and tokens without one; I and O of each matrix.
_TOKENS, _OF_NONE = (70, 0, 200), 26
_SIZE = (2 * BLOCK, 3 * BLOCK)
# Operand -> the GEMMs that read its rows and its columns.
_GEMMS = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}


@cache
def fault(name: str, device: torch.device) -> str | None:
    """Returns why a format's GEMMs fail on a device, None if they pass. Takes seconds for each format, once."""
    from .backend import TENSOR_SCALED  # which imports this module

    given = operands(FORMATS[name], device)
    products = partial(products_of, TENSOR_SCALED, given)
    return fault_of(__name__, FORMATS[name], device, partial(_encoded, given, None), products)


@cache
def grouped_fault(device: torch.device) -> str | None:
    """Returns why a CUDA device cannot run grouped FP8 products, None if it can. Takes seconds, once."""
    capability = torch.cuda.get_device_capability(device)
    if capability != _GROUPED_CAPABILITY:
        needed, own = (".".join(map(str, one)) for one in (_GROUPED_CAPABILITY, capability))
        return f"torch's grouped FP8 products need compute capability {needed}, the GPU has {own}"
    tokens, (in_features, out_features) = sum(_TOKENS) + _OF_NONE, _SIZE
    slots = slots_of(torch.tensor(_TOKENS, device=device).cumsum(0), tokens)
    # One format of each kind.
    for is_kind in (encoding_of, has_one_scale, is_delayed):
        format = next(filter(is_kind, FORMATS.values()))
        given = operands(format, device, (tokens, in_features, out_features * len(_TOKENS)))
        given = replace(given, grad_output=given.grad_output[:, :out_features])
        encode, products = partial(_encoded, given, slots), partial(_grouped_products, given, slots)
        found = fault_of(f"{__name__}.grouped", format, device, encode, products)
        if found is not None:
            return found
    return None


def _encoded(given: Operands, slots: Slots | None, by_kernel: bool | None) -> dict[str, tuple[Tensor, ...]]:
    """Returns operand -> its rows, columns and parameters; of several matrices if there are slots."""
    records, found = Records.new(given.x.device), dict[str, tuple[Tensor, ...]]()
    for operand, gemms in _GEMMS.items():
        matrices, blocks = (0, None) if slots is None else (len(_TOKENS), slots.blocks)
        blocks = None if operand == "weight" else blocks
        layer = given.state, records.record, records.table
        arguments = given.by_name[operand], *layer, OPERANDS.index(operand), gemms, True, None, matrices, blocks
        found[operand] = operators.encode(*arguments, by_kernel)
    return found


def _grouped_products(given: Operands, slots: Slots) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields each GEMM with its products and the CPU's products of the same operands."""
    own, ends = _encoded(given, slots, None), slots.padded_ends
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
