"""The trial that a device must pass before a run: one small product per GEMM and format, against the emulated one.

A machine may have the right GPU and still lack a product: MXFP4's, for one, is part of some builds of torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...numerics.formats import FORMATS, NumberFormat
from ...numerics.gemms import CONTRACTIONS, GEMMS
from ...numerics.random_streams import stream_key
from .. import emulated
from . import operators
from .quantization import quantize

# T, I, O: ragged in what products and runs of scales are multiples of.
_SIZE = (296, 176, 208)
# Both results are BF16 of FP32 sums of the same products. The next format's are 3% off, a wrong scale's 100%.
TOLERANCE = 0.005
_MOST_TEXT = 200


@dataclass(frozen=True)
class Operands:
    """x (T, I), weight (O, I) and grad_output (T, O) in BF16, and a layer's state, on the device of a trial."""

    x: Tensor
    weight: Tensor
    grad_output: Tensor
    state: Tensor

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {"activation": self.x, "weight": self.weight, "gradient": self.grad_output}


def operands(format: NumberFormat, device: torch.device, size: tuple[int, int, int] = _SIZE) -> Operands:
    """Returns random operands over many magnitudes, and a state in which all GEMMs have the format."""
    tokens, in_features, out_features = size
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        normal, magnitude = (torch.randn(shape, generator=generator, device="cpu") for _ in range(2))
        return (normal * torch.exp(magnitude)).to(device, torch.bfloat16)

    x, weight = random(tokens, in_features), random(out_features, in_features)
    grad_output = random(tokens, out_features)
    key = stream_key(1, 2, 3, 4, 1) % 2**63
    state = torch.tensor([*[format.code] * len(GEMMS), key, 0, 1], device=device)
    return Operands(x, weight, grad_output, state)


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
        expected = reference().double()
        yield gemm, float((run().double() - expected).norm() / expected.norm())


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


def is_lost(device: torch.device) -> bool:
    """Returns True if nothing can run on a device until the process ends, as is so after some CUDA errors."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


@cache
def fault(name: str, device: torch.device) -> str | None:
    """Returns what is wrong with a format's GEMMs on a device, None if nothing is. Takes some seconds, once.

    Raises:
        RuntimeError: the trial has left the device unusable, so that emulation would not run there either.
    """
    format = FORMATS[name]
    try:
        others = other_bytes(format, device)
        found = f"the kernel rounds otherwise than the reference ({', '.join(others)})" if others else None
        for gemm, error in () if others else errors(format, device):
            if not error < TOLERANCE:
                found = f"{gemm} is {error:.2g} off the reference, expected less than {TOLERANCE}"
                break
    except Exception as error:
        if is_lost(device):
            raise RuntimeError(
                f"The trial of the format {name!r} on {device} ended with {type(error).__name__}: "
                f"{str(error).splitlines()[0][:_MOST_TEXT]}. Nothing runs on this GPU until the process ends. Start "
                f"again with backend={emulated.EMULATED.name!r}, or with other formats."
            ) from error
        # A run goes on without these kernels; whatever keeps them from running is said.
        found = f"{type(error).__name__}: {error}"
    return found and f"the trial of {name!r} failed: {found.splitlines()[0][:_MOST_TEXT]}"
