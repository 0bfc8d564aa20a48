"""The bytes of operands against torchao's, and what they stand for against the reference rounding."""

from __future__ import annotations

import dataclasses
import logging

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from snip_hf.kernels.blackwell import packing
from snip_hf.kernels.blackwell.packing import MXFP4, MXFP8, NVFP4, Kind, Packed, kind_of
from snip_hf.kernels.blackwell.quantization import quantize
from snip_hf.numerics.formats import FORMATS, NumberFormat, Operand
from snip_hf.numerics.gemms import CONTRACTIONS, GEMMS
from snip_hf.numerics.random_streams import stream_key
from snip_hf.numerics.rotation import rotate_back
from snip_hf.numerics.rounding import round_operand

# torchao's libraries for other machines do not load here, and it says so while it is imported.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import MXTensor  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale  # noqa: E402
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked  # noqa: E402

KNOWN = [name for name, format in FORMATS.items() if kind_of(format) is not None]
OPERANDS = [(operand, contracts) for pair in CONTRACTIONS.values() for operand, contracts in pair]
KEY = stream_key(2**40 + 7, 3, 4, 123456789, 1)  # negative as an int64
# R, C: whole runs of scales; whole blocks; ragged in all; smaller than a block.
SHAPES = [(256, 256), (160, 96), (131, 181), (3, 5)]


def state(key: int = KEY, rank: int = 0, ranks: int = 1) -> Tensor:
    return torch.tensor([0] * len(GEMMS) + [key - 2**64 if key >= 2**63 else key, rank, ranks])


def random(shape: tuple[int, int]) -> Tensor:
    """Over many magnitudes, with zeros of both signs, a zero row and a zero column."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x[1:2], x[:, 3:4], x[:, 4:5] = 0.0, -0.0, x[:, 4:5] * 1e-7
    return x.to(torch.bfloat16)


def not_finite(shape: tuple[int, int]) -> Tensor:
    x = random(shape)
    x[-1, 0], x[-1, -1], x[shape[0] // 3, -2:-1] = torch.nan, torch.inf, -torch.inf
    return x


def tiny(shape: tuple[int, int]) -> Tensor:
    """Around and below the smallest normal FP32 number, where scales are raised to their smallest."""
    sizes = torch.tensor([1e-4, 0.01, 1.0, 20.0, 1000.0, 1e5])
    return (random(shape).float().clamp(-4, 4) * 2.0**-126 * sizes.repeat(shape[1])[: shape[1]]).to(torch.bfloat16)


def large(shape: tuple[int, int]) -> Tensor:
    return (random(shape).float().clamp(-1, 1) * 3.3e38).to(torch.bfloat16)


def every_value() -> Tensor:
    """All finite BF16 values but those whose blocks torchao treats in its own way (docs/formats.md), (R, 64)."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite() & (values.abs() >= 2.0**-100)].view(-1, 64)


def nearest(name: str) -> NumberFormat:
    """The format with gradients rounded to nearest, as torchao rounds."""
    format = FORMATS[name]
    return dataclasses.replace(format, gradient=dataclasses.replace(format.gradient, stochastic=False))


# ------------------------------------------------------------------------------------- against torchao


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (130, 5), (1, 1), (300, 8)])
def test_scales_are_swizzled_as_torchao_does(shape: tuple[int, int]) -> None:
    scales = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = packing.swizzled(scales)
    assert torch.equal(found, to_blocked(scales))
    assert torch.equal(packing.unswizzled(found, *shape), scales)
    assert torch.equal(packing.unswizzled(found, *shape), from_blocked(found, *shape))


def test_a_scale_lies_where_the_docstring_says() -> None:
    scales = (torch.arange(128)[:, None] + 2 * torch.arange(4)[None]).to(torch.uint8)
    found = packing.swizzled(scales)
    for row, scale in ((0, 0), (33, 1), (127, 3)):
        assert found[16 * (row % 32) + 4 * (row // 32) + scale] == scales[row, scale]


@pytest.mark.parametrize("mode", ScaleCalculationMode, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_mx_bytes_are_those_of_torchao(name: str, mode: ScaleCalculationMode) -> None:
    format = dataclasses.replace(nearest(name), scale_rule=mode.name.lower())
    for x in (every_value(), random((256, 256)), random((160, 96))):
        element = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
        expected = MXTensor.to_mx(x, element, 32, mode)
        for operand in ("activation", "weight", "gradient"):
            check(quantize(x, format, operand, 1, state()), expected.qdata, expected.scale)


def test_nvfp4_bytes_are_those_of_torchao() -> None:
    """On tensors whose block scales are not below 2^-6, E4M3's smallest normal number, to which torchao raises them."""
    values = every_value().flatten()
    shuffled = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))].view(-1, 64)
    for x in (shuffled, random((256, 256)).abs() + 1, random((160, 96)).abs() + 1):
        x = x[(x.float().abs().view(x.shape[0], -1, 16).amax(2) > 2.0**-13 * x.float().abs().amax()).all(1)]
        assert x.shape[0] > 60
        of_tensor = per_tensor_amax_to_scale(x.abs().amax())
        expected = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=of_tensor)
        found = quantize(x, nearest("nvfp4"), "activation", 1, state())
        check(found, expected.qdata, expected.scale)
        assert torch.equal(found.tensor_scale, of_tensor.view(1))


def check(found: Packed, data: Tensor, scales: Tensor) -> None:
    """Bytes equal, and zeros behind the ends."""
    expected = data.view(torch.uint8)
    assert torch.equal(found.data[: expected.shape[0], : expected.shape[1]], expected)
    assert found.data[expected.shape[0] :].count_nonzero() == found.data[:, expected.shape[1] :].count_nonzero() == 0
    per_row = scales.view(torch.uint8).view(expected.shape[0], -1)
    assert torch.equal(found.scales, to_blocked(per_row))


@pytest.mark.parametrize("kind", [MXFP8, MXFP4], ids=["e4m3", "e2m1"])
def test_codes_are_those_of_ml_dtypes(kind: Kind) -> None:
    name = {MXFP8: "float8_e4m3fn", MXFP4: "float4_e2m1fn"}[kind]
    codes = np.arange(256 if kind is MXFP8 else 16, dtype=np.uint8)
    values = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    is_number = ~np.isnan(values)
    found = packing.codes_of(torch.from_numpy(values), kind.grid).numpy()
    assert np.array_equal(found[is_number], codes[is_number])
    assert not found[~is_number].any()


# ------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("data", [random, not_finite, tiny, large])
@pytest.mark.parametrize("name", KNOWN)
def test_the_bytes_of_every_operand_stand_for_what_the_reference_rounds_to(name: str, data: object) -> None:
    assert callable(data)
    format, x = FORMATS[name], data((131, 181))
    for gemm, pair in CONTRACTIONS.items():
        for operand, contracts in pair:
            packed = quantize(x, format, operand, contracts, state())
            found = packed.dequantize() if contracts == 1 else packed.dequantize().t()
            if gemm in format.rotated:
                found = rotate_back(found, format.rotation, contracts)
            expected = round_operand(x, format, operand, contracts, KEY)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0)), (gemm, operand)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_operands_have_the_sizes_that_products_demand(name: str, shape: tuple[int, int]) -> None:
    kind, format = kind_of(FORMATS[name]), FORMATS[name]
    assert kind is not None
    for operand, contracts in OPERANDS:
        found = quantize(random(shape), format, operand, contracts, state())
        rows, contracted = shape[1 - contracts], shape[contracts]
        assert (found.rows, found.contracted) == (rows, contracted)
        assert found.data.shape == (-(-rows // 16) * 16, -(-contracted // 32) * 32 // kind.per_byte)
        assert found.scales.shape == (-(-rows // 128) * 128 * (-(-contracted // (4 * kind.block)) * 4),)
        assert all(part.data_ptr() % 16 == 0 and part.is_contiguous() for part in (found.data, found.scales))
        assert found.buffer.numel() == packing.size_of(kind, rows, contracted)
        again = packing.within(found.buffer, kind, rows, contracted)
        assert torch.equal(again.dequantize(), found.dequantize())


@pytest.mark.parametrize("rank", [(1, 2), (6, 7)], ids=str)
def test_ranks_draw_the_numbers_of_the_reference(rank: tuple[int, int]) -> None:
    x = random((131, 181))
    for contracts in (0, 1):
        found = quantize(x, FORMATS["mxfp4"], "gradient", contracts, state(KEY, *rank)).dequantize()
        expected = round_operand(x, FORMATS["mxfp4"], "gradient", contracts, KEY, *rank)
        assert torch.equal(found if contracts == 1 else found.t(), expected)


def test_square_blocks_are_one_quantized_weight_for_both_gemms_and_others_are_two() -> None:
    weight = random((160, 96))
    for name, is_one in {"nvfp4": True, "mxfp4-32x32": True, "nvfp4-1x16": False, "mxfp4": False}.items():
        by_output, by_input = (quantize(weight, FORMATS[name], "weight", contracts, state()) for contracts in (1, 0))
        assert torch.equal(by_output.dequantize(), by_input.dequantize().t()) == is_one == FORMATS[name].shares_weight


# ------------------------------------------------------------------------------------- which formats


def test_the_formats_that_have_a_product_are_these() -> None:
    assert {name: kind_of(format) for name, format in FORMATS.items() if kind_of(format)} == {
        "mxfp8": MXFP8,
        "mxfp4": MXFP4,
        "mxfp4-32x32": MXFP4,
        "mxfp4-rht": MXFP4,
        "nvfp4": NVFP4,
        "nvfp4-1x16": NVFP4,
        "nvfp4-46": NVFP4,
        "nvfp4-rht": NVFP4,
        "nvfp4-rht128": NVFP4,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": Operand((32, 16))},
        {"activation": Operand((1, 32), quantized=False)},
        {"weight": Operand((1, 32), noise=True)},
        {"scale": "e5m2"},
        {"gradient": Operand((1, 32), grid=FORMATS["mxfp6"].grid)},
    ],
    ids=str,
)
def test_a_format_that_differs_in_one_operand_has_none(changes: dict[str, object]) -> None:
    assert kind_of(dataclasses.replace(FORMATS["mxfp8"], **changes)) is None  # type: ignore[arg-type]
