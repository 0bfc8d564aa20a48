"""The three GEMMs against products of the oracle's operands, and what torch demands of a custom operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from backends import gemm_call, hopper_lacks, select_backend
from oracles.rounding import stream_halves
from oracles.three_gemms import GRAD_OUTPUT, Layer, Product
from rounded import fake_quantize
from torch import Tensor

from snip_hf.kernels import backend as backend_module
from snip_hf.kernels.emulated import STATE_SIZE, forward_gemm, grad_input_gemm, grad_weight_gemm
from snip_hf.numerics.formats import E2M1, FORMATS
from snip_hf.numerics.gemms import GEMMS, ROW_TILE

KEY = (11, 250, 3, 0xCAFE)  # seed, step, micro-batch, layer; its 64-bit key is above 2**63
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

each_format = pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4"])
each_dtype = pytest.mark.parametrize("dtype", UNIT, ids=["float32", "bfloat16", "float16"])
# T, I, O: whole tiles; ragged in all three; smaller than a tile.
each_size = pytest.mark.parametrize("size", [(128, 256, 128), (150, 200, 136), (3, 5, 7)], ids=str)


EXPECTED = "expected a CUDA device of compute capability 9.0 (H100, H200)"


def state(*formats: str, rank: tuple[int, int] = (0, 1)) -> Tensor:
    low, high = stream_halves(*KEY, GRAD_OUTPUT)
    key = high << 32 | low
    return torch.tensor([*(FORMATS[fmt].code for fmt in formats), key - 2**64 if key >= 2**63 else key, *rank])


def tensors(size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (T, I), weight (O, I), bias (O,), grad_output (T, O), with columns of different magnitude."""
    t, i, o = size
    generator = torch.Generator().manual_seed(t)
    shapes = ((t, i), (o, i), (o,), (t, o))
    x, weight, bias, grad_output = (torch.randn(shape, generator=generator) for shape in shapes)
    x[:, ::7] *= 20
    return x.to(dtype), (weight / 8).to(dtype), bias.to(dtype), grad_output.to(dtype)


def oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad_output: Tensor, rank: tuple[int, int] = (0, 1)
) -> Layer:
    x, weight, grad_output = x.float(), weight.float(), grad_output.float()
    arrays = (x.numpy(), weight.numpy(), None if bias is None else bias.float().numpy(), grad_output.numpy())
    return Layer(*arrays, KEY, rank)


def check(got: Tensor, expected: Product, dtype: torch.dtype, name: str) -> None:
    assert got.dtype == dtype
    expected.check(got.float().numpy(), UNIT[dtype], name)


class TestEachGemm:
    @each_dtype
    @each_format
    @each_size
    @pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
    def test_forward_is_the_product_of_the_oracle_s_operands(
        self, size: tuple[int, int, int], fmt: str, dtype: torch.dtype, with_bias: bool
    ) -> None:
        x, weight, bias, grad_output = tensors(size, dtype)
        given = bias if with_bias else None
        y = forward_gemm(x, weight, given, state(fmt, "bf16", "bf16"))
        check(y, oracle(x, weight, given, grad_output).output(fmt), dtype, "y")

    @each_dtype
    @each_format
    @each_size
    def test_grad_input_is_the_product_of_the_oracle_s_operands(
        self, size: tuple[int, int, int], fmt: str, dtype: torch.dtype
    ) -> None:
        x, weight, _, grad_output = tensors(size, dtype)
        grad_input = grad_input_gemm(grad_output, weight, state("bf16", fmt, "bf16"))
        check(grad_input, oracle(x, weight, None, grad_output).grad_input(fmt), dtype, "grad_input")

    @each_dtype
    @each_format
    @each_size
    def test_grad_weight_is_the_product_of_the_oracle_s_operands(
        self, size: tuple[int, int, int], fmt: str, dtype: torch.dtype
    ) -> None:
        x, weight, _, grad_output = tensors(size, dtype)
        grad_weight = grad_weight_gemm(grad_output, x, state("bf16", "bf16", fmt))
        check(grad_weight, oracle(x, weight, None, grad_output).grad_weight(fmt), dtype, "grad_weight")


@each_size
@pytest.mark.parametrize("rank", [(1, 2), (2, 5)], ids=str)
def test_on_each_rank_the_operands_are_those_of_the_oracle(size: tuple[int, int, int], rank: tuple[int, int]) -> None:
    x, weight, _, grad_output = tensors(size, torch.float32)
    numbers, layer = state("fp4", "fp4", "fp4", rank=rank), oracle(x, weight, None, grad_output, rank)
    check(grad_input_gemm(grad_output, weight, numbers), layer.grad_input("fp4"), torch.float32, "grad_input")
    check(grad_weight_gemm(grad_output, x, numbers), layer.grad_weight("fp4"), torch.float32, "grad_weight")


def test_another_rank_differs_by_far_more_than_the_checks_allow() -> None:
    """Guards the check above."""
    values = tensors((150, 200, 136), torch.float32)
    for rank in ((0, 2), (1, 3)):
        right, wrong = oracle(*values, (1, 2)), oracle(*values, rank)
        for gemm in ("grad_input", "grad_weight"):
            with pytest.raises(AssertionError, match="outside its error bound"):
                getattr(right, gemm)("fp4").check(
                    getattr(wrong, gemm)("fp4").value.astype(np.float32), 2.0**-8, "wrong"
                )


def test_the_three_formats_differ_by_far_more_than_the_checks_allow() -> None:
    """Guards the checks above: each of them would fail under another format, and grad_weight under nearest rounding."""
    layer = oracle(*tensors((150, 200, 136), torch.float32))
    for gemm in (layer.output, layer.grad_input, layer.grad_weight):
        for right, wrong in (("fp8", "fp4"), ("fp4", "fp8"), ("bf16", "fp8")):
            with pytest.raises(AssertionError, match="outside its error bound"):
                gemm(right).check(gemm(wrong).value.astype(np.float32), 2.0**-8, "wrong")


def test_both_gemms_round_the_output_gradient_with_the_same_numbers() -> None:
    """Through an identity weight and an identity x, with tiles of equal scale in both directions."""
    generator = torch.Generator().manual_seed(0)
    grad_output = torch.rand(128, 128, generator=generator)
    grad_output.fill_diagonal_(6.0)  # the largest of its row and of its column: all scales are 1
    numbers, identity = state("fp4", "fp4", "fp4"), torch.eye(128) * 6
    by_rows, by_columns = (
        grad_input_gemm(grad_output, identity, numbers),
        grad_weight_gemm(grad_output, identity, numbers),
    )
    assert torch.equal(by_rows, by_columns.t())
    assert not torch.equal(by_rows, fake_quantize(grad_output, E2M1, ROW_TILE) * 6)


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_the_bias_is_added_in_fp32_to_an_unrounded_product(fmt: str) -> None:
    """257 - 256 in BF16: the product alone would round to 256."""
    x, weight = torch.ones(1, 257, dtype=torch.bfloat16), torch.ones(1, 257, dtype=torch.bfloat16)
    y = forward_gemm(x, weight, torch.tensor([-256.0], dtype=torch.bfloat16), state(fmt, fmt, fmt))
    assert y.item() == 1.0


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_products_stay_in_fp32_under_autocast(fmt: str) -> None:
    x, weight, bias, grad_output = tensors((150, 200, 136), torch.float32)
    numbers = state(fmt, fmt, fmt)
    plain = [forward_gemm(x, weight, bias, numbers), grad_input_gemm(grad_output, weight, numbers)]
    plain.append(grad_weight_gemm(grad_output, x, numbers))
    with torch.autocast("cpu", torch.bfloat16):
        under = [forward_gemm(x, weight, bias, numbers), grad_input_gemm(grad_output, weight, numbers)]
        under.append(grad_weight_gemm(grad_output, x, numbers))
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


@pytest.mark.parametrize("gemm", [0, 1, 2])
def test_each_gemm_reads_its_own_format_only(gemm: int) -> None:
    x, weight, bias, grad_output = tensors((150, 200, 136), torch.float32)
    call: Callable[[Tensor], Tensor] = [
        lambda numbers: forward_gemm(x, weight, bias, numbers),
        lambda numbers: grad_input_gemm(grad_output, weight, numbers),
        lambda numbers: grad_weight_gemm(grad_output, x, numbers),
    ][gemm]
    for fmt in FORMATS:
        results = []
        for others in ("bf16", "fp8", "nvfp4"):
            formats = [others] * 3
            formats[gemm] = fmt
            results.append(call(state(*formats)))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("bit", [0, 31, 32, 62, 63])
def test_only_fp4_output_gradients_depend_on_the_random_key(bit: int) -> None:
    x, weight, bias, grad_output = tensors((150, 200, 136), torch.float32)
    for fmt in ("bf16", "fp8", "fp4"):
        numbers = state(fmt, fmt, fmt)
        other = numbers.clone()
        other[3] ^= 1 << bit if bit < 63 else -(2**63)
        assert torch.equal(forward_gemm(x, weight, bias, numbers), forward_gemm(x, weight, bias, other))
        backward = [
            torch.equal(grad_input_gemm(grad_output, weight, numbers), grad_input_gemm(grad_output, weight, other)),
            torch.equal(grad_weight_gemm(grad_output, x, numbers), grad_weight_gemm(grad_output, x, other)),
        ]
        assert backward == [fmt != "fp4"] * 2


@each_format
def test_no_tokens_give_an_empty_output_and_a_zero_weight_gradient(fmt: str) -> None:
    x, weight, bias, grad_output = tensors((4, 200, 136), torch.bfloat16)
    numbers = state(fmt, fmt, fmt)
    assert forward_gemm(x[:0], weight, bias, numbers).shape == (0, 136)
    assert grad_input_gemm(grad_output[:0], weight, numbers).shape == (0, 200)
    grad_weight = grad_weight_gemm(grad_output[:0], x[:0], numbers)
    assert torch.equal(grad_weight, torch.zeros(136, 200, dtype=torch.bfloat16))


@each_format
def test_a_nan_in_one_token_reaches_every_product_that_its_tiles_enter(fmt: str) -> None:
    x, weight, bias, grad_output = tensors((150, 200, 136), torch.float32)
    numbers = state(fmt, fmt, fmt)
    x[140, 5] = torch.nan
    y = forward_gemm(x, weight, bias, numbers)
    assert y[140].isnan().all() and y.isnan().sum() == 136
    columns = grad_weight_gemm(grad_output, x, numbers).isnan()
    assert columns[:, 5].all() and columns.sum() == 136
    grad_output[7, 0] = torch.inf
    rows = ~grad_input_gemm(grad_output, weight, numbers).isfinite()
    assert rows[7].all() and rows.sum() == 200


class TestRegistration:
    """Fake tensors, schema and aliasing, as torch.compile relies on them."""

    @each_format
    @pytest.mark.parametrize("tokens", [0, 10])
    def test_operators_pass_torch_s_own_checks(self, fmt: str, tokens: int) -> None:
        x, weight, bias, grad_output = tensors((10, 6, 4), torch.bfloat16)
        x, grad_output, numbers = x[:tokens], grad_output[:tokens], state(fmt, fmt, fmt)
        torch.library.opcheck(torch.ops.snip_hf.forward_gemm.default, (x, weight, bias, numbers))
        torch.library.opcheck(torch.ops.snip_hf.forward_gemm.default, (x, weight, None, numbers))
        torch.library.opcheck(torch.ops.snip_hf.forward_gemm.default, (x.view(2, -1, 6), weight, bias, numbers))
        torch.library.opcheck(torch.ops.snip_hf.grad_input_gemm.default, (grad_output, weight, numbers))
        torch.library.opcheck(torch.ops.snip_hf.grad_weight_gemm.default, (grad_output, x, numbers))

    @each_format
    @each_dtype
    def test_fake_results_have_the_real_ones_shape_strides_and_dtype(self, fmt: str, dtype: torch.dtype) -> None:
        x, weight, bias, grad_output = tensors((10, 6, 4), dtype)
        numbers = state(fmt, fmt, fmt)
        transposed = torch.randn(5, 2, 6).to(dtype).transpose(0, 1)
        calls = [
            (forward_gemm, (x, weight, bias, numbers)),
            (forward_gemm, (transposed, weight, bias, numbers)),
            (grad_input_gemm, (grad_output, weight, numbers)),
            (grad_weight_gemm, (grad_output, x, numbers)),
        ]
        for operator, arguments in calls:
            real = operator(*arguments)
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


class TestSelectBackend:
    """Tests the choice of a backend; torch's reports of the machine are made up."""

    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def pretend(
            capability: tuple[int, int] = (9, 0), cuda: str | None = "13.0", triton: bool = True, available: bool = True
        ) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            monkeypatch.setattr(torch.version, "cuda", cuda)
            monkeypatch.setattr(
                backend_module, "find_spec", lambda name: object() if triton and name == "triton" else None
            )

        return pretend

    @pytest.mark.parametrize("requested", ["auto", "emulated"])
    @pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")], ids=str)
    def test_every_machine_has_the_emulated_backend(self, requested: str, device: str | torch.device) -> None:
        assert select_backend(requested, device) == "emulated"

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_the_hopper_backend_is_refused_off_the_gpu_with_the_way_out(self, device: str) -> None:
        with pytest.raises(ValueError) as error:
            select_backend("hopper", device)
        assert str(error.value) == (
            f"backend='hopper' cannot run: the model is on {device!r}, expected a CUDA device of compute capability "
            "9.0 (H100, H200). Use backend='auto' or 'emulated' (same numerics, slower than BF16)."
        )

    @pytest.mark.parametrize("cuda", ["12.9", "13.0", "13.1", "12.10"])
    def test_a_hopper_gpu_has_both_backends_and_prefers_its_own(self, machine: Callable[..., None], cuda: str) -> None:
        machine(cuda=cuda)
        assert hopper_lacks(torch.device("cuda:1")) is None
        assert [select_backend(requested, "cuda:1") for requested in ("auto", "hopper", "emulated")] == [
            "hopper",
            "hopper",
            "emulated",
        ]

    @pytest.mark.parametrize(
        ("made_up", "lacks"),
        [
            (
                {"capability": (8, 0)},
                "the GPU has compute capability 8.0, expected a CUDA device of compute capability 9.0 (H100, H200)",
            ),
            (
                {"capability": (10, 0)},
                "the GPU has compute capability 10.0, expected a CUDA device of compute capability 9.0 (H100, H200)",
            ),
            (
                {"capability": (12, 1)},
                "the GPU has compute capability 12.1, expected a CUDA device of compute capability 9.0 (H100, H200)",
            ),
            ({"cuda": "12.8"}, "torch is built for CUDA 12.8, expected at least 12.9"),
            ({"cuda": "11.13"}, "torch is built for CUDA 11.13, expected at least 12.9"),
            ({"cuda": None}, "torch is not built for CUDA"),
            ({"triton": False}, "the package triton is not installed"),
            ({"available": False}, f"the model is on 'cuda', {EXPECTED}"),
        ],
        ids=str,
    )
    def test_missing_requirements_are_named_and_auto_falls_back(
        self, machine: Callable[..., None], made_up: dict[str, Any], lacks: str
    ) -> None:
        machine(**made_up)
        assert hopper_lacks(torch.device("cuda")) == lacks
        assert select_backend("auto", "cuda") == select_backend("emulated", "cuda") == "emulated"
        with pytest.raises(ValueError) as error:
            select_backend("hopper", "cuda")
        assert str(error.value) == (
            f"backend='hopper' cannot run: {lacks}. Use backend='auto' or 'emulated' (same numerics, slower than BF16)."
        )

    def test_the_device_that_was_named_is_asked(
        self, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 1 else (8, 6))
        assert [select_backend("auto", f"cuda:{index}") for index in range(3)] == ["emulated", "hopper", "emulated"]


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_gemm_call_is_the_operator_on_the_emulated_backend(gemm: str, fmt: str) -> None:
    """And on any backend in BF16, which has no other kernels."""
    x, weight, _, grad_output = tensors((150, 200, 136), torch.bfloat16)
    formats = ["fp8", "fp8", "fp8"]
    formats[GEMMS.index(gemm)] = fmt
    numbers = state(*formats)
    expected = {
        "forward": lambda: forward_gemm(x, weight, None, numbers),
        "grad_input": lambda: grad_input_gemm(grad_output, weight, numbers),
        "grad_weight": lambda: grad_weight_gemm(grad_output, x, numbers),
    }[gemm]()
    for backend in ("emulated", "hopper") if fmt == "bf16" else ("emulated",):
        call = gemm_call(backend, gemm, x, weight, grad_output, numbers)
        assert torch.equal(call(), expected) and torch.equal(call(), expected)


@pytest.mark.parametrize("place", [4, 5])
def test_only_fp4_output_gradients_depend_on_the_rank_and_on_how_many_there_are(place: int) -> None:
    x, weight, bias, grad_output = tensors((150, 200, 136), torch.float32)
    for fmt in ("bf16", "fp8", "fp4"):
        numbers = state(fmt, fmt, fmt)
        other = numbers.clone()
        other[place] += 1
        assert torch.equal(forward_gemm(x, weight, bias, numbers), forward_gemm(x, weight, bias, other))
        backward = [
            torch.equal(grad_input_gemm(grad_output, weight, numbers), grad_input_gemm(grad_output, weight, other)),
            torch.equal(grad_weight_gemm(grad_output, x, numbers), grad_weight_gemm(grad_output, x, other)),
        ]
        assert backward == [fmt != "fp4"] * 2


def test_the_state_holds_three_formats_the_key_the_rank_and_how_many_ranks_there_are() -> None:
    assert len(state("bf16", "fp8", "fp4")) == STATE_SIZE == 6
