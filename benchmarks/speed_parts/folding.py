"""Part `folding`: operands folded into tensor-scaled E4M3, against the copy rate, and their products against BF16's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from snip_hf.kernels.tensor_scaled import operators
from snip_hf.kernels.tensor_scaled.records import Records, follow
from snip_hf.numerics.gemms import GEMMS, OPERANDS

from .kernels import copy_rate, timed_against
from .measuring import guarded, milliseconds, replayed, require_tensor_scaled, state_of
from .setting import LARGEST, Row

DATA = ("normal", "wide")
# The first ones are those of --quick.
TILES: tuple[operators.Tile, ...] = (
    (8, 64, 1, None),
    (8, 64, 1, 168),
    (8, 32, 1, 96),
    (8, 32, 1, None),
    (16, 32, 1, None),
    (16, 64, 1, None),
    (8, 128, 2, None),
    (16, 64, 2, None),
    (8, 64, 2, None),
    (16, 64, 4, None),
    (16, 128, 4, None),
    (32, 64, 4, None),
)
_QUICKLY = 3
# Operand -> the GEMMs that read its rows and its columns.
_GEMMS_OF = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}


def folding_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    require_tensor_scaled(options.device)
    rate = copy_rate(options.device)
    yield {"operand": "copy", "tb_per_s": rate * 1e-9}
    for operand in OPERANDS:
        for fmt in ("mxfp4", "fp8-tensor"):
            for channels in options.channels:
                rows = options.tokens if operand != "weight" else channels
                identity = {"operand": operand, "format": fmt, "rows": rows, "columns": channels}
                yield from guarded(identity, partial(layouts, rate, identity, options), options)
    for operand in OPERANDS:
        for tile in TILES[:_QUICKLY] if options.quick else TILES:
            rows = options.tokens if operand != "weight" else options.channels[-1]
            identity = {"operand": operand, "format": "mxfp4", "rows": rows, "columns": options.channels[-1]}
            identity |= {"tile": "x".join(str(part) for part in tile if part is not None)}
            yield from guarded(identity, partial(one_tile, rate, identity, tile, options), options)
    for size in LARGEST[:2] if options.quick else LARGEST:
        for fmt in ("mxfp4", "fp8-tensor"):
            for data in DATA:
                identity = {"out_features": size[0], "in_features": size[1], "tokens": options.tokens}
                identity |= {"format": fmt, "data": data}
                yield from guarded(identity, partial(products, size, fmt, data, options), options)


def operand_of(identity: Row, device: torch.device) -> tuple[Tensor, Tensor, Records]:
    """Returns random numbers, a state and the records of a layer that has trained for a step."""
    operand = identity["operand"]
    dtype = torch.float32 if operand == "weight" else torch.bfloat16
    x = torch.randn(identity["rows"], identity["columns"], device=device, dtype=dtype)
    state, records = state_of(identity["format"], device), Records.new(device)
    operators.folded(x, state, records, OPERANDS.index(operand), _GEMMS_OF[operand])
    follow([records])
    return x, state, records


def layouts(rate: float, identity: Row, options: argparse.Namespace) -> Iterator[Row]:
    """Times both layouts in one pass, each alone, and both where there is no exponent yet; rate: bytes per ms."""
    device, number = options.device, OPERANDS.index(identity["operand"])
    x, state, records = operand_of(identity, device)
    row_gemm, column_gemm = _GEMMS_OF[identity["operand"]]
    figures = {}
    for name, gemms in {"both": (row_gemm, column_gemm), "rows": (row_gemm, -1), "columns": (-1, column_gemm)}.items():
        fold = partial(operators.fold_operand, x, state, records.record, records.table, number, gemms, True)
        bound = (x.nbytes + sum(output.nbytes for output in fold())) / rate
        figures |= timed_against(bound, milliseconds(replayed(fold), device), name)
    yield figures


def one_tile(rate: float, identity: Row, tile: operators.Tile, options: argparse.Namespace) -> Iterator[Row]:
    """Times the folding of both layouts alone, without the launch before it that finds the scales."""
    device, operand = options.device, identity["operand"]
    number = OPERANDS.index(operand)
    x, state, records = operand_of(identity, device)
    outputs = operators.folded(x, state, records, number, _GEMMS_OF[operand])
    record = records.record[number]
    fold = partial(operators.launch_fold, x, state, record, number, True, outputs, tile)
    bound = (x.nbytes + sum(output.nbytes for output in outputs)) / rate
    yield timed_against(bound, milliseconds(replayed(fold), device), "both")


def products(size: tuple[int, int], fmt: str, data: str, options: argparse.Namespace) -> Iterator[Row]:
    """Times the three products alone, with exact and with fast sums, and compares both with FP64."""
    (out_features, in_features), tokens, device = size, options.tokens, options.device
    state, records = state_of(fmt, device), Records.new(device)
    x, g, weight = (
        numbers(data, *shape, device=device) for shape in ((tokens, in_features), (tokens, out_features), size)
    )
    of_x, of_g, of_weight = (
        operators.folded(one, state, records, OPERANDS.index(operand), _GEMMS_OF[operand])
        for operand, one in (("activation", x), ("gradient", g), ("weight", weight))
    )
    pairs = {
        "forward": (of_x[:2], of_weight[:2], (tokens, out_features), torch.bfloat16),
        "grad_input": (of_g[:2], of_weight[2:], (tokens, in_features), torch.bfloat16),
        "grad_weight": (of_g[2:], of_x[2:], size, torch.float32),
    }
    high: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: x @ weight.t(),
        "grad_input": lambda: g @ weight,
        "grad_weight": lambda: g.t() @ x,
    }
    tera = 2 * tokens * math.prod(size) * 1e-9
    product = torch.ops.snip_hf.tensor_scaled_product
    for gemm in GEMMS:
        left, right, shape, dtype = pairs[gemm]
        bf16 = milliseconds(high[gemm], device)
        for fast in (False, True):
            call = partial(product, [*left, *right], *shape, fast, dtype)
            taken = milliseconds(call, device)
            rates = {"tflops": tera / taken, "bf16_tflops": tera / bf16, "speedup": bf16 / taken}
            fault = error(product([*left, *right], *shape, fast, torch.float32), left, right)
            yield {"gemm": gemm, "fast": fast, "us": 1e3 * taken, **rates, **fault}


def numbers(data: str, rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns normal numbers; of "wide" data, rows and columns have standard deviations over ten binades each."""
    x = torch.randn(rows, columns, device=device)
    if data == "wide":
        x *= torch.exp2(-10 * torch.rand(rows, 1, device=device)) * torch.exp2(-10 * torch.rand(columns, device=device))
    return x.to(torch.bfloat16)


def error(got: Tensor, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], rows: int = 256) -> Row:
    """Returns how far some rows of a product are from the exact sums: of the sum of magnitudes at most, and in norm."""
    a = left[0][:rows].double() * left[1][0].double()
    b = right[0][: got.shape[1]].double() * right[1][0].double()
    exact, magnitudes = a @ b.t(), a.abs() @ b.abs().t()
    difference = got[:rows].double() - exact
    return {
        "largest_error": float((difference.abs() / magnitudes.clamp_min(1e-300)).max()),
        "error_norm": float(difference.norm() / exact.norm()),
    }
