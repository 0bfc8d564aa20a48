"""The trial that a device must pass before a run: operands against the reference, and a small product per GEMM."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from ...numerics.formats import FORMATS, NumberFormat
from ...numerics.gemms import CONTRACTIONS, GEMMS, OPERANDS
from ..emulated import EMULATED
from ..trials import Operands, deviation, fault_of, operands
from . import gemm_calls, operators
from .records import Records


def errors(format: NumberFormat, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yields each GEMM with its deviation from the emulated one, on a CPU: no kernel need be compiled for that."""
    given = operands(format, device)
    arguments = given.x, given.weight, given.grad_output, given.state
    on_cpu = [tensor.cpu() for tensor in arguments]
    for gemm in GEMMS:
        expected = EMULATED.gemm_call(gemm, *on_cpu)()
        yield gemm, deviation(gemm_calls.gemm_call(gemm, *arguments)(), expected.to(device))


def other_bytes(format: NumberFormat, device: torch.device) -> list[str]:
    """Returns the operands that the device's kernels fold to other bytes than torch's operations do."""
    given = operands(format, device)
    return [
        f"{operand} of {gemm}"
        for gemm, pair in CONTRACTIONS.items()
        for operand, contracts in pair
        if not _agree(given, gemm, operand, contracts, device)
    ]


def _agree(given: Operands, gemm: str, operand: str, contracts: int, device: torch.device) -> bool:
    gemms = (GEMMS.index(gemm), -1) if contracts == 1 else (-1, GEMMS.index(gemm))
    arguments = given.by_name[operand], given.state, Records.new(device), OPERANDS.index(operand), gemms
    layout = slice(0, 2) if contracts == 1 else slice(2, 4)
    got, expected = operators.folded(*arguments)[layout], operators.folded(*arguments, by_kernel=False)[layout]
    return all(torch.equal(a.float(), b.float()) for a, b in zip(got, expected, strict=True))


@cache
def fault(name: str, device: torch.device) -> str | None:
    """Returns what is wrong with a format's GEMMs on a device, None if nothing is. Takes some seconds, once."""
    format = FORMATS[name]
    return fault_of(__name__, format, device, lambda: other_bytes(format, device), lambda: errors(format, device))
