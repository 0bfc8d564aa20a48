"""Number formats as data: element grid, blocks, scales, and the rounding of each operand.

A plan names a format for each GEMM. The registry `FORMATS` holds what the names stand for; users add their own with
`register_format`. Kernels, estimates, the integer program and figures loop over the formats of a run
(`SnipConfig.formats`) and read what they need from the entries. The device tensors that kernels read hold a format's
`code`, its place in the registry.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import Registry
from .gemms import OPERANDS, TILE


@dataclass(frozen=True)
class ElementGrid:
    """The values that one element can take, before its scale: a small floating-point format with a sign bit.

    Values are `significand * 2**exponent` with `mantissa_bits` bits behind the point, subnormals included. Rounding
    saturates: a magnitude above `max` becomes `max`. Infinity and NaN are outside the domain of rounding. Integers
    -n..n are such a grid too (`integers`).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number; below it the spacing stays constant (subnormals)."""
    max: float
    """Largest finite value."""


def integers(largest: int) -> ElementGrid:
    """Returns the grid of the integers -largest..largest: all of them are subnormals with the spacing 1."""
    bits = largest.bit_length()
    return ElementGrid(f"int{bits + 1}", 0, bits - 1, bits - 1, float(largest))


# OCP Microscaling (MX) v1.0: FP4 E2M1; values 0, .5, 1, 1.5, 2, 3, 4, 6.
E2M1 = ElementGrid("e2m1", exponent_bits=2, mantissa_bits=1, min_exponent=0, max=6.0)
# OCP FP8 (arXiv:2209.05433): E4M3 without infinity ("fn"), and E5M2.
E4M3 = ElementGrid("e4m3", exponent_bits=4, mantissa_bits=3, min_exponent=-6, max=448.0)
E5M2 = ElementGrid("e5m2", exponent_bits=5, mantissa_bits=2, min_exponent=-14, max=57344.0)


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is rounded."""

    block: tuple[int, int]
    """Elements that share a scale: across and along the contracted dimension."""
    stochastic: bool = False
    """Round up or down at random, without bias; otherwise to nearest, ties to even."""

    def tile(self, contracts: int) -> tuple[int, int]:
        """Returns rows and columns of a block of a matrix whose dimension `contracts` (0 or 1) the GEMM contracts."""
        across, along = self.block
        return (across, along) if contracts == 1 else (along, across)


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """What runs under one name of a plan.

    Raises:
        ValueError: a field is out of range; the message names the format, the field and what is expected.
    """

    name: str
    grid: ElementGrid | None
    """None: the operands are not quantized, the GEMM runs in the compute dtype."""
    bits: int
    """Bits of an element, without its share of the scale."""
    activation: Operand = Operand((1, TILE))
    gradient: Operand = Operand((1, TILE))
    weight: Operand = Operand((TILE, TILE))
    """One quantized weight serves the forward and the grad_input GEMM, so its blocks are square."""
    scale: str = "fp32"
    """Kind of the scales: "fp32"."""
    scale_rule: str = "amax"
    """How a block's scale is found: "amax", the block's largest magnitude / the grid's largest value."""
    speed: float
    """Rate of its GEMMs on a modelled machine whose FP8 has the rate 1 (ours; an idea, not a device)."""
    label: str
    """In texts and legends."""
    colour: str
    """In figures."""
    style: str = ""
    """In terminals, as `rich` writes it."""

    def __post_init__(self) -> None:
        def refuse(field: str, expected: str) -> None:
            raise ValueError(f"Format {self.name!r}: {field}={getattr(self, field)!r}; expected {expected}.")

        if not self.name or not all(part.isalnum() for part in self.name.split("-")):
            refuse("name", "letters, digits and single hyphens")
        if self.scale != "fp32":
            refuse("scale", "'fp32'")
        if self.scale_rule != "amax":
            refuse("scale_rule", "'amax'")
        if self.bits < 1:
            refuse("bits", "at least 1")
        if not self.speed > 0:
            refuse("speed", "a rate above 0")
        for operand in OPERANDS:
            if any(size < 1 or TILE % size for size in self.operand(operand).block):
                refuse(operand, f"a block whose sides divide {TILE}, of which samples and padding are multiples")
        if self.weight.block[0] != self.weight.block[1]:
            refuse("weight", "a square block")

    def operand(self, name: str) -> Operand:
        """Returns `activation`, `gradient` or `weight` by name."""
        found: Operand = getattr(self, name)
        return found

    @property
    def code(self) -> int:
        """The number that stands for the format in device tensors."""
        return list(FORMATS).index(self.name)

    @property
    def is_quantized(self) -> bool:
        return self.grid is not None

    @property
    def counts_as_fp4(self) -> bool:
        """Whether its FLOPs count towards `target_fp4_fraction`: elements of at most 4 bits."""
        return self.bits <= 4


FORMATS: Registry[NumberFormat] = Registry("format")

UNQUANTIZED = FORMATS.register(
    NumberFormat(name="bf16", grid=None, bits=16, speed=0.5, label="BF16", colour="#dddddd", style="dim")
)
REFERENCE = FORMATS.register(
    NumberFormat(name="fp8", grid=E4M3, bits=8, speed=1.0, label="FP8", colour="#56b4e9", style="cyan")
)
"""The format whose measured time is what a GEMM counts where time is the budget."""
FORMATS.register(
    NumberFormat(
        name="fp4",
        grid=E2M1,
        bits=4,
        # Only these are rounded stochastically (docs/method.md, section 1).
        gradient=Operand((1, TILE), stochastic=True),
        speed=2.0,
        label="FP4",
        colour="#d55e00",
        style="bold red",
    )
)


def register_format(format: NumberFormat) -> NumberFormat:
    """Adds a user's own format, which plans and `SnipConfig.formats` may then name. Returns it.

    Every process of a run must register the same formats in the same order.

    Raises:
        ValueError: there is another format of this name.
    """
    return FORMATS.register(format)


def format_of_code(code: int) -> NumberFormat:
    """Returns the format that a device tensor's number stands for."""
    return list(FORMATS.values())[code]


def check_format(name: object, where: str) -> str:
    """Returns `name` if it is a format that a plan may use; raises ValueError naming `where` otherwise."""
    return FORMATS.checked(name, where)
