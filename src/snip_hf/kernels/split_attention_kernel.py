"""The Triton kernels of `split_attention`.

Legend: B sequences of L queries and S keys in H heads, of which some share the keys of one; D channels of a head. Parts
are of BF16, high ones before low ones; scores are of powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cut(x):  # type: ignore[no-untyped-def]
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(left_high, left_low, right_high, right_low, found):  # type: ignore[no-untyped-def]
    found = tl.dot(left_low, right_high, found)
    found = tl.dot(left_high, right_low, found)
    return tl.dot(left_high, right_high, found)


@triton.jit
def _load_parts(tensor, part, at, inside):  # type: ignore[no-untyped-def]
    return tl.load(tensor + at, inside, other=0.0), tl.load(tensor + part + at, inside, other=0.0)


@triton.jit
def _seen(rows, columns, keys, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    return (columns < keys) & (rows >= columns) if CAUSAL else columns < keys


@triton.jit
def cut_kernel(  # type: ignore[no-untyped-def]
    x,  # (B, H, L, D), of any strides but the last
    means,  # (B, of the heads of keys, D), over tokens
    out,  # (B, L, H, D)
    parts,  # (2, B, H, L, D), BF16
    sums,  # (B, H, L): of x times out without the mean
    length,
    heads,
    shared,  # heads of one mean
    x_batch,
    x_head,
    x_row,
    part,
    CENTERED: tl.constexpr,  # whether x loses its mean
    SUMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)  # of all heads of all sequences
    batch, head = own // heads, own % heads
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    channel, inside = tl.arange(0, D)[None, :], row < length
    value = tl.load(x + batch * x_batch + head * x_head + row * x_row + channel, inside, other=0.0)
    if CENTERED or SUMS:
        mean = tl.load(means + own // shared * D + channel)
    if CENTERED:
        value -= mean
    high, low = _cut(value)
    at = (own * length + row) * D + channel
    tl.store(parts + at, high, inside)
    tl.store(parts + part + at, low, inside)
    if SUMS:
        other = tl.load(out + ((batch * length + row) * heads + head) * D + channel, inside, other=0.0) - mean
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(sums + own * length + at, tl.sum(value * other, 1), at < length)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    state,
    query,
    keys,
    values,
    part,
    rows,
    first,
    last,
    count,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    found, total, most = state
    column = tl.arange(0, BLOCK)
    at = column[:, None] * D + tl.arange(0, D)[None, :]
    for start in range(first, last, BLOCK):
        inside = (start + column)[:, None] < count
        key_high, key_low = _load_parts(keys + start * D, part, at, inside)
        scores = tl.zeros([rows.shape[0], BLOCK], tl.float32)
        scores = _product(query[0], query[1], tl.trans(key_high), tl.trans(key_low), scores) * scale
        if MASKED:
            seen = _seen(rows[:, None], (start + column)[None, :], count, CAUSAL)
            scores = tl.where(seen, scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        weights, shrunk = tl.exp2(scores - more[:, None]), tl.exp2(most - more)
        total, most = total * shrunk + tl.sum(weights, 1), more
        value_high, value_low = _load_parts(values + start * D, part, at, inside)
        high, low = _cut(weights)
        found = _product(high, low, value_high, value_low, found * shrunk[:, None])
    return found, total, most


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    means,  # of values, (B, of the heads of keys, D)
    out,  # (B, L, H, D)
    logs,  # (B, H, L): log2 of the sum that weights are divided by
    scale,  # for powers of two
    length,
    count,  # of keys
    heads,
    shared,  # query heads of one head of keys
    queries_part,
    keys_part,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the longest first
    rows, channel = start + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    inside = rows[:, None] < length
    query = _load_parts(queries + own * length * D, queries_part, rows[:, None] * D + channel, inside)
    keys += own // shared * count * D
    values += own // shared * count * D
    zeros = tl.zeros([ROWS], tl.float32)
    state = tl.zeros([ROWS, D], tl.float32), zeros, zeros - float("inf")
    whole, last = count // COLUMNS * COLUMNS, count
    if CAUSAL:
        whole, last = start // COLUMNS * COLUMNS, tl.minimum(count, start + ROWS)
    state = _attend(state, query, keys, values, keys_part, rows, 0, whole, count, scale, False, CAUSAL, D, COLUMNS)
    found, total, most = _attend(
        state, query, keys, values, keys_part, rows, whole, last, count, scale, True, CAUSAL, D, COLUMNS
    )
    at = ((own // heads * length + rows[:, None]) * heads + own % heads) * D + channel
    mean = tl.load(means + own // shared * D + channel)
    tl.store(out + at, found / total[:, None] + mean, inside)
    tl.store(logs + own * length + rows, most + tl.log2(total), rows < length)


@triton.jit
def _pull_to_queries(  # type: ignore[no-untyped-def]
    found,
    query,
    grad_output,
    logs,
    sums,
    keys,
    values,
    part,
    rows,
    first,
    last,
    count,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    at = column[:, None] * D + tl.arange(0, D)[None, :]
    for start in range(first, last, BLOCK):
        inside = (start + column)[:, None] < count
        key_high, key_low = _load_parts(keys + start * D, part, at, inside)
        value_high, value_low = _load_parts(values + start * D, part, at, inside)
        zeros = tl.zeros([rows.shape[0], BLOCK], tl.float32)
        scores = _product(query[0], query[1], tl.trans(key_high), tl.trans(key_low), zeros) * scale
        if MASKED:
            seen = _seen(rows[:, None], (start + column)[None, :], count, CAUSAL)
            scores = tl.where(seen, scores, float("-inf"))
        of_weights = _product(grad_output[0], grad_output[1], tl.trans(value_high), tl.trans(value_low), zeros)
        high, low = _cut(tl.exp2(scores - logs[:, None]) * (of_weights - sums[:, None]))
        found = _product(high, low, key_high, key_low, found)
    return found


@triton.jit
def queries_kernel(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    grad_outputs,
    logs,
    sums,
    grad_queries,  # (B, L, H, D)
    scale,
    factor,  # of scores
    length,
    count,
    heads,
    shared,
    queries_part,
    keys_part,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    rows, channel = start + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    inside, at = rows[:, None] < length, rows[:, None] * D + channel
    query = _load_parts(queries + own * length * D, queries_part, at, inside)
    grad_output = _load_parts(grad_outputs + own * length * D, queries_part, at, inside)
    log = tl.load(logs + own * length + rows, rows < length, other=float("inf"))
    of_row = tl.load(sums + own * length + rows, rows < length, other=0.0)
    keys += own // shared * count * D
    values += own // shared * count * D
    found = tl.zeros([ROWS, D], tl.float32)
    whole, last = count // COLUMNS * COLUMNS, count
    if CAUSAL:
        whole, last = start // COLUMNS * COLUMNS, tl.minimum(count, start + ROWS)
    found = _pull_to_queries(
        found, query, grad_output, log, of_row, keys, values, keys_part,
        rows, 0, whole, count, scale, False, CAUSAL, D, COLUMNS,
    )  # fmt: skip
    found = _pull_to_queries(
        found, query, grad_output, log, of_row, keys, values, keys_part,
        rows, whole, last, count, scale, True, CAUSAL, D, COLUMNS,
    )  # fmt: skip
    at = ((own // heads * length + rows[:, None]) * heads + own % heads) * D + channel
    tl.store(grad_queries + at, found * factor, inside)


@triton.jit
def _pull_to_keys(  # type: ignore[no-untyped-def]
    found,
    key,
    value,
    queries,
    grad_outputs,
    logs,
    sums,
    part,
    columns,
    first,
    last,
    length,
    count,
    scale,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    of_keys, of_values = found
    row = tl.arange(0, BLOCK)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    for start in range(first, last, BLOCK):
        rows = start + row
        inside = rows[:, None] < length
        query_high, query_low = _load_parts(queries + start * D, part, at, inside)
        log = tl.load(logs + rows, rows < length, other=float("inf"))  # no weights of rows that are not there
        zeros = tl.zeros([columns.shape[0], BLOCK], tl.float32)
        scores = _product(key[0], key[1], tl.trans(query_high), tl.trans(query_low), zeros) * scale
        if MASKED:
            scores = tl.where(_seen(rows[None, :], columns[:, None], count, True), scores, float("-inf"))
        weights = tl.exp2(scores - log[None, :])
        grad_high, grad_low = _load_parts(grad_outputs + start * D, part, at, inside)
        high, low = _cut(weights)
        of_values = _product(high, low, grad_high, grad_low, of_values)
        of_weights = _product(value[0], value[1], tl.trans(grad_high), tl.trans(grad_low), zeros)
        of_row = tl.load(sums + rows, rows < length, other=0.0)
        high, low = _cut(weights * (of_weights - of_row[None, :]))
        of_keys = _product(high, low, query_high, query_low, of_keys)
    return of_keys, of_values


@triton.jit
def keys_kernel(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    grad_outputs,
    logs,
    sums,
    grad_keys,  # (B, S, H, D), of each query head
    grad_values,
    scale,
    factor,
    length,
    count,
    heads,
    shared,
    queries_part,
    keys_part,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * COLUMNS  # the first keys are seen by most queries
    columns, channel = start + tl.arange(0, COLUMNS), tl.arange(0, D)[None, :]
    inside, at = columns[:, None] < count, columns[:, None] * D + channel
    key = _load_parts(keys + own // shared * count * D, keys_part, at, inside)
    value = _load_parts(values + own // shared * count * D, keys_part, at, inside)
    queries += own * length * D
    grad_outputs += own * length * D
    logs += own * length
    sums += own * length
    found = tl.zeros([COLUMNS, D], tl.float32), tl.zeros([COLUMNS, D], tl.float32)
    whole = 0
    if CAUSAL:
        first, whole = start // ROWS * ROWS, tl.cdiv(start + COLUMNS, ROWS) * ROWS
        found = _pull_to_keys(
            found, key, value, queries, grad_outputs, logs, sums, queries_part,
            columns, first, tl.minimum(whole, length), length, count, scale, True, D, ROWS,
        )  # fmt: skip
    of_keys, of_values = _pull_to_keys(
        found, key, value, queries, grad_outputs, logs, sums, queries_part,
        columns, whole, length, length, count, scale, False, D, ROWS,
    )  # fmt: skip
    at = ((own // heads * count + columns[:, None]) * heads + own % heads) * D + channel
    tl.store(grad_keys + at, of_keys * factor, inside)
    tl.store(grad_values + at, of_values, inside)
