"""Number formats as data: element grid, blocks, scales, and the rounding of each operand.

A plan names a format for each GEMM. The registry `FORMATS` defines the names; users add their own with
`register_format`. Kernels, estimates, the integer program and figures loop over the formats of a run
(`SnipConfig.formats`) and read its properties from the entries. The device tensors that kernels read hold a format's
`code`, its place in the registry. docs/formats.md has the table of built-in formats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..registry import Registry, UnknownName
from .gemms import GEMMS, OPERANDS, TILE
from .grids import E2M1 as E2M1
from .grids import E2M3, E3M2, scale_grid
from .grids import E4M3 as E4M3
from .grids import E5M2 as E5M2
from .grids import ElementGrid as ElementGrid
from .grids import floats as floats
from .grids import integers as integers
from .rotation import LARGEST

# Kind of scale -> rules for a block's scale from its largest magnitude; the first is the default.
_E8M0 = "e8m0"
_RULES = {"fp32": ("amax",), _E8M0: ("rceil", "ceil", "floor", "even")}
_RULES_OF_A_GRID = ("nearest", "up")
# Under these rules no element exceeds the grid's largest value. Cutting it off would be a bias.
_UNSATURATED = ("amax", "rceil", "ceil", "up")
_MOST_BITS = 32
_COLOUR = re.compile("#[0-9a-fA-F]{6}")


@dataclass(frozen=True)
class Operand:
    """The rounding of one operand of a GEMM."""

    block: tuple[int, int] | None
    """Elements that share a scale: (across, along) the contracted dimension. None: all elements of the tensor."""
    stochastic: bool = False
    """True rounds up or down at random, without bias, for gradients; False to nearest, ties to even."""
    grid: ElementGrid | None = None
    """Values of an element; None: `NumberFormat.grid`."""
    scale_rule: str | None = None
    """None: `NumberFormat.scale_rule`."""
    targets: tuple[float, ...] = ()
    """Values to which a block's largest magnitude may be scaled; each block uses the one with the smallest squared
    error, the first of equal ones. (): the grid's largest value."""
    noise: bool = False
    """True adds Gaussian noise with the variance of rounding instead of rounding, for weights."""
    quantized: bool = True
    """False: the operand stays in the compute dtype."""

    def tile(self, contracts: int, shape: tuple[int, ...] = ()) -> tuple[int, int]:
        """Returns rows and columns of a block of a matrix whose dimension `contracts` (0 or 1) the GEMM contracts.

        Args:
            contracts: 0 or 1.
            shape: of the matrix, needed if the block is the whole matrix.
        """
        if self.block is None:
            rows, columns = shape
            return rows, columns
        across, along = self.block
        return (across, along) if contracts == 1 else (along, across)

    @property
    def is_plain(self) -> bool:
        """True if it is rounded in blocks, each with one scale that depends only on the largest magnitude."""
        return self.block is not None and self.quantized and not self.targets and not self.noise


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A number format, which a plan names for a GEMM.

    Raises:
        ValueError: a field is out of range; the message names the format, the field and the expected values.
    """

    name: str
    grid: ElementGrid | None
    """None: the operands are not quantized, the GEMM runs in the compute dtype."""
    bits: int
    """Bits of an element with its sign, without its share of the scale (see `stored_bits`); the maximum over operands
    with their own grids."""
    activation: Operand = Operand((1, TILE))
    gradient: Operand = Operand((1, TILE))
    weight: Operand = Operand((TILE, TILE))
    """With square blocks the forward and the grad_input GEMM share one quantized weight; otherwise each quantizes it
    along the dimension that it contracts."""
    scale: str = "fp32"
    """Kind of the scales: "fp32", "e8m0" (powers of two), or "eYmZ", a floating-point format with Y exponent and Z
    mantissa bits."""
    scale_rule: str | None = None
    """Rule for a block's scale from its largest magnitude, amax (docs/formats.md). fp32: "amax". e8m0: "rceil" (the
    default), "ceil", "floor" or "even". eYmZ: "nearest" (the default) or "up" (for stochastic operands)."""
    tensor_scale: float | None = None
    """With scales eYmZ: adds an FP32 scale of the whole tensor, such that the block with the tensor's largest magnitude
    gets this block scale. None: there is no such scale."""
    rotation: int = 0
    """Size of the random Hadamard transform of both operands of the GEMMs in `rotated`; 0: none."""
    rotated: tuple[str, ...] = ()
    speed: float
    """Rate of its GEMMs on a modelled machine relative to FP8 there (our model, not a device)."""
    label: str
    """Name in texts and legends."""
    colour: str
    """Colour in figures: "#rrggbb"."""
    style: str = ""
    """Style in terminals, in the notation of `rich`."""

    def __post_init__(self) -> None:
        if not self.name or not all(part.isalnum() for part in self.name.split("-")):
            self._refuse("name", "letters, digits and single hyphens")
        if not self.speed > 0:
            self._refuse("speed", "a rate above 0")
        if not _COLOUR.fullmatch(self.colour):
            self._refuse("colour", "#rrggbb in hexadecimal digits, e.g. #56b4e9")
        if not isinstance(self.grid, ElementGrid | None):
            self._refuse("grid", "E2M1, E4M3, E5M2, integers(7), floats(3, 2) or the like, or None")
        self._check_scales()
        if self.rotation not in (0, *(2**power for power in range(1, LARGEST.bit_length()))):
            self._refuse("rotation", f"0 or a power of two from 2 to {LARGEST}")
        if bool(self.rotation) != bool(self.rotated) or not set(self.rotated) <= set(GEMMS):
            self._refuse("rotated", f"some of {', '.join(GEMMS)} with a rotation, () without")
        for operand in OPERANDS:
            self._check_operand(operand, self.operand(operand))
        self._check_bits()

    def _refuse(self, field: str, expected: str) -> None:
        raise ValueError(f"Format {self.name!r}: {field}={getattr(self, field)!r}; expected {expected}.")

    def _check_bits(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= _MOST_BITS:
            self._refuse("bits", f"1 to {_MOST_BITS}")
        if self.grid is None:
            return
        grids = {name: self.operand(name).grid or self.grid for name in OPERANDS}
        most = max(grid.bits for grid in grids.values())
        if self.bits != most:
            listed = ", ".join(f"{name} {grid.name}: {grid.bits}" for name, grid in grids.items())
            self._refuse("bits", f"{most}, the most bits of an element, with its sign ({listed})")

    def _check_scales(self) -> None:
        try:
            kind = scale_grid(self.scale)
        except ValueError as error:
            raise ValueError(f"Format {self.name!r}: scale: {error}") from None
        rules = _RULES.get(self.scale, _RULES_OF_A_GRID)
        if self.scale_rule not in (None, *rules):
            self._refuse("scale_rule", f"one of {', '.join(rules)} for scale={self.scale!r}")
        most = 0.0 if kind is None else kind.max
        if self.tensor_scale is not None and not 0 < self.tensor_scale <= most:
            self._refuse("tensor_scale", "None" if kind is None else f"None or above 0 and at most {most:g}")

    def _check_operand(self, name: str, rule: Operand) -> None:
        if not isinstance(rule, Operand):
            self._refuse(name, "an Operand, e.g. Operand((1, 32))")
        if rule.block is None:
            if self.scale not in _RULES:
                self._refuse(name, f"a block, since only scales {' and '.join(_RULES)} serve a whole tensor")
        elif not (isinstance(rule.block, tuple) and [type(size) for size in rule.block] == [int, int]):
            self._refuse(name, "a block of two integers, (across, along), or None for the whole tensor")
        elif any(size < 1 or TILE % size for size in rule.block):
            self._refuse(name, f"a block whose sides divide {TILE}, of which samples and padding are multiples")
        rules = _RULES.get(self.scale, _RULES_OF_A_GRID)
        if rule.scale_rule not in (None, *rules):
            self._refuse(name, f"scale_rule None or one of {', '.join(rules)} for scale={self.scale!r}")
        if rule.stochastic and name != "gradient":
            self._refuse(name, "stochastic=False: rounding at random is for gradients")
        if rule.stochastic and self.rule_of(rule) not in _UNSATURATED:
            unbiased = [name for name in rules if name in _UNSATURATED]
            self._refuse(
                name, f"scale_rule {' or '.join(unbiased)} with stochastic=True, since others cut elements off"
            )
        if rule.noise and (name != "weight" or rule.targets):
            self._refuse(name, "noise=False: noise is for weights, without targets")
        if rule.targets:
            self._check_targets(name, rule)

    def _check_targets(self, name: str, rule: Operand) -> None:
        grid, kind = rule.grid or self.grid, scale_grid(self.scale)
        if grid is None or self.scale == _E8M0 or rule.stochastic or rule.block is None:
            self._refuse(name, "targets=(): they need blocks, rounding to nearest, and scales other than powers of two")
        elif any(not 0 < target <= grid.max for target in rule.targets):
            self._refuse(name, f"targets above 0 and at most {grid.max:g}, the grid's largest value")
        elif kind and self.tensor_scale and self.tensor_scale * grid.max / min(rule.targets) > kind.max:
            self._refuse(name, f"targets whose scales stay within {kind.max:g}; a smaller tensor_scale leaves room")

    def operand(self, name: str) -> Operand:
        """Returns `activation`, `gradient` or `weight` by name."""
        return getattr(self, name)

    def rule_of(self, operand: Operand) -> str:
        """Returns the rule for the scales of an operand: its own, the format's, or the default."""
        of_a_grid = "up" if operand.stochastic else "nearest"
        default = _RULES.get(self.scale, (of_a_grid,))[0]
        return operand.scale_rule or self.scale_rule or default

    def stored_bits(self, operand: str = "activation") -> float:
        """Returns the bits of a value of an operand in memory, with its share of a block's scale."""
        rule = self.operand(operand)
        if self.grid is None or not rule.quantized:
            return float(UNQUANTIZED.bits)
        bits = (rule.grid or self.grid).bits
        if rule.block is None:
            return float(bits)
        across, along = rule.block
        if self.scale in _RULES:
            scale_bits = 32 if self.scale == "fp32" else 8
        else:  # with an unused sign
            kind = scale_grid(self.scale)
            assert kind is not None
            scale_bits = 1 + kind.exponent_bits + kind.mantissa_bits
        return bits + scale_bits / (across * along)

    @property
    def shares_weight(self) -> bool:
        """True if the forward and the grad_input GEMM share one quantized weight."""
        block = self.weight.block
        return (block is None or block[0] == block[1]) and not {"forward", "grad_input"} & set(self.rotated)

    @property
    def has_tensor_scale(self) -> bool:
        """True if rounding depends on the whole tensor's largest magnitude, so that a part is rounded differently."""
        is_whole = any(self.operand(name).block is None for name in OPERANDS)
        return self.grid is not None and (is_whole or self.tensor_scale is not None)

    @property
    def is_random(self) -> bool:
        """True if results depend on the seed."""
        return any(self.operand(name).stochastic or self.operand(name).noise for name in OPERANDS)

    @property
    def code(self) -> int:
        """The number that stands for the format in device tensors."""
        return list(FORMATS).index(self.name)

    @property
    def is_quantized(self) -> bool:
        return self.grid is not None

    @property
    def counts_as_fp4(self) -> bool:
        """True if its FLOPs count towards `target_fp4_fraction`: all operands have elements of at most 4 bits."""
        operands = map(self.operand, OPERANDS)
        return self.bits <= 4 and all(operand.quantized and not operand.noise for operand in operands)


FORMATS: Registry[NumberFormat] = Registry("format", listing="`list(snip_hf.formats)`")

UNQUANTIZED = FORMATS.register(
    NumberFormat(name="bf16", grid=None, bits=16, speed=0.5, label="BF16", colour="#dddddd", style="dim")
)
REFERENCE = FORMATS.register(
    NumberFormat(name="fp8", grid=E4M3, bits=8, speed=1.0, label="FP8", colour="#56b4e9", style="cyan")
)
"""The format whose measured time is the cost of a GEMM if time is the budget."""
# Output gradients in 4 bits, and only these, are rounded stochastically (docs/method.md, section 1).
_FP4 = FORMATS.register(
    NumberFormat(
        name="fp4",
        grid=E2M1,
        bits=4,
        gradient=Operand((1, TILE), stochastic=True),
        speed=2.0,
        label="FP4",
        colour="#d55e00",
        style="bold red",
    )
)


def _variant(of: NumberFormat, name: str, label: str, colour: str, **changes: object) -> NumberFormat:
    """Registers a built-in format that differs from another one in some fields."""
    return FORMATS.register(replace(of, name=name, label=label, colour=colour, **changes))  # type: ignore[arg-type]


# Entries keep their order, since device tensors hold their indices.
_WHOLE = Operand(None)
_FP8_TENSOR = _variant(
    REFERENCE, "fp8-tensor", "FP8 tensor", "#0072b2", activation=_WHOLE, gradient=_WHOLE, weight=_WHOLE
)
_variant(_FP8_TENSOR, "fp8-tensor-e5m2", "FP8 tensor, E5M2 gradients", "#004c78", gradient=Operand(None, grid=E5M2))

# OCP Microscaling (MX) v1.0 with cuBLAS's rule for the scales (docs/formats.md explains why).
_B32, _B32_RANDOM = Operand((1, 32)), Operand((1, 32), stochastic=True)
_MXFP8 = _variant(
    REFERENCE, "mxfp8", "MXFP8", "#009e73", scale=_E8M0, activation=_B32, gradient=_B32, weight=_B32, style="green"
)
_variant(_MXFP8, "mxfp6", "MXFP6", "#8c6bb1", grid=E3M2, bits=6, style="magenta")
_variant(_MXFP8, "mxfp6-e2m3", "MXFP6 E2M3", "#6e4f9c", grid=E2M3, bits=6, style="magenta")
_MXFP4 = _variant(
    _MXFP8, "mxfp4", "MXFP4", "#e69f00", grid=E2M1, bits=4, gradient=_B32_RANDOM, speed=2.0, style="bold yellow"
)
_variant(_MXFP4, "mxfp4-32x32", "MXFP4 32x32", "#b37b00", weight=Operand((32, 32)))
_BACKWARD = ("grad_input", "grad_weight")
_variant(_MXFP4, "mxfp4-rht", "MXFP4 RHT", "#805800", rotation=128, rotated=_BACKWARD)

# NVIDIA's FP4 (arXiv:2509.25149).
_B16 = Operand((1, 16))
_NVFP4 = _variant(
    _FP4,
    "nvfp4",
    "NVFP4",
    "#cc79a7",
    scale=E4M3.name,
    tensor_scale=E4M3.max,
    activation=_B16,
    gradient=Operand((1, 16), stochastic=True),
    weight=Operand((16, 16)),
    style="bold magenta",
)
_variant(_NVFP4, "nvfp4-1x16", "NVFP4 1x16", "#a8507f", weight=_B16)
# Four over six (arXiv:2512.02010). A block whose largest magnitude is scaled to 4 has 1.5 times the scale. With 256 as
# the largest scale this is 384, an E4M3 value.
_FOUR_SIX = (6.0, 4.0)
_variant(
    _NVFP4,
    "nvfp4-46",
    "NVFP4 4/6",
    "#e3b1cb",
    tensor_scale=256.0,
    activation=Operand((1, 16), targets=_FOUR_SIX),
    weight=Operand((16, 16), targets=_FOUR_SIX),
)
_variant(_NVFP4, "nvfp4-rht", "NVFP4 RHT16", "#84315f", weight=_B16, rotation=16, rotated=_BACKWARD)
_variant(_NVFP4, "nvfp4-rht128", "NVFP4 RHT128", "#5c1d40", weight=_B16, rotation=128, rotated=_BACKWARD)

_variant(REFERENCE, "int8", "INT8", "#f0e442", grid=integers(127))
_variant(_FP4, "int4", "INT4", "#b8ad1c", grid=integers(7))
# The grid of UFP4 (arXiv:2606.20381) in MX's blocks, so that only the grid differs from MXFP4.
_UFP4 = _variant(_MXFP4, "ufp4", "UFP4", "#7f7710", grid=integers(7))
_variant(_UFP4, "ufp4-rht", "UFP4 RHT", "#5a540a", rotation=128, rotated=GEMMS)

_variant(
    _FP4,
    "fp4-46",
    "FP4 4/6",
    "#f0a070",
    activation=Operand((1, TILE), targets=_FOUR_SIX),
    weight=Operand((TILE, TILE), targets=_FOUR_SIX),
)
# Pseudo-quantization training: Gaussian noise on the weights, other operands unquantized.
_KEPT = Operand((1, TILE), quantized=False)
_variant(
    _FP4,
    "fp4-pqt",
    "FP4 noise",
    "#999999",
    activation=_KEPT,
    gradient=_KEPT,
    weight=Operand((TILE, TILE), noise=True),
    speed=UNQUANTIZED.speed,
    style="dim",
)

# A power of two can be delayed without changing how normal numbers are rounded: `tensor_scaled` takes it from the steps
# before.
_variant(_FP8_TENSOR, "fp8-delayed", "FP8 delayed", "#56a0d8", scale=_E8M0)


def register_format(format: NumberFormat) -> NumberFormat:
    """Registers a user's format, which plans and `SnipConfig.formats` may then name. Returns it.

    Every process of a run must register the same formats in the same order.

    Raises:
        ValueError: there is another format of this name.
    """
    return FORMATS.register(format)


def format_of_code(code: int) -> NumberFormat:
    """Returns the format with this code."""
    return list(FORMATS.values())[code]


def check_format(name: object, where: str) -> str:
    """Returns `name` if it is a registered format; otherwise raises ValueError naming `where`."""
    try:
        return FORMATS.checked(name, where)
    except UnknownName as error:
        raise UnknownName(
            f"{error} A format of your own is registered first: by `snip_hf.register_format`, or by `--import MODULE` "
            "on the command line."
        ) from error
