"""SnipLinear against nn.Linear and the written-out reference; the swapped model against the original."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import LINEARS, batch, build
from operator_calls import Calls, assert_same
from oracles.rounding import stream_halves
from oracles.three_gemms import GRAD_OUTPUT, Layer
from slow_cases import pairwise
from small import convert_in_formats
from torch import Tensor, nn
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from snip_hf import SnipLinear, SnipLinearConfig, convert_model, register_linear_class, restore_model
from snip_hf.layers.kinds import LAYER_KINDS
from snip_hf.layers.linear import LINEAR_CLASSES, SnipConv1D
from snip_hf.layers.selection import skip_reasons
from snip_hf.layers.state import PackedStates, plain_name, set_step, snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

T, I, O = 150, 200, 136  # tokens, in_features, out_features: ragged in every tiling  # noqa: E741
FAMILIES = list(LINEARS)
NAMES = ("bf16", "fp8", "fp4")
COMBINATIONS = list(itertools.product(NAMES, repeat=3))
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}

each_combination = pytest.mark.parametrize("formats", pairwise(NAMES), ids="/".join)
each_family = pytest.mark.parametrize("family", FAMILIES)


def swapped(linear: nn.Linear, fmt: str = "fp8", seed: int = 0) -> SnipLinear:
    """A copy of `linear` as a SnipLinear; the original stays an nn.Linear."""
    model = nn.Sequential(copy.deepcopy(linear))
    quantize_(model, SnipLinearConfig(start_format=fmt, seed=seed), filter_fn=lambda module, name: name == "0")
    layer = model[0]
    assert isinstance(layer, SnipLinear)
    return layer


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(I, O, bias=bias, dtype=dtype)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(layer: nn.Linear, x: Tensor, grad_output: Tensor | None = None) -> dict[str, Tensor]:
    """The output and the gradients of x, weight and bias of one pass (those that there are)."""
    layer.zero_grad()
    x = x.detach().requires_grad_(x.is_floating_point())
    y = layer(x)
    y.backward(randn(*y.shape, seed=9, dtype=y.dtype) if grad_output is None else grad_output)
    found = {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad}
    found["bias"] = None if layer.bias is None else layer.bias.grad
    return {name: value.clone() for name, value in found.items() if value is not None}


# ---------------------------------------------------------------------------------------------------------------------


class TestGradients:
    KEY = (5, 40, 2, 123)  # seed, step, micro-batch, layer

    def set_key(self, layer: SnipLinear) -> None:
        seed, step, micro_batch, layer.snip_key = self.KEY
        set_step({"layer": layer}, seed, step, micro_batch)

    @staticmethod
    @functools.cache
    def reference(dtype: torch.dtype) -> Layer:
        """The oracle's layer with its tensors rounded to `dtype`; it makes every product once per format."""
        layer = linear(dtype=dtype)
        x, grad_output = randn(T, I, dtype=dtype), randn(T, O, seed=9, dtype=dtype)
        values = (x, layer.weight.detach(), layer.bias.detach(), grad_output)
        return Layer(*(value.float().numpy() for value in values), TestGradients.KEY)

    def check(self, got: dict[str, Tensor], reference: Layer, formats: tuple[str, ...], unit: float) -> None:
        reference.output(formats[0]).check(got["y"].float().numpy(), unit, "y")
        reference.grad_input(formats[1]).check(got["x"].float().numpy(), unit, "grad_input")
        reference.grad_weight(formats[2]).check(got["weight"].float().numpy(), unit, "grad_weight")
        reference.grad_bias.check(got["bias"].float().numpy()[None], unit, "grad_bias")

    @each_combination
    @pytest.mark.parametrize("dtype", UNIT, ids=["float32", "bfloat16"])
    def test_match_the_written_out_reference(self, formats: tuple[str, str, str], dtype: torch.dtype) -> None:
        layer = swapped(linear(dtype=dtype))
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        self.set_key(layer)
        got = gradients(layer, randn(T, I, dtype=dtype))
        assert all(value.dtype == dtype for value in got.values())
        self.check(got, self.reference(dtype), formats, UNIT[dtype])

    @each_combination
    def test_match_the_written_out_reference_under_autocast_and_in_three_dimensions(
        self, formats: tuple[str, str, str]
    ) -> None:
        """FP32 weights and inputs that are BF16 numbers, so that autocast computes what the BF16 reference does."""
        layer = swapped(linear(dtype=torch.bfloat16).float())
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        self.set_key(layer)
        with torch.autocast("cpu", torch.bfloat16):
            x = randn(T, I, dtype=torch.bfloat16).float().view(3, T // 3, I)
            got = gradients(layer, x, randn(T, O, seed=9, dtype=torch.bfloat16).view(3, T // 3, O))
        assert got["y"].dtype == torch.bfloat16 and got["y"].shape == (3, T // 3, O)
        assert all(got[name].dtype == torch.float32 for name in ("x", "weight", "bias"))
        flat = {name: value.flatten(0, 1) if value.dim() == 3 else value for name, value in got.items()}
        self.check(flat, self.reference(torch.bfloat16), formats, UNIT[torch.bfloat16])

    @each_combination
    def test_under_autocast_are_those_of_a_layer_in_the_autocast_dtype(self, formats: tuple[str, str, str]) -> None:
        """Weight, bias and input are rounded to BF16 before anything else, as autocast does for nn.Linear."""
        mixed, pure = swapped(linear()), swapped(linear().to(torch.bfloat16))
        for layer in (mixed, pure):
            layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        with torch.autocast("cpu", torch.bfloat16):
            got = gradients(mixed, randn(T, I))
        expected = gradients(pure, randn(T, I, dtype=torch.bfloat16))
        assert_same(got, {name: value if name == "y" else value.float() for name, value in expected.items()})

    @each_combination
    def test_do_not_depend_on_dimensions_or_strides(self, formats: tuple[str, str, str]) -> None:
        layer = swapped(linear())
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        x, grad_output = randn(60, I), randn(60, O, seed=1)
        flat = gradients(layer, x, grad_output)
        for shape in ((3, 20), (2, 3, 10), (1, 60)):
            got = gradients(layer, x.view(*shape, I), grad_output.view(*shape, O))
            assert_same({name: value.view(flat[name].shape) for name, value in got.items()}, flat)
        turned = x.view(3, 20, I).transpose(0, 1).contiguous().transpose(0, 1)
        got = gradients(layer, turned, grad_output.view(3, 20, O))
        got["y"], got["x"] = got["y"].reshape(60, O), got["x"].reshape(60, I)
        for name, value in flat.items():
            # In BF16 aten adds the bias to such inputs in its own way, as for nn.Linear.
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5 if formats[0] == "bf16" else 0)

    def test_one_token_as_a_vector(self) -> None:
        layer = swapped(linear(), "fp4")
        vector, row = gradients(layer, randn(I)), gradients(layer, randn(1, I))
        assert vector["y"].shape == (O,)
        assert_same(vector, {name: value.view(vector[name].shape) for name, value in row.items()})


INPUTS: dict[str, Callable[[], Tensor]] = {
    "2-D": lambda: randn(37, I),
    "3-D": lambda: randn(3, 37, I),
    "4-D": lambda: randn(2, 3, 7, I),
    "1-D": lambda: randn(I),
    "transposed": lambda: randn(I, 37).t(),
    "batch-second": lambda: randn(37, 3, I).transpose(0, 1),
    "features-first": lambda: randn(3, I, 37).transpose(1, 2),
    "every-second": lambda: randn(3, 37, 2 * I)[..., ::2],
    "expanded": lambda: randn(1, 37, I).expand(3, 37, I),
    "4-D-heads": lambda: randn(2, 5, 3, I).transpose(1, 2),
    "empty": lambda: randn(0, I),
    "empty-3-D": lambda: randn(2, 0, I),
}


class TestBf16:
    """With all three GEMMs in BF16 a SnipLinear is an nn.Linear, to the bit."""

    @pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
    @pytest.mark.parametrize("shape", INPUTS)
    @pytest.mark.parametrize("mode", ["float32", "bfloat16", "float16", "autocast"])
    def test_gives_the_bits_of_nn_linear(self, mode: str, shape: str, with_bias: bool) -> None:
        dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
        plain = linear(with_bias, dtype)
        x = INPUTS[shape]().to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            assert_same(gradients(swapped(plain, "bf16"), x), gradients(plain, x))
            with torch.no_grad():
                assert torch.equal(swapped(plain, "bf16")(x), plain(x))

    @each_family
    @pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
    def test_a_converted_model_trains_with_the_bits_of_the_plain_one(self, family: str, autocast: bool) -> None:
        plain, converted = build(family), build(family)
        convert_in_formats(converted, fp4_config(start_format="bf16"))
        losses = []
        for model in (plain, converted):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch()).loss
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
        assert_same(
            {name: parameter.grad for name, parameter in converted.named_parameters()},
            {name: parameter.grad for name, parameter in plain.named_parameters()},
        )


@pytest.mark.parametrize(
    ("fmt", "shape", "with_bias"),
    [
        # All formats on one shape, and all shapes in one format.
        (fmt, shape, with_bias)
        for fmt in FORMATS
        for shape in INPUTS
        for with_bias in (True, False)
        if shape == "2-D" or fmt == "fp4"
    ],
)
def test_an_output_can_be_changed_in_place(fmt: str, shape: str, with_bias: bool) -> None:
    """Falcon's parallel attention does this with `attention_output += mlp_output`."""
    layer, x = swapped(linear(with_bias), fmt), INPUTS[shape]()
    expected = gradients(layer, x)
    layer.register_forward_hook(lambda module, args, output: output.add_(0.0))
    assert_same(gradients(layer, x), expected)


class TestStep:
    """Tests the keys of the random numbers, as a layer uses them."""

    @pytest.mark.parametrize("field", ["seed", "step", "micro_batch"])
    def test_each_part_of_the_key_changes_fp4_gradients_only(self, field: str) -> None:
        layer = swapped(linear(), "fp4")
        key = {"seed": 1, "step": 2, "micro_batch": 3}
        set_step({"layer": layer}, **key)
        first, again = gradients(layer, randn(T, I)), gradients(layer, randn(T, I))
        assert_same(again, first)
        set_step({"layer": layer}, **{**key, field: 9})
        other = gradients(layer, randn(T, I))
        assert torch.equal(other["y"], first["y"]) and torch.equal(other["bias"], first["bias"])
        assert not torch.equal(other["x"], first["x"]) and not torch.equal(other["weight"], first["weight"])

    @pytest.mark.parametrize("packed", [False, True])
    def test_setting_the_step_writes_the_oracle_s_keys_and_leaves_formats_alone(self, packed: bool) -> None:
        """Keys of both signs, whether the states are rows of one tensor or one tensor each."""
        model = build("llama")
        convert_model(model, fp4_config())
        layers = snip_linears(model)
        for index, layer in enumerate(layers.values()):
            layer.set_formats(dict(zip(GEMMS, COMBINATIONS[index], strict=True)))
        before = states(model)
        write = PackedStates(dict(reversed(layers.items()))).set_step if packed else functools.partial(set_step, layers)
        for key in ((2**40 + 1, 77, 5), (0, 1, 0), (2**64 - 1, 2**32 - 1, 3)):
            write(*key)
            numbers = {name: key_number(*key, zlib.crc32(name.encode())) for name in layers}
            assert states(model) == {name: [*before[name][:3], numbers[name], 0, 1] for name in layers}
            assert {number < 0 for number in numbers.values()} == {True, False}

    def test_packed_states_are_rows_of_one_tensor_until_a_layer_gets_another_state(self) -> None:
        """As by `module.to(device)`."""
        model = build("llama")
        convert_model(model, fp4_config(seed=9))
        layers, before = snip_linears(model), states(model)
        packed, name = PackedStates(layers), list(layers)[3]
        assert packed.are_in_place and states(model) == before
        assert len({layer.snip_state.untyped_storage().data_ptr() for layer in layers.values()}) == 1
        layers[name].set_formats(dict.fromkeys(GEMMS, "fp4"))
        assert states(model) == {**before, name: [2, 2, 2, *before[name][3:]]}
        layers[name].snip_state = layers[name].snip_state.clone()
        assert not packed.are_in_place
        again = PackedStates(layers)
        assert again.are_in_place and not packed.are_in_place
        layers[name].restore()
        assert not again.are_in_place

    def test_a_rank_that_is_set_again_is_not_brought_to_the_device_again(self) -> None:
        found = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is torch.ops.aten.copy_.default:
                    found.append((args[0].device.type, args[1].device.type))
                return function(*args, **(kwargs or {}))

        model = build("llama")
        convert_model(model, fp4_config())
        layers = snip_linears(model)
        for layer in layers.values():
            layer.snip_state = layer.snip_state.to("meta")
        packed = PackedStates(layers)
        packed.set_rank(3, 8)
        with Copies():
            packed.set_rank(3, 8)
        assert found == [("meta", "meta")]

    def test_the_rank_stays_what_it_was_set_to(self) -> None:
        model = build("llama")
        convert_model(model, fp4_config())
        layers, before = snip_linears(model), states(model)
        packed = PackedStates(layers)
        packed.set_rank(3, 8)
        assert states(model) == {name: [*numbers[:4], 3, 8] for name, numbers in before.items()}
        packed.set_step(1, 2, 3)
        next(iter(layers.values())).set_formats(dict.fromkeys(GEMMS, "fp4"))
        assert all(numbers[4:] == [3, 8] for numbers in states(model).values())


class TestRanks:
    """One process with all tokens against two that share them. All numbers are on FP4's grid or, of gradients, between
    its numbers with scales of 1, so that every sum is exact and results must be the same bit for bit."""

    TOKENS = 256

    @staticmethod
    def exact(*shape: int, seed: int, steps: int) -> Tensor:
        """Multiples of 1 / steps up to 6, which the first of every 128 in each direction is."""
        x = torch.randint(-6 * steps, 6 * steps + 1, shape, generator=torch.Generator().manual_seed(seed)) / steps
        x[::128], x[:, ::128] = 6.0, -6.0
        return x

    def layer(self) -> SnipLinear:
        layer = swapped(nn.Linear(256, 384, bias=False), "fp4", seed=3)
        layer.weight.data = self.exact(384, 256, seed=0, steps=2)
        return layer

    def part(self, rank: int, ranks: int, scale: float = 1.0, tokens: tuple[int, int] | None = None) -> list[Tensor]:
        """Output, grad_input and grad_weight of a rank's tokens."""
        first, last = tokens or (self.TOKENS // ranks * rank, self.TOKENS // ranks * (rank + 1))
        x = self.exact(self.TOKENS, 256, seed=1, steps=2)[first:last]
        grad_output = self.exact(self.TOKENS, 384, seed=2, steps=16)[first:last]
        layer = self.layer()
        PackedStates({"layer": layer}).set_rank(rank, ranks)
        found = gradients(layer, x, grad_output * scale)
        return [found["y"], found["x"], found["weight"]]

    @pytest.mark.parametrize("scale", [1.0, 2.0, 2.0**-9])
    def test_that_share_the_tokens_compute_what_one_process_does(self, scale: float) -> None:
        """Also with gradients scaled by a power of two, as those of a mean over fewer tokens are."""
        output, grad_input, grad_weight = self.part(0, 1)
        first, second = self.part(0, 2, scale), self.part(1, 2, scale)
        assert torch.equal(torch.cat([first[0], second[0]]), output)
        assert torch.equal(torch.cat([first[1], second[1]]), grad_input * scale)
        assert torch.equal(first[2] + second[2], grad_weight * scale)

    def test_draw_other_numbers_than_each_other(self) -> None:
        tokens = (128, 256)
        (first, *first_grads), (second, *second_grads) = (self.part(rank, 2, tokens=tokens) for rank in range(2))
        assert torch.equal(first, second)
        assert all((a != b).float().mean() > 0.9 for a, b in zip(first_grads, second_grads, strict=True))


class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    @pytest.mark.parametrize("formats", ["bf16", "fp8", "fp4"])
    def test_recomputation_gives_the_same_bits(self, formats: str, reentrant: bool) -> None:
        first, second = swapped(nn.Linear(I, O), formats), swapped(nn.Linear(O, I), formats)
        block = nn.Sequential(first, nn.GELU(), second)
        set_step({"a": first, "b": second}, 1, 2, 3)

        def run(recompute: bool) -> list[Tensor]:
            block.zero_grad()
            x = randn(2, 40, I).requires_grad_()
            y = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
            y.square().mean().backward()
            assert x.grad is not None
            return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in block.parameters())]

        assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))

    @pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    @pytest.mark.parametrize("family", ["llama", "opt"])
    def test_a_model_in_fp4_has_the_same_gradients(self, family: str, reentrant: bool) -> None:
        def run(recompute: bool) -> dict[str, Tensor]:
            model = build(family)
            convert_model(model, fp4_config())
            for layer in snip_linears(model).values():
                layer.set_formats(dict.fromkeys(GEMMS, "fp4"))
            if recompute:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            with Calls() as calls:
                model(**batch()).loss.backward()
            assert calls.names.count("forward_gemm") == len(LINEARS[family]) * (1 + recompute)
            return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

        assert_same(run(True), run(False))


class TestWhatIsNotNeeded:
    def test_everything_needed_runs_each_gemm_once(self) -> None:
        with Calls() as calls:
            gradients(swapped(linear()), randn(4, I))
        assert calls.names == ["forward_gemm", "grad_input_gemm", "grad_weight_gemm"]

    @pytest.mark.parametrize("fmt", tuple(FORMATS))
    def test_a_frozen_weight_has_no_gradient_computed(self, fmt: str) -> None:
        layer = swapped(linear(), fmt)
        trained = gradients(layer, randn(4, I))
        layer.weight.requires_grad_(False)
        layer.weight.grad = None
        with Calls() as calls:
            got = gradients(layer, randn(4, I))
        assert calls.names == ["forward_gemm", "grad_input_gemm"]
        assert_same(got, {name: value for name, value in trained.items() if name != "weight"})

    @pytest.mark.parametrize("fmt", tuple(FORMATS))
    def test_a_frozen_input_has_no_gradient_computed(self, fmt: str) -> None:
        layer = swapped(linear(), fmt)
        trained = gradients(layer, randn(4, I))
        layer.zero_grad()
        with Calls() as calls:
            layer(randn(4, I)).backward(randn(4, O, seed=9))
        assert calls.names == ["forward_gemm", "grad_weight_gemm"]
        assert torch.equal(layer.weight.grad, trained["weight"]) and torch.equal(layer.bias.grad, trained["bias"])

    def test_a_bias_alone_can_be_trained(self) -> None:
        layer = swapped(linear())
        layer.weight.requires_grad_(False)
        with Calls() as calls:
            layer(randn(4, I)).sum().backward()
        assert calls.names == ["forward_gemm"] and torch.equal(layer.bias.grad, torch.full((O,), 4.0))

    def test_a_frozen_bias_has_no_gradient(self) -> None:
        layer = swapped(linear())
        layer.bias.requires_grad_(False)
        assert "bias" not in gradients(layer, randn(4, I))

    def test_no_grad_runs_the_forward_gemm_only_and_gives_the_same_output(self) -> None:
        layer = swapped(linear(), "fp4")
        expected = gradients(layer, randn(4, I))["y"]
        with Calls() as calls, torch.no_grad():
            got = layer(randn(4, I))
        assert calls.names == ["forward_gemm"] and torch.equal(got, expected) and not got.requires_grad

    @each_combination
    @pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0)], ids=str)
    def test_empty_batches_pass_forward_and_backward(self, formats: tuple[str, ...], shape: tuple[int, ...]) -> None:
        layer = swapped(linear())
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        got = gradients(layer, torch.empty(*shape, I))
        assert got["y"].shape == (*shape, O) and got["x"].shape == (*shape, I)
        assert torch.equal(got["weight"], torch.zeros(O, I)) and torch.equal(got["bias"], torch.zeros(O))


class TestFormats:
    @each_combination
    def test_are_read_back_as_they_were_set(self, formats: tuple[str, str, str]) -> None:
        layer = swapped(linear())
        wanted = dict(zip(GEMMS, formats, strict=True))
        layer.set_formats(dict(reversed(wanted.items())))
        assert layer.formats == wanted and f"formats={'/'.join(formats)}" in repr(layer)

    def test_take_effect_at_the_next_pass_without_rebuilding(self) -> None:
        """Also when the codes are written into the state tensor directly, in place."""
        layer = swapped(linear(), "bf16")
        state = layer.snip_state
        expected = {fmt: gradients(swapped(linear(), fmt), randn(T, I)) for fmt in tuple(FORMATS)}
        for code, fmt in ((2, "fp4"), (0, "bf16"), (1, "fp8"), (2, "fp4")):
            layer.set_formats(dict.fromkeys(GEMMS, fmt))
            assert_same(gradients(layer, randn(T, I)), expected[fmt])
            layer.set_formats(dict.fromkeys(GEMMS, "bf16"))
            state[:3] = code
            assert_same(gradients(layer, randn(T, I)), expected[fmt])
        assert layer.snip_state is state

    @pytest.mark.parametrize(
        ("formats", "message"),
        [
            (
                {"forward": "fp4", "grad_input": "fp4"},
                "Got formats for ['forward', 'grad_input']; expected exactly forward, grad_input, grad_weight.",
            ),
            (
                dict.fromkeys([*GEMMS, "lm_head"], "fp8"),
                "Got formats for ['forward', 'grad_input', 'grad_weight', 'lm_head']; expected exactly forward, "
                "grad_input, grad_weight.",
            ),
            (
                {**dict.fromkeys(GEMMS, "fp8"), "grad_input": "int9"},
                "Unknown format 'int9' for grad_input. Did you mean 'int8'? `list(snip_hf.formats)` lists all "
                f"{len(FORMATS)}. A format of your own is registered first: by `snip_hf.register_format`, or by "
                "`--import MODULE` on the command line.",
            ),
        ],
    )
    def test_that_are_wrong_are_refused_and_change_nothing(self, formats: dict[str, str], message: str) -> None:
        layer = swapped(linear(), "fp8")
        before = layer.snip_state.clone()
        with pytest.raises(ValueError) as error:
            layer.set_formats(formats)
        assert str(error.value) == message and torch.equal(layer.snip_state, before)


# ---------------------------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """Every module by identity, with its class and its __dict__ in order; what is in there by identity as well,
    but for numbers."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, id(item)) for key, item in value.items()]
        if isinstance(value, set):
            return sorted(value)
        return value if isinstance(value, int) else id(value)

    return [
        (name, id(module), type(module), [(key, shown(value)) for key, value in vars(module).items()])
        for name, module in model.named_modules()
    ]


def key_number(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """The key in a state: the oracle's two halves of the output gradient's stream as a signed integer."""
    low, high = stream_halves(seed, step, micro_batch, layer, GRAD_OUTPUT)
    return low | (high - 2**32 if high >= 2**31 else high) << 32


def states(model: nn.Module) -> dict[str, list[int]]:
    """Returns layer -> the numbers of its state tensor."""
    return {name: layer.snip_state.tolist() for name, layer in snip_linears(model).items()}


@each_family
class TestConvert:
    def test_returns_the_names_in_the_model_s_order(self, family: str) -> None:
        model = build(family)
        order = [name for name, _ in model.named_modules() if name in LINEARS[family]]
        assert convert_model(model, fp4_config()) == order == list(snip_linears(model))

    def test_leaves_parameters_ties_buffers_and_keys_as_they_were(self, family: str) -> None:
        model = build(family)
        before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        keys, buffers = list(model.state_dict()), {name for name, _ in model.named_buffers()}
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        convert_model(model, fp4_config())
        assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == before
        assert list(model.state_dict()) == keys
        assert_same(model.state_dict(), weights)
        added = {name for name, _ in model.named_buffers()} - buffers
        assert added == {f"{name}.snip_state" for name in LINEARS[family]}

    def test_then_restore_is_the_identity(self, family: str) -> None:
        model = build(family)
        handles = [module.register_forward_hook(lambda *_: None) for module in list(model.modules())[-3:]]
        before = snapshot(model)
        convert_model(model, fp4_config())
        assert snapshot(model) != before
        restore_model(model)
        assert snapshot(model) == before
        assert not snip_linears(model)
        for handle in handles:
            handle.remove()

    def test_twice_is_once(self, family: str) -> None:
        model = build(family)
        names = convert_model(model, fp4_config(seed=4))
        snip_linears(model)[names[0]].set_formats(dict.fromkeys(GEMMS, "fp4"))
        before, numbers = snapshot(model), states(model)
        assert convert_model(model, fp4_config(seed=4)) == names
        assert snapshot(model) == before and states(model) == numbers

    def test_starts_plainly_with_the_config_s_seed_and_a_key_from_the_name(self, family: str) -> None:
        model = build(family)
        convert_model(model, fp4_config(seed=2**40 + 3))
        for name, layer in snip_linears(model).items():
            assert layer.snip_is_plain and layer.formats == dict.fromkeys(GEMMS, "bf16")
            assert layer.snip_state.tolist() == [0] * 3 + [key_number(2**40 + 3, 0, 0, layer.snip_key), 0, 1]
            assert layer.snip_key == zlib.crc32(name.encode())
            assert layer.snip_state.dtype == torch.int64

    def test_a_deep_copy_is_a_converted_model_of_its_own(self, family: str) -> None:
        model = build(family)
        convert_model(model, fp4_config())
        twin = copy.deepcopy(model)
        assert list(snip_linears(twin)) == list(snip_linears(model))
        for layer in snip_linears(model).values():
            layer.set_formats(dict.fromkeys(GEMMS, "fp4"))
        assert all(layer.snip_is_plain for layer in snip_linears(twin).values())
        assert not torch.equal(model(**batch()).loss, twin(**batch()).loss)
        for layer in snip_linears(twin).values():
            layer.set_formats(dict.fromkeys(GEMMS, "fp4"))
        assert torch.equal(model(**batch()).loss, twin(**batch()).loss)

    def test_is_invisible_in_saved_checkpoints(self, family: str, tmp_path: Path) -> None:
        """save_pretrained writes the same files; plain transformers loads them and computes what it did."""
        plain, model = build(family), build(family)
        convert_model(model, fp4_config())
        plain.save_pretrained(tmp_path / "plain")
        model.save_pretrained(tmp_path / "converted")
        for path in (tmp_path / "plain").iterdir():
            assert path.read_bytes() == (tmp_path / "converted" / path.name).read_bytes(), path.name
        assert "quantization_config" not in json.loads((tmp_path / "converted" / "config.json").read_text())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").train()
        assert not snip_linears(loaded)
        assert_same(loaded.state_dict(), plain.state_dict())
        assert torch.equal(loaded(**batch()).loss, plain(**batch()).loss)


class TestHooks:
    def test_run_as_before_and_see_the_same_tensors(self) -> None:
        """Forward pre-hooks, forward hooks, full backward hooks and gradient hooks, put on before the swap."""
        model = build("gpt-neox")
        layer = model.get_submodule("gpt_neox.layers.1.mlp.dense_h_to_4h")
        seen: list[str] = []
        layer.register_forward_pre_hook(lambda module, args: seen.append("pre"))
        layer.register_forward_hook(lambda module, args, output: seen.append(f"forward {tuple(output.shape)}"))
        layer.register_full_backward_hook(lambda module, into, out: seen.append(f"backward {tuple(out[0].shape)}"))
        layer.weight.register_hook(lambda grad: seen.append(f"weight {tuple(grad.shape)}"))
        model(**batch()).loss.backward()
        plain, seen[:] = list(seen), []
        convert_model(model, fp4_config())
        model(**batch()).loss.backward()
        assert sorted(seen) == sorted(plain) and len(plain) == 4

    def test_a_hook_on_a_converted_layer_can_replace_its_output(self) -> None:
        layer = swapped(linear())
        layer.register_forward_hook(lambda module, args, output: output * 0)
        assert (layer(randn(3, I)) == 0).all()


class TestDevicesAndDtypes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_casting_a_converted_model_leaves_the_state_alone(self, dtype: torch.dtype) -> None:
        model = build("llama")
        convert_model(model, fp4_config())
        before = states(model)
        model.to(dtype)
        assert states(model) == before and next(model.parameters()).dtype == dtype
        assert all(layer.snip_state.dtype == torch.int64 for layer in snip_linears(model).values())

    def test_pickling_keeps_class_state_and_weights(self, tmp_path: Path) -> None:
        layer = swapped(linear(), "fp4")
        torch.save(layer, tmp_path / "layer.pt")
        loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
        assert type(loaded) is SnipLinear and torch.equal(loaded.snip_state, layer.snip_state)
        assert_same(gradients(loaded, randn(T, I)), gradients(layer, randn(T, I)))


def test_a_weight_shared_by_two_linears_stays_shared_and_sums_both_gradients() -> None:
    """Two layers of one parameter; the gradient is the sum over the layers taken by themselves."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])})
    first, second = model["layers"]
    second.weight = first.weight
    assert convert_model(model, fp4_config()) == ["layers.0", "layers.1"]
    assert first.weight is second.weight
    x = randn(5, 8)
    alone = [gradients(layer, x)["weight"] for layer in (first, second)]
    first.zero_grad()
    grad_output = randn(5, 8, seed=9)
    torch.autograd.backward([first(x), second(x)], [grad_output, grad_output])
    assert torch.equal(first.weight.grad, alone[0] + alone[1])


def test_a_layer_under_two_names_is_swapped_once_and_stays_one_layer() -> None:
    block = nn.ModuleDict({"up": nn.Linear(8, 8)})
    model = nn.ModuleDict({"layers": nn.ModuleList([block, block])})
    assert convert_model(model, fp4_config()) == ["layers.0.up"]
    assert model["layers"][0]["up"] is model["layers"][1]["up"]
    restore_model(model)
    assert type(model["layers"][1]["up"]) is nn.Linear


# ---------------------------------------------------------------------------------------------------------------------


class Router(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).softmax(-1)


class Lora(nn.Module):
    """A linear with an adapter, in the names that PEFT gives."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})


class TestSkipping:
    def test_the_head_is_found_by_identity_under_any_name(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 8), "out": nn.Linear(8, 8)})])
                self.lm_head = nn.Linear(8, 8)

            def get_output_embeddings(self) -> nn.Module:
                return self.layers[0]["out"]

        model = Odd()
        assert skip_reasons(model, fp4_config()) == {
            "layers.0.up": None,
            "layers.0.out": "output head",
            "lm_head": "outside the transformer blocks",
        }
        assert convert_model(model, fp4_config()) == ["layers.0.up"]

    def test_subclasses_with_another_forward_are_skipped_by_class(self) -> None:
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 8), "gate": Router(8, 4)})])})
        assert skip_reasons(model, fp4_config()) == {"layers.0.up": None, "layers.0.gate": "class Router"}
        convert_model(model, fp4_config())
        assert type(model["layers"][0]["gate"]) is Router

    def test_adapters_stay_in_high_precision_and_their_base_layer_does_not(self) -> None:
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": Lora()})])})
        assert skip_reasons(model, fp4_config()) == {
            "layers.0.q_proj": None,
            "layers.0.q_proj.lora_A.default": "adapter",
            "layers.0.q_proj.lora_B.default": "adapter",
        }
        assert convert_model(model, fp4_config()) == ["layers.0.q_proj"]

    def test_a_reason_does_not_depend_on_being_converted_already(self) -> None:
        model = build("falcon")
        before = skip_reasons(model, fp4_config())
        convert_model(model, fp4_config())
        assert skip_reasons(model, fp4_config()) == before

    @pytest.mark.parametrize(
        ("patterns", "skipped"),
        [
            (["model.layers.1.mlp.down_proj"], {"model.layers.1.mlp.down_proj"}),
            (["*.down_proj"], {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
            (["model.layers.0.*"], {name for name in LINEARS["llama"] if ".0." in name}),
            (["*.self_attn.[qk]_proj"], {n for n in LINEARS["llama"] if n.endswith(("q_proj", "k_proj"))}),
            (["*.q_proj", "model.layers.?.mlp.*"], {n for n in LINEARS["llama"] if "mlp" in n or n.endswith("q_proj")}),
            (["lm_head"], set()),  # skipped anyway, but it is a linear
        ],
    )
    def test_skip_modules_take_exact_names_and_globs(self, patterns: list[str], skipped: set[str]) -> None:
        model = build("llama")
        names = convert_model(model, fp4_config(skip_modules=tuple(patterns)))
        assert set(names) == LINEARS["llama"] - skipped

    @pytest.mark.parametrize("pattern", ["down_proj", "layers.1", "model.layers.1", "*.DOWN_PROJ", "model.norm"])
    def test_a_pattern_is_never_a_substring_and_one_that_matches_nothing_is_named(self, pattern: str) -> None:
        model = build("llama")
        with pytest.raises(ValueError) as error:
            convert_model(model, fp4_config(skip_modules=("*.up_proj", pattern)))
        assert str(error.value) == (
            f"skip_modules: {pattern!r} matches no linear layer; the layers are named like "
            "'model.layers.0.self_attn.q_proj'. Use exact names or globs over the whole name, such as '*.down_proj'."
        )
        assert not snip_linears(model)

    def test_swapped_and_skipped_layers_are_logged_with_reasons(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
            convert_model(build("llama"), fp4_config(skip_modules=("*.self_attn.*",)))
        assert caplog.messages == [
            "snip-hf swapped 6 layers; skipped 9 (skip_modules: 8, output head: 1).",
            "snip-hf: these weights stay in high precision (embeddings and output head aside): "
            "model.layers.*.self_attn.q_proj x 2 (Linear, skip_modules), "
            "model.layers.*.self_attn.o_proj x 2 (Linear, skip_modules), "
            "model.layers.*.self_attn.k_proj x 2 (Linear, skip_modules), "
            "model.layers.*.self_attn.v_proj x 2 (Linear, skip_modules).",
        ]

    def test_a_compiled_block_leaves_the_names_and_the_random_numbers_as_they_are(self) -> None:
        names, keys = [], []
        for compiled in (False, True):
            model = build("llama")
            if compiled:
                model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
            assert any("_orig_mod" in name for name, _ in model.named_modules()) == compiled
            names.append(convert_model(model, fp4_config()))
            assert list(snip_linears(model)) == names[-1]
            keys.append(list(states(model).values()))
        assert names[0] == names[1] and set(names[0]) == LINEARS["llama"]
        assert keys[0] == keys[1]

    @pytest.mark.parametrize(
        ("name", "plain"),
        [
            ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
            ("_orig_mod.model.layers.0._orig_mod.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("layers.3._checkpoint_wrapped_module._orig_mod.up", "layers.3.up"),
            ("snip_part_12.layers.3.up", "layers.3.up"),
            ("model.snip_part_1.up", "model.snip_part_1.up"),  # only in front
            # PEFT's, around a model and its layers; prompts leave the layers as they are.
            ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
            ("base_model.model.model.layers.0.q_proj.lora_A.default", "model.layers.0.q_proj.lora_A.default"),
            ("base_model.model.layers.0.q_proj", "model.layers.0.q_proj"),
            ("base_model.model.decoder.layers.0.fc1", "model.decoder.layers.0.fc1"),
            ("base_model.model.language_model.layers.0.up", "model.language_model.layers.0.up"),
            ("base_model.model.model.decoder.layers.0.fc1.base_layer", "model.decoder.layers.0.fc1"),
            ("base_model.model.decoder.block.0.layer.1.up", "decoder.block.0.layer.1.up"),  # T5's under LoRA
            ("base_model.transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn"),
            ("base_model.model.lm_head", "lm_head"),
            ("model.layers.0.q_proj.base_layer", "model.layers.0.q_proj"),
            ("model.base_layers.0.up", "model.base_layers.0.up"),
            # Two parameters of one module have two adapters.
            ("layers.0.experts.lora_A.default.weight", "layers.0.experts.lora_A.default.weight"),
            ("layers.0.experts.base_layer.lora_A.default.weight", "layers.0.experts.base_layer.lora_A.default.weight"),
            ("layers.0.experts.base_layer.base_layer.down_proj", "layers.0.experts.down_proj"),
        ],
    )
    def test_a_plain_name_is_without_what_wrappers_put_in(self, name: str, plain: str) -> None:
        assert plain_name(name) == plain

    def test_skipping_a_layer_leaves_the_random_numbers_of_the_others_alone(self) -> None:
        keys = []
        for config in (fp4_config(), fp4_config(skip_modules=("model.layers.0.*",))):
            model = build("llama")
            convert_model(model, config)
            keys.append({name: numbers[3] for name, numbers in states(model).items()})
        assert keys[1].items() < keys[0].items()
        assert len(set(keys[0].values())) == len(LINEARS["llama"])


class TestRefusals:
    def test_models_without_linears_are_refused_with_the_classes_that_they_have(self) -> None:
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Conv1d(8, 8, 3)]), "out": nn.Linear(8, 8)})
        before = snapshot(model)
        with pytest.raises(ValueError) as error:
            convert_model(model, fp4_config())
        assert str(error.value) == (
            "No layer of ModuleDict can be swapped: 1 linears are skipped (outside the transformer blocks: out); "
            "modules with weights are of the classes Conv1d, Linear. Expected at least one nn.Linear inside a "
            "numbered block: check skip_modules, name linears elsewhere in include_modules, or add another class of "
            "modules with register_layer_kind (docs/extending.md)."
        )
        assert snapshot(model) == before

    def test_skipping_everything_says_so(self) -> None:
        with pytest.raises(ValueError) as error:
            convert_model(build("llama"), fp4_config(skip_modules=("model.layers.*",)))
        assert str(error.value) == (
            "No layer of LlamaForCausalLM can be swapped: 15 linears are skipped (skip_modules: "
            "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj, ...; "
            "output head: lm_head); modules with weights are of the classes Embedding, Linear, LlamaRMSNorm. Expected "
            "at least one nn.Linear inside a numbered block: check skip_modules, name linears elsewhere in "
            "include_modules, or add another class of modules with register_layer_kind (docs/extending.md)."
        )

    def test_anything_but_a_config_is_refused(self) -> None:
        model: Any = build("llama")
        config: Any = {"target_fp4_fraction": 0.5}
        with pytest.raises(TypeError, match=r"Got a dict for config; expected a SnipConfig, .*SnipConfig\.from_dict"):
            convert_model(model, config)

    def test_a_model_without_weights_says_so(self) -> None:
        with pytest.raises(ValueError, match=r"0 linears are skipped \(none\); .* of the classes none\."):
            convert_model(nn.Sequential(nn.GELU()), fp4_config())

    def quantized(self, **attributes: Any) -> PreTrainedModel:
        model = build("llama")
        model.config = copy.deepcopy(model.config)
        for name, value in attributes.items():
            setattr(model.config if name == "quantization_config" else model, name, value)
        return model

    def test_a_model_with_a_quantization_config_is_refused(self) -> None:
        model = self.quantized(quantization_config={"quant_method": "bitsandbytes"})
        with pytest.raises(ValueError) as error:
            convert_model(model, fp4_config())
        assert str(error.value) == (
            "The model is already quantized (dict); expected ordinary weights. Load it without a quantization_config, "
            "or dequantize it first."
        )
        assert not snip_linears(model)

    def test_a_model_marked_as_quantized_is_refused(self) -> None:
        with pytest.raises(ValueError) as error:
            convert_model(self.quantized(is_quantized=True), fp4_config())
        assert str(error.value) == (
            "The model is already quantized (is_quantized is set); expected ordinary weights. Load it without a "
            "quantization_config, or dequantize it first."
        )

    def test_integer_weights_are_refused_by_name(self) -> None:
        model = build("llama")
        layer = model.model.layers[1].mlp.up_proj
        layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
        with pytest.raises(ValueError) as error:
            convert_model(model, fp4_config())
        assert str(error.value) == (
            "Layer 'model.layers.1.mlp.up_proj' has torch.int8 weights of the type Parameter; expected ordinary "
            "floating-point weights. Load the model without quantization."
        )

    def test_a_model_quantized_by_torchao_is_refused(self) -> None:
        model = build("llama")
        quantize_(model, Int8WeightOnlyConfig())
        with pytest.raises(
            ValueError, match=r"'model.layers.0.self_attn.q_proj' has torch.float32 weights of the type Int8"
        ):
            convert_model(model, fp4_config())
        assert not snip_linears(model)

    def test_a_layer_that_a_second_config_skips_is_restored(self) -> None:
        model = build("llama")
        convert_model(model, fp4_config())
        names = convert_model(model, fp4_config(skip_modules=("*.down_proj",)))
        assert names == list(snip_linears(model)) and len(names) == 12
        assert type(model.model.layers[0].mlp.down_proj) is nn.Linear

    def test_the_state_may_be_written_between_forward_and_backward(self) -> None:
        layer, x = swapped(linear(), "fp4"), randn(T, I).requires_grad_()
        y = layer(x)
        layer.set_formats(dict.fromkeys(GEMMS, "bf16"))
        y.backward(torch.ones_like(y))
        # The backward pass belongs to its forward pass: rounded in FP4, with the same random numbers.
        assert torch.equal(layer.weight.grad, gradients(swapped(linear(), "fp4"), x, torch.ones_like(y))["weight"])


class TestQuantize:
    """torchao's own interface."""

    def test_swaps_in_place_what_the_filter_lets_pass(self) -> None:
        model = build("llama")
        layer, weight = model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.up_proj.weight
        quantize_(model, SnipLinearConfig("fp4", seed=6), filter_fn=lambda module, name: name.endswith("up_proj"))
        assert set(snip_linears(model)) == {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}
        assert model.model.layers[0].mlp.up_proj is layer and layer.weight is weight
        assert layer.formats == dict.fromkeys(GEMMS, "fp4") and layer.snip_state[3] == key_number(6, 0, 0, 0)
        restore_model(model)
        assert not snip_linears(model) and type(layer) is nn.Linear

    def test_has_fp8_as_its_default_format(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        quantize_(model, SnipLinearConfig(), filter_fn=lambda module, name: isinstance(module, nn.Linear))
        assert model[0].formats == dict.fromkeys(GEMMS, "fp8")

    def test_a_filter_that_lets_another_class_pass_is_refused(self) -> None:
        pruned = prune.identity(nn.Linear(8, 4), "weight")
        computed = "Linear (its weight is computed from other parameters, e.g. by weight_norm)"
        for module, name in ((Router(8, 4), "Router"), (nn.LayerNorm(8), "LayerNorm"), (pruned, computed)):
            with pytest.raises(TypeError) as error:
                quantize_(nn.Sequential(module), SnipLinearConfig(), filter_fn=lambda _, name: name == "0")
            assert str(error.value) == (
                f"Cannot quantize a {name}; expected {'; or '.join(kind.accepts for kind in LAYER_KINDS.values())}. "
                "Let the filter pass only such modules."
            )

    def test_an_unknown_format_is_refused(self) -> None:
        with pytest.raises(ValueError) as error:
            SnipLinearConfig(start_format="fp6")
        expected = "Unknown format 'fp6' for start_format. Did you mean 'mxfp6'?"
        assert str(error.value).startswith(expected)

    def test_twice_changes_nothing(self) -> None:
        layer = swapped(linear(), "fp4", seed=3)
        model = nn.Sequential(layer)
        quantize_(model, SnipLinearConfig("fp8", seed=8), filter_fn=lambda module, name: name == "0")
        assert model[0] is layer and layer.snip_state.tolist() == [2, 2, 2, key_number(3, 0, 0, 0), 0, 1]


# ---------------------------------------------------------------------------------------------------------------------


# These warnings come from torch's own compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> Iterator[None]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()

    def graphs(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_gives_the_eager_result_and_takes_new_formats_without_recompilation(self, backend: str) -> None:
        """All to the bit, but for the bias gradient under inductor, which sums over the tokens in another order."""
        if backend == "inductor":
            try:
                cpp_builder.get_cpp_compiler()
            except InvalidCxxCompiler:
                pytest.skip("inductor needs a C++ compiler")
        block = nn.Sequential(swapped(linear()), nn.ReLU())
        layer = block[0]
        compiled = torch.compile(block, fullgraph=True, backend=backend)

        def run(module: nn.Module) -> dict[str, Tensor]:
            layer.zero_grad()
            x = randn(2, 30, I).requires_grad_()
            y = module(x)
            y.backward(randn(*y.shape, seed=9))
            return {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad.clone(), "bias": layer.bias.grad.clone()}

        for step, formats in enumerate(COMBINATIONS):
            layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
            set_step({"layer": layer}, 1, step, 0)
            got, expected = run(compiled), run(block)
            if backend == "inductor":
                torch.testing.assert_close(got.pop("bias"), expected.pop("bias"), rtol=1e-5, atol=1e-5)
            assert_same(got, expected)
            assert self.graphs() == 1

    def test_layers_in_different_formats_share_one_graph(self) -> None:
        """One code path for all layers: precision is data, or a model of more than 8 layers would stop compiling."""
        layers = [swapped(linear(), fmt) for fmt in ("bf16", "fp8", "fp4")]

        def run(layer: SnipLinear, x: Tensor) -> Tensor:
            return layer(x)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        x = randn(30, I)
        for layer in layers:
            assert torch.equal(compiled(layer, x), layer(x))
        assert self.graphs() == 1


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    before = list(LINEAR_CLASSES)
    yield
    LINEAR_CLASSES[:] = before


class Same(nn.Linear):
    """The same product in other words."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        y = torch.einsum("...i,oi->...o", input, self.weight)
        return y if self.bias is None else y + self.bias


class Child(Same):
    """Registered by nobody."""


def block(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(modules)])})


def test_modules_of_a_registered_class_run_as_linears_until_they_are_restored() -> None:
    model = block(own=Same(8), child=Child(8))
    assert skip_reasons(model, fp4_config()) == {"layers.0.own": "class Same", "layers.0.child": "class Child"}
    random = torch.get_rng_state()
    assert register_linear_class(Same) is Same
    assert torch.equal(torch.get_rng_state(), random)
    assert skip_reasons(model, fp4_config()) == {"layers.0.own": None, "layers.0.child": "class Child"}
    assert convert_model(model, fp4_config()) == ["layers.0.own"]
    assert type(model["layers"][0]["own"]) is SnipLinear
    restore_model(model)
    assert type(model["layers"][0]["own"]) is Same


def test_falcon_s_is_registered_by_its_name_so_that_remote_code_s_is_too() -> None:
    remote = type("FalconLinear", (nn.Linear,), {})
    assert skip_reasons(block(a=FalconLinear(8, 8), b=remote(8, 8)), fp4_config()) == {
        "layers.0.a": None,
        "layers.0.b": None,
    }
    assert list(LINEAR_CLASSES) == ["FalconLinear"]


@pytest.mark.parametrize("other", [nn.Linear, SnipLinear, SnipConv1D, nn.LayerNorm, nn.Linear(2, 2), "Same", None])
def test_a_class_that_is_not_a_subclass_of_linear_is_refused(other: Any) -> None:
    with pytest.raises(TypeError) as error:
        register_linear_class(other)
    assert str(error.value) == (
        f"Got {other!r}; expected a subclass of nn.Linear. Modules of other classes need a layer kind "
        "(docs/extending.md)."
    )


def subclass(**methods: Any) -> type[nn.Linear]:
    return type("Odd", (nn.Linear,), methods)


def router_in_fp32(self: nn.Linear, input: Tensor) -> Tensor:
    return nn.functional.linear(input.float(), self.weight.float())


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (subclass(forward=lambda self, x: nn.Linear.forward(self, x).softmax(-1)), r"fails a trial .*not close"),
        (subclass(forward=lambda self, x: nn.functional.linear(x, self.weight)), r"fails a trial .*not close"),
        (subclass(forward=router_in_fp32), r"fails a trial .*'dtype' do not match: torch\.float32 != torch\.bfloat16"),
        (
            subclass(forward=lambda self, x: nn.Linear.forward(self, x).flatten(0, 1)),
            r"fails a trial .*'shape' do not match: torch\.Size\(\[6, 5\]\) != torch\.Size\(\[2, 3, 5\]\)",
        ),
        (subclass(forward=lambda self, x: (nn.Linear.forward(self, x), None)), r"fails a trial .*class 'tuple'"),
        (
            subclass(forward=lambda self, x: self.scale * nn.Linear.forward(self, x)),
            r"fails a trial .*\(AttributeError: 'Odd' object has no attribute 'scale'\)",
        ),
        (subclass(state_dict=lambda self, *args, **kwargs: {}), "has a state_dict of its own"),
        (subclass(_load_from_state_dict=lambda self, *args: None), "has a _load_from_state_dict of its own"),
        (PhimoeTopKRouter, "fails a trial with only a weight and a bias"),
    ],
)
def test_a_class_that_is_not_the_same_product_is_refused_with_what_differs(cls: type[nn.Linear], reason: str) -> None:
    message = f"{cls.__name__} cannot be swapped as an nn.Linear: it {reason}.*Write a layer kind for it"
    with pytest.raises(ValueError, match=message):
        register_linear_class(cls)
    assert list(LINEAR_CLASSES) == ["FalconLinear"]
