"""The backend "blackwell" on a CPU, where its products multiply what the packed bytes stand for: operators and layers
against the emulated backend, calls against what torch's own meta function demands, and who chooses it when."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from snip_hf import SnipConfig, SnipController, SnipLinear, convert_model
from snip_hf.kernels import emulated
from snip_hf.kernels.backend import BACKENDS, select_backend, why_emulated
from snip_hf.kernels.blackwell import backend as blackwell_backend
from snip_hf.kernels.blackwell import operators, packing, trial
from snip_hf.kernels.blackwell.backend import BLACKWELL, Blackwell
from snip_hf.kernels.blackwell.packing import MXFP4, MXFP8, NVFP4, Kind
from snip_hf.kernels.emulated import EMULATED
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
    assert (got - expected).norm() > 10 * trial.TOLERANCE * expected.norm()
    other = right.clone()
    other[len(GEMMS)] += 1
    expected, got = (emulated.grad_input_gemm(grad_output, weight, numbers).double() for numbers in (right, other))
    assert (got - expected).norm() > 10 * trial.TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    "formats", [("nvfp4", "mxfp8", "mxfp4"), ("mxfp8", "nvfp4", "bf16"), ("bf16", "mxfp4", "nvfp4")]
)
def test_kept_weights_are_the_same_weights(formats: tuple[str, ...]) -> None:
    x, weight, bias, grad_output = tensors((131, 181, 77))
    numbers, codes = state(*formats)
    kept, none = operators.keep(weight, numbers, codes), torch.empty(0, dtype=torch.uint8)
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
    """torch 2.13's meta function takes half of K for K, where two elements are a byte. Its CUDA code, as later meta
    functions, wants round_up(M, 128) * round_up(ceil(K / 32), 4)."""
    rows, columns, contracted = size
    padded = -(-contracted // 32) * 32
    for count in (rows, columns):
        found = packing.empty(MXFP4, count, contracted, CPU)
        assert found.scales.numel() == -(-count // 128) * 128 * -(-padded // 128) * 4
    if -(-padded // 128) == -(-padded // 2 // 128):
        assert by_meta(MXFP4, *size, BF16).dtype == BF16
    else:
        with pytest.raises(RuntimeError, match="for MX scaling scale_a must have"):
            by_meta(MXFP4, *size, BF16)


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
    convert_model(model, SnipConfig(backend="emulated"))
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


def test_what_does_not_compute_in_bf16_runs_emulated() -> None:
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
    kept = ours.snip_cache.kept
    ours.set_formats(dict.fromkeys(GEMMS, "mxfp8"))
    assert ours.snip_cache.kept.numel() == 0 < kept.numel()
    BLACKWELL.release({"layer": ours})


def test_a_copy_of_a_layer_shares_nothing_with_it() -> None:
    ours, _ = layer_of(("nvfp4",) * 3)
    BLACKWELL.before_pass({"layer": ours}, everything=True)
    other = copy.deepcopy(ours)
    other.set_formats(dict.fromkeys(GEMMS, "mxfp8"))
    assert ours.snip_cache.codes.tolist() == [FORMATS["nvfp4"].code] * 3
    assert other.snip_cache.codes.tolist() == [FORMATS["mxfp8"].code] * 3
    assert other.snip_backend is BLACKWELL and other.snip_cache.kept.numel() == 0 < ours.snip_cache.kept.numel()


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
    convert_model(model, SnipConfig(backend="emulated"))
    for layer in model.layers:
        layer.set_formats(dict.fromkeys(GEMMS, "mxfp8"))
        layer.use_backend(BLACKWELL)
    yield model
    torch._dynamo.reset()


# Dynamo's and inductor's own doing.
OF_TORCH = "ignore:.*(should not be instantiated|script_method).*:DeprecationWarning"
PLANS = [("mxfp8",) * 3, ("nvfp4",) * 3, ("mxfp4", "mxfp8", "nvfp4"), ("bf16", "nvfp4", "bf16"), ("bf16",) * 3]


@pytest.mark.filterwarnings(OF_TORCH)
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


@pytest.mark.filterwarnings(OF_TORCH)
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


# ------------------------------------------------------------------------------------- who chooses it


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends to be a machine with a GPU, where trials find what `faults` says."""

    def pretend(
        capability: tuple[int, int] = (10, 0),
        cuda: str | None = "13.0",
        available: bool = True,
        triton: bool = True,
        faults: dict[str, str] | None = None,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(blackwell_backend, "find_spec", lambda name: object() if triton else None)
        monkeypatch.setattr(blackwell_backend, "fault", lambda name, device: (faults or {}).get(name))

    return pretend


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)], ids=str)
def test_auto_takes_it_on_blackwell_for_the_formats_that_it_knows(
    machine: Callable[..., None], capability: tuple[int, int]
) -> None:
    machine(capability)
    for formats in (("nvfp4", "mxfp8"), ("mxfp4-rht", "mxfp8", "bf16"), ("nvfp4-46", "nvfp4")):
        assert select_backend("auto", "cuda", formats) is BLACKWELL
        assert why_emulated(torch.device("cuda"), formats) is None
    for formats, unknown in ((("fp4", "fp8"), "fp4"), (("nvfp4", "fp8"), "fp8"), (("nvfp4", "mxfp6"), "mxfp6")):
        assert select_backend("auto", "cuda", formats) is EMULATED
        reason = f"its kernels do not know the format {unknown!r}"
        assert why_emulated(torch.device("cuda"), formats) == reason
        with pytest.raises(ValueError, match=f"backend='blackwell' cannot run: {reason}"):
            select_backend("blackwell", "cuda", formats)


def test_a_trial_that_fails_leaves_the_run_emulated_and_says_why(machine: Callable[..., None]) -> None:
    machine(faults={"mxfp4": "the trial of 'mxfp4' failed: NotImplementedError: no such kernel"})
    assert select_backend("auto", "cuda", ("nvfp4", "mxfp8")) is BLACKWELL
    assert select_backend("auto", "cuda", ("mxfp4", "mxfp8")) is EMULATED
    reason = "the trial of 'mxfp4' failed: NotImplementedError: no such kernel"
    assert why_emulated(torch.device("cuda"), ("mxfp4", "mxfp8")) == reason
    with pytest.raises(ValueError, match=r"no such kernel\. Use backend='auto' or 'emulated'"):
        select_backend("blackwell", "cuda", ("mxfp4", "mxfp8"))


@pytest.mark.parametrize(
    ("made_up", "lacks"),
    [
        ({"available": False}, "the model is on 'cuda', expected a CUDA device of compute capability 10.x or 12.x"),
        ({"capability": (9, 0)}, "the GPU has compute capability 9.0, expected a CUDA device of"),
        ({"capability": (11, 0)}, "the GPU has compute capability 11.0, expected"),
        ({"cuda": None}, "torch is not built for CUDA"),
        ({"cuda": "12.6"}, "torch is built for CUDA 12.6, expected at least 12.8"),
        ({"triton": False}, "the package triton is not installed"),
    ],
    ids=str,
)
def test_what_is_lacking_is_said(machine: Callable[..., None], made_up: dict[str, Any], lacks: str) -> None:
    machine(**made_up)
    found = BLACKWELL.lacks(torch.device("cuda"))
    assert found is not None and found.startswith(lacks)
    assert select_backend("auto", "cuda", ("nvfp4",)) is EMULATED


def test_off_the_gpu_the_reason_in_the_log_is_the_first_backend_s() -> None:
    assert why_emulated(CPU, ("nvfp4",)) == BACKENDS["hopper"].lacks(CPU)
    assert BLACKWELL.lacks(CPU) == (
        "the model is on 'cpu', expected a CUDA device of compute capability 10.x or 12.x (Blackwell)"
    )


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_a_trial_passes_where_all_is_well(name: str) -> None:
    assert trial.fault.__wrapped__(name, CPU) is None


def test_a_trial_notices_wrong_products_other_bytes_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = trial.fault.__wrapped__
    multiply = operators.multiply
    with monkeypatch.context() as patch:
        patch.setattr(operators, "multiply", lambda left, right, dtype: multiply(left, right, dtype) * 1.01)
        expected = "the trial of 'nvfp4' failed: forward is 0.0099 off the reference, expected less than 0.005"
        assert fault("nvfp4", CPU) == expected
    with monkeypatch.context() as patch:
        patch.setattr(operators, "multiply", lambda left, right, dtype: multiply(left, right, dtype) * torch.nan)
        assert "forward is nan off the reference" in fault("nvfp4", CPU)
    with monkeypatch.context() as patch:

        def broken(*arguments: object) -> Tensor:
            raise NotImplementedError("not on this GPU\nmore")

        patch.setattr(operators, "multiply", broken)
        assert fault("mxfp4", CPU) == "the trial of 'mxfp4' failed: NotImplementedError: not on this GPU"
    quantize = trial.quantize

    def other(*arguments: Any, by_kernel: bool | None = None) -> packing.Packed:
        packed = quantize(*arguments, by_kernel=False)
        if by_kernel is None:
            packed.data[0, 0] ^= 1
        return packed

    monkeypatch.setattr(trial, "quantize", other)
    assert "its kernel rounds" not in (found := fault("mxfp8", CPU)) and "rounds otherwise" in found


def test_the_notice_says_that_it_was_written_without_the_hardware() -> None:
    weight = torch.zeros(1)
    warns, text = BLACKWELL.notice(weight, "bf16", False)
    assert not warns and "benchmarks/first_run.py" in text and "written without one" in text
    assert BLACKWELL.notice(weight, "fp16", False)[0]


def test_the_first_line_of_its_documentation_says_that_it_has_not_run() -> None:
    from snip_hf.kernels import blackwell

    assert (blackwell.__doc__ or "").startswith("Not run on Blackwell")
    assert isinstance(BLACKWELL, Blackwell) and not BLACKWELL.is_emulation


def test_a_run_logs_why_its_formats_are_emulated(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Blackwell, "lacks", lambda self, device: None)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)])})
    config = SnipConfig(policy="uniform-fp8", formats=("fp4", "fp8"))
    caplog.set_level(logging.INFO)
    SnipController(model, torch.optim.SGD(model.parameters(), 0.1), config)
    assert "slower than BF16 (its kernels do not know the format 'fp4')" in caplog.text
