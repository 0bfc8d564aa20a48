"""The trial that a device must pass before a run: one small product per GEMM and format, against the emulated one.

A machine may have the right GPU and still lack a product: MXFP4's, for one, is part of some builds of torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from ...numerics.formats import FORMATS, NumberFormat
from ...numerics.gemms import CONTRACTIONS, GEMMS
from .. import emulated
from ..trials import deviation, fault_of, operands
from . import operators
from .quantization import quantize


def errors(format: NumberFormat, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yields each GEMM with the norm of its deviation from the emulated one, relative to that one's norm."""
    given = operands(format, device)
    x, weight, grad_output, state = given.x, given.weight, given.grad_output, given.state
    codes, none = state[: len(GEMMS)].cpu(), torch.empty(0, dtype=torch.uint8, device=device)
    calls = {
        "forward": (
            lambda: operators.forward_gemm(x, weight, None, none, state, codes),
            lambda: emulated.forward_gemm(x, weight, None, state),
        ),
        "grad_input": (
            lambda: operators.grad_input_gemm(grad_output, weight, none, state, codes),
            lambda: emulated.grad_input_gemm(grad_output, weight, state),
        ),
        "grad_weight": (
            lambda: operators.grad_weight_gemm(grad_output, x, state, codes),
            lambda: emulated.grad_weight_gemm(grad_output, x, state),
        ),
    }
    for gemm, (run, reference) in calls.items():
        yield gemm, deviation(run(), reference())


def other_bytes(format: NumberFormat, device: torch.device) -> list[str]:
    """Returns the operands that the device's kernel quantizes to other bytes than torch's operations do."""
    given = operands(format, device)
    found = []
    for gemm, pair in CONTRACTIONS.items():
        for operand, contracts in pair:
            packed = quantize(given.by_name[operand], format, operand, contracts, given.state)
            again = quantize(given.by_name[operand], format, operand, contracts, given.state, by_kernel=False)
            if not torch.equal(packed.data, again.data) or not torch.equal(packed.scales, again.scales):
                found.append(f"{operand} of {gemm}")
    return found


@cache
def fault(name: str, device: torch.device) -> str | None:
    """Returns what is wrong with a format's GEMMs on a device, None if nothing is. Takes some seconds, once.

    Raises:
        RuntimeError: the trial has left the device unusable, so that emulation would not run there either.
    """
    format = FORMATS[name]
    return fault_of(__name__, format, device, lambda: other_bytes(format, device), lambda: errors(format, device))
