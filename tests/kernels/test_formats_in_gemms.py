"""The emulated GEMMs in every built-in format: which operand is rounded how, and along which dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from registries import restored
from small import convert_in_formats
from torch import Tensor, nn
from torch._dynamo.utils import counters

from snip_hf import SnipConfig
from snip_hf.kernels import emulated
from snip_hf.kernels import rounding as kernels
from snip_hf.kernels.emulated import forward_gemm, grad_input_gemm, grad_weight_gemm
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS, NumberFormat, Operand, floats, integers, register_format
from snip_hf.numerics.gemms import CONTRACTIONS, GEMMS
from snip_hf.numerics.rotation import rotate
from snip_hf.numerics.rounding import quantize, quantize_operand, round_operand

KEY = 0x0123_4567_89AB_CDEF
T, I, O = 150, 200, 136  # tokens, in_features, out_features: ragged in every block  # noqa: E741
QUANTIZED = [name for name, format in FORMATS.items() if format.is_quantized]
each_format = pytest.mark.parametrize("fmt", QUANTIZED)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in ((T, I), (O, I), (T, O)))  # type: ignore


def state(fmt: str, key: int = KEY, rank: int = 0, ranks: int = 1) -> Tensor:
    return torch.tensor([*[FORMATS[fmt].code] * 3, key, rank, ranks])


def gemms(fmt: str, **options: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, grad_output = tensors()
    numbers = state(fmt, **options)
    forward = forward_gemm(x, weight, None, numbers)
    return forward, grad_input_gemm(grad_output, weight, numbers), grad_weight_gemm(grad_output, x, numbers)


def assert_close(got: Tensor, left: Tensor, right: Tensor) -> None:
    """`got` is left @ right up to FP32 sums."""
    expected, terms = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert ((got.double() - expected).abs() <= 1e-5 * terms).all()


@each_format
def test_products_are_those_of_operands_rounded_along_what_is_contracted(fmt: str) -> None:
    """Operands of unrotated GEMMs by the public reference, whose blocks lie along the last dimension."""
    x, weight, grad_output = tensors()
    y, grad_input, grad_weight = gemms(fmt)
    format, key = FORMATS[fmt], KEY
    seen = {
        gemm: [round_operand(tensor, format, operand, contracts, key) for tensor, operand, contracts in operands]
        for gemm, operands in {
            "forward": ((x, "activation", 1), (weight, "weight", 1)),
            "grad_input": ((grad_output, "gradient", 1), (weight, "weight", 0)),
            "grad_weight": ((grad_output, "gradient", 0), (x, "activation", 0)),
        }.items()
    }
    assert_close(y, seen["forward"][0], seen["forward"][1].t())
    assert_close(grad_input, *seen["grad_input"])
    assert_close(grad_weight, seen["grad_weight"][0].t(), seen["grad_weight"][1])
    if not format.weight.noise:
        assert torch.equal(seen["forward"][1], quantize(weight, fmt, "weight"))
        if "grad_input" not in format.rotated and "forward" not in format.rotated:
            of_columns = quantize(weight.t(), fmt, "weight").t()
            assert torch.equal(seen["grad_input"][1], of_columns)
            assert torch.equal(of_columns, seen["forward"][1]) == format.shares_weight
    if "grad_weight" not in format.rotated and "forward" not in format.rotated:
        assert torch.equal(seen["grad_weight"][1], quantize(x.t(), fmt, "activation").t())


@pytest.mark.parametrize("fmt", [name for name in QUANTIZED if FORMATS[name].rotation])
def test_rotated_products_are_those_of_rotated_and_rounded_operands(fmt: str) -> None:
    """Which are not rotated back: that is what hardware multiplies."""
    x, weight, grad_output = tensors()
    format = FORMATS[fmt]
    nearest = Operand(format.gradient.block)

    def rounded(tensor: Tensor, rule: Operand) -> Tensor:
        turned = rotate(tensor, format.rotation, 1)
        return quantize_operand(turned, format, rule, rule.tile(1, turned.shape)).dequantize()

    def of_gemm(tensor: Tensor, operand: str, contracts: int) -> Tensor:
        return round_operand(tensor, format, operand, contracts)

    left, right = rounded(grad_output, nearest), rounded(weight.t().contiguous(), format.weight)
    scale = 1e-4 * float((left @ right.t()).abs().max())
    # Without a key gradients are rounded to nearest; scales of stochastic operands are rounded up for these tests too.
    if format.rule_of(format.gradient) == format.rule_of(nearest):
        got = of_gemm(grad_output, "gradient", 1) @ of_gemm(weight, "weight", 0)
        assert (got - left @ right.t()).abs().max() < scale
    own = rounded(x.t().contiguous(), format.activation)
    assert (own @ own.t() - of_gemm(x, "activation", 0).t() @ of_gemm(x, "activation", 0)).abs().max() < scale * 10
    # In exact arithmetic a rotation cancels: with fine numbers only rounding errors of FP32 are left.
    with restored(FORMATS):
        fine = NumberFormat(
            name="fine", grid=floats(8, 10, infinities=True), bits=19, rotation=format.rotation,
            rotated=format.rotated, speed=1.0, label="", colour="#000000",
        )  # fmt: skip
        register_format(fine)
        y, grad_input, grad_weight = gemms("fine")
    for got, expected in ((y, x @ weight.t()), (grad_input, grad_output @ weight), (grad_weight, grad_output.t() @ x)):
        assert float((got - expected).norm() / expected.norm()) < 1e-3


@each_format
def test_only_what_the_format_says_depends_on_the_key_and_on_the_rank(fmt: str) -> None:
    one, other, elsewhere = gemms(fmt), gemms(fmt, key=KEY + 2**33), gemms(fmt, rank=1, ranks=2)
    format = FORMATS[fmt]
    of_g, of_w = format.gradient.stochastic, format.weight.noise
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert same == [not of_w, not (of_g or of_w), not of_g]
    # All ranks see the same weights.
    assert [torch.equal(a, b) for a, b in zip(one, elsewhere, strict=True)] == [True, not of_g, not of_g]


def test_ranks_with_equal_parts_draw_together_what_one_process_draws() -> None:
    """In formats without a scale of the whole tensor."""
    _, weight, grad_output = tensors()
    grad_output = grad_output[:128]
    for fmt in ("mxfp4", "ufp4", "fp4"):
        whole = grad_input_gemm(grad_output, weight, state(fmt))
        parts = [
            grad_input_gemm(part, weight, state(fmt, rank=rank, ranks=2))
            for rank, part in enumerate(grad_output.chunk(2))
        ]
        assert torch.equal(torch.cat(parts), whole)


@each_format
def test_autograd_gives_the_gemms_gradients(fmt: str) -> None:
    x, weight, grad_output = tensors()
    model = nn.Sequential(nn.Linear(I, O, bias=False))
    convert_model_of_one(model, fmt)
    with torch.no_grad():
        model[0].weight.copy_(weight)
    model[0].snip_state[3] = KEY
    x.requires_grad_()
    y = model(x)
    y.backward(grad_output)
    expected = gemms(fmt)
    for got, wanted in zip((y, x.grad, model[0].weight.grad), expected, strict=True):
        assert torch.equal(got, wanted)


def convert_model_of_one(model: nn.Module, fmt: str) -> None:
    from torchao.quantization import quantize_

    from snip_hf import SnipLinearConfig

    quantize_(model, SnipLinearConfig(start_format=fmt))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_a_compiled_layer_is_one_graph_for_all_formats(fresh_compiler: None) -> None:
    model = nn.Sequential(nn.Linear(I, O))
    convert_model_of_one(model, "nvfp4")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for fmt in ("nvfp4", "mxfp4", "nvfp4-rht", "fp8-tensor", "fp8-delayed", "bf16"):
        model[0].set_formats(dict.fromkeys(GEMMS, fmt))
        results = []
        for run in (model, compiled):
            x = tensors()[0].requires_grad_()
            model.zero_grad()
            y = run(x)
            y.backward(tensors()[2])
            results.append((y, x.grad, model[0].weight.grad.clone()))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_the_fused_kernel_gets_what_its_data_allow_whatever_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def by_kernel(x: Tensor, format: NumberFormat, *arguments: Any) -> Tensor:
        seen.append(format.name)
        return round_operand(x, format, *arguments)

    monkeypatch.setattr(kernels, "has_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "round_by_kernel", by_kernel)
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    for fmt in QUANTIZED:
        expected = round_operand(x, FORMATS[fmt], "weight", 1)
        assert torch.equal(kernels.fake_quantize(x, FORMATS[fmt], "weight", 1), expected)
    assert seen == [name for name in QUANTIZED if not FORMATS[name].weight.noise]
    grids = (floats(2, 1, subnormals=False), floats(3, 0), floats(7, 10), floats(8, 2, infinities=True), integers(3))
    for name, grid in zip("abcde", grids, strict=True):
        format = NumberFormat(name=name, grid=grid, bits=grid.bits, speed=1.0, label="", colour="#000000")
        kernels.fake_quantize(x, format, "activation", 1)
    # With 8 exponent bits spacings are subnormal FP32 numbers.
    assert seen[-4:] == ["a", "b", "c", "e"]


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_operands_of_products_in_bf16_are_bf16_numbers(fmt: str) -> None:
    """The property that lets tensor cores multiply: at most 8 bits, times a power of two, and no rotation."""
    format, exact = FORMATS[fmt], []
    for gemm, operands in CONTRACTIONS.items():
        rounded = [round_operand(tensors()[0], format, operand, contracts, KEY) for operand, contracts in operands]
        assert emulated.fits_bf16(format, gemm) <= all(torch.equal(x, x.bfloat16().float()) for x in rounded)
        exact.append(emulated.fits_bf16(format, gemm))
    assert exact == [format.scale == "e8m0" and gemm not in format.rotated for gemm in GEMMS]


def test_products_of_fine_elements_stay_in_fp32() -> None:
    for bits, fits in ((7, True), (8, False)):
        format = dataclasses.replace(FORMATS["mxfp8"], name="fine", grid=floats(5, bits), bits=6 + bits)
        assert [emulated.fits_bf16(format, gemm) for gemm in GEMMS] == [fits] * 3


def test_a_model_is_converted_to_any_of_them_by_name() -> None:
    from small import tiny_llama

    model = tiny_llama(hidden=32)
    convert_in_formats(model, SnipConfig(formats=("nvfp4", "mxfp6", "mxfp8", "bf16"), start_format="mxfp6"))
    assert {layer.snip_backend.name for layer in snip_linears(model).values()} == {"emulated"}
    assert {name for layer in snip_linears(model).values() for name in layer.formats.values()} == {"mxfp6"}
