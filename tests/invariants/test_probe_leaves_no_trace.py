"""After a probe everything is, to the bit, as if it had never run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from configs import fp4_config
from small import TinyLM, checkpoint_activations, convert_in_formats, text, tiny_llama, tiny_lm, tokens, watched
from torch import Tensor, nn

from snip_hf import coverage
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import divergences_at, estimate_divergence
from snip_hf.estimation.ground_truth import measure_assignment, measure_divergence
from snip_hf.estimation.optimizer_step import OptimizerStep
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.optimizers.response import responses

Inputs = dict[str, Tensor]
CONFIG = fp4_config(probe_tokens=128, probe_batch_tokens=128)


class Noisy(TinyLM):
    """Draws from every generator, writes to buffers in place and by assignment, and counts calls in an attribute."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.register_buffer("last", torch.zeros(()))
        self.count = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.count += 1
        self.calls += 1
        outputs = super().forward(input_ids, labels)
        noise = 1 + 0.1 * (random.random() + np.random.rand() + torch.rand((), device=input_ids.device))
        self.mean.lerp_(outputs["loss"].detach(), 0.1)
        self.last = outputs["loss"].detach()
        return {"loss": outputs["loss"] * noise, "logits": outputs["logits"]}


def noisy(device: str = "cpu") -> Noisy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Noisy(dropout=0.3).to(device)
    model.layers[0].dropout.eval()  # a flag that differs from its neighbours'
    model.layers[1].up.bias.requires_grad_(False)
    return model


def bits(value: Any) -> Any:
    """A value that compares equal only to the same bits."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (str(value.dtype), str(value.device), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return bits(
        {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}
    )


def attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes by value, tensors, modules and hooks by identity."""

    def seen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: seen(item) for key, item in value.items()}
        return copy.copy(value) if isinstance(value, (bool, int, float, str, set, type(None))) else id(value)

    return {"class": type(module), **{key: seen(value) for key, value in vars(module).items()}}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "generators": generators(),
        "modules": {name: attributes(module) for name, module in model.named_modules()},
        "parameters": {name: bits(p) for name, p in model.named_parameters()},
        "flags": {name: (p.requires_grad, p.is_leaf) for name, p in model.named_parameters()},
        # Not even written with what was there before.
        "writes": {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad._version, bits(p.grad))
            for name, p in model.named_parameters()
        },
        "buffers": {name: bits(b) for name, b in model.named_buffers()},
        "switches": (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
        ),
        "accelerate": copy.deepcopy(
            {k: v for k, v in GradientState._shared_state.items() if k != "dataloader_references"}
        ),
    }
    if optimizer is not None:
        found["optimizer"] = bits(optimizer.state_dict())
        found["state size"] = len(optimizer.state)
    return found


def assert_nothing_changed(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert list(before) == list(after)
    for part in before:
        assert after[part] == before[part], part


def probe_alone(
    model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None, probes: int = 2, **options: Any
) -> None:
    pullbacks = {name: torch.ones_like(layer.weight).mul for name, layer in snip_linears(model).items()}
    run_probe(model, Batch.of(inputs), pullbacks, ProbeSettings(probes, probe_tokens=128, **options))


def refresh(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None) -> None:
    weights = {name: layer.weight for name, layer in snip_linears(model).items()}
    gradients = {name: torch.ones_like(weight) for name, weight in weights.items()}
    optimizer_step = OptimizerStep(gradients, responses(optimizer, weights), micro_batches=2)
    divergences_at(model, Batch.of(inputs), optimizer_step, CONFIG, step=3)


def refresh_with_noise(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None) -> None:
    weights = {name: layer.weight for name, layer in snip_linears(model).items()}
    gradients = {name: torch.ones_like(weight) for name, weight in weights.items()}
    config = replace(CONFIG, policy="snip-paper", granularity=None, probes=2)
    divergences_at(model, Batch.of(inputs), OptimizerStep(gradients, responses(optimizer, weights)), config, step=3)


def estimate(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None) -> None:
    estimate_divergence(model, inputs, optimizer, CONFIG)


def measure(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None) -> None:
    measure_divergence(model, inputs, optimizer, CONFIG, draws=1, gemms=("layer",))


def assignments(model: nn.Module) -> list[dict[str, dict[str, str]]]:
    """Two that differ in the layers that they name, and one that names none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name]
    return [
        {name: {"forward": "fp4", "grad_weight": "fp8"} for name in names[::2]},
        {name: {"forward": "fp8", "grad_input": "fp4"} for name in names},
        {},
    ]


def measure_plans(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None) -> None:
    measure_assignment(model, inputs, optimizer, assignments(model), CONFIG, draws=1)


def count(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None) -> None:
    coverage(model, inputs)


ACTIONS: dict[str, Callable[..., None]] = {
    "probe": probe_alone,
    "probe without directions": partial(probe_alone, probes=0),
    "refresh": refresh,
    "refresh with noise": refresh_with_noise,
    "estimate": estimate,
    "measure": measure,
    "measure plans": measure_plans,
    "coverage": count,
}
# These take a converted model only.
CONVERTED = ("probe", "probe without directions", "refresh", "refresh with noise")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
}


@pytest.fixture(autouse=True)
def fresh_generators() -> Iterator[None]:
    states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    states = (AcceleratorState, PartialState, GradientState)
    for state in states:
        state._reset_state()
    yield
    for state in states:
        state._reset_state()


def some_steps(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    """Two steps, and then two micro-batches whose gradients are left there."""
    for micro_batch in range(4):
        model(**inputs)["loss"].backward()
        if micro_batch < 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("action", "rule"),
    [
        *((action, "adamw fused") for action in ACTIONS if action != "refresh"),
        *(("refresh", rule) for rule in OPTIMIZERS),
        ("measure plans", "muon"),
        ("measure plans", "rmsprop"),
    ],
)
def test_weights_gradients_states_generators_buffers_and_flags_stay(action: str, rule: str) -> None:
    model, inputs = noisy(), tokens()
    if action in CONVERTED:
        convert_model(model, CONFIG)
    optimizer = OPTIMIZERS[rule](p for p in model.parameters() if p.requires_grad)
    some_steps(model, optimizer, inputs)
    assert model.head.weight.grad is not None
    model.embed.weight.grad = None  # None has to stay None
    before = everything(model, optimizer)
    ACTIONS[action](model, inputs, optimizer)
    assert_nothing_changed(before, everything(model, optimizer))


@pytest.mark.parametrize("action", ACTIONS)
def test_before_the_first_step_neither_gradients_nor_state_come_to_be(action: str) -> None:
    model, inputs = noisy(), tokens()
    if action in CONVERTED:
        convert_model(model, CONFIG)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    before = everything(model, optimizer)
    ACTIONS[action](model, inputs, optimizer)
    assert_nothing_changed(before, everything(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("formats", [None, ("fp4", "fp8", "bf16")])
def test_formats_and_keys_of_a_converted_model_stay(action: str, formats: tuple[str, str, str] | None) -> None:
    model, inputs = noisy(), tokens()
    convert_in_formats(model, CONFIG)
    for layer in snip_linears(model).values():
        if formats:
            layer.set_formats(dict(zip(("forward", "grad_input", "grad_weight"), formats, strict=True)))
    set_step(snip_linears(model), 9, 8, 7)
    before = everything(model, None)
    ACTIONS[action](model, inputs, None)
    assert_nothing_changed(before, everything(model, None))


@pytest.mark.parametrize("action", [action for action in ACTIONS if action != "coverage"])  # it has no backward pass
def test_a_pass_that_fails_leaves_no_trace_either(action: str) -> None:
    model, inputs = noisy(), tokens()
    if action in CONVERTED:
        convert_model(model, CONFIG)
    model(**inputs)["loss"].backward()

    def fail(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not output.requires_grad:  # no backward pass follows
            raise RuntimeError("no more memory")
        output.register_hook(lambda grad: (_ for _ in ()).throw(RuntimeError("no more memory")))
        return output

    handle = model.layers[0].norm.register_forward_hook(fail)
    before = everything(model, None)
    with pytest.raises(RuntimeError, match="no more memory"):
        ACTIONS[action](model, inputs, None)
    assert_nothing_changed(before, everything(model, None))
    handle.remove()


@pytest.mark.parametrize("was_converted", [True, False])
@pytest.mark.parametrize("action", ["measure", "measure plans"])
def test_a_pass_that_fails_while_formats_are_in_force_leaves_no_trace_either(action: str, was_converted: bool) -> None:
    model, inputs = noisy(), tokens()
    if was_converted:
        convert_model(model, CONFIG)

    def fail(_: Tensor) -> set[str]:
        formats = {fmt for layer in snip_linears(model).values() for fmt in layer.formats.values()}
        if "fp4" in formats:
            raise RuntimeError("no more memory")
        return formats

    seen = watched(model.layers[0].norm, fail)
    before = everything(model, None)
    with pytest.raises(RuntimeError, match="no more memory"):
        ACTIONS[action](model, inputs, None)
    assert_nothing_changed(before, everything(model, None))
    # It was reached after passes in high precision.
    assert {"bf16"} in seen()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("action", ACTIONS)
def test_activation_checkpointing_with_dropout_leaves_no_trace(action: str, reentrant: bool) -> None:
    model, inputs = tiny_llama(hidden=32, layers=1, attention_dropout=0.2).train(), text(2, 8)
    checkpoint_activations(model, reentrant)
    convert_model(model, CONFIG)
    model(**inputs).loss.backward()
    before = everything(model, None)
    ACTIONS[action](model, inputs, None)
    assert_nothing_changed(before, everything(model, None))


def test_a_rope_that_grows_with_the_longest_text_seen_does_not_see_the_probe() -> None:
    options = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    model, longer, inputs = tiny_llama(hidden=32, **options), text(1, 320), text(1, 280)
    reference = copy.deepcopy(model)
    estimate_divergence(model, longer)
    assert torch.equal(model(**inputs).loss, reference(**inputs).loss)


def test_autocast_and_no_grad_around_the_probe_stay() -> None:
    model, inputs = noisy(), tokens()
    convert_model(model, CONFIG)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        before = everything(model, None)
        refresh(model, inputs, torch.optim.AdamW(model.parameters()))
        assert_nothing_changed(before, everything(model, None))


def test_hooks_on_parameters_are_not_called() -> None:
    model, inputs = tiny_lm(), tokens()
    convert_model(model, CONFIG)
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
        parameter.register_hook(lambda _, name=name: called.append(name))
    for action in ACTIONS.values():
        action(model, inputs, None)
    assert called == []


def accelerated_run(probe_at: int | None, action: str = "refresh") -> tuple[list[bytes], Any]:
    """Losses and final state of five optimizer steps of two micro-batches each, with or without a probe in between."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    model = tiny_llama(hidden=32, layers=1, attention_dropout=0.2).train()
    convert_in_formats(model, fp4_config(start_format="fp8"))
    for layer in list(snip_linears(model).values())[::2]:
        layer.set_formats(dict.fromkeys(("forward", "grad_input", "grad_weight"), "fp4"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    losses = []
    for micro_batch in range(10):
        inputs = text(2, 8, micro_batch)
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            losses.append(bits(loss))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if micro_batch == probe_at:
                before = everything(model, optimizer)
                step = accelerator.step, accelerator.sync_gradients
                ACTIONS[action](model, inputs, optimizer)
                assert (accelerator.step, accelerator.sync_gradients) == step
                assert_nothing_changed(before, everything(model, optimizer))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, (bits(model.state_dict()), bits(optimizer.state_dict()), generators())


@pytest.mark.parametrize("action", ["refresh", "estimate", "probe", "measure plans"])
def test_training_under_accelerate_goes_on_to_the_bit(action: str, fresh_accelerate: None) -> None:
    plain = accelerated_run(None)
    assert len(set(plain[0])) == 10
    for probe_at in (3, 4):  # before an optimizer step, and between two micro-batches
        probed = accelerated_run(probe_at, action)
        assert probed[0] == plain[0]
        assert probed[1] == plain[1]


@pytest.mark.gpu
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}, {"fused": True, "capturable": True}]
)
def test_nothing_stays_on_cuda(action: str, options: dict[str, bool]) -> None:
    model = noisy("cuda")
    inputs = {name: value.cuda() for name, value in tokens().items()}
    if action in CONVERTED:
        convert_model(model, CONFIG)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    some_steps(model, optimizer, inputs)
    before = everything(model, optimizer)
    ACTIONS[action](model, inputs, optimizer)
    assert_nothing_changed(before, everything(model, optimizer))
