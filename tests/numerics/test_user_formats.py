"""Formats that users may define, and those that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from registries import restored

from snip_hf import formats, quantize, register_format
from snip_hf.numerics.formats import E2M1, FORMATS, NumberFormat, Operand, floats, integers
from snip_hf.numerics.grids import E2M3, E3M2, E4M3, E5M2, scale_grid


def a_format(**changes: Any) -> NumberFormat:
    """E2M1 in blocks of 16 with E4M3 scales and one scale per tensor, but for the changes."""
    given = {
        "name": "mine",
        "grid": E2M1,
        "bits": 4,
        "scale": "e4m3",
        "tensor_scale": 448.0,
        "activation": Operand((1, 16)),
        "gradient": Operand((1, 16), stochastic=True),
        "weight": Operand((16, 16)),
        "speed": 2.0,
        "label": "Mine",
        "colour": "#000000",
    }
    return NumberFormat(**{**given, **changes})


B16, MX = Operand((1, 16)), {"scale": "e8m0", "tensor_scale": None}
FP32 = {"scale": "fp32", "tensor_scale": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 0}, "bits=0; expected 1 to 32"),
        ({"bits": 33}, "bits=33; expected 1 to 32"),
        ({"bits": 4.0}, "bits=4.0; expected 1 to 32"),
        (
            {"bits": 3},
            r"bits=3; expected 4, the most bits of an element, with its sign \(activation e2m1: 4, gradient e2m1: 4, "
            r"weight e2m1: 4\)\.$",
        ),
        (
            {"grid": "E2M1"},
            r"grid='E2M1'; expected E2M1, E4M3, E5M2, integers\(7\), floats\(3, 2\) or the like, or None",
        ),
        ({"grid": integers(8)}, r"bits=4; expected 5, the most bits of an element, with its sign \(activation int5: 5"),
        ({"weight": Operand((16, 16), grid=E4M3)}, r"bits=4; expected 8, the most .*, weight e4m3: 8\)"),
        ({"colour": "blue"}, "colour='blue'; expected #rrggbb in hexadecimal digits, e.g. #56b4e9"),
        ({"colour": "#fff"}, "colour='#fff'; expected #rrggbb"),
        ({"activation": (1, 16)}, r"activation=\(1, 16\); expected an Operand, e.g. Operand"),
        ({"activation": Operand((1, 16.0))}, "activation=.*; expected a block of two integers"),  # type: ignore[arg-type]
        ({"weight": Operand(64)}, "weight=.*; expected a block of two integers, .across, along., or None for the"),  # type: ignore[arg-type]
        ({"weight": Operand((16,))}, "weight=.*; expected a block of two integers"),  # type: ignore[arg-type]
        ({"scale": "e9m0"}, "scale: 'e9m0' is not a kind of scale; expected 'fp32', 'e8m0' or 'eYmZ', e.g. 'e4m3'"),
        ({"scale": "fp16"}, "scale: 'fp16' is not a kind of scale"),
        ({"scale": "e8m7"}, "scale: 'e8m7' has values beyond FP32; expected 2 to 7 exponent bits, e.g. 'e4m3', or"),
        ({"scale": "e1m0"}, "scale: 'e1m0' has no value above 0; expected 2 to 7 exponent bits"),
        ({"scale_rule": "floor"}, "scale_rule='floor'; expected one of nearest, up for scale='e4m3'"),
        ({**MX, "scale_rule": "up"}, "scale_rule='up'; expected one of rceil, ceil, floor, even for scale='e8m0'"),
        ({**FP32, "scale_rule": "mean"}, "scale_rule='mean'; expected one of amax for scale='fp32'"),
        ({"tensor_scale": 449.0}, "tensor_scale=449.0; expected None or above 0 and at most 448"),
        ({"tensor_scale": 0.0}, "tensor_scale=0.0; expected None or above 0"),
        ({"scale": "e8m0"}, "tensor_scale=448.0; expected None"),
        ({"rotation": 24, "rotated": ("forward",)}, "rotation=24; expected 0 or a power of two from 2 to 128"),
        ({"rotation": 256, "rotated": ("forward",)}, "rotation=256; expected 0 or a power of two from 2 to 128"),
        ({"rotation": 16}, "rotated=.*; expected some of forward, grad_input, grad_weight with a rotation"),
        ({"rotated": ("forward",)}, "rotated=.*; expected some of .* \\(\\) without"),
        ({"rotation": 16, "rotated": ("fprop",)}, "rotated=.*; expected some of forward"),
        ({"activation": Operand((1, 24))}, "activation=.*; expected a block whose sides divide 128"),
        ({"weight": Operand((0, 16))}, "weight=.*; expected a block whose sides divide 128"),
        (
            {"weight": Operand(None), "scale": "e4m3", "scale_rule": None, "gradient": Operand((1, 32))},
            "weight=.*; expected a block, since only scales fp32 and e8m0 serve a whole tensor",
        ),
        ({"activation": Operand((1, 16), scale_rule="ceil")}, "activation=.*; expected scale_rule None or one of near"),
        ({"activation": Operand((1, 16), stochastic=True)}, "activation=.*; expected stochastic=False"),
        (
            {"gradient": Operand((1, 16), stochastic=True, scale_rule="nearest")},
            "gradient=.*; expected scale_rule up with stochastic=True, since others cut elements off",
        ),
        ({**MX, "scale_rule": "floor"}, "gradient=.*; expected scale_rule rceil or ceil with stochastic=True"),
        ({"activation": Operand((1, 16), noise=True)}, "activation=.*; expected noise=False"),
        (
            {"activation": Operand((1, 16), targets=(6.0, 4.0))},
            "activation=.*; expected targets whose scales stay within 448",
        ),
        ({"activation": Operand((1, 16), targets=(7.0, 4.0))}, "activation=.*; expected targets above 0 and at most 6"),
        ({**MX, "activation": Operand((1, 16), targets=(6.0, 4.0))}, r"activation=.*; expected targets=\(\)"),
        ({"name": "a b"}, "name='a b'; expected letters, digits and single hyphens"),
        ({"speed": 0.0}, "speed=0.0; expected a rate above 0"),
    ],
)
def test_a_format_that_cannot_be_is_refused_with_its_field(changes: dict[str, Any], message: str) -> None:
    a_format()
    with pytest.raises(ValueError, match=f"Format '{changes.get('name', 'mine')}': {message}"):
        a_format(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: floats(0, 3), r"floats\(0, 3\): expected 1 to 8 exponent bits and 0 to 10 mantissa bits"),
        (lambda: floats(9, 3), r"floats\(9, 3\): expected"),
        (lambda: floats(4, 11), r"floats\(4, 11\): expected"),
        (lambda: floats(8, 7), "e8m7 with .* has the largest value 6.*e\\+38; expected one above 0 that FP32 can hold"),
        (lambda: floats(1, 0, nans=True), "e1m0 with .* has the largest value 0; expected one above 0"),
        (lambda: integers(0), r"integers\(0\): expected 1 to 2047"),
        (lambda: integers(2048), r"integers\(2048\): expected 1 to 2047"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_named_grids_are_floats() -> None:
    assert [grid.max for grid in (E2M1, E2M3, E3M2, E4M3, E5M2)] == [6.0, 7.5, 28.0, 448.0, 57344.0]
    assert [grid.smallest for grid in (E2M1, E2M3, E3M2, E4M3, E5M2)] == [0.5, 0.125, 2.0**-4, 2.0**-9, 2.0**-16]
    assert scale_grid("e4m3") == E4M3 and scale_grid("e5m2") == E5M2 and scale_grid("fp32") is None
    # UE5M3: one code is NaN.
    found = scale_grid("e5m3")
    assert found is not None and found.max == 2.0**16 * 1.75


def test_a_user_s_format_is_registered_once_and_rounds_as_its_data_say() -> None:
    with restored(FORMATS):
        register_format(a_format(grid=floats(3, 1), bits=5, scale="e5m3", tensor_scale=None))
        assert formats["mine"].code == len(formats) - 1
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
        got = quantize(x, "mine")
        assert 0.01 < float((got - x).norm() / x.norm()) < 0.2
        with pytest.raises(ValueError, match="rounds a gradient stochastically; give a seed"):
            quantize(x, "mine", "gradient")
        with pytest.raises(ValueError, match="There is a format named 'nvfp4' already"):
            register_format(dataclasses.replace(FORMATS["nvfp4"], speed=3.0))
    assert "mine" not in formats


def test_a_variant_is_one_expression() -> None:
    floor = dataclasses.replace(FORMATS["mxfp4"], name="mxfp4-floor", scale_rule="floor", gradient=Operand((1, 32)))
    with restored(FORMATS):
        register_format(floor)
        x = torch.full((1, 32), 7.0)
        # The specification's rule cuts 7 off at 6; ours doubles the scale.
        assert quantize(x, "mxfp4-floor")[0, 0] == 6.0 and quantize(x, "mxfp4")[0, 0] == 8.0


def test_operands_of_other_grids_count_their_own_bits() -> None:
    mixed = a_format(gradient=Operand((1, 16), grid=E5M2), bits=8)
    assert [mixed.stored_bits(name) for name in ("activation", "gradient", "weight")] == [4.5, 8.5, 4.03125]
    assert not mixed.counts_as_fp4 and a_format().counts_as_fp4


def test_which_weights_are_quantized_once_and_which_formats_need_whole_tensors() -> None:
    twice = [name for name, format in FORMATS.items() if not format.shares_weight]
    in_rows = "mxfp8 mxfp6 mxfp6-e2m3 mxfp4 mxfp4-rht nvfp4-1x16 nvfp4-rht nvfp4-rht128 ufp4 ufp4-rht"
    assert " ".join(twice) == in_rows
    whole = [name for name, format in FORMATS.items() if format.has_tensor_scale]
    assert " ".join(whole) == "fp8-tensor fp8-tensor-e5m2 nvfp4 nvfp4-1x16 nvfp4-46 nvfp4-rht nvfp4-rht128 fp8-delayed"
