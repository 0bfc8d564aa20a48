"""The Triton kernels of gated MLPs: they compute silu(gate) * up and its gradients, and encode them.

Legend: as in `tiles`. Everything is computed in FP32 and rounded to BF16 once, as Inductor does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_numerics import INTERPRETED, RUN, load_runs
from .tiles import encode_tile

# Bits of `plain`, in the order of the operands.
_GATE, _UP, _ACTIVATION = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_FORWARD, _GRAD_INPUT, _GRAD_WEIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # in `gemms.GEMMS`


@triton.jit
def _rounded(x):
    """Rounds to BF16, which encoding reads."""
    return x.to(tl.bfloat16)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), to the last bits of FP32."""
    if INTERPRETED:
        found = 1.0 / (1.0 + tl.exp(-x))
    else:
        # Without handling of subnormal numbers: two thirds of the compiler's instructions.
        found = tl.inline_asm_elementwise(
            "{ .reg .f32 power;"
            "  mul.ftz.f32 power, $1, 0fBFB8AA3B;"  # -log2(e)
            "  ex2.approx.ftz.f32 power, power;"
            "  add.ftz.f32 power, power, 0f3F800000;"
            "  rcp.approx.ftz.f32 $0, power; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return found


@triton.jit
def _activation(gate, up):
    return _rounded(gate * _sigmoid(gate) * up)


@triton.jit
def _with_gradients(grad, gate, up):
    """silu(gate) * up, and the gradients of gate and up."""
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    slope = tl.fma(silu, 1.0 - sigmoid, sigmoid)
    return _rounded(silu * up), _rounded(grad * up * slope), _rounded(grad * silu)


@triton.jit
def _store_values(values, a, b, c, d, run, channel, tokens, channels, RAGGED: tl.constexpr):
    """Stores the four tokens of each run, BF16."""
    token = run * RUN
    at = values + token[:, None] * channels + channel[None, :]
    if RAGGED:
        inside = channel[None, :] < channels
        tl.store(at, a, inside & (token[:, None] < tokens))
        tl.store(at + channels, b, inside & (token[:, None] + 1 < tokens))
        tl.store(at + 2 * channels, c, inside & (token[:, None] + 2 < tokens))
        tl.store(at + 3 * channels, d, inside & (token[:, None] + 3 < tokens))
    else:
        tl.store(at, a)
        tl.store(at + channels, b)
        tl.store(at + 2 * channels, c)
        tl.store(at + 3 * channels, d)


@triton.jit
def _encode(
    a,
    b,
    c,
    d,
    values,  # receives the operand in BF16 if `is_plain`
    state,
    record,
    table,
    row_parameters,
    column_parameters,
    rows,
    columns,
    run,
    channel,
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    is_plain,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    COUNTS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    RAGGED: tl.constexpr,
    RUNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Writes an operand's layouts, or its values if the layouts need scales that are not known yet."""
    if is_plain:
        _store_values(values, a, b, c, d, run, channel, tokens, channels, RAGGED)
    else:
        encode_tile(
            a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32), state, record, table, record, 0,
            row_parameters, column_parameters, rows, columns, run, run, channel,
            tl.program_id(0) + tl.program_id(1) == 0, tokens, channels, padded_tokens, padded_channels, HAS_ROWS,
            HAS_COLUMNS, ROW_GEMM, COLUMN_GEMM, True, IN_BLOCKS, False, IS_GRADIENT, COUNTS, RUNS, CHANNELS,
        )  # fmt: skip


@triton.jit
def _place(RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns a program's runs and channels. Programs start at the operand's end, which may still be cached."""
    run = ((tl.num_programs(1) - 1 - tl.program_id(1)) * RUNS + tl.arange(0, RUNS)).to(tl.int64)
    return run, tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)


# tokens = 1 must not become a constant (see `encode_kernel`).
@triton.jit(do_not_specialize=["plain", "tokens"])
def encode_gated_kernel(
    gate,
    up,
    state,
    record,
    table,
    parameters,
    rows,
    values,
    plain: tl.int32,
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    COUNTS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,  # all formats are block formats; False if unknown
    RAGGED: tl.constexpr,
    RUNS: tl.constexpr,  # of 4 tokens, a multiple of 8
    CHANNELS: tl.constexpr,  # a multiple of 32
):
    """Rows of silu(gate) * up for the forward GEMM, or its values if `plain` is not 0."""
    run, channel = _place(RUNS, CHANNELS)
    ga, gb, gc, gd = load_runs(gate, run, channel, tokens, channels, channels, RAGGED)
    ua, ub, uc, ud = load_runs(up, run, channel, tokens, channels, channels, RAGGED)
    a, b, c, d = _activation(ga, ua), _activation(gb, ub), _activation(gc, uc), _activation(gd, ud)
    _encode(
        a, b, c, d, values, state, record, table, parameters, parameters, rows, rows, run, channel, tokens, channels,
        padded_tokens, padded_channels, plain != 0, True, False, _FORWARD, -1, False, COUNTS, IN_BLOCKS, RAGGED, RUNS,
        CHANNELS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["plain", "tokens"])
def encode_gated_gradients_kernel(
    grad,
    gate,
    up,
    # The gradient of gate.
    gate_state,
    gate_record,
    gate_row_parameters,
    gate_column_parameters,
    gate_rows,
    gate_columns,
    gate_values,
    # The gradient of up.
    up_state,
    up_record,
    up_row_parameters,
    up_column_parameters,
    up_rows,
    up_columns,
    up_values,
    # silu(gate) * up, columns only.
    state,
    record,
    parameters,
    columns,
    values,
    table,
    plain: tl.int32,
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    HAS_ROWS: tl.constexpr,  # of the gradients
    COUNTS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,  # all formats are block formats; False if unknown
    RAGGED: tl.constexpr,
    RUNS: tl.constexpr,  # of 4 tokens, a multiple of 8
    CHANNELS: tl.constexpr,  # a multiple of 32
):
    """Columns of silu(gate) * up for the next linear's weight gradient, and both layouts of the gradients of gate and
    up, from one read of grad, gate and up. The bits of `plain` select operands whose values are written instead."""
    run, channel = _place(RUNS, CHANNELS)
    da, db, dc, dd = load_runs(grad, run, channel, tokens, channels, channels, RAGGED)
    ga, gb, gc, gd = load_runs(gate, run, channel, tokens, channels, channels, RAGGED)
    ua, ub, uc, ud = load_runs(up, run, channel, tokens, channels, channels, RAGGED)
    a, ga, ua = _with_gradients(da, ga, ua)
    b, gb, ub = _with_gradients(db, gb, ub)
    c, gc, uc = _with_gradients(dc, gc, uc)
    d, gd, ud = _with_gradients(dd, gd, ud)
    _encode(
        a, b, c, d, values, state, record, table, parameters, parameters, columns, columns, run, channel, tokens,
        channels, padded_tokens, padded_channels, (plain & _ACTIVATION) != 0, False, True, -1, _GRAD_WEIGHT, False,
        False, IN_BLOCKS, RAGGED, RUNS, CHANNELS,
    )  # fmt: skip
    ROW_GEMM: tl.constexpr = _GRAD_INPUT if HAS_ROWS else -1
    _encode(
        ga, gb, gc, gd, gate_values, gate_state, gate_record, table, gate_row_parameters, gate_column_parameters,
        gate_rows, gate_columns, run, channel, tokens, channels, padded_tokens, padded_channels, (plain & _GATE) != 0,
        HAS_ROWS, True, ROW_GEMM, _GRAD_WEIGHT, True, COUNTS, IN_BLOCKS, RAGGED, RUNS, CHANNELS,
    )  # fmt: skip
    _encode(
        ua, ub, uc, ud, up_values, up_state, up_record, table, up_row_parameters, up_column_parameters, up_rows,
        up_columns, run, channel, tokens, channels, padded_tokens, padded_channels, (plain & _UP) != 0, HAS_ROWS, True,
        ROW_GEMM, _GRAD_WEIGHT, True, COUNTS, IN_BLOCKS, RAGGED, RUNS, CHANNELS,
    )  # fmt: skip
