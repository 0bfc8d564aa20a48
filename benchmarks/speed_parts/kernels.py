"""Parts `kernels` and `gemms`: quantization against the copy rate, and the three GEMMs against BF16's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from snip_hf.kernels import hopper
from snip_hf.numerics.gemms import GEMMS

from .measuring import (
    guarded,
    milliseconds,
    replayed,
    require_hopper,
    state_of,
)
from .setting import (
    BEYOND_CACHE,
    LINEARS,
    Row,
)


def kernels_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    require_hopper(options.device)
    rate = copy_rate(options.device)
    yield {"operand": "copy", "tb_per_s": rate * 1e-9}
    for operand in ("activation", "gradient"):
        for fmt in ("fp4", "fp8"):
            for channels in options.channels:
                identity = {"operand": operand, "format": fmt, "rows": options.tokens, "columns": channels}
                yield from guarded(identity, partial(token_kernel, rate, operand, fmt, channels, options), options)
    sizes = [size for size in LINEARS if size[0] in options.channels and size[1] in options.channels]
    for fmt in ("fp4", "fp8"):
        for size in sizes:
            identity = {"operand": "weight", "format": fmt, "rows": size[0], "columns": size[1]}
            yield from guarded(identity, partial(weight_kernel, rate, fmt, size, options.device), options)


def copy_rate(device: torch.device) -> float:
    """Returns the bytes read and written per millisecond of a large copy."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), device)


def token_kernel(rate: float, operand: str, fmt: str, channels: int, options: argparse.Namespace) -> Iterator[Row]:
    """Times both layouts in one pass, and each alone; gradients are rounded to FP4 stochastically.

    rate: bytes per millisecond.
    """
    device, is_gradient = options.device, operand == "gradient"
    x = torch.randn(options.tokens, channels, device=device, dtype=torch.bfloat16)
    gemm = GEMMS.index("grad_input" if is_gradient else "forward")
    figures = {}
    for layouts, gemms in {"both": (gemm, 2), "rows": (gemm, -1), "columns": (-1, 2)}.items():
        call = partial(hopper.operators.quantize_tokens, x, state_of(fmt, device), *gemms, is_gradient)
        bound = (x.nbytes + sum(output.nbytes for output in call())) / rate
        figures |= timed_against(bound, milliseconds(call, device), layouts)
    yield figures


def weight_kernel(rate: float, fmt: str, size: tuple[int, int], device: torch.device) -> Iterator[Row]:
    """Times many weights one after another, as after an optimizer step, without Python between them."""
    state, sizes = state_of(fmt, device), 6 * math.prod(size)
    weights = [torch.randn(size, device=device) for _ in range(math.ceil(BEYOND_CACHE / sizes))]
    outputs = [hopper.operators.quantize_weight(weight, state, True, True) for weight in weights]

    def quantize_all() -> None:
        for weight, output in zip(weights, outputs, strict=True):
            hopper.operators.quantize_weight_into(weight, state, output)

    bound = (weights[0].nbytes + sum(output.nbytes for output in outputs[0])) / rate
    yield timed_against(bound, milliseconds(replayed(quantize_all), device) / len(weights), "both")


def timed_against(bound: float, taken: float, layouts: str) -> Row:
    return {f"{layouts}_us": 1e3 * taken, f"{layouts}_bound_us": 1e3 * bound, f"{layouts}_ratio": taken / bound}


def gemms_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    require_hopper(options.device)
    for size in LINEARS:
        identity = {"out_features": size[0], "in_features": size[1], "tokens": options.tokens}
        yield from guarded(identity, partial(gemms, size, options), options)


def gemms(size: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    """Times the products alone. "128x128": the right operand with square tiles, as the other two GEMMs have it."""
    (out_features, in_features), tokens, device = size, options.tokens, options.device
    quantize_tokens, multiply = hopper.operators.quantize_tokens, hopper.operators.multiply
    x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16)
    g = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    weight = torch.randn(size, device=device, dtype=torch.bfloat16)
    state = state_of("fp4", device)
    x_rows, x_row_scales, x_columns, x_column_scales = quantize_tokens(x, state, 0, 2, False)
    g_rows, g_row_scales, g_columns, g_column_scales = quantize_tokens(g, state, 1, 2, True)
    by_output, output_scales, by_input, input_scales = hopper.operators.quantize_weight(weight, state, True, True)
    x_squares, x_square_scales = hopper.operators.quantize_weight(x, state, False, True)[2:]

    y, grad_x, grad_weight = (tokens, out_features), (tokens, in_features), size
    forward = partial(multiply, x_rows, x_row_scales, by_output, output_scales, True, *y)
    grad_input = partial(multiply, g_rows, g_row_scales, by_input, input_scales, True, *grad_x)
    of_weight = partial(multiply, g_columns, g_column_scales, x_columns, x_column_scales, False, *grad_weight)
    squares = partial(multiply, g_columns, g_column_scales, x_squares, x_square_scales, True, *grad_weight)
    high = milliseconds(lambda: g.t() @ x, device)
    calls: dict[str, tuple[Callable[[], Tensor], float]] = {
        "forward": (forward, milliseconds(lambda: x @ weight.t(), device)),
        "grad_input": (grad_input, milliseconds(lambda: g @ weight, device)),
        "grad_weight, into FP32": (partial(of_weight, torch.float32), high),  # as with FP32 masters
        "grad_weight, into BF16": (of_weight, high),
        "grad_weight, 128x128, into BF16": (squares, high),
    }
    tera = 2 * tokens * math.prod(size) * 1e-9
    for gemm, (call, bf16) in calls.items():
        taken = milliseconds(call, device)
        rates = {"tflops": tera / taken, "bf16_tflops": tera / bf16, "speedup": bf16 / taken}
        yield {"gemm": gemm, "us": 1e3 * taken, "bf16_us": 1e3 * bf16, **rates}
