"""The formats against the descriptions in ml_dtypes, gfloat and torch."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy as np
import pytest
from gfloat import formats as gfloat_formats
from oracles.rounding import GRIDS, grid_values

from snip_hf.numerics.formats import E2M1, E4M3, E5M2, FORMATS, ElementGrid, check_format, format_of_code
from snip_hf.numerics.gemms import GEMMS

GFLOAT = {
    "e2m1": gfloat_formats.format_info_ocp_e2m1,
    "e4m3": gfloat_formats.format_info_ocp_e4m3,
    "e5m2": gfloat_formats.format_info_ocp_e5m2,
}

# New ones come last: layers' states hold places in this list.
ORDER = [
    "bf16",
    "fp8",
    "fp4",
    "fp8-tensor",
    "fp8-tensor-e5m2",
    "mxfp8",
    "mxfp6",
    "mxfp6-e2m3",
    "mxfp4",
    "mxfp4-32x32",
    "mxfp4-rht",
    "nvfp4",
    "nvfp4-1x16",
    "nvfp4-46",
    "nvfp4-rht",
    "nvfp4-rht128",
    "int8",
    "int4",
    "ufp4",
    "ufp4-rht",
    "fp4-46",
    "fp4-pqt",
    "fp8-delayed",
]


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2], ids=lambda fmt: fmt.name)
class TestEachFormat:
    def test_has_the_constants_of_ml_dtypes(self, fmt: ElementGrid) -> None:
        info = ml_dtypes.finfo(GRIDS[fmt.name])
        got = (fmt.max, 2.0**fmt.min_exponent, fmt.mantissa_bits, fmt.exponent_bits)
        assert got == (float(info.max), float(info.smallest_normal), info.nmant, info.nexp)

    def test_its_fields_span_exactly_the_finite_values_of_every_code(self, fmt: ElementGrid) -> None:
        steps = 2**fmt.mantissa_bits
        values = {step * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits) for step in range(steps)}
        exponent = fmt.min_exponent
        while 2.0**exponent <= fmt.max:
            values |= {(1 + step / steps) * 2.0**exponent for step in range(steps)}
            exponent += 1
        assert sorted(value for value in values if value <= fmt.max) == grid_values(fmt.name).tolist()


def test_every_e2m1_value_is_an_e4m3_value() -> None:
    assert np.isin(grid_values("e2m1"), grid_values("e4m3")).all()
    assert grid_values("e2m1").tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_every_code_of_a_plan_stands_for_one_format_and_never_moves() -> None:
    """Plans and checkpoints hold these names and codes."""
    assert list(FORMATS) == ORDER
    assert [format.code for format in FORMATS.values()] == list(range(len(ORDER)))
    assert [FORMATS[name].grid for name in ("bf16", "fp8", "fp4")] == [None, E4M3, E2M1]
    assert [format_of_code(code).name for code in range(len(ORDER))] == ORDER
    assert GEMMS == ("forward", "grad_input", "grad_weight")


FIRST = (
    " A format of your own is registered first: by `snip_hf.register_format`, or by `--import MODULE` on the command "
    "line."
)


@pytest.mark.parametrize(
    ("name", "guess", "advice"),
    [
        ("FP4", " Did you mean 'fp4'?", FIRST),
        ("int9", " Did you mean 'int8'?", FIRST),
        ("", "", FIRST),
        (None, "", ""),
        (2, "", ""),
        (["fp4"], "", ""),
    ],
)
def test_an_unknown_format_is_named_with_its_place_the_closest_one_and_advice(
    name: object, guess: str, advice: str
) -> None:
    with pytest.raises(ValueError) as error:
        check_format(name, "model.layers.0.q_proj:forward")
    assert str(error.value) == (
        f"Unknown format {name!r} for model.layers.0.q_proj:forward.{guess} `list(snip_hf.formats)` lists all "
        f"{len(ORDER)}.{advice}"
    )


def test_gfloat_and_ml_dtypes_agree_on_every_value_of_the_formats() -> None:
    """The two oracles of the rounding tests describe the same grids."""
    for grid, info in GFLOAT.items():
        decoded = {abs(gfloat.decode_float(info, code).fval) for code in range(2**info.k)}
        assert sorted(value for value in decoded if np.isfinite(value)) == grid_values(grid).tolist()
