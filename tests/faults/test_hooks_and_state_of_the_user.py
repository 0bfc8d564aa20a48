"""Do the user's hooks run in the probe as in training, and can those that count tell it from training?"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import text, tiny_lm, tokens, watched
from tiny_runs import FAST, differing, model_with_dropout, train, weights
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer

from snip_hf import SnipConfig, coverage, is_probing, measure_divergence
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.passes import run_pass
from snip_hf.layers.convert import convert_model
from snip_hf.optimizers.response import responses

# A probe at step 2, whose plan is applied after the last of 6 steps: the run is that of BF16 without SNIP.
PROBES_ALONE = SnipConfig(start_format="bf16", first_refresh=2, refresh_every=9, apply_delay=4, **FAST)
GLOBAL_PENALTIES: list[Tensor] = []


class Ear:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard: dict[str, int] = {}

    def note(self, what: str) -> None:
        if is_probing():
            return
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


class WithPenalty(Trainer):
    """Adds to the loss what hooks and modules have left in lists since the last forward pass."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        GLOBAL_PENALTIES.clear()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + 0.1 * sum(GLOBAL_PENALTIES)


def note_a_penalty(module: nn.Module, args: Any, output: Tensor) -> None:
    GLOBAL_PENALTIES.append(output.pow(2).mean())


def scale_and_note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    scaled = output * 0.9
    GLOBAL_PENALTIES.append(scaled.abs().mean())
    return scaled


class Keeping(nn.Module):
    """A norm that counts in attributes, adds up in a tensor, and draws from a generator of its own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.counter = 0
        self.last: Tensor | None = None
        self.generator = torch.Generator().manual_seed(5)
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        self.counter += 1
        self.last = y.detach()
        self.total.add_(1)
        return y * (1 + 0.1 * torch.rand((), generator=self.generator))

    def state(self) -> list[Any]:
        drawn = torch.rand((), generator=self.generator).item()
        return [self.counter, self.last.tolist(), self.total.item(), drawn]  # type: ignore[union-attr]


def furnished() -> tuple[LlamaForCausalLM, Ear]:
    """A model with all of this."""
    model, ear = model_with_dropout(), Ear()
    model.model.norm = Keeping(model.model.norm)
    first, second = model.model.layers
    first.register_forward_pre_hook(ear.before)
    first.register_forward_hook(ear.with_kwargs, with_kwargs=True)
    second.input_layernorm.register_forward_hook(ear.always, always_call=True)
    second.register_full_backward_hook(ear.backward)
    second.register_full_backward_pre_hook(ear.before_backward)
    second.mlp.register_forward_hook(note_a_penalty)
    first.mlp.register_forward_hook(scale_and_note)
    return model, ear


def furnished_run(folder: Path, config: SnipConfig | None) -> tuple[Any, ...]:
    model, ear = furnished()
    run = train(folder, config, model=model, max_steps=6, trainer_class=WithPenalty, gradient_accumulation_steps=2)
    norm: Any = model.model.norm
    return run, weights(model), ear.heard, norm.state()


def test_a_run_with_probes_is_one_without_for_attributes_and_hooks_that_ask(tmp_path: Path) -> None:
    bare, *expected = furnished_run(tmp_path / "bare", None)
    run, *found = furnished_run(tmp_path / "probed", PROBES_ALONE)
    assert [line["step"] for line in run.refreshes] == [2]
    assert "error" not in str(run.refreshes).lower()
    assert run.losses == bare.losses
    assert differing(found[0], expected[0]) == []
    assert found[1:] == expected[1:]
    # 11 micro-batches in 6 steps.
    assert expected[1]["before"] == expected[2][0] > 0


def clamp(module: nn.Module, args: Any, output: Tensor) -> None:
    torch.clamp_(output, -0.1, 0.1)


def rectify(module: nn.Module, args: Any, output: Tensor) -> None:
    torch.relu_(output)


def zero(module: nn.Module, args: Any, output: Tensor) -> None:
    nn.init.zeros_(output)


def by_a_helper(module: nn.Module, args: Any, output: Tensor) -> None:
    halve(output)


def halve(output: Tensor) -> None:
    with torch.no_grad():
        output *= 0.5


@pytest.mark.parametrize("hook", [clamp, rectify, zero, by_a_helper])
def test_the_probe_prices_the_loss_of_training_whatever_a_hook_writes_with(hook: Any) -> None:
    model, batch = tiny_lm(), tokens()
    bare = estimate_divergence(model, batch).loss
    for layer in model.layers:
        layer.up.register_forward_hook(hook)
    expected = model(**batch)["loss"].item()
    assert expected != pytest.approx(bare, rel=1e-4)
    assert estimate_divergence(model, batch).loss == pytest.approx(expected, rel=1e-6)


def test_what_another_thread_appends_during_a_probe_stays() -> None:
    model, rows = tiny_lm(), list[str]()
    model.rows = rows

    def append(module: nn.Module, args: Any, output: Tensor) -> None:
        rows.append("hook")
        thread = threading.Thread(target=rows.append, args=("thread",))
        thread.start()
        thread.join()

    model.layers[0].norm.register_forward_hook(append)
    estimate_divergence(model, tokens())
    assert rows == ["hook", "thread"] * (len(rows) // 2)
    assert rows


def asking(model: nn.Module) -> list[bool]:
    """Returns what forward, backward and tensor hooks of a model will hear when they ask for a probe."""
    heard: list[bool] = []

    def forward(module: nn.Module, args: Any, output: Tensor) -> None:
        heard.append(is_probing())
        if output.requires_grad:
            output.register_hook(lambda _: heard.append(is_probing()))

    module: Any = model
    module.layers[0].norm.register_forward_hook(forward)
    module.layers[1].norm.register_full_backward_hook(lambda *_: heard.append(is_probing()))
    return heard


PASSES: dict[str, Any] = {
    "estimate": lambda model: estimate_divergence(model, tokens()),
    "measure": lambda model: measure_divergence(model, tokens(), draws=1),
    "coverage": lambda model: coverage(model, tokens()),
}


@pytest.mark.parametrize("name", PASSES)
def test_hooks_of_all_kinds_can_tell_snips_passes_from_training(name: str) -> None:
    model = tiny_lm()
    heard = asking(model)
    PASSES[name](model)
    assert heard
    assert all(heard)
    heard.clear()
    model(**tokens())["loss"].backward()
    assert heard == [False] * 3


def test_the_log_names_hooked_modules_at_the_first_probe(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf.estimation.passes")
    model, plain = tiny_lm(), tiny_lm()
    asking(model)
    for one in (model, model, plain):
        estimate_divergence(one, tokens())
    assert [record.getMessage() for record in caplog.records] == [
        "snip-hf: hooks of 2 modules ('layers.0.norm', 'layers.1.norm') run in probes too. In those that must not "
        "count a probe, ask snip_hf.is_probing()."
    ]


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_all_modules_act_in_the_probe_and_can_tell_it() -> None:
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


def test_a_hook_may_read_what_another_one_left() -> None:
    model, stash = tiny_lm(), {}

    def remember(module: nn.Module, args: Any) -> None:
        stash["x"] = args[0]

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + stash["x"]

    model.layers[0].up.register_forward_pre_hook(lambda *_: None)
    model.layers[1].norm.register_forward_pre_hook(remember)
    model.layers[1].norm.register_forward_hook(add)
    loss = model(**tokens())["loss"]
    assert estimate_divergence(model, tokens()).loss == pytest.approx(loss.item(), rel=1e-6)
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
    """Plain descent that counts its steps in itself and outside, with noise from a generator of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.mine, self.noise = 0, torch.Generator().manual_seed(7)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.mine += 1
        if not is_probing():
            TOLD.append(self.mine)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (1 + 0.1 * torch.rand((), generator=self.noise)) * parameter.grad)


TOLD: list[int] = []


def test_the_step_of_an_optimizer_of_the_users_leaves_no_trace_outside_its_copies() -> None:
    TOLD.clear()
    model = tiny_lm()
    optimizer = Counting(model.parameters(), 0.1)
    model(**tokens())["loss"].backward()
    hooked: list[int] = []
    handles = [
        optimizer.register_step_post_hook(lambda *_: hooked.append(1)),
        register_optimizer_step_pre_hook(lambda *_: hooked.append(1)),
        register_optimizer_step_post_hook(lambda *_: hooked.append(1)),
    ]

    def state() -> list[Any]:
        return [list(TOLD), optimizer.mine, optimizer.noise.get_state().tolist()]

    before = state()
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
    assert TOLD == [1]
