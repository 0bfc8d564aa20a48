"""One GEMM alone, as training runs it, for those who time it or try it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...numerics.formats import format_of_code
from ...numerics.gemms import GEMMS
from ..emulated import EMULATED
from .operators import fold_operand, multiply
from .records import Records, follow


def gemm_call(gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor) -> Callable[[], Tensor]:
    """As `Backend.gemm_call`; the weight is quantized before, as it is once per optimizer step."""
    if not format_of_code(int(state[GEMMS.index(gemm)])).is_quantized:
        return EMULATED.gemm_call(gemm, x, weight, grad_output, state)
    records = Records.new(x.device)
    record, table = records.record, records.table
    records.note.take([format_of_code(code) for code in state[: len(GEMMS)].tolist()])

    def fold(operand: Tensor, number: int, row_gemm: int, column_gemm: int) -> tuple[Tensor, ...]:
        layouts: tuple[Tensor, ...] = fold_operand(operand, state, record, table, number, (row_gemm, column_gemm), True)
        return layouts[:2] if row_gemm >= 0 else layouts[2:]

    by_output, by_input = fold(weight, 2, 0, -1), fold(weight, 2, -1, 1)

    def forward() -> Tensor:
        return multiply(gemm, fold(x, 0, 0, -1), by_output, (x.shape[0], weight.shape[0]), x.dtype, record)

    def grad_input() -> Tensor:
        return multiply(gemm, fold(grad_output, 1, 1, -1), by_input, (x.shape[0], weight.shape[1]), x.dtype, record)

    def grad_weight() -> Tensor:
        left, right = fold(grad_output, 1, -1, 2), fold(x, 0, -1, 2)
        return multiply(gemm, left, right, (weight.shape[0], weight.shape[1]), x.dtype, record)

    call = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}[gemm]
    call()
    follow([records])  # in training, too, the exponents are there before the pass
    return call
