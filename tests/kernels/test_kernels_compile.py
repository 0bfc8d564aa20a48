"""Does every Triton kernel compile for a GPU? The interpreter accepts code that the compiler refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")

from kernel_runs import triton_ir

from snip_hf.kernels import adam_slopes, bf16_parts, errors, rounding_tiles, sums
from snip_hf.kernels.hopper import tiles as hopper_tiles
from snip_hf.kernels.tensor_scaled import gated_tiles, tiles

FP32, BF16, FP8, INT64 = "*fp32", "*bf16", "*fp8e4nv", "*i64"


def of(types: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, types)


RECORDS = of(INT64, "state", "record", "blocks") | of(FP32, "table")
LAYOUTS = of(FP8, "rows", "columns") | of(FP32, "row_scales", "column_scales", "row_parameters", "column_parameters")
ENCODING = of(BF16, "x") | RECORDS | LAYOUTS
GATED = of(BF16, "grad", "gate", "up", "values", "gate_values", "up_values") | RECORDS | of(FP32, "parameters")
GATED |= of(FP8, "rows", "columns", "gate_rows", "gate_columns", "up_rows", "up_columns")
GATED |= of(INT64, "gate_state", "gate_record", "up_state", "up_record")
GATED |= of(FP32, "gate_row_parameters", "gate_column_parameters", "up_row_parameters", "up_column_parameters")
BOTH = {"ROW_GEMM": 1, "COLUMN_GEMM": 2}
TILE = {"COUNTS": True, "IN_BLOCKS": False, "RAGGED": True, "RUNS": 8, "CHANNELS": 64}
SUMS = of(
    FP32, "first", "second", "errors", "sums", "parts", "factors", "x", "grad_output", "figures", "weight", "found"
)
SUMS |= of(FP32, "found", "rounded", "along", "slopes", "rises", "roots", "rows", "channels", "of_x") | of(
    "*i1", "is_kept"
)
SUMS |= of(BF16, "narrow", "joined", "error")
ADAM = of(FP32, "gradient", "first", "second", "tangent", "slopes") | of("fp32", *adam_slopes.AdamNumbers._fields)
HOPPER = {"IS_GRADIENT": True, "RAGGED": True, "ROW_RUNS": 8, "WIDTH": 16}

CASES: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (hopper_tiles.tokens_kernel, ENCODING, BOTH | HOPPER),
    (
        hopper_tiles.weight_kernel,
        of(BF16, "weight") | RECORDS | of(FP8, "by_output", "by_input") | of(FP32, "output_scales", "input_scales"),
        {"FORWARD": True, "GRAD_INPUT": True, "RAGGED": True},
    ),
    *(
        (tiles.encode_kernel, ENCODING, BOTH | TILE | {"HAS_ROWS": True, "HAS_COLUMNS": True} | more)
        for more in ({"FINDS": True, "IN_BLOCKS": True, "IS_GRADIENT": True}, {"FINDS": False, "IS_GRADIENT": False})
    ),
    (tiles.scales_kernel, ENCODING, BOTH | {"COUNTS": True, "COUNTING": 64, "HEIGHT": 8, "WIDTH": 512}),
    *(
        (
            tiles.matrix_scales_kernel,
            ENCODING | of("*i32", "amaxes"),
            BOTH | {"COUNTS": True, "COUNTING": 64, "EVEN": even, "WIDTH": 128},
        )
        for even in (True, False)
    ),
    *(
        (
            tiles.encode_matrices_kernel,
            ENCODING | of("*i32", "amaxes"),
            BOTH
            | {"HAS_ROWS": True, "HAS_COLUMNS": True, "FINDS": finds, "IS_GRADIENT": not finds}
            | {"IN_BLOCKS": finds, "COUNTS": True, "EVEN": finds, "CHANNELS": 64},
        )
        for finds in (True, False)
    ),
    (gated_tiles.encode_gated_kernel, GATED, TILE),
    (gated_tiles.encode_gated_gradients_kernel, GATED, TILE | {"HAS_ROWS": True}),
    (
        rounding_tiles.tensor_amax_kernel,
        of(BF16, "x") | of("*i32", "found"),
        {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 128, "STAGES": 4, "ALONG": 1},
    ),
    (sums._error_squares_kernel, SUMS, {"PIECES": 3, "KINDS": 2, "BLOCK": 1024}),
    (sums._scaled_squares_kernel, SUMS, {"PIECES": 3, "BLOCK": 1024}),
    (sums._row_figures_kernel, SUMS, {"BLOCK": 1024}),
    (sums._token_figures_kernel, SUMS, {"BLOCK": 1024}),
    (errors._weight_errors_kernel, SUMS, {"IS_TWO": True, "BLOCK": 1024}),
    (errors._error_norms_kernel, SUMS, {"BLOCK": 1024}),
    (errors._joined_errors_kernel, SUMS, {"IS_FIRST": True, "BLOCK": 1024}),
    (errors._rises_kernel, SUMS, {"BLOCK": 1024}),
    (errors._error_products_kernel, SUMS, {"ROWS": 32, "COLUMNS": 64}),
    (adam_slopes._adam_slopes_kernel, ADAM, {"WIDE": True, "STEP": 1, "BLOCK": 1024}),
    (bf16_parts._parts_kernel, of(FP32, "x") | of(BF16, "joined"), {"LOW": 1, "BLOCK": 1024}),
]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("kernel", "kinds", "constants"), CASES, ids=[case[0].fn.__name__ for case in CASES])
def test_a_kernel_becomes_triton_s_code(kernel: Any, kinds: dict[str, str], constants: dict[str, Any]) -> None:
    assert "tt.store" in (code := triton_ir(kernel, kinds, constants)) or "tt.atomic" in code
