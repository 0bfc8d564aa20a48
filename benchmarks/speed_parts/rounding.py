"""Part `rounding`: one rounded operand of every format, by the Triton kernel and by torch's operations, against the
time that its bytes take."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from snip_hf.kernels import rounding
from snip_hf.numerics.formats import FORMATS, NumberFormat
from snip_hf.numerics.gemms import gemm_of
from snip_hf.numerics.rounding import round_operand

from .kernels import copy_rate
from .measuring import guarded, milliseconds
from .setting import Row

CHANNELS = 4096
KEY = 1234567891234
# Each operand along one dimension: the gradient along the tokens, as grad_weight has it.
OPERANDS = (("activation", 1), ("gradient", 0), ("weight", 1))
QUICK = OPERANDS[1:2]


def rounding_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    """Yields a row per format and operand; what is rounded as in an earlier format is left out."""
    if not rounding.has_kernels(options.device):
        raise RuntimeError(f"no rounding kernel on {options.device}: it needs a CUDA GPU with Triton")
    rate = copy_rate(options.device)
    yield {"operand": "copy", "tb_per_s": rate * 1e-9}
    tensors = {
        "activation": torch.randn(options.tokens, CHANNELS, device=options.device).bfloat16(),
        "weight": torch.randn(CHANNELS, CHANNELS, device=options.device).bfloat16(),
    }
    tensors["gradient"] = tensors["activation"]
    seen = set()
    for operand, contracts in QUICK if options.quick else OPERANDS:
        for name, format in FORMATS.items():
            if not format.is_quantized or not format.operand(operand).quantized:
                continue
            kind = kind_of(format, operand, contracts)
            if kind not in seen:
                seen.add(kind)
                x = tensors[operand]
                identity = {"format": name, "operand": operand, "contracts": contracts, "rows": len(x)}
                yield from guarded(identity, partial(operand_of, rate, x, format, operand, contracts), options)


def kind_of(format: NumberFormat, operand: str, contracts: int) -> tuple[object, ...]:
    """Returns all that the rounding of an operand depends on."""
    rule, is_rotated = format.operand(operand), gemm_of(operand, contracts) in format.rotated
    scales = format.scale, format.rule_of(rule), format.tensor_scale
    return operand, rule, rule.grid or format.grid, scales, format.rotation * is_rotated


def operand_of(rate: float, x: Tensor, format: NumberFormat, operand: str, contracts: int) -> Iterator[Row]:
    """Yields the times. The bound counts x once and the FP32 result; an amax of the tensor reads x once more.

    rate: bytes per millisecond.
    """
    bound = (x.nbytes + 4 * x.numel()) / rate
    arguments = x, format, operand, contracts, KEY
    taken = milliseconds(lambda: rounding.fake_quantize(*arguments), x.device)
    by_torch = milliseconds(lambda: round_operand(*arguments), x.device)
    figures = {"us": 1e3 * taken, "bound_us": 1e3 * bound, "ratio": taken / bound, "torch_us": 1e3 * by_torch}
    yield figures | {"speedup": by_torch / taken, "kernel": rounding.takes(format, operand)}
