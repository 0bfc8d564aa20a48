"""Do the user's hooks, lists, counters and generators notice that SNIP probes?"""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small import text, tiny_lm, tokens, watched
from tiny_runs import FAST, differing, model_with_dropout, train, weights
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer

from snip_hf import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.passes import run_pass
from snip_hf.layers.convert import convert_model
from snip_hf.optimizers.response import responses

# A probe at step 2, whose plan is applied after the last of 6 steps: the run is that of BF16 without SNIP.
PROBES_ALONE = SnipConfig(start_format="bf16", first_refresh=2, refresh_every=9, apply_delay=4, **FAST)
GLOBAL_PENALTIES: list[Tensor] = []
GLOBAL_COUNT = 0


class Ear:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard: dict[str, int] = {}

    def note(self, what: str) -> None:
        self.heard[what] = self.heard.get(what, 0) + 1

    def before(self, module: nn.Module, args: Any) -> None:
        self.note("before")

    def with_kwargs(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.note("with kwargs")

    def always(self, module: nn.Module, args: Any, output: Any) -> None:
        self.note("always")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self.tell(gradient))

    def tell(self, gradient: Tensor) -> None:
        self.note("gradient")

    def backward(self, module: nn.Module, into: Any, out: Any) -> None:
        self.note("backward")

    def before_backward(self, module: nn.Module, out: Any) -> None:
        self.note("before backward")

    def everywhere(self, module: nn.Module, args: Any, output: Any) -> None:
        self.note(type(module).__name__)


class Noise:
    """Changes activations with random numbers of its own, and notes what it did."""

    def __init__(self) -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.old_numpy, self.python = np.random.RandomState(3), random.Random(4)
        self.calls, self.means = 0, deque(maxlen=3)

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        global GLOBAL_COUNT
        GLOBAL_COUNT += 1
        self.calls += 1
        self.means.append(float(output.detach().mean()))
        size = self.numpy.random() + self.old_numpy.rand() + self.python.random()
        return output + 0.01 * size * torch.randn(output.shape, generator=self.torch)

    def state(self) -> list[Any]:
        drawn = [torch.rand((), generator=self.torch).item(), self.numpy.random(), self.old_numpy.rand()]
        return [self.calls, list(self.means), *drawn, self.python.random()]


class WithPenalty(Trainer):
    """Adds to the loss what hooks and modules have left in lists since the last forward pass."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        GLOBAL_PENALTIES.clear()
        self.model.model.norm.penalties.clear()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + 0.1 * sum(GLOBAL_PENALTIES) + 0.1 * sum(self.model.model.norm.penalties)


def note_a_penalty(module: nn.Module, args: Any, output: Tensor) -> None:
    GLOBAL_PENALTIES.append(output.pow(2).mean())


def scale_and_note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    scaled = output * 0.9
    GLOBAL_PENALTIES.append(scaled.abs().mean())
    return scaled


class Keeping(nn.Module):
    """A norm that keeps a penalty, and a history of nested containers, a set and numbers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.penalties: list[Tensor] = []
        self.history: dict[str, list[Any]] = {"lengths": [], "pairs": []}
        self.lengths: set[Any] = set()
        self.generator = torch.Generator().manual_seed(5)
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        self.penalties.append(y.pow(2).mean())
        self.history["lengths"].append(y.shape[1])
        self.history["pairs"].append([len(self.lengths)])
        self.lengths.add(len(self.history["lengths"]))
        self.total.add_(1)
        return y * (1 + 0.1 * torch.rand((), generator=self.generator))

    def state(self) -> list[Any]:
        drawn = torch.rand((), generator=self.generator).item()
        return [len(self.penalties), self.history, self.lengths, self.total.item(), drawn]


def furnished() -> tuple[LlamaForCausalLM, Ear, Noise]:
    """A model with all of this."""
    model, ear, noise = model_with_dropout(), Ear(), Noise()
    model.model.norm = Keeping(model.model.norm)
    first, second = model.model.layers
    first.register_forward_pre_hook(ear.before)
    first.register_forward_hook(ear.with_kwargs, with_kwargs=True)
    second.input_layernorm.register_forward_hook(ear.always, always_call=True)
    second.register_full_backward_hook(ear.backward)
    second.register_full_backward_pre_hook(ear.before_backward)
    second.mlp.register_forward_hook(note_a_penalty)
    first.mlp.register_forward_hook(scale_and_note)
    second.mlp.up_proj.register_forward_hook(noise)
    return model, ear, noise


def furnished_run(folder: Path, config: SnipConfig | None) -> tuple[Any, ...]:
    global GLOBAL_COUNT
    GLOBAL_COUNT = 0
    model, ear, noise = furnished()
    run = train(folder, config, model=model, max_steps=6, trainer_class=WithPenalty, gradient_accumulation_steps=2)
    norm: Any = model.model.norm
    return run, weights(model), ear.heard, noise.state(), norm.state(), GLOBAL_COUNT


def test_a_run_with_probes_is_one_without_for_hooks_lists_and_generators_of_all_kinds(tmp_path: Path) -> None:
    bare, *expected = furnished_run(tmp_path / "bare", None)
    run, *found = furnished_run(tmp_path / "probed", PROBES_ALONE)
    assert [line["step"] for line in run.refreshes] == [2]
    assert "error" not in str(run.refreshes).lower()
    assert run.losses == bare.losses
    assert differing(found[0], expected[0]) == []
    assert found[1:] == expected[1:]
    # 11 micro-batches in 6 steps.
    assert expected[1]["before"] == expected[2][0] == expected[4] > 0


class Registering(nn.Module):
    """A block that leaves its penalty in lists outside the model, through a function, and counts its calls there."""

    kept: ClassVar[list[Tensor]] = []
    calls = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        type(self).calls += 1
        leave(output)
        self.kept.append(output.pow(2).mean())
        return output


def leave(output: Tensor) -> None:
    global GLOBAL_COUNT
    GLOBAL_COUNT += 1
    GLOBAL_PENALTIES.append(output.abs().mean())


class WithRegistered(Trainer):
    """Adds what modules have left, and then empties the lists."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs) + 0.1 * sum(GLOBAL_PENALTIES) + 0.1 * sum(Registering.kept)
        GLOBAL_PENALTIES.clear()
        Registering.kept.clear()
        return loss


def test_what_a_modules_own_code_leaves_outside_the_model_is_put_back(tmp_path: Path) -> None:
    def run(name: str, config: SnipConfig | None) -> Any:
        global GLOBAL_COUNT
        GLOBAL_PENALTIES.clear()
        Registering.kept.clear()
        GLOBAL_COUNT = Registering.calls = 0
        model = model_with_dropout()
        for layer in model.model.layers:
            layer.mlp = Registering(layer.mlp)
        found = train(tmp_path / name, config, model=model, trainer_class=WithRegistered, max_steps=6)
        return weights(found.model), found.losses, GLOBAL_COUNT, Registering.calls

    bare, probed = run("bare", SnipConfig(policy="bf16")), run("probed", PROBES_ALONE)
    assert differing(bare[0], probed[0]) == []
    assert bare[1:] == probed[1:]


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
def test_hooks_of_all_modules_that_observe_do_not_see_the_probe_and_stay() -> None:
    ear, model = Ear(), tiny_lm()

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.LayerNorm) else output

    handles = [
        torch_modules.register_module_forward_hook(ear.everywhere),
        torch_modules.register_module_forward_hook(double),
        torch_modules.register_module_forward_pre_hook(ear.before),
        torch_modules.register_module_full_backward_hook(ear.backward),
        torch_modules.register_module_full_backward_pre_hook(ear.before_backward),
    ]
    try:
        order = list(torch_modules._global_forward_hooks.values())
        with_hooks = estimate_divergence(model, tokens()).loss
        assert ear.heard == {}
        assert list(torch_modules._global_forward_hooks.values()) == order
        loss = model(**tokens())["loss"].item()
        assert set(ear.heard) == {"TinyLM", "Embedding", "Block", "LayerNorm", "Linear", "Dropout", "before"}
        assert with_hooks == pytest.approx(loss, rel=1e-6)
    finally:
        for handle in handles:
            handle.remove()
    assert estimate_divergence(model, tokens()).loss != pytest.approx(loss, rel=1e-3)


def test_hooks_of_the_model_itself_act_in_the_probe_once() -> None:
    model, batch = tiny_lm(), tokens()
    convert_model(model, SnipConfig(start_format="bf16"))
    bare = float(run_pass(model, Batch.of(batch), {}))

    def shift(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        changed = {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 17}
        return args, changed

    def double(module: nn.Module, args: Any, output: dict[str, Tensor]) -> dict[str, Tensor]:
        doubled = output["loss"] * 2
        return {**output, "loss": doubled}

    model.register_forward_hook(double)
    assert float(run_pass(model, Batch.of(batch), {})) == 2 * bare
    model.register_forward_pre_hook(shift, with_kwargs=True)
    shifted = float(run_pass(model, Batch.of(batch), {}))
    assert shifted != 2 * bare
    expected = {**batch, "input_ids": (batch["input_ids"] + 1) % 17}
    with torch.no_grad():
        assert shifted == pytest.approx(float(model(**batch)["loss"]), rel=1e-6)
        model._forward_pre_hooks.clear()
        assert shifted == float(run_pass(model, Batch.of(expected), {}))


def test_what_hooks_did_to_the_inputs_that_snip_noted_is_not_done_twice(tmp_path: Path) -> None:
    def drop_the_last(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        cut = {name: value[:, :-1] for name, value in kwargs.items() if isinstance(value, Tensor) and value.dim() == 2}
        return args, {**kwargs, **cut}

    model = model_with_dropout()
    model.register_forward_pre_hook(drop_the_last, with_kwargs=True)
    lengths = watched(model.model.embed_tokens, lambda output: output.shape[1])
    run = train(tmp_path, replace(PROBES_ALONE, apply_delay=1), model=model, max_steps=3, gradient_accumulation_steps=2)
    assert run.refreshes[0]["loss"] is not None
    # Six micro-batches, the pass that counts what is covered, and two passes of the probe.
    assert lengths() == [23] * 9


def test_recomputed_layers_do_not_call_hooks_that_observe() -> None:
    model, ear = tiny_lm(reentrant=False), Ear()
    model.layers[0].register_forward_pre_hook(ear.before)
    model.layers[0].norm.register_forward_hook(ear.always, always_call=True)
    estimate_divergence(model, tokens())
    assert ear.heard == {}
    model(**tokens())["loss"].backward()
    assert ear.heard["before"] == 2


def test_a_hook_whose_list_another_one_reads_acts_with_it() -> None:
    model, stash = tiny_lm(), {}

    def remember(module: nn.Module, args: Any) -> None:
        stash["x"] = args[0]

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + stash["x"]

    model.layers[0].up.register_forward_pre_hook(lambda *_: None)
    model.layers[1].norm.register_forward_pre_hook(remember)
    model.layers[1].norm.register_forward_hook(add)
    loss = model(**tokens())["loss"]
    then = stash["x"]
    assert estimate_divergence(model, tokens()).loss == pytest.approx(loss.item(), rel=1e-6)
    assert stash["x"] is then
    loss.backward()


def test_aux_losses_of_transformers_models_take_part_in_the_probe() -> None:
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=1.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = MixtralForCausalLM(config).train()
    hooks = {name: dict(module._forward_hooks) for name, module in model.named_modules()}
    estimated = estimate_divergence(model, text(2, 8)).loss
    # Those that the first forward pass installs for good are there after the first one outside the probe.
    assert {name: dict(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert estimated == pytest.approx(model(**text(2, 8)).loss.item(), rel=1e-5)
    assert estimate_divergence(model, text(2, 8)).loss == estimated


# ----------------------------------------------------------------------------------------------------------- optimizers


class Counting(torch.optim.Optimizer):
    """Plain descent that counts its steps everywhere, with noise from generators of its own."""

    steps = 0
    log: list[int] = []  # noqa: RUF012
    noise = torch.Generator().manual_seed(6)

    def __init__(self, parameters: Any, lr: float, tell: Any) -> None:
        super().__init__(parameters, {"lr": lr})
        self.mine, self.own_noise, self.tell = 0, torch.Generator().manual_seed(7), tell

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        global GLOBAL_COUNT
        GLOBAL_COUNT += 1
        type(self).steps += 1
        self.log.append(self.mine)
        self.mine += 1
        self.tell()
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = 1 + 0.1 * torch.rand((), generator=self.noise) * torch.rand((), generator=self.own_noise)
                parameter.sub_(group["lr"] * scale * parameter.grad)


def test_the_step_of_an_optimizer_of_the_users_leaves_no_trace_outside_its_copies() -> None:
    told, count = [], 0

    def tell() -> None:
        nonlocal count
        count += 1
        told.append(count)

    model = tiny_lm()
    optimizer = Counting(model.parameters(), 0.1, tell)
    model(**tokens())["loss"].backward()
    hooked: list[int] = []
    handles = [
        optimizer.register_step_post_hook(lambda *_: hooked.append(1)),
        register_optimizer_step_pre_hook(lambda *_: hooked.append(1)),
        register_optimizer_step_post_hook(lambda *_: hooked.append(1)),
    ]

    def state() -> list[Any]:
        generators = [one.get_state().tolist() for one in (optimizer.noise, optimizer.own_noise)]
        return [GLOBAL_COUNT, Counting.steps, list(Counting.log), optimizer.mine, count, list(told), generators]

    before = copy.deepcopy(state())
    found = estimate_divergence(model, tokens(), optimizer)
    assert found.totals("fp4")["weight"] > 0
    answer = responses(optimizer, {"weight": model.head.weight})["weight"]
    assert answer.update(torch.ones_like(model.head.weight)).mean() > 0.1
    assert state() == before
    assert hooked == []
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert hooked == [1, 1, 1]
    assert state()[1] == before[1] + 1
    Counting.log.clear()
