"""SnipLinear with the Hopper kernels against the emulated backend: anywhere with a stand-in for the kernels that is
made of the reference, and on a GPU with the real ones."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from backends import hopper_lacks
from configs import fp4_config
from models import batch, build
from operator_calls import Calls, assert_same
from rounded import COLUMN_TILE, quantize
from slow_cases import pairwise
from small import checkpoint_activations, tiny_llama
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from snip_hf import SnipController, SnipLinear, convert_model
from snip_hf.kernels.backend import BACKENDS
from snip_hf.kernels.emulated import EMULATED, STATE_SIZE
from snip_hf.kernels.hopper import backend as hopper
from snip_hf.kernels.hopper.backend import Hopper
from snip_hf.kernels.tensor_core import TiedInput
from snip_hf.layers.state import PackedStates, set_step, snip_linears
from snip_hf.numerics.formats import E2M1, format_of_code
from snip_hf.numerics.gemms import GEMMS, ROW_TILE, SQUARE_TILE, TILE
from snip_hf.numerics.rounding import Quantized

T, I, O = 150, 200, 136  # tokens, in_features, out_features: ragged in every tiling  # noqa: E741
BF16 = torch.bfloat16
HOPPER = BACKENDS["hopper"]
NAMES = ("bf16", "fp8", "fp4")
COMBINATIONS = list(itertools.product(NAMES, repeat=3))
QUANTIZED = [formats for formats in COMBINATIONS if set(formats) != {"bf16"}]

each_combination = pytest.mark.parametrize("formats", pairwise(NAMES), ids="/".join)
each_quantized = pytest.mark.parametrize(
    "formats", [formats for formats in pairwise(NAMES) if formats in QUANTIZED], ids="/".join
)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU"),
]


# ------------------------------------------------------------------------------------- a stand-in for the kernels


def padded(size: int, multiple: int = TILE) -> int:
    return -(-size // multiple) * multiple


def put(quantized: Quantized, values: tuple[int, int], scales: tuple[int, int], turned: bool) -> tuple[Tensor, Tensor]:
    """Values in E4M3 and scales, in the upper left corners of tensors of these shapes, transposed or not; beyond them
    stand zeros and scales that must not be read."""
    padded_values, padded_scales = torch.zeros(values), torch.full(scales, 7.0)
    for target, source in ((padded_values, quantized.values), (padded_scales, quantized.scales)):
        source = source.t() if turned else source
        target[: source.shape[0], : source.shape[1]] = source
    return padded_values.to(torch.float8_e4m3fn), padded_scales


class StandIn:
    """The operators of `kernels.hopper` in their layouts, of `quantize` and products in FP32; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def quantize_tokens(
        self, x: Tensor, state: Tensor, row_gemm: int, column_gemm: int, is_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert x.dtype == BF16 and x.dim() == 2 and x.is_cpu and not torch.is_grad_enabled()
        if row_gemm >= 0 or column_gemm >= 0:
            self.calls.append(("quantize_tokens", row_gemm, column_gemm, is_gradient))
        tokens, channels = x.shape
        rows, columns = padded(tokens), padded(channels)
        row_layout = column_layout = torch.empty(0, dtype=torch.float8_e4m3fn), torch.empty(0)
        if row_gemm >= 0 and tokens > 0:
            quantized = self._quantize(x, state, row_gemm, ROW_TILE, is_gradient)
            values, scales = put(quantized, (rows, columns), (rows, columns // TILE), False)
            row_layout = values, scales.t().contiguous()
        if column_gemm >= 0 and tokens > 0:
            quantized = self._quantize(x, state, column_gemm, COLUMN_TILE, is_gradient)
            values, _ = put(quantized, (columns, rows), (columns, rows), True)
            _, scales = put(quantized, (rows, columns), (rows // TILE, columns), False)
            column_layout = values, scales
        return *row_layout, *column_layout

    def quantize_weight(
        self, weight: Tensor, state: Tensor, forward: bool, grad_input: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert weight.dtype in (BF16, torch.float32)
        self.calls.append(("quantize_weight", forward, grad_input))
        return self._weight(weight, state, forward, grad_input)

    def quantize_weight_into(self, weight: Tensor, state: Tensor, outputs: tuple[Tensor, ...]) -> None:
        self.calls.append(("quantize_weight_into",))
        new = self._weight(weight.detach(), state, outputs[0].numel() > 0, outputs[2].numel() > 0)
        for output, value in zip(outputs, new, strict=True):
            output.copy_(value)

    def multiply(
        self,
        left: Tensor,
        left_scales: Tensor,
        right: Tensor,
        right_scales: Tensor,
        square: bool,
        rows: int,
        columns: int,
        dtype: torch.dtype = BF16,
    ) -> Tensor:
        self.calls.append(("multiply", square))
        if left.numel() == 0:
            assert rows == 0 or right.numel() == 0
            return torch.zeros(rows, columns, dtype=dtype)
        right_spread = right_scales.repeat_interleave(TILE, 1)
        right_spread = right_spread.repeat_interleave(TILE, 0)[:, : right.shape[1]] if square else None
        if right_spread is None:
            right_spread = right_scales.t().repeat_interleave(TILE, 1)
        a = left.float() * left_scales.t().repeat_interleave(TILE, 1)
        b = right.float() * right_spread
        with torch.autocast("cpu", enabled=False):
            return (a @ b.t())[:rows, :columns].to(dtype).contiguous()

    def _weight(self, weight: Tensor, state: Tensor, forward: bool, grad_input: bool) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for gemm, used in enumerate((forward, grad_input)):
            if not used:
                outputs += torch.empty(0, dtype=torch.float8_e4m3fn), torch.empty(0)
                continue
            rows, columns = weight.shape if gemm == 0 else weight.t().shape
            quantized = self._quantize(weight.to(BF16), state, gemm, SQUARE_TILE, False)
            shape = padded(rows), padded(columns)
            outputs += put(quantized, shape, (shape[0] // TILE, padded(shape[1] // TILE, 4)), gemm == 1)
        return tuple(outputs)

    @staticmethod
    def _quantize(x: Tensor, state: Tensor, gemm: int, tile: tuple[int, int], is_gradient: bool) -> Quantized:
        fmt = format_of_code(int(state[gemm]))
        assert fmt.grid is not None, "A GEMM in BF16 is not to be quantized."
        key, rank, ranks = state[3:].tolist()
        return quantize(x, fmt, tile, key % 2**64 if is_gradient and fmt.grid == E2M1 else None, rank, ranks)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made_up = StandIn()
    monkeypatch.setattr(hopper, "operators", made_up, raising=False)
    return made_up


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of the SnipLinear: "cpu" with the stand-in, or "cuda" with the kernels."""
    if request.param == "cpu":
        request.getfixturevalue("stand_in")
    return request.param


# ------------------------------------------------------------------------------------- layers and what they compute


def linear(bias: bool = True, dtype: torch.dtype = BF16, device: str = "cpu") -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(I, O, bias=bias).to(device, dtype)


def layer_of(plain: nn.Linear, formats: tuple[str, ...], backend: str) -> SnipLinear:
    """A copy as a SnipLinear on a backend, with a key of its own."""
    model = nn.ModuleDict({"layers": nn.ModuleList([copy.deepcopy(plain)])})
    convert_model(model, fp4_config(backend="emulated"))
    layer = model["layers"][0]
    layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
    layer.use_backend(BACKENDS[backend])
    set_step({"layer": layer}, 5, 40, 2)
    return layer


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.tensor([1.0, 8.0]).repeat(-(-shape[-1] // 2))[: shape[-1]]).to(device, dtype)


def gradients(layer: nn.Linear, x: Tensor, needs_x: bool = True) -> dict[str, Tensor]:
    """The output and the gradients of x, weight and bias of one pass (those that there are)."""
    layer.zero_grad()
    x = x.detach().requires_grad_(needs_x)
    y = layer(x)
    y.backward(randn(*y.shape, seed=9, dtype=y.dtype, device=x.device.type))
    found = {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad}
    found["bias"] = None if layer.bias is None else layer.bias.grad
    return {name: value.clone() for name, value in found.items() if value is not None}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], bias: Tensor | None = None) -> None:
    """Equal but for sums in another order, their rounding to BF16, and the one before the bias is added to an output.

    Other formats are 2% and more away, other random numbers 10%.
    """
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        if value.numel() == 0:
            continue
        a, b = got[name].double(), value.double()
        rounding = plain = 2.0**-7 * b.abs()
        if name == "y" and bias is not None:
            rounding = plain + 2.0**-8 * (b.abs() + bias.detach().double().abs())
        worst = ((a - b).abs() - rounding).max() / b.square().mean().sqrt().clamp_min(1e-30)
        assert worst <= 2e-3, f"{name}: {worst:.2g} of its root mean square beyond rounding."
        assert (a - b).norm() <= (3e-3 if rounding is plain else 5e-3) * b.norm(), (
            f"{name}: {(a - b).norm() / b.norm():.2g} away."
        )


INPUTS: dict[str, Callable[[], Tensor]] = {
    "3-D": lambda: randn(3, 37, I),
    "4-D": lambda: randn(2, 3, 7, I),
    "1-D": lambda: randn(I),
    "transposed": lambda: randn(I, 37).t(),
    "batch-second": lambda: randn(37, 3, I).transpose(0, 1),
    "features-first": lambda: randn(3, I, 37).transpose(1, 2),
    "every-second": lambda: randn(3, 37, 2 * I)[..., ::2],
    "expanded": lambda: randn(1, 37, I).expand(3, 37, I),
}
MIXED = [("fp8", "fp4", "fp8"), ("fp4", "fp8", "fp4"), ("bf16", "fp4", "fp8"), ("fp4", "bf16", "bf16")]


class TestOneLayer:
    @each_combination
    @pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
    def test_gives_what_the_emulated_backend_gives(
        self, device: str, formats: tuple[str, str, str], with_bias: bool
    ) -> None:
        plain, x = linear(with_bias, device=device), randn(T, I, device=device)
        ours, emulated = (gradients(layer_of(plain, formats, backend), x) for backend in ("hopper", "emulated"))
        assert_close(ours, emulated, plain.bias)

    @each_combination
    def test_gives_what_the_emulated_backend_gives_under_autocast_in_three_dimensions(
        self, device: str, formats: tuple[str, str, str]
    ) -> None:
        """FP32 parameters and inputs, whose gradients are FP32 too."""
        plain = linear(dtype=torch.float32, device=device)
        x = randn(3, T // 3, I, dtype=torch.float32, device=device)
        with torch.autocast(device, BF16):
            ours, emulated = (gradients(layer_of(plain, formats, backend), x) for backend in ("hopper", "emulated"))
        assert ours["y"].dtype == BF16 and ours["weight"].dtype == ours["x"].dtype == torch.float32
        assert_close(ours, emulated, plain.bias)

    @pytest.mark.parametrize("formats", MIXED[:2], ids="/".join)
    @pytest.mark.parametrize("shape", INPUTS)
    @pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
    def test_inputs_may_have_any_dimensions_and_strides(
        self, device: str, shape: str, formats: tuple[str, str, str], with_bias: bool
    ) -> None:
        plain, x = linear(with_bias, device=device), INPUTS[shape]().to(device)
        ours, emulated = (gradients(layer_of(plain, formats, backend), x) for backend in ("hopper", "emulated"))
        assert_close(ours, emulated, plain.bias)

    @pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
    @pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
    @pytest.mark.parametrize("shape", INPUTS)
    def test_in_bf16_gives_the_bits_of_nn_linear(self, device: str, shape: str, with_bias: bool, mode: str) -> None:
        plain = linear(with_bias, torch.float32 if mode == "autocast" else BF16, device)
        x = INPUTS[shape]().to(device)
        with torch.autocast(device, BF16, enabled=mode == "autocast"):
            assert_same(gradients(layer_of(plain, ("bf16",) * 3, "hopper"), x), gradients(plain, x))
        if device == "cpu":
            assert hopper.operators.calls == []

    @each_quantized
    @pytest.mark.parametrize("shape", [(0, I), (2, 0, I)], ids=str)
    def test_no_tokens_give_an_empty_output_and_zero_gradients(
        self, device: str, formats: tuple[str, str, str], shape: tuple[int, ...]
    ) -> None:
        layer = layer_of(linear(device=device), formats, "hopper")
        got = gradients(layer, torch.empty(shape, dtype=BF16, device=device))
        assert got["y"].shape == (*shape[:-1], O) and got["x"].shape == shape
        assert got["weight"].shape == (O, I) and got["bias"].shape == (O,)
        assert not got["weight"].any() and not got["bias"].any()

    @pytest.mark.parametrize("formats", MIXED, ids="/".join)
    def test_an_output_can_be_changed_in_place(self, device: str, formats: tuple[str, str, str]) -> None:
        layer, x = layer_of(linear(False, device=device), formats, "hopper"), randn(3, 37, I, device=device)
        expected = gradients(layer, x)
        layer.register_forward_hook(lambda module, args, output: output.add_(0.0))
        assert_same(gradients(layer, x), expected)

    def test_the_key_and_formats_may_be_written_between_forward_and_backward(self, device: str) -> None:
        layer, x = layer_of(linear(device=device), ("fp4", "fp4", "fp4"), "hopper"), randn(T, I, device=device)
        expected = gradients(layer, x)
        layer.zero_grad()
        x = x.requires_grad_()
        y = layer(x)
        set_step({"layer": layer}, 9, 9, 9)
        layer.set_formats(dict.fromkeys(GEMMS, "bf16"))
        y.backward(randn(T, O, seed=9, device=device))
        assert_same({"x": x.grad, "weight": layer.weight.grad}, {name: expected[name] for name in ("x", "weight")})

    def test_two_ranks_compute_together_what_one_process_does(self, device: str) -> None:
        """Whole tiles of tokens each, weight gradients in FP32; other random numbers would be 10% away."""
        plain, x = linear(False, torch.float32, device), randn(256, I, device=device)
        layer = layer_of(plain, ("fp4", "fp4", "fp4"), "hopper")
        grad_output = randn(256, O, seed=9, device=device)

        def backward(part: slice, rank: int, ranks: int) -> dict[str, Tensor]:
            PackedStates({"layer": layer}).set_rank(rank, ranks)
            layer.zero_grad()
            given = x[part].detach().requires_grad_()
            with torch.autocast(device, BF16):
                y = layer(given)
            y.backward(grad_output[part])
            return {"y": y.detach(), "x": given.grad, "weight": layer.weight.grad.clone()}

        whole = backward(slice(None), 0, 1)
        first, second = (backward(slice(128 * rank, 128 * (rank + 1)), rank, 2) for rank in range(2))
        together = {name: torch.cat([first[name], second[name]]) for name in ("y", "x")}
        assert_close({**together, "weight": first["weight"] + second["weight"]}, whole)
        again = backward(slice(128, 256), 0, 2)
        assert (again["x"] - second["x"]).norm() > 0.05 * second["x"].norm()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
    @pytest.mark.parametrize("autocast", [False, True], ids=["pure", "autocast"])
    def test_other_compute_dtypes_run_emulated(self, device: str, dtype: torch.dtype, autocast: bool) -> None:
        if autocast and dtype == torch.float32:
            plain, context = linear(dtype=dtype, device=device), torch.autocast(device, enabled=False)
        else:
            plain = linear(dtype=torch.float32 if autocast else dtype, device=device)
            context = torch.autocast(device, dtype, enabled=autocast)
        x, results = randn(T, I, dtype=plain.weight.dtype, device=device), []
        for backend in ("hopper", "emulated"):
            with context, Calls() as operators:
                results.append(gradients(layer_of(plain, ("fp4", "fp8", "fp4"), backend), x))
            assert operators.names == ["forward_gemm", "grad_input_gemm", "grad_weight_gemm"]
        assert_same(*results)
        if device == "cpu":
            assert hopper.operators.calls == []

    @each_quantized
    def test_kernels_run_for_what_is_needed_only(self, stand_in: StandIn, formats: tuple[str, str, str]) -> None:
        """Each operand is quantized once, in the layouts of the GEMMs that are not in BF16."""
        forward, grad_input, grad_weight = (fmt != "bf16" for fmt in formats)
        layer, x = layer_of(linear(), formats, "hopper"), randn(T, I)

        def calls(needs_x: bool, needs_weight: bool) -> tuple[list[Any], list[Any]]:
            layer.weight.requires_grad_(needs_weight)
            stand_in.calls.clear()
            y = layer(x.clone().requires_grad_(needs_x))
            ahead = list(stand_in.calls)
            stand_in.calls.clear()
            y.sum().backward()
            return ahead, list(stand_in.calls)

        for needs_x, needs_weight in itertools.product([True, False], repeat=2):
            x_gemms = (0 if forward else -1, 2 if grad_weight and needs_weight else -1)
            g_gemms = (1 if grad_input and needs_x else -1, 2 if grad_weight and needs_weight else -1)
            ahead = [("quantize_tokens", *x_gemms, False)] * (x_gemms != (-1, -1))
            ahead += [("quantize_weight", True, False), ("multiply", True)] * forward
            back = [("quantize_tokens", *g_gemms, True)] * (g_gemms != (-1, -1))
            back += [("quantize_weight", False, True), ("multiply", True)] * (grad_input and needs_x)
            back += [("multiply", False)] * (grad_weight and needs_weight)
            assert calls(needs_x, needs_weight) == (ahead, back)
        layer.weight.requires_grad_(True)
        stand_in.calls.clear()
        with torch.no_grad():
            layer(x)
        tokens = [("quantize_tokens", 0, -1, False), ("quantize_weight", True, False), ("multiply", True)]
        assert stand_in.calls == tokens * forward

    @pytest.mark.parametrize("formats", MIXED, ids="/".join)
    def test_without_a_gradient_the_output_is_the_same(self, device: str, formats: tuple[str, str, str]) -> None:
        layer, x = layer_of(linear(device=device), formats, "hopper"), randn(T, I, device=device)
        with_gradients = gradients(layer, x)
        with torch.no_grad():
            y = layer(x)
        assert torch.equal(y, with_gradients["y"]) and not y.requires_grad
        layer.weight.requires_grad_(False)
        layer.weight.grad = None
        assert_same(gradients(layer, x), {n: value for n, value in with_gradients.items() if n != "weight"})
        layer.weight.requires_grad_(True)
        without_x = gradients(layer, x, needs_x=False)
        assert_same(without_x, {name: value for name, value in with_gradients.items() if name != "x"})

    def test_a_bias_alone_can_be_trained(self, device: str) -> None:
        layer, x = layer_of(linear(device=device), ("fp8", "fp4", "fp8"), "hopper"), randn(T, I, device=device)
        expected = gradients(layer, x)
        layer.weight.requires_grad_(False)
        layer.weight.grad = None
        got = gradients(layer, x, needs_x=False)
        assert_same(got, {name: expected[name] for name in ("y", "bias")})


# ------------------------------------------------------------------------------------- what is kept for backward


class TestSaved:
    """Bytes that the graph of one forward pass keeps, beside the parameter itself."""

    def saved(self, layer: SnipLinear, x: Tensor, autocast: bool = False) -> list[Tensor]:
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        with torch.autocast(x.device.type, BF16, enabled=autocast), saved_tensors_hooks(note, lambda tensor: tensor):
            layer(x)
        return [tensor for tensor in tensors if tensor.data_ptr() != layer.weight.data_ptr() or tensor.numel() == 0]

    @pytest.mark.parametrize("formats", [f for f in pairwise(NAMES) if f in QUANTIZED and f[2] != "bf16"], ids="/".join)
    @pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
    def test_one_byte_per_element_of_the_input_is_kept(
        self, device: str, formats: tuple[str, str, str], autocast: bool
    ) -> None:
        """And a scale of four bytes for each 128; no BF16 or FP32 copy of the input, and nothing of the weight."""
        dtype = torch.float32 if autocast else BF16
        layer = layer_of(linear(dtype=dtype, device=device), formats, "hopper")
        x = randn(256, I, dtype=dtype, device=device).requires_grad_()
        saved = self.saved(layer, x, autocast)
        assert sorted(tensor.element_size() for tensor in saved if tensor.numel() >= 256) == [1, 4]
        elements = 256 * padded(I)
        assert sum(tensor.nbytes for tensor in saved) == elements + 4 * elements // TILE + 6 * 8  # and the state

    @pytest.mark.parametrize("formats", [f for f in QUANTIZED if f[2] == "bf16"], ids="/".join)
    def test_a_weight_gradient_in_bf16_keeps_the_input_itself(self, device: str, formats: tuple[str, str, str]) -> None:
        layer, x = layer_of(linear(device=device), formats, "hopper"), randn(256, I, device=device).requires_grad_()
        saved = self.saved(layer, x)
        assert [tensor.data_ptr() == x.data_ptr() for tensor in saved if tensor.numel() >= 256] == [True]
        assert sum(tensor.nbytes for tensor in saved) == x.nbytes + 8 * STATE_SIZE

    @pytest.mark.parametrize("formats", MIXED, ids="/".join)
    def test_for_a_frozen_weight_nothing_of_the_input_is_kept(self, device: str, formats: tuple[str, str, str]) -> None:
        layer, x = layer_of(linear(device=device), formats, "hopper"), randn(256, I, device=device).requires_grad_()
        layer.weight.requires_grad_(False)
        assert sum(tensor.nbytes for tensor in self.saved(layer, x)) == 8 * STATE_SIZE

    def test_a_kept_weight_is_not_copied(self, device: str) -> None:
        layer, x = layer_of(linear(device=device), ("fp8", "fp8", "fp4"), "hopper"), randn(256, I, device=device)
        HOPPER.before_pass({"layer": layer})
        kept = {tensor.data_ptr() for tensor in layer.snip_cache.weights[2:]}
        saved = [tensor for tensor in self.saved(layer, x.requires_grad_()) if tensor.data_ptr() in kept]
        assert len(saved) == 2


# ------------------------------------------------------------------------------------- tied inputs


def siblings(formats: tuple[str, str, str], count: int = 3, device: str = "cpu") -> tuple[list[SnipLinear], TiedInput]:
    """Layers with weights of their own that share a TiedInput."""
    layers = []
    for index in range(count):
        plain = linear(device=device)
        with torch.no_grad():
            plain.weight.mul_(index + 1)
        layers.append(layer_of(plain, formats, "hopper"))
    HOPPER.share_inputs(
        {str(index): layer for index, layer in enumerate(layers)}, [[str(index) for index in range(count)]]
    )
    tied = layers[0].snip_cache.tied
    assert tied is not None
    return layers, tied


def of_inputs(stand_in: StandIn) -> int:
    """Returns how often activations, not gradients, were quantized."""
    return sum(call[0] == "quantize_tokens" and not call[3] for call in stand_in.calls)


def together(layers: list[SnipLinear], x: Tensor) -> list[Tensor]:
    """Outputs, x's gradient and the weights' gradients of layers that read one tensor."""
    x = x.detach().requires_grad_()
    outputs = [layer(x) for layer in layers]
    torch.autograd.backward(outputs, [randn(*y.shape, seed=9, device=x.device.type) for y in outputs])
    found = [*(y.detach() for y in outputs), x.grad, *(layer.weight.grad for layer in layers)]
    for layer in layers:
        layer.zero_grad()
    return found


class TestTied:
    @each_quantized
    def test_layers_that_share_an_input_compute_what_each_does_by_itself(
        self, device: str, formats: tuple[str, str, str]
    ) -> None:
        layers, _ = siblings(formats, device=device)
        tied = together(layers, randn(T, I, device=device))
        for layer in layers:
            layer.snip_cache.tied = None
        alone = together(layers, randn(T, I, device=device))
        assert all(torch.equal(a, b) for a, b in zip(tied, alone, strict=True))

    def test_one_input_is_quantized_once_for_all_and_each_new_one_anew(self, stand_in: StandIn) -> None:
        layers, _ = siblings(("fp4", "fp8", "fp4"))
        for passes in range(1, 4):
            together(layers, randn(T, I, seed=passes))
            assert of_inputs(stand_in) == passes

    def test_the_same_tensor_again_is_quantized_again(self, stand_in: StandIn) -> None:
        """It may have been changed in place since then."""
        layers, _ = siblings(("fp8", "fp8", "fp8"))
        x = randn(T, I)
        before = [layer(x) for layer in layers]
        x.mul_(3)
        after = [layer(x) for layer in layers]
        assert of_inputs(stand_in) == 2
        assert all((b - 3 * a).norm() < 0.1 * b.norm() for a, b in zip(before, after, strict=True))

    def test_a_tensor_that_is_written_to_between_two_siblings_is_quantized_again(self, stand_in: StandIn) -> None:
        layers, _ = siblings(("fp8", "fp8", "fp8"))
        x = randn(T, I)
        for layer in layers:
            layer(x)
            x.mul_(3)
        assert of_inputs(stand_in) == 3

    def test_an_fp32_input_under_autocast_is_known_again_though_each_layer_casts_it(self, stand_in: StandIn) -> None:
        layers, _ = siblings(("fp8", "fp8", "fp8"))
        x = randn(T, I, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", BF16):
            for layer in layers:
                layer(x)
        assert of_inputs(stand_in) == 1

    @pytest.mark.parametrize("order", [(0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2), (0, 1, 0, 1, 2, 2), (2, 1, 0, 0, 2, 1)])
    def test_different_inputs_are_never_mixed_up(self, stand_in: StandIn, order: tuple[int, ...]) -> None:
        """Also if a layer takes another input than its siblings, or one comes between them; values decide."""
        layers, _ = siblings(("fp8", "fp8", "fp8"))
        inputs = [randn(T, I, seed=1), randn(T, I, seed=2)]
        seen = {0: 0, 1: 0, 2: 0}
        got = []
        for index in order:
            got.append((index, seen[index], layers[index](inputs[seen[index]])))
            seen[index] += 1
        for layer in layers:
            layer.snip_cache.tied = None
        assert all(torch.equal(y, layers[index](inputs[which])) for index, which, y in got)

    def test_a_pass_without_gradients_and_one_with_them_are_not_mixed_up(self, stand_in: StandIn) -> None:
        """A pass that was left after the first layer, as activation checkpointing does."""
        layers, _ = siblings(("fp8", "fp8", "fp8"))
        x = randn(T, I).requires_grad_()
        with torch.no_grad():
            layers[0](x)
        torch.autograd.backward([layer(x) for layer in layers], [randn(T, O, seed=9)] * 3)
        got = [x.grad, *(layer.weight.grad.clone() for layer in layers)]
        for layer in layers:
            layer.snip_cache.tied = None
            layer.zero_grad()
        alone = together(layers, x)
        assert all(torch.equal(a, b) for a, b in zip(got, alone[3:], strict=True))

    @pytest.mark.parametrize("frozen", [0, 1, 2])
    def test_one_of_them_may_be_frozen(self, stand_in: StandIn, frozen: int) -> None:
        """Keeps nothing of its input for backward; the other weight gradients are unchanged."""
        layers, _ = siblings(("fp8", "fp4", "fp8"))
        trained = together(layers, randn(T, I))
        layers[frozen].weight.requires_grad_(False)
        x = randn(T, I).requires_grad_()
        torch.autograd.backward([layer(x) for layer in layers], [randn(T, O, seed=9)] * 3)
        assert torch.equal(x.grad, trained[3])
        for index, layer in enumerate(layers):
            assert layer.weight.grad is None if index == frozen else torch.equal(layer.weight.grad, trained[4 + index])

    def test_nothing_is_held_after_the_last_layer(self, stand_in: StandIn) -> None:
        layers, tied = siblings(("fp8", "fp8", "fp8"))
        with torch.no_grad():
            x = randn(T, I)
            watched = weakref.ref(x)
            layers[0](x)
            quantized = weakref.ref(tied._quantized[0])
            layers[1](x)
            assert quantized() is not None
            layers[2](x)
            del x
        gc.collect()
        assert watched() is None and quantized() is None

    def test_layers_whose_formats_part_each_quantize_for_themselves(self, stand_in: StandIn) -> None:
        layers, tied = siblings(("fp8", "fp8", "fp8"))
        layers[1].set_formats({"forward": "fp8", "grad_input": "fp4", "grad_weight": "fp8"})
        assert not tied.parted  # grad_input does not read the input
        layers[1].set_formats({"forward": "fp4", "grad_input": "fp4", "grad_weight": "fp8"})
        assert tied.parted
        x = randn(T, I)
        got = [layer(x) for layer in layers]
        assert of_inputs(stand_in) == 3
        for layer in layers:
            layer.set_formats(layers[1].formats)
        together(layers, x)
        assert not tied.parted and of_inputs(stand_in) == 4
        assert torch.equal(layers[1](x), got[1])

    def test_an_input_that_not_all_layers_asked_for_can_be_released(self, stand_in: StandIn) -> None:
        layers, tied = siblings(("fp8", "fp8", "fp8"))
        layers[0](randn(T, I))
        assert tied._source is not None
        HOPPER.after_step({str(index): layer for index, layer in enumerate(layers)})
        assert tied._source is None and tied._quantized is None

    def test_each_group_shares_an_input_of_its_own_and_dropping_ends_that(self, stand_in: StandIn) -> None:
        layers = {str(index): layer_of(linear(), ("fp8", "fp8", "fp8"), "hopper") for index in range(5)}
        HOPPER.share_inputs(layers, [["0", "1"], ["2", "4"]])
        tied = [layer.snip_cache.tied for layer in layers.values()]
        assert tied[0] is tied[1] is not None and tied[2] is tied[4] is not None and tied[3] is None
        assert tied[0] is not tied[2]
        x = randn(T, I)
        for layer in layers.values():
            layer(x)
        assert of_inputs(stand_in) == 3
        HOPPER.release(layers)
        assert [layer.snip_cache.tied for layer in layers.values()] == [None] * 5


# ------------------------------------------------------------------------------------- weights kept quantized


class TestKept:
    @each_quantized
    @pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
    def test_passes_with_kept_weights_are_those_without(
        self, device: str, formats: tuple[str, str, str], dtype: torch.dtype
    ) -> None:
        layer = layer_of(linear(dtype=dtype, device=device), formats, "hopper")
        x = randn(T, I, dtype=dtype, device=device)
        with torch.autocast(device, BF16):
            expected = gradients(layer, x)
            HOPPER.before_pass({"layer": layer})
            assert bool(layer.snip_cache.weights) == (formats[:2] != ("bf16", "bf16"))
            assert_same(gradients(layer, x), expected)
            HOPPER.release({"layer": layer})
            assert layer.snip_cache.weights == ()
            assert_same(gradients(layer, x), expected)

    def test_passes_quantize_no_weight_that_is_kept(self, stand_in: StandIn) -> None:
        layer = layer_of(linear(), ("fp8", "fp4", "fp8"), "hopper")
        HOPPER.before_pass({"layer": layer})
        assert stand_in.names == ["quantize_weight"]
        for _ in range(2):
            gradients(layer, randn(T, I))
        assert stand_in.names.count("quantize_weight") == 1
        HOPPER.release({"layer": layer})
        gradients(layer, randn(T, I))
        assert stand_in.names.count("quantize_weight") == 3

    def test_they_are_refreshed_in_place_when_weights_or_formats_have_changed(self, device: str) -> None:
        """At the same addresses, where CUDA graphs read them."""
        layer, x = layer_of(linear(device=device), ("fp8", "fp8", "fp8"), "hopper"), randn(T, I, device=device)
        HOPPER.before_pass({"layer": layer})
        places = [tensor.data_ptr() for tensor in layer.snip_cache.weights]
        for change in (
            lambda: layer.weight.data.mul_(3),
            lambda: layer.set_formats({"forward": "fp4", "grad_input": "fp8", "grad_weight": "fp8"}),
            lambda: layer.set_formats({"forward": "fp8", "grad_input": "fp4", "grad_weight": "fp4"}),
        ):
            change()
            HOPPER.before_pass({"layer": layer})
            assert [tensor.data_ptr() for tensor in layer.snip_cache.weights] == places
            kept = gradients(layer, x)
            twin = copy.deepcopy(layer)
            HOPPER.release({"layer": twin})
            assert_same(kept, gradients(twin, x))

    def test_a_change_of_the_weight_is_found_by_torch_s_count_and_only_then(self, stand_in: StandIn) -> None:
        layers = {str(index): layer_of(linear(), ("fp8", "fp8", "fp8"), "hopper") for index in range(3)}
        HOPPER.before_pass(layers)
        stand_in.calls.clear()
        HOPPER.before_pass(layers, everything=False)
        assert stand_in.calls == []
        with torch.no_grad():
            layers["1"].weight.add_(1)
        HOPPER.before_pass(layers, everything=False)
        assert stand_in.names == ["quantize_weight_into"]
        HOPPER.before_pass(layers, everything=False)
        assert stand_in.names == ["quantize_weight_into"]
        twin = copy.deepcopy(layers["1"])
        HOPPER.release({"twin": twin})
        assert torch.equal(layers["1"](randn(T, I)), twin(randn(T, I)))
        layers["2"].weight.data.add_(1)  # torch does not count it
        HOPPER.before_pass(layers, everything=False)
        assert stand_in.names.count("quantize_weight_into") == 1
        HOPPER.before_pass(layers)
        assert stand_in.names.count("quantize_weight_into") == 4

    def test_a_pass_without_gradients_in_training_mode_quantizes_the_weight_as_it_is(self, stand_in: StandIn) -> None:
        """It may follow a fused optimizer's step, which torch does not count."""
        layer = layer_of(linear(), ("fp8", "fp8", "fp8"), "hopper").train()
        HOPPER.before_pass({"layer": layer})
        layer.weight.data.add_(1)
        x, twin = randn(T, I), copy.deepcopy(layer)
        stale = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), twin(x))
        assert not torch.equal(stale, twin(x))

    @pytest.mark.parametrize("option", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
    def test_everything_is_refreshed_after_a_step_of_any_optimizer(
        self, stand_in: StandIn, option: dict[str, bool]
    ) -> None:
        layer = layer_of(linear(), ("fp8", "fp8", "fp8"), "hopper")
        HOPPER.before_pass({"layer": layer})
        layer(randn(T, I)).sum().backward()
        torch.optim.AdamW(layer.parameters(), lr=0.1, **option).step()  # torch does not count fused ones
        for everything in (True, False):
            stand_in.calls.clear()
            HOPPER.before_pass({"layer": layer}, everything=everything)
            assert stand_in.names == ["quantize_weight_into"] * everything
            twin = copy.deepcopy(layer)
            HOPPER.release({"twin": twin})
            assert torch.equal(layer(randn(T, I)), twin(randn(T, I)))

    def test_operands_of_gemms_in_bf16_are_not_kept(self, stand_in: StandIn) -> None:
        layer = layer_of(linear(), ("fp8", "fp8", "fp8"), "hopper")
        for formats, wanted in (
            (("fp8", "bf16", "fp8"), (True, False)),
            (("bf16", "fp4", "bf16"), (False, True)),
            (("bf16", "bf16", "fp8"), ()),
            (("fp4", "fp8", "bf16"), (True, True)),
        ):
            layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
            HOPPER.before_pass({"layer": layer})
            assert tuple(tensor.numel() > 0 for tensor in layer.snip_cache.weights[::2]) == wanted
            twin = copy.deepcopy(layer)
            HOPPER.release({"twin": twin})
            assert_same(gradients(layer, randn(T, I)), gradients(twin, randn(T, I)))

    def test_layers_on_another_backend_or_with_sharded_weights_keep_nothing(self, stand_in: StandIn) -> None:
        class Sharded(nn.Parameter):
            pass

        emulated, sharded = (layer_of(linear(), ("fp8", "fp8", "fp8"), "hopper") for _ in range(2))
        HOPPER.before_pass({"emulated": emulated})
        emulated.use_backend(EMULATED)
        sharded.weight = Sharded(sharded.weight.detach())
        HOPPER.before_pass({"sharded": sharded})
        assert emulated.snip_cache is None and sharded.snip_cache.weights == ()

    def test_a_weight_that_changed_between_forward_and_backward_is_refused_by_torch(self, device: str) -> None:
        """nn.Linear behaves the same; the quantized copy would be the new weight's."""
        layer, x = layer_of(linear(device=device), ("fp8", "fp8", "fp8"), "hopper"), randn(T, I, device=device)
        HOPPER.before_pass({"layer": layer})
        y = layer(x.requires_grad_())
        with torch.no_grad():
            layer.weight.mul_(2)
        HOPPER.before_pass({"layer": layer}, everything=False)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# ------------------------------------------------------------------------------------- whole models


FAMILIES = ["llama", "gpt-neox", "opt", "falcon", "gpt2"]


def model_on(backend: str, family: str, device: str, formats: tuple[str, ...] | None, dtype: torch.dtype) -> Any:
    """A converted model in training mode; formats None draws FP8 or FP4 for each GEMM."""
    model = build(family).to(device, dtype)
    convert_model(model, fp4_config(backend="emulated"))
    draw = torch.Generator().manual_seed(3)
    layers = snip_linears(model)
    PackedStates(layers)
    for layer in layers.values():
        chosen = formats or [("fp8", "fp4")[torch.randint(0, 2, (), generator=draw)] for _ in GEMMS]
        layer.set_formats(dict(zip(GEMMS, chosen, strict=True)))
        layer.use_backend(BACKENDS[backend])
    set_step(layers, 1, 2, 3)
    return model


def tie(model: nn.Module) -> None:
    """Shares the inputs of q, k, v and of gate, up; gives them the formats of the first."""
    layers = snip_linears(model)
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for first in [name for name in layers if name.endswith(group[0])]:
            names = [first.removesuffix(group[0]) + name for name in group]
            for name in names:
                layers[name].set_formats(layers[first].formats)
            HOPPER.share_inputs(layers, [names])


def of_formats(layers: dict[str, SnipLinear], *formats: str) -> None:
    for layer in layers.values():
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))


def training_pass(model: Any, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients under BF16 autocast."""
    model.zero_grad()
    with torch.autocast(device, BF16):
        loss = model(**{name: ids.to(device) for name, ids in batch(4, 64).items()}).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def distances(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[float]:
    assert got.keys() == expected.keys()
    pairs = [(got[name].double(), value.double()) for name, value in expected.items()]
    return [float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs]


# Last bits of BF16 that sums in another order, or in tensor cores, tip single roundings: found on a CPU 0.0017 (the
# gradients of FP32 weights, which are not rounded to BF16 in between). Another key makes 0.04 and more of
# it, other formats 0.1.
CLOSE = {"cpu": 0.003, "cuda": 0.03}
# Through a whole model on a GPU each layer tips some FP4 roundings of the next. What a layer computes, with which key,
# is judged layer by layer, above; this judges that the layers are put together. Found on an H200 in five families: 0.26
# to 0.52 times the distance to the gradients of another key.
OF_ANOTHER_KEY = 0.75
# Of single gradients of a compiled model: found 0.05 to 0.15.
COMPILED_MODEL = 0.3


class TestModel:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
    def test_a_model_trains_as_on_the_emulated_backend(self, device: str, family: str, dtype: torch.dtype) -> None:
        models = [model_on(backend, family, device, None, dtype) for backend in ("hopper", "emulated", "emulated")]
        set_step(snip_linears(models[2]), 1, 2, 4)
        (loss, got), (expected_loss, expected), (_, other) = (training_pass(model, device) for model in models)
        assert abs(loss / expected_loss - 1) < 1e-3
        if device == "cpu":
            # Keys' biases move all of a query's scores alike: what gradient they show is rounding.
            names = [name for name in expected if not name.endswith("k_proj.bias")]
            assert max(distances({n: got[n] for n in names}, {n: expected[n] for n in names})) < CLOSE[device]
        near, far = (distances({"all": flat(gradients)}, {"all": flat(expected)})[0] for gradients in (got, other))
        assert near < OF_ANOTHER_KEY * far

    def test_other_keys_and_formats_are_farther_away_than_that(self, device: str) -> None:
        """Guards the tests of single layers and of compiled ones, and on a CPU the one above."""
        model = model_on("hopper", "llama", device, ("fp8", "fp4", "fp4"), BF16)
        names = [f"{name}.weight" for name in snip_linears(model)]
        _, base = training_pass(model, device)
        set_step(snip_linears(model), 1, 2, 4)
        _, other = training_pass(model, device)
        assert min(distances({n: other[n] for n in names}, {n: base[n] for n in names})) > 1.3 * CLOSE["cuda"]
        of_formats(snip_linears(model), "fp8", "fp8", "fp8")
        _, other = training_pass(model, device)
        assert min(distances({n: other[n] for n in names}, {n: base[n] for n in names})) > 1.3 * CLOSE["cuda"]

    @pytest.mark.parametrize("kept", [False, True], ids=["quantized-in-passes", "kept"])
    def test_shared_inputs_and_kept_weights_change_no_bit(self, device: str, kept: bool) -> None:
        plain, model = (model_on("hopper", "llama", device, ("fp4", "fp4", "fp8"), torch.float32) for _ in range(2))
        tie(model)
        if kept:
            HOPPER.before_pass(snip_linears(model))
        for _ in range(2):
            expected, got = (training_pass(one, device) for one in (plain, model))
            assert torch.equal(got[0], expected[0])
            assert_same(got[1], expected[1])
        assert all(
            layer.snip_cache.tied is None or layer.snip_cache.tied._source is None
            for layer in snip_linears(model).values()
        )

    @pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    def test_recomputed_activations_give_the_same_bits(self, device: str, reentrant: bool, tied: bool) -> None:
        results = []
        for recompute in (False, True):
            model = model_on("hopper", "llama", device, ("fp8", "fp4", "fp4"), torch.float32)
            if tied:
                tie(model)
            if recompute:
                checkpoint_activations(model, reentrant)
                model.enable_input_require_grads()
            results.append([training_pass(model, device) for _ in range(2)])
        for (loss, got), (expected_loss, expected) in zip(*results, strict=True):
            assert torch.equal(loss, expected_loss)
            assert_same(got, expected)


# ------------------------------------------------------------------------------------- driven by a controller


TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.fixture
def on_hopper(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Makes this machine one that has the kernels."""
    monkeypatch.setattr(Hopper, "lacks", lambda self, device: None)
    return stand_in


def driven(**config: Any) -> tuple[Any, SnipController]:
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, SnipController(model, optimizer, fp4_config(**{"policy": "uniform-fp4"} | config))


def output_of(layer: SnipLinear) -> Tensor:
    with torch.no_grad():
        return layer(randn(5, layer.in_features))


def alone(layer: SnipLinear) -> Tensor:
    """Returns the layer's output with nothing kept or shared."""
    twin = copy.deepcopy(layer)
    HOPPER.release({"": twin})
    return output_of(twin)


class TestController:
    def test_weights_are_kept_from_the_step_after_the_first_with_several_micro_batches(
        self, on_hopper: StandIn
    ) -> None:
        model, controller = driven()
        layers = snip_linears(model)
        assert controller.backend == "hopper"
        kept = []
        for step in range(1, 4):
            for _ in range(2):
                controller.capture(batch(2, 32))
                kept.append(all(layer.snip_cache.weights for layer in layers.values()))
            controller.after_step(step)
        assert kept == [False, False, True, True, True, True]
        controller.close()
        assert not any(layer.snip_cache.weights for layer in layers.values())

    def test_one_micro_batch_per_step_keeps_nothing(self, on_hopper: StandIn) -> None:
        model, controller = driven()
        for step in range(1, 4):
            controller.capture(batch(2, 32))
            controller.after_step(step)
        assert not any(layer.snip_cache.weights for layer in snip_linears(model).values())

    def test_no_pass_uses_weights_that_have_changed_since(self, on_hopper: StandIn) -> None:
        model, controller = driven()
        layer = next(iter(snip_linears(model).values()))
        for step in range(1, 3):
            for _ in range(2):
                controller.capture(batch(2, 32))
            controller.after_step(step)
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        assert torch.equal(output_of(layer), alone(layer))  # counted by torch
        layer.weight.data.mul_(2)
        layer.eval()
        assert torch.equal(output_of(layer), alone(layer))  # evaluation takes nothing that was kept
        layer.train()
        controller.capture(batch(2, 32))
        assert layer.snip_cache.weights and torch.equal(output_of(layer), alone(layer))  # a step begins

    def test_two_passes_before_a_backward_pass_recompute_what_they_did(self, on_hopper: StandIn) -> None:
        model, controller = driven()
        checkpoint_activations(model, reentrant=False)
        losses = []
        for _ in range(2):
            controller.capture(batch(2, 32))
            with torch.autocast("cpu", BF16):
                losses.append(model(**batch(2, 32)).loss)
        sum(losses).backward()

    def test_ties_share_inputs_and_a_new_controller_begins_anew(self, on_hopper: StandIn) -> None:
        model, first = driven(ties=TIES)
        layers = snip_linears(model)
        tied = {name.rpartition(".")[2] for name, layer in layers.items() if layer.snip_cache.tied is not None}
        assert tied == {name for tie in TIES for name in tie}
        for step in range(1, 3):
            for _ in range(2):
                first.capture(batch(2, 32))
            first.after_step(step)
        assert all(layer.snip_cache.weights for layer in layers.values())
        del first  # without close()
        optimizer = torch.optim.AdamW(model.parameters())
        SnipController(model, optimizer, fp4_config(policy="uniform-fp8"))
        assert all(layer.snip_cache.weights == () and layer.snip_cache.tied is None for layer in layers.values())

    def test_layers_on_another_kind_of_device_run_emulated(self, on_hopper: StandIn) -> None:
        model, _ = driven()
        layer = next(iter(snip_linears(model).values()))
        output_of(layer)
        assert on_hopper.calls
        on_hopper.calls.clear()
        layer.snip_cache.device = "cuda"  # where the backend was chosen; the weight is on the CPU
        output_of(layer)
        assert on_hopper.calls == []

    @pytest.mark.parametrize(("precision", "warns"), [("no", True), ("bf16", False)])
    def test_a_run_that_does_not_compute_in_bf16_is_told_so(
        self, on_hopper: StandIn, caplog: pytest.LogCaptureFixture, precision: str, warns: bool
    ) -> None:
        model = build("llama").float()
        accelerator = SimpleNamespace(mixed_precision=precision, num_processes=1, distributed_type="NO")
        SnipController(model, torch.optim.AdamW(model.parameters()), fp4_config(policy="uniform-fp4"), accelerator)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == warns * [
            "snip-hf: the GPU has FP8 tensor cores, but the model does not compute in BF16 (mixed_precision='no', "
            "torch.float32 weights): FP8 and FP4 are emulated, slower than BF16. Train with bf16=True."
        ]


# ------------------------------------------------------------------------------------- what dynamo sees, on a CPU


class Unrounded:
    """The operators of `kernels.hopper` in plain torch that dynamo can trace; they round nothing."""

    @staticmethod
    def quantize_tokens(x: Tensor, state: Tensor, rows: int, columns: int, _: bool) -> tuple[Tensor, ...]:
        x = x + 0 * state.sum()
        return x if rows >= 0 else x[:0], x[:1], x.t() if columns >= 0 else x.t()[:0], x[:1]

    @staticmethod
    def quantize_weight(weight: Tensor, state: Tensor, forward: bool, grad_input: bool) -> tuple[Tensor, ...]:
        weight = weight.to(BF16)
        return (
            (weight if forward else weight[:0]),
            weight[:1],
            (weight.t() if grad_input else weight.t()[:0]),
            weight[:1],
        )

    @staticmethod
    def multiply(left: Tensor, _: Tensor, right: Tensor, *arguments: Any) -> Tensor:
        return (left.float() @ right.float().t()).to(arguments[4] if len(arguments) > 4 else BF16)


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q", "k", "v")})])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.layers[0].values())
        return q + k * v


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Siblings]:
    monkeypatch.setattr(hopper, "operators", Unrounded, raising=False)
    model = Siblings()
    convert_model(model, fp4_config())
    PackedStates(snip_linears(model))
    for layer in snip_linears(model).values():
        layer.use_backend(HOPPER)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield model
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("tied", "kept"), [(False, False), (True, True)], ids=["alone-quantized-in-passes", "tied-kept"]
)
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
def test_layers_are_one_graph_and_new_plans_and_steps_compile_nothing(tied: bool, kept: bool, model: Siblings) -> None:
    layers = snip_linears(model)
    for layer in layers.values() if kept else ():
        layer.snip_cache.weights = Unrounded.quantize_weight(layer.weight.detach(), layer.snip_state, True, True)
    if tied:
        HOPPER.share_inputs(layers, [list(layers)])
    compiled, x = torch.compile(model, fullgraph=True, backend="aot_eager"), randn(8, 64, dtype=torch.float32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, formats in enumerate([("fp8", "fp8", "fp8"), ("fp4", "fp8", "fp4"), ("fp8", "fp4", "fp8")]):
            of_formats(layers, *formats)
            set_step(layers, 0, step, 0)
            with torch.autocast("cpu", BF16):
                got, expected = compiled(x), model(x)
            assert torch.equal(got, expected)
            got.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not tied or layers["layers.0.q"].snip_cache.tied._source is None


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
def test_each_pattern_of_bf16_is_a_graph_of_its_own_and_returning_to_one_compiles_nothing(model: Siblings) -> None:
    """`Hopper.recompiles_for_bf16` announces this; FP4 and FP8 are the same pattern."""
    assert HOPPER.recompiles_for_bf16
    compiled, x = torch.compile(model, fullgraph=True, backend="aot_eager"), randn(8, 64, dtype=torch.float32)
    counts = []
    for formats in ("fp8", "fp8", "fp8"), ("bf16", "fp8", "fp8"), ("bf16", "fp8", "bf16"), ("fp4", "fp8", "fp4"):
        of_formats(snip_linears(model), *formats)
        with torch.autocast("cpu", BF16):
            assert torch.equal(compiled(x), model(x))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == [1, 2, 3, 3]


# ------------------------------------------------------------------------------------- compiled, on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
class TestCompiled:
    PLANS = tuple(itertools.product(["fp8", "fp4"], repeat=3))

    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> Iterator[None]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # Rounds to BF16 wherever eager does.
        with torch._inductor.config.patch(emulate_precision_casts=True):
            yield
        torch._dynamo.reset()

    @staticmethod
    def block(tied: bool) -> tuple[nn.Module, dict[str, SnipLinear], Callable[[Callable[..., Any]], dict[str, Tensor]]]:
        """A decoder layer of a Llama, its linears, and a function that passes the same data through it."""
        model = tiny_llama(hidden=256, layers=1).to("cuda", BF16)
        convert_model(model, fp4_config(backend="hopper"))
        layers = snip_linears(model)
        PackedStates(layers)
        of_formats(layers, "fp8", "fp8", "fp8")
        if tied:
            tie(model)
        layer, x = model.model.layers[0], randn(2, 96, 256, device="cuda") / 8
        positions = torch.arange(96, device="cuda")[None]
        embeddings = model.model.rotary_emb(x, positions)
        grad_output = randn(2, 96, 256, seed=9, device="cuda")

        def run(call: Callable[..., Any]) -> dict[str, Tensor]:
            torch.compiler.cudagraph_mark_step_begin()
            given = x.detach().clone().requires_grad_()
            y = call(given, position_embeddings=embeddings, position_ids=positions)
            y = y[0] if isinstance(y, tuple) else y
            wanted = {"x": given, **dict(layer.named_parameters())}
            found = torch.autograd.grad(y, list(wanted.values()), grad_output)
            # Copies: the next pass may write where a CUDA graph leaves its results.
            results = {name: gradient.clone() for name, gradient in zip(wanted, found, strict=True)}
            return {"y": y.detach().clone(), **results}

        return layer, layers, run

    @pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_a_decoder_layer_is_one_graph_under_any_plan(self, backend: str, tied: bool) -> None:
        layer, layers, run = self.block(tied)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step, formats in enumerate(self.PLANS):
                of_formats(layers, *formats)
                set_step(layers, 1, step, 0)
                assert max(distances(run(compiled), run(layer))) < CLOSE["cuda"], formats
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]

    def test_a_plan_with_bf16_is_another_graph_and_the_way_back_is_none(self) -> None:
        layer, layers, run = self.block(False)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        run(compiled)
        of_formats(layers, "bf16", "fp8", "fp4")
        assert max(distances(run(compiled), run(layer))) < CLOSE["cuda"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        of_formats(layers, "fp4", "fp8", "fp8")
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert max(distances(run(compiled), run(layer))) < CLOSE["cuda"]

    @pytest.mark.parametrize("kept", [False, True], ids=["quantized-in-passes", "kept"])
    @pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
    def test_cuda_graphs_read_new_formats_keys_and_weights(self, tied: bool, kept: bool) -> None:
        layer, layers, run = self.block(tied)
        if kept:
            HOPPER.before_pass(layers)
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        for step, formats in enumerate([*self.PLANS, *self.PLANS]):
            of_formats(layers, *formats)
            set_step(layers, 1, step, 0)
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.mul_(1.05)
            if kept:
                HOPPER.before_pass(layers)
            assert max(distances(run(compiled), run(layer))) < CLOSE["cuda"], (step, formats)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0

    @pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
    def test_a_whole_model_is_one_graph_and_trains_as_uncompiled(self, dtype: torch.dtype) -> None:
        model = model_on("hopper", "llama", "cuda", None, dtype)
        tie(model)
        model.config.use_cache = False
        expected_loss, expected = training_pass(model, "cuda")
        model.compile(fullgraph=True)
        loss, got = training_pass(model, "cuda")
        assert abs(loss / expected_loss - 1) < 2e-3
        assert max(distances(got, expected)) < COMPILED_MODEL
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
