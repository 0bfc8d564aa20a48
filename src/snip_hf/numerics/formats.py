"""What the numbers are: each number format as data.

A format is described by its bits and nothing else; `quantize` rounds to any of them with one function. The plan names
them by the short names of `FORMATS`; the device tensors that the kernels read hold the matching integer codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class NumberFormat:
    """A small binary floating-point format with subnormals and a sign bit.

    Values are `significand * 2**exponent` with `mantissa_bits` bits behind the point. Rounding to it saturates: what is
    larger than `max` becomes `max`. Infinity and NaN are outside the domain of rounding (see `quantize`).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number; below it the spacing stays constant (subnormals)."""
    max: float
    """Largest finite value."""


# OCP Microscaling (MX) v1.0: FP4 E2M1; values 0, .5, 1, 1.5, 2, 3, 4, 6.
E2M1 = NumberFormat("e2m1", exponent_bits=2, mantissa_bits=1, min_exponent=0, max=6.0)
# OCP FP8 (arXiv:2209.05433): E4M3 without infinity ("fn"), and E5M2.
E4M3 = NumberFormat("e4m3", exponent_bits=4, mantissa_bits=3, min_exponent=-6, max=448.0)
E5M2 = NumberFormat("e5m2", exponent_bits=5, mantissa_bits=2, min_exponent=-14, max=57344.0)

# Names that plans use -> grid. "bf16" stands for "not quantized": the GEMM runs in the compute dtype.
FORMATS: MappingProxyType[str, NumberFormat | None] = MappingProxyType({"bf16": None, "fp8": E4M3, "fp4": E2M1})
FORMAT_NAMES = tuple(FORMATS)
FORMAT_CODES = MappingProxyType({name: code for code, name in enumerate(FORMAT_NAMES)})


def check_format(name: object, where: str) -> str:
    """Returns `name` if it is a format that a plan may use; raises ValueError naming `where` otherwise."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"Unknown format {name!r} for {where}; expected one of {', '.join(FORMAT_NAMES)}.")
    return name
