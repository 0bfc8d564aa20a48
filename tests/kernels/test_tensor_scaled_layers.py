"""SnipLinear on the backend "tensor-scaled" against the emulated one: on a CPU by its reference, and on a GPU by the
kernels."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from configs import fp4_config
from functorch.compile import min_cut_rematerialization_partition
from kernels.test_gated_layers import WITH_FP8, Graphs, check, linears, mlp_of, one_by_one, trained
from kernels.test_hopper_layers import assert_close, gradients, layer_of, linear, randn
from models import batch
from operator_calls import assert_same
from slow_cases import pairwise, slow
from small import checkpoint_activations, tiny_llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from snip_hf import SnipController, SnipLinear
from snip_hf.kernels.backend import BACKENDS
from snip_hf.kernels.tensor_scaled import exponents, operators, trial
from snip_hf.kernels.tensor_scaled import linear as scaled_linear
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED, TensorScaled
from snip_hf.kernels.tensor_scaled.exponents import BLOCKS, CLIPPED, EXPONENT, LARGEST, SATURATED, UNSET, follow
from snip_hf.layers.gated import gate_up_down
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

T, I, O = 150, 200, 136  # as in test_hopper_layers  # noqa: E741
BF16 = torch.bfloat16
NAME = TENSOR_SCALED.name
NAMES = ("bf16", "mxfp4", "fp8-tensor")
MIXED = [("mxfp4", "mxfp4", "mxfp4"), ("ufp4", "fp8-tensor", "mxfp4"), ("bf16", "mxfp4", "ufp4")]
DELAYED = [("fp8-delayed",) * 3, ("mxfp4", "fp8-delayed", "fp8-tensor")]
MXFP4, OTHER = MIXED[0], MIXED[1]

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(TENSOR_SCALED.lacks(torch.device("cuda")) is not None, reason="needs a GPU with FP8"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Operand and GEMMs of each operand that is encoded from now on."""
    found: list[tuple[Any, ...]] = []
    encode_into = operators.encode_into

    def noted(*arguments: Any, **more: Any) -> None:
        found.append((arguments[2], *arguments[3]))
        encode_into(*arguments, **more)

    monkeypatch.setattr(operators, "encode_into", noted)
    return found


def record_of(layer: SnipLinear) -> Tensor:
    record: Tensor = layer.snip_cache.records.record
    return record


# ------------------------------------------------------------------------------------- one layer


@pytest.mark.parametrize("formats", pairwise(NAMES), ids="/".join)
def test_a_layer_computes_what_the_emulated_backend_does(formats: tuple[str, ...], device: str) -> None:
    plain, x = linear(device=device), randn(T, I, device=device)
    got = gradients(layer_of(plain, formats, NAME), x)
    assert_close(got, gradients(layer_of(plain, formats, "emulated"), x), plain.bias)


@pytest.mark.parametrize("formats", [*MIXED, *DELAYED], ids="/".join)
@pytest.mark.parametrize("shape", [(3, 50, I), (I,), (1, I), (0, I)], ids=str)
def test_it_does_for_inputs_of_any_shape(shape: tuple[int, ...], formats: tuple[str, ...], device: str) -> None:
    plain, x = linear(bias=False, device=device), randn(*shape, device=device)
    got, expected = (gradients(layer_of(plain, formats, name), x) for name in (NAME, "emulated"))
    assert_close(got, expected)


def test_gradients_of_fp32_weights_are_not_rounded_to_bf16(device: str) -> None:
    layer = layer_of(linear(dtype=torch.float32, device=device), MXFP4, NAME)
    with torch.autocast(device, BF16):
        layer(randn(T, I, dtype=torch.float32, device=device)).float().square().sum().backward()
    grad = layer.weight.grad
    assert grad is not None and grad.dtype == torch.float32
    assert not torch.equal(grad, grad.to(BF16).float())


def test_layers_that_compute_in_fp32_run_emulated(device: str) -> None:
    plain, x = linear(dtype=torch.float32, device=device), randn(T, I, dtype=torch.float32, device=device)
    got, expected = (gradients(layer_of(plain, MXFP4, name), x) for name in (NAME, "emulated"))
    assert_same(got, expected)


@pytest.mark.parametrize("formats", MIXED, ids="/".join)
def test_the_exponent_inside_the_range_changes_no_bit(formats: tuple[str, ...], device: str) -> None:
    layer, x = layer_of(linear(device=device), formats, NAME), randn(T, I, device=device)
    first = gradients(layer, x)
    for _ in range(2):
        TENSOR_SCALED.after_step({"": layer})
        assert (record_of(layer)[:, EXPONENT] != UNSET).any()
        assert_same(gradients(layer, x), first)
        record_of(layer)[:, EXPONENT] += record_of(layer)[:, EXPONENT] != UNSET
        assert_same(gradients(layer, x), first)


def test_only_passes_that_are_trained_on_count_for_the_next_exponent(device: str) -> None:
    layer, x = layer_of(linear(device=device), MXFP4, NAME), randn(T, I, device=device)
    with torch.no_grad():
        layer(x)
    assert not record_of(layer)[:, LARGEST].any()
    gradients(layer.eval(), x)  # as training without dropout
    assert record_of(layer)[:, LARGEST].all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_uses_the_same_exponents(reentrant: bool, device: str) -> None:
    layer, x = layer_of(linear(device=device), MXFP4, NAME), randn(T, I, device=device)
    record_of(layer)[:, EXPONENT] = torch.tensor([-8, 30, -12])  # outside of the range: a difference would show
    expected, y_grad = gradients(layer, x), randn(T, O, seed=9, device=device)
    layer.zero_grad()
    x = x.requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).backward(y_grad)
    assert torch.equal(layer.weight.grad, expected["weight"]) and torch.equal(x.grad, expected["x"])


def test_one_byte_per_element_of_the_input_and_of_small_weights_is_kept(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(linear(device=device), MXFP4, NAME), randn(256, I, device=device)

    def sizes() -> list[int]:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
            layer(x.requires_grad_())
        others = {layer.weight.data_ptr(), record_of(layer).data_ptr(), layer.snip_cache.records.table.data_ptr()}
        return sorted(tensor.nbytes for tensor in saved if tensor.data_ptr() not in others)

    assert sizes() == [32, 32, 48, 256 * 192, 256 * 256]
    monkeypatch.setattr(scaled_linear, "SMALL", layer.weight.numel() - 1)
    assert sizes() == [32, 48, 256 * 256]


@pytest.mark.parametrize("formats", MIXED[:2], ids="/".join)
def test_a_small_weight_is_encoded_once_for_both_passes_and_gives_the_same_bits(
    formats: tuple[str, ...], device: str, encodings: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(linear(device=device), formats, NAME), randn(T, I, device=device)
    found = gradients(layer, x)
    assert [one for one in encodings if one[0] == 2] == [(2, 0, 1)]
    noted = record_of(layer).clone()
    with torch.no_grad():
        layer(x)
    assert encodings[-1] == (2, 0, -1)
    monkeypatch.setattr(scaled_linear, "SMALL", 0)
    layer = layer_of(linear(device=device), formats, NAME)
    encodings.clear()
    assert_same(gradients(layer, x), found)
    assert [one for one in encodings if one[0] == 2] == [(2, 0, -1), (2, -1, 1)]
    assert torch.equal(record_of(layer), noted)


# ------------------------------------------------------------------------------------- several layers, and the run


def siblings(formats: tuple[str, ...], device: str) -> dict[str, SnipLinear]:
    layers = {str(index): layer_of(linear(device=device), formats, NAME) for index in range(3)}
    TENSOR_SCALED.share_inputs(layers, [list(layers)])
    return layers


def test_tied_layers_encode_a_common_input_once(device: str, encodings: list[tuple[Any, ...]]) -> None:
    layers, x = siblings(MXFP4, device), randn(T, I, device=device)
    expected = gradients(layer_of(linear(device=device), MXFP4, NAME), x)
    encodings.clear()
    x = x.requires_grad_()
    results = [layer(x) for layer in layers.values()]
    assert encodings == [(0, 0, 2), *[(2, 0, 1)] * 3]
    assert all(torch.equal(y, expected["y"]) for y in results)
    layers["1"].set_formats(dict(zip(("forward", "grad_input", "grad_weight"), OTHER, strict=True)))
    encodings.clear()
    for layer in layers.values():
        layer(x)
    assert [one for one in encodings if one[0] == 0] == [(0, 0, 2)] * 3


def test_kept_weights_are_encoded_once_and_give_the_same_bits(device: str, encodings: list[tuple[Any, ...]]) -> None:
    layer, x = layer_of(linear(device=device), OTHER, NAME), randn(T, I, device=device)
    expected = gradients(layer, x)
    TENSOR_SCALED.before_pass({"": layer})
    encodings.clear()
    assert_same(gradients(layer, x), expected)
    assert [one[0] for one in encodings] == [0, 1]
    with torch.no_grad():
        layer.weight.mul_(2)
    addresses = [tensor.data_ptr() for tensor in layer.snip_cache.weights]
    TENSOR_SCALED.before_pass({"": layer}, everything=False)
    assert [tensor.data_ptr() for tensor in layer.snip_cache.weights] == addresses
    doubled = gradients(layer, x)
    TENSOR_SCALED.release({"": layer})
    assert_same(gradients(layer, x), doubled)


@pytest.mark.parametrize("keeps", [False, True], ids=["quantized in passes", "kept weights"])
@pytest.mark.parametrize("ties", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("formats", [{}, {"up_proj": WITH_FP8, "down_proj": WITH_FP8}], ids=["mxfp4", "mixed"])
def test_a_gated_mlp_trains_as_its_three_layers_do(formats: Any, ties: bool, keeps: bool) -> None:
    mlp, twin = mlp_of(formats, ties), mlp_of(formats, ties)
    if keeps:
        TENSOR_SCALED.before_pass(linears(mlp))
    found = trained(mlp, lambda x: TENSOR_SCALED.gated_forward(gate_up_down(mlp), x), steps=1 if keeps else 3)
    check(found, trained(twin, lambda x: one_by_one(twin, x), steps=1 if keeps else 3))


def test_a_gated_mlp_in_bf16_has_one_gradient_of_its_input_and_no_second_derivative() -> None:
    mlp, twin = mlp_of().to(BF16), mlp_of().to(BF16)
    found = []
    for one in (lambda x: TENSOR_SCALED.gated_forward(gate_up_down(mlp), x), lambda x: one_by_one(twin, x)):
        x = randn(40, 64).requires_grad_()
        one(x).float().square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    x = randn(40, 64).requires_grad_()
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(TENSOR_SCALED.gated_forward(gate_up_down(mlp), x).sum(), x, create_graph=True)


def test_a_gated_mlp_is_left_to_its_layers_in_fp32_and_if_one_is_not_trained() -> None:
    mlp, x = mlp_of(), randn(40, 64, dtype=torch.float32)
    assert TENSOR_SCALED.gated_forward(gate_up_down(mlp), x) is None
    mlp.eval()
    assert TENSOR_SCALED.gated_forward(gate_up_down(mlp), x.to(BF16)) is None


def test_a_copy_has_records_of_its_own(device: str) -> None:
    layer, x = layer_of(linear(device=device), MXFP4, NAME), randn(T, I, device=device)
    gradients(layer, x)
    follow([layer.snip_cache.records])
    twin = copy.deepcopy(layer)
    assert torch.equal(record_of(twin), record_of(layer))
    record_of(layer)[:, EXPONENT] = 50
    assert (record_of(twin)[:, EXPONENT] < 50).all()


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend can run on a CPU; its trial, whose result is kept, is made before a test changes anything."""
    for name in SNIP["formats"]:
        assert trial.fault(name, torch.device("cpu")) is None
    monkeypatch.setattr(TensorScaled, "lacks", lambda self, device: None)
    monkeypatch.setattr(BACKENDS["hopper"], "lacks", lambda device: "not here", raising=False)


SNIP = {"formats": ("mxfp4", "fp8-delayed"), "policy": "uniform-mxfp4", "backend": NAME}
UNIFORM = [f"uniform-{name}" for name in SNIP["formats"]]
TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Run:
    """A tiny Llama in BF16 in training."""

    def __init__(self, wraps: Any = None, **snip: Any) -> None:
        self.model = tiny_llama(layers=1).to(BF16)
        if wraps is not None:
            wraps(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.controller = SnipController(self.model, self.optimizer, fp4_config(**SNIP | snip))

    def train(self, steps: int, micro_batches: int = 1) -> list[float]:
        """Goes on for some steps; returns the losses."""
        found = []
        for step in range(self.controller.step + 1, self.controller.step + steps + 1):
            for number in range(micro_batches):
                data = batch(seed=10 * step + number)
                self.controller.capture(data)
                loss = self.model(**data).loss
                loss.backward()
                found.append(float(loss.detach()))
            self.controller.before_optimizer_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.controller.after_step(step)
        return found


def exponents_of(run: Run) -> Tensor:
    return torch.stack([record_of(layer)[:, EXPONENT] for layer in snip_linears(run.model).values()])


@pytest.mark.usefixtures("everywhere")
class TestRun:
    @pytest.mark.parametrize("policy", UNIFORM)
    def test_exponents_follow_after_each_step_and_losses_are_the_emulated_ones(self, policy: str) -> None:
        run = Run(policy=policy)
        losses = run.train(3, micro_batches=2)
        assert (exponents_of(run) != UNSET).all()
        assert len({id(layer.snip_cache.records.everything) for layer in snip_linears(run.model).values()}) == 1
        expected = Run(backend="emulated", policy=policy).train(3, micro_batches=2)
        assert losses == pytest.approx(expected, rel=2e-3)
        assert losses[0] == pytest.approx(expected[0], rel=1e-6)

    def test_checkpointing_changes_no_loss(self) -> None:
        expected = Run().train(2)
        for reentrant in (True, False):
            assert Run(wraps=partial(checkpoint_activations, reentrant=reentrant)).train(2) == expected

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_compiled_checkpointed_layers_are_one_graph_that_saves_no_activation(self) -> None:
        graphs = Graphs(partition_fn=min_cut_rematerialization_partition)

        def wraps(model: Any) -> None:
            checkpoint_activations(model, reentrant=False)
            torch._dynamo.reset()
            model.model.layers[0] = torch.compile(model.model.layers[0], backend=graphs.backend, fullgraph=True)

        assert Run(wraps, ties=TIES).train(2) == pytest.approx(Run().train(2), rel=1e-3)
        (outputs,) = graphs.all[0].graph.output_node().args
        made = [node.meta["val"].dtype for node in outputs if node is not None and node.op != "placeholder"]
        # Up to torch 2.13 the state of random numbers is saved, too.
        assert [dtype for dtype in made if dtype != torch.uint8] == [BF16]

    def test_ties_change_no_loss(self) -> None:
        assert Run(ties=TIES).train(2) == Run().train(2)

    @pytest.mark.parametrize("policy", UNIFORM)
    def test_a_resumed_run_goes_on_bit_for_bit_outside_the_range_too(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exponents, "HEADROOM", -3)  # everything saturates
        run = Run(policy=policy)
        begun = run.train(2)
        saved = json.loads(json.dumps(run.controller.state_dict()))
        assert set(saved["kernels"]) == {NAME}
        states = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        rest = run.train(2)
        again = Run(policy=policy)
        again.model.load_state_dict(states[0])
        again.optimizer.load_state_dict(states[1])
        again.controller.load_state_dict(saved)
        assert again.train(2) == rest
        monkeypatch.undo()
        monkeypatch.setattr(TensorScaled, "lacks", lambda self, device: None)
        assert Run(policy=policy).train(4) != begun + rest

    def test_a_state_without_exponents_begins_without(self) -> None:
        run = Run()
        run.train(2)
        state = run.controller.state_dict()
        state["kernels"] = {}
        run.controller.load_state_dict(state)
        assert (exponents_of(run) == UNSET).all()

    def test_blocks_that_do_not_fit_are_logged_when_the_run_ends(self, caplog: pytest.LogCaptureFixture) -> None:
        run = Run()
        record_of(next(iter(snip_linears(run.model).values())))[1, BLOCKS : SATURATED + 1] = torch.tensor([100, 50])
        run.controller.close()
        (text,) = [record.getMessage() for record in caplog.records if "binades" in record.getMessage()]
        assert "model.layers.0.self_attn.q_proj gradient: 50.00% saturated" in text

    def test_blocks_that_do_not_fit_are_counted_for_trackers_before_they_are_logged(self) -> None:
        layers = snip_linears(Run().model)
        nothing = {"saturated_share": 0.0, "small_share": 0.0, "saturated_operands": 0}
        assert BACKENDS[NAME].counters(layers) == nothing
        seen = torch.tensor([100, 50, 2])
        record_of(next(iter(layers.values())))[1, [BLOCKS, SATURATED, CLIPPED]] = seen
        found = nothing | {"saturated_share": 0.5, "saturated_operands": 1}
        assert [BACKENDS[NAME].counters(layers) for _ in range(2)] == [found, found]
        BACKENDS[NAME].findings(layers)
        assert BACKENDS[NAME].counters(layers) == nothing

    def test_other_backends_save_nothing(self) -> None:
        assert Run(backend="emulated").controller.state_dict()["kernels"] == {}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_compiled_layers_take_new_formats_and_exponents_without_compiling(backend: str, device: str) -> None:
    layer, x = layer_of(linear(device=device), MXFP4, NAME), randn(T, I, device=device)
    twin = copy.deepcopy(layer)
    graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    fast: nn.Module = torch.compile(layer, backend=counting, fullgraph=True)
    for formats in (MXFP4, OTHER, ("fp8-tensor", "ufp4", "ufp4"), *DELAYED, MXFP4):
        for one in (layer, twin):
            one.set_formats(dict(zip(("forward", "grad_input", "grad_weight"), formats, strict=True)))
        got, expected = through(fast, layer, x), through(twin, twin, x)
        assert_same(got, expected)
        for one in (layer, twin):
            TENSOR_SCALED.after_step({"": one})
        assert torch.equal(record_of(layer)[:, : LARGEST + 1], record_of(twin)[:, : LARGEST + 1])
    assert graphs == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", [None, pytest.param("reduce-overhead", marks=on_gpu)])
def test_layers_that_share_a_graph_note_what_they_see_each_in_its_own_record(mode: str | None) -> None:
    device = "cpu" if mode is None else "cuda"
    compiling: dict[str, Any] = {"backend": "aot_eager"} if mode is None else {"mode": mode}
    layers = {str(index): layer_of(linear(device=device), MXFP4, NAME) for index in range(2)}
    TENSOR_SCALED.share_inputs(layers, [])
    torch._dynamo.reset()
    for number in range(4):
        for index, layer in enumerate(layers.values()):
            torch.compiler.cudagraph_mark_step_begin()
            layer.compile(**compiling) if number == 0 else None
            x = randn(T, I, device=device) * 2 ** (index + number)
            through(layer, layer, x)
            assert record_of(layer)[0, LARGEST] == exponents.bits_of(float(x.abs().max()))
        TENSOR_SCALED.after_step(layers)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")
def test_graphs_of_torch_compile_launch_what_the_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(linear(device="cuda"), MXFP4, NAME), randn(T, I, device="cuda")
    twin = copy.deepcopy(layer)
    for one in (layer, twin):
        TENSOR_SCALED.share_inputs({"": one}, [])
    captured: list[tuple[bool, bool]] = []
    facts_of, sums_fast = operators.facts_of, operators.sums_fast

    def noted(record: Tensor, *arguments: Any) -> Any:
        found = facts_of(record, *arguments)
        if operators.is_captured(record):
            captured.append((found.needs_scales, sums_fast(record, 0)))
        return found

    monkeypatch.setattr(operators, "facts_of", noted)
    torch._dynamo.reset()
    fast: nn.Module = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    replayed = []
    plans = [MXFP4] * 4 + [("fp8-tensor",) * 3] * 2 + [MXFP4] * 2 + [("fp8-delayed",) * 3] * 2
    for number, formats in enumerate(plans):
        for one in (layer, twin):
            one.set_formats(dict(zip(GEMMS, formats, strict=True)))
            TENSOR_SCALED.after_step({"": one})
        torch.compiler.cudagraph_mark_step_begin()
        before = len(captured)
        assert_same(through(fast, layer, x * (1 + number)), through(twin, twin, x * (1 + number)))
        assert torch.equal(record_of(layer)[:, : LARGEST + 1], record_of(twin)[:, : LARGEST + 1])
        replayed.append(len(captured) == before)
    # A launch per operand and direction is captured when facts are new. The plan of old comes back without a capture,
    # and `fp8-delayed` needs none.
    assert replayed[-4:] == [True] * 4 and not all(replayed[:4]) and not replayed[4]
    assert (False, True) in captured and (True, False) in captured
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")
def test_a_graph_of_other_formats_is_not_replayed_even_before_the_next_step() -> None:
    layer, x = layer_of(linear(device="cuda"), MXFP4, NAME), randn(T, I, device="cuda")
    twin = copy.deepcopy(layer)
    for one in (layer, twin):
        TENSOR_SCALED.share_inputs({"": one}, [])
    torch._dynamo.reset()
    fast: nn.Module = torch.compile(layer, mode="reduce-overhead", fullgraph=True)

    def step() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.compiler.cudagraph_mark_step_begin()
        return through(fast, layer, x), through(twin, twin, x)

    for _ in range(4):
        step()
        for one in (layer, twin):
            TENSOR_SCALED.after_step({"": one})
    for one in (layer, twin):
        one.set_formats(dict.fromkeys(GEMMS, "fp8-tensor"))
    assert_same(*step())
    torch._dynamo.reset()


def through(module: nn.Module, layer: SnipLinear, x: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(randn(*y.shape, seed=9, device=x.device.type))
    return {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad.clone()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
