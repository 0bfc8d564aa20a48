"""The backend "blackwell" on a CPU, where its products multiply what the packed bytes stand for: operators and layers
against the emulated backend, and calls against what torch's own meta function demands."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from configs import fp4_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from snip_hf import SnipLinear, convert_model
from snip_hf.kernels import emulated, trials
from snip_hf.kernels.blackwell import operators, packing
from snip_hf.kernels.blackwell.backend import BLACKWELL
from snip_hf.kernels.blackwell.packing import MXFP4, MXFP8, NVFP4, Kind
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

BF16 = torch.bfloat16
CPU = torch.device("cpu")
KNOWN = [name for name, format in FORMATS.items() if packing.kind_of(format) is not None]
# T, I, O: ragged in all; as products want them; smaller than a block.
SIZES = [(131, 181, 77), (64, 96, 48), (3, 5, 7)]


def state(*formats: str) -> tuple[Tensor, Tensor]:
    """A layer's state, and the codes on the host."""
    codes = torch.tensor([FORMATS[name].code for name in formats])
    return torch.cat([codes, torch.tensor([-123456789123456789, 0, 1])]), codes


def tensors(size: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (T, I), weight (O, I), bias (O,), grad_output (T, O), BF16, with columns of different magnitude."""
    tokens, in_features, out_features = size
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, in_features), (out_features, in_features), (out_features,), (tokens, out_features))
    x, weight, bias, grad_output = (torch.randn(shape, generator=generator) for shape in shapes)
    x[:, ::7] *= 20
    return x.to(BF16), (weight / 8).to(BF16), bias.to(BF16), grad_output.to(BF16)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal but for FP32 sums in another order, which may tip the rounding to BF16."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    distance = (got.double() - expected.double()).norm()
    assert distance <= 2e-3 * expected.double().norm(), distance / expected.double().norm()
    assert ((got.double() - expected.double()).abs() <= 2.0**-6 * expected.double().abs() + 1e-3 * expected.std()).all()


# ------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", [*KNOWN, "bf16"])
def test_the_three_gemms_are_those_of_the_emulated_backend(name: str, size: tuple[int, int, int]) -> None:
    x, weight, bias, grad_output = tensors(size)
    numbers, codes = state(name, name, name)
    none = torch.empty(0, dtype=torch.uint8)
    for given in (None, bias):
        y = operators.forward_gemm(x, weight, given, none, numbers, codes)
        assert_close(y, emulated.forward_gemm(x, weight, given, numbers))
    grad_input = operators.grad_input_gemm(grad_output, weight, none, numbers, codes)
    assert_close(grad_input, emulated.grad_input_gemm(grad_output, weight, numbers))
    grad_weight = operators.grad_weight_gemm(grad_output, x, numbers, codes)
    assert_close(grad_weight, emulated.grad_weight_gemm(grad_output, x, numbers))


def test_another_format_or_other_random_numbers_are_far_more_than_that_away() -> None:
    """Guards the checks above, and the tolerance of trials."""
    x, weight, _, grad_output = tensors((131, 181, 77))
    right, wrong = (state(name, name, name)[0] for name in ("nvfp4", "mxfp4"))
    expected, got = (emulated.forward_gemm(x, weight, None, numbers).double() for numbers in (right, wrong))
    assert (got - expected).norm() > 10 * trials.TOLERANCE * expected.norm()
    other = right.clone()
    other[len(GEMMS)] += 1
    expected, got = (emulated.grad_input_gemm(grad_output, weight, numbers).double() for numbers in (right, other))
    assert (got - expected).norm() > 10 * trials.TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    "formats", [("nvfp4", "mxfp8", "mxfp4"), ("mxfp8", "nvfp4", "bf16"), ("bf16", "mxfp4", "nvfp4")]
)
def test_kept_weights_are_the_same_weights(formats: tuple[str, ...]) -> None:
    x, weight, bias, grad_output = tensors((131, 181, 77))
    numbers, codes = state(*formats)
    kept, none = operators.pack_weight(weight, numbers, codes), torch.empty(0, dtype=torch.uint8)
    sizes = {"forward": (77, 181), "grad_input": (181, 77)}
    kinds = {gemm: packing.kind_of(FORMATS[name]) for gemm, name in zip(GEMMS, formats, strict=True)}
    assert kept.numel() == sum(packing.size_of(kind, *sizes[gemm]) for gemm in sizes if (kind := kinds[gemm]))
    wrong = torch.full_like(weight, torch.nan)  # is not read
    y = operators.forward_gemm(x, wrong if kinds["forward"] else weight, bias, kept, numbers, codes)
    assert torch.equal(y, operators.forward_gemm(x, weight, bias, none, numbers, codes))
    grad_input = operators.grad_input_gemm(grad_output, wrong, kept, numbers, codes)
    assert torch.equal(grad_input, operators.grad_input_gemm(grad_output, weight, none, numbers, codes))


def test_a_batch_without_tokens_gives_zeros() -> None:
    x, weight, bias, grad_output = tensors((0, 32, 16))
    numbers, codes = state("nvfp4", "nvfp4", "nvfp4")
    none = torch.empty(0, dtype=torch.uint8)
    assert operators.forward_gemm(x, weight, bias, none, numbers, codes).shape == (0, 16)
    assert operators.grad_input_gemm(grad_output, weight, none, numbers, codes).shape == x.shape
    assert not operators.grad_weight_gemm(grad_output, x, numbers, codes).any()


def test_nan_reaches_what_it_reaches_in_the_emulated_backend() -> None:
    x, weight, _, _ = tensors((131, 181, 77))
    x[5, 7] = torch.nan
    for name, rows in {"mxfp8": 1, "nvfp4": 131}.items():
        numbers, codes = state(name, name, name)
        y = operators.forward_gemm(x, weight, None, torch.empty(0, dtype=torch.uint8), numbers, codes)
        assert y.isnan().all(1).sum() == rows
        assert torch.equal(y.isnan(), emulated.forward_gemm(x, weight, None, numbers).isnan())


def test_the_operators_are_what_torch_demands_of_operators() -> None:
    x, weight, bias, grad_output = tensors((33, 40, 24))
    numbers, codes = state("nvfp4", "mxfp8", "mxfp4")
    none = torch.empty(0, dtype=torch.uint8)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operators.forward_gemm, (x, weight, bias, none, numbers, codes), test_utils=tests)
    torch.library.opcheck(operators.grad_input_gemm, (grad_output, weight, none, numbers, codes), test_utils=tests)
    torch.library.opcheck(operators.grad_weight_gemm, (grad_output, x, numbers, codes), test_utils=tests)


# ------------------------------------------------------------------------------------- the product's call


def by_meta(kind: Kind, rows: int, columns: int, contracted: int, dtype: torch.dtype) -> Tensor:
    """The product of operands that stand on a GPU as far as torch knows, by its own meta function."""
    with FakeTensorMode():
        cuda = torch.device("cuda", 0)
        left, right = (packing.empty(kind, size, contracted, cuda) for size in (rows, columns))
        return operators.by_scaled_mm(left, right, dtype)


# From 2.14 on, torch's meta function infers shapes and leaves the checks of scales to its CUDA code.
META_CHECKS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
# M, N, K of the three GEMMs of ragged layers and whole ones.
PRODUCTS = [(131, 77, 181), (131, 181, 77), (77, 181, 131), (256, 512, 1024), (1, 1, 1)]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("size", PRODUCTS, ids=str)
@pytest.mark.parametrize("kind", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_shapes_strides_and_dtypes_pass_torch_s_own_checks(
    kind: Kind, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    product = by_meta(kind, *size, dtype)
    assert product.shape == (-(-size[0] // 16) * 16, -(-size[1] // 16) * 16)
    assert product.dtype == dtype and product.device == torch.device("cuda", 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", PRODUCTS, ids=str)
def test_mxfp4_has_the_scales_that_the_kernel_checks_for_and_not_those_of_torch_s_meta_function(
    size: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """torch 2.13's meta function takes half of K for K, where two elements are a byte. Its CUDA code wants
    round_up(M, 128) * round_up(ceil(K / 32), 4)."""
    rows, columns, contracted = size
    padded = -(-contracted // 32) * 32
    for count in (rows, columns):
        found = packing.empty(MXFP4, count, contracted, CPU)
        assert found.scales.numel() == -(-count // 128) * 128 * -(-padded // 128) * 4
    if not META_CHECKS or -(-padded // 128) == -(-padded // 2 // 128):
        assert by_meta(MXFP4, *size, BF16).dtype == BF16
    else:
        with pytest.raises(RuntimeError, match="for MX scaling scale_a must have"):
            by_meta(MXFP4, *size, BF16)


@pytest.mark.skipif(not META_CHECKS, reason="this torch's meta function checks no scales")
@pytest.mark.parametrize("kind", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_torch_s_checks_would_notice_operands_that_are_not_padded(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above."""
    monkeypatch.setattr(packing, "_ROWS", 1)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        by_meta(kind, 131, 77, 181, BF16)
    monkeypatch.setattr(packing, "_ROWS", 16)
    monkeypatch.setattr(packing, "SCALE_ROWS", 1)
    with pytest.raises(RuntimeError, match="scaling scale_a must have"):
        by_meta(kind, 131, 77, 181, BF16)


# ------------------------------------------------------------------------------------- layers


def layer_of(formats: tuple[str, ...], bias: bool = True, dtype: torch.dtype = BF16) -> tuple[SnipLinear, SnipLinear]:
    """The same layer twice: on this backend, and emulated."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(181, 77, bias=bias).to(dtype)])})
    convert_model(model, fp4_config(backend="emulated"))
    ours = model["layers"][0]
    set_step({"layer": ours}, 5, 40, 2)
    ours.set_formats(dict(zip(GEMMS, formats, strict=True)))
    theirs = copy.deepcopy(ours)
    ours.use_backend(BLACKWELL)
    return ours, theirs


def pass_of(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients of one pass."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype))
    return [y.detach(), x.grad.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.mark.parametrize("shape", [(4, 33, 181), (131, 181), (181,)], ids=str)
@pytest.mark.parametrize("formats", [("nvfp4",) * 3, ("mxfp4", "mxfp8", "nvfp4"), ("bf16", "nvfp4", "mxfp8")], ids=str)
def test_a_layer_and_its_gradients_are_those_of_the_emulated_backend(
    formats: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    ours, theirs = layer_of(formats)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    for got, expected in zip(pass_of(ours, x), pass_of(theirs, x), strict=True):
        assert_close(got, expected)


def test_under_autocast_fp32_weights_are_rounded_to_bf16_first_and_get_fp32_gradients() -> None:
    ours, theirs = layer_of(("nvfp4", "mxfp8", "mxfp4"), dtype=torch.float32)
    x = torch.randn(64, 181, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", BF16):
        for got, expected in zip(pass_of(ours, x), pass_of(theirs, x), strict=True):
            assert_close(got, expected)


def test_a_layer_that_is_bf16_is_a_linear_bit_for_bit() -> None:
    ours, _ = layer_of(("bf16",) * 3)
    plain = nn.Linear(181, 77).to(BF16)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(4, 33, 181, generator=torch.Generator().manual_seed(1)).to(BF16)
    for got, expected in zip(pass_of(ours, x), pass_of(plain, x), strict=True):
        assert torch.equal(got, expected)


def test_layers_that_do_not_compute_in_bf16_run_emulated() -> None:
    ours, theirs = layer_of(("nvfp4",) * 3, dtype=torch.float32)
    x = torch.randn(64, 181, generator=torch.Generator().manual_seed(1))
    for got, expected in zip(pass_of(ours, x), pass_of(theirs, x), strict=True):
        assert torch.equal(got, expected)


def test_a_backward_pass_takes_the_formats_and_the_key_of_its_forward_pass() -> None:
    ours, _ = layer_of(("nvfp4",) * 3)
    x = torch.randn(64, 181, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
    expected = pass_of(ours, x)
    ours.zero_grad()
    inside = x.detach().requires_grad_()
    y = ours(inside)
    ours.set_formats(dict.fromkeys(GEMMS, "mxfp8"))
    set_step({"layer": ours}, 5, 41, 0)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(BF16))
    assert torch.equal(inside.grad, expected[1]) and torch.equal(ours.weight.grad, expected[2])


class Quantized:
    """Counts what is quantized, by operand and contracted dimension."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        quantize = operators.quantize

        def counted(x: Tensor, format: Any, operand: str, contracts: int, state: Tensor) -> packing.Packed:
            self.calls.append((operand, contracts))
            return quantize(x, format, operand, contracts, state)

        monkeypatch.setattr(operators, "quantize", counted)


def test_weights_are_quantized_once_per_step_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = layer_of(("nvfp4",) * 3)
    x = torch.randn(64, 181, generator=torch.Generator().manual_seed(1)).to(BF16)
    expected, found = pass_of(ours, x), Quantized(monkeypatch)
    BLACKWELL.before_pass({"layer": ours}, everything=True)
    assert found.calls == [("weight", 1), ("weight", 0)]
    for _ in range(3):  # micro-batches
        BLACKWELL.before_pass({"layer": ours}, everything=False)
        for got, wanted in zip(pass_of(ours, x), expected, strict=True):
            assert torch.equal(got, wanted)
    assert found.calls.count(("weight", 1)) == found.calls.count(("weight", 0)) == 1
    with torch.no_grad():
        ours(x)  # evaluation trusts nothing that is kept
    assert found.calls.count(("weight", 1)) == 2
    with torch.no_grad():
        ours.weight.add_(0.5)
    BLACKWELL.before_pass({"layer": ours}, everything=False)
    assert found.calls.count(("weight", 1)) == 3
    kept = ours.snip_cache.packed
    ours.set_formats(dict.fromkeys(GEMMS, "mxfp8"))
    assert ours.snip_cache.packed.numel() == 0 < kept.numel()
    BLACKWELL.release({"layer": ours})


def test_the_codes_are_on_the_cpu_whatever_the_default_device_is() -> None:
    ours, _ = layer_of(("nvfp4",) * 3)
    with torch.device("meta"):
        ours.use_backend(BLACKWELL)
        assert trials.operands(FORMATS["nvfp4"], CPU).x.device == CPU
    assert ours.snip_cache.codes.device == CPU and ours.snip_cache.codes.tolist() == [FORMATS["nvfp4"].code] * 3


def test_a_copy_of_a_layer_shares_nothing_with_it() -> None:
    ours, _ = layer_of(("nvfp4",) * 3)
    BLACKWELL.before_pass({"layer": ours}, everything=True)
    other = copy.deepcopy(ours)
    other.set_formats(dict.fromkeys(GEMMS, "mxfp8"))
    assert ours.snip_cache.codes.tolist() == [FORMATS["nvfp4"].code] * 3
    assert other.snip_cache.codes.tolist() == [FORMATS["mxfp8"].code] * 3
    assert other.snip_backend is BLACKWELL and other.snip_cache.packed.numel() == 0 < ours.snip_cache.packed.numel()


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "bf16"])
def test_a_gemm_call_is_the_operator(name: str, gemm: str) -> None:
    x, weight, _, grad_output = tensors((131, 181, 77))
    numbers, codes = state(name, name, name)
    none = torch.empty(0, dtype=torch.uint8)
    expected = {
        "forward": lambda: operators.forward_gemm(x, weight, None, none, numbers, codes),
        "grad_input": lambda: operators.grad_input_gemm(grad_output, weight, none, numbers, codes),
        "grad_weight": lambda: operators.grad_weight_gemm(grad_output, x, numbers, codes),
    }
    assert torch.equal(BLACKWELL.gemm_call(gemm, x, weight, grad_output, numbers)(), expected[gemm]())


# ------------------------------------------------------------------------------------- compiled


class Block(nn.Module):
    """Two linears with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 64)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[1](torch.nn.functional.gelu(self.layers[0](x)))
        return y


@pytest.fixture
def block() -> Iterator[Block]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block().to(BF16)
    convert_model(model, fp4_config(backend="emulated"))
    for layer in model.layers:
        layer.set_formats(dict.fromkeys(GEMMS, "mxfp8"))
        layer.use_backend(BLACKWELL)
    yield model
    torch._dynamo.reset()


PLANS = [("mxfp8",) * 3, ("nvfp4",) * 3, ("mxfp4", "mxfp8", "nvfp4"), ("bf16", "nvfp4", "bf16"), ("bf16",) * 3]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_layers_are_one_graph_and_new_plans_compile_nothing(block: Block, backend: str) -> None:
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    layers, x = snip_linears(block), torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    pass_of(compiled, x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, formats in enumerate(PLANS):
            set_step(layers, 5, step, 0)
            for layer in layers.values():
                layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
            for got, expected in zip(pass_of(compiled, x), pass_of(block, x), strict=True):
                assert_close(got, expected)


def test_kept_weights_of_another_size_compile_nothing_after_the_first(block: Block) -> None:
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    layers, x = snip_linears(block), torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(BF16)

    def check(formats: tuple[str, ...]) -> None:
        for layer in layers.values():
            layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        expected = pass_of(block, x)
        BLACKWELL.before_pass(layers, everything=True)
        for got, wanted in zip(pass_of(compiled, x), expected, strict=True):
            assert_close(got, wanted)

    check(PLANS[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for formats in PLANS[:4]:
            check(formats)


def test_a_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _, codes = state("nvfp4", "nvfp4", "nvfp4")
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
    with pytest.raises(RuntimeError, match="A CUDA graph would keep the formats"):
        operators._format_of(codes, "forward", x)
    tags = [operator.default.tags for operator in (operators.forward_gemm, operators.grad_input_gemm)]
    assert all(torch.Tag.cudagraph_unsafe in found for found in [*tags, operators.grad_weight_gemm.default.tags])
