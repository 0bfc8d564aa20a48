"""Do the user's hooks run in a probe as under activation checkpointing, and can they tell it from training?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import BYTES, text, tiny_lm, tokens, watched
from tiny_runs import FAST, differing, model_with_dropout, train, weights
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import MixtralConfig, MixtralForCausalLM

import snip_hf
from snip_hf import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.ground_truth import measure_divergence
from snip_hf.estimation.passes import run_pass
from snip_hf.layers.convert import convert_model

# A probe at step 2, whose plan is applied after the last of 6 steps: the run is that of BF16 without SNIP.
PROBES_ALONE = fp4_config(start_format="bf16", first_refresh=2, refresh_every=9, apply_delay=4, **FAST)


class Counting(nn.Module):
    """A norm that counts its calls in an attribute, keeps its last output, and writes to a tensor of its own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.calls, self.total = norm, 0, torch.zeros(())
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = y = self.norm(x)
        self.calls += 1
        self.total.add_(1)
        return y


def run_with(folder: Path, config: SnipConfig | None) -> tuple[Any, ...]:
    """A run with hooks that count training alone, and a module that counts every call."""
    model, heard = model_with_dropout(), list[str]()

    def note(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not snip_hf.is_probing():
                heard.append(what)

        return hook

    model.model.norm = Counting(model.model.norm)
    first, second = model.model.layers
    first.register_forward_pre_hook(note("before"))
    second.input_layernorm.register_forward_hook(note("after"), always_call=True)
    second.register_full_backward_hook(note("backward"))
    second.register_full_backward_pre_hook(note("before backward"))
    run = train(folder, config, model=model, max_steps=6, gradient_accumulation_steps=2)
    norm: Any = model.model.norm
    return run, weights(model), heard, norm.calls, norm.total.item(), norm.last.tolist()


def test_a_run_with_probes_is_one_without_for_hooks_that_ask_and_attributes_of_modules(tmp_path: Path) -> None:
    bare, *expected = run_with(tmp_path / "bare", None)
    run, *found = run_with(tmp_path / "probed", PROBES_ALONE)
    assert [line["step"] for line in run.refreshes] == [2]
    assert "error" not in str(run.refreshes).lower()
    assert run.losses == bare.losses
    assert differing(found[0], expected[0]) == []
    assert found[1:] == expected[1:]
    assert set(found[1]) == {"before", "after", "backward", "before backward"}


def clamp(module: nn.Module, args: Any, output: Tensor) -> None:
    torch.clamp_(output, -0.1, 0.1)


def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


@pytest.mark.parametrize("hook", [clamp, scale])
def test_a_hook_that_writes_or_returns_acts_in_the_probe_however_it_does(hook: Callable[..., Any]) -> None:
    model = tiny_lm()
    plain = estimate_divergence(model, tokens()).loss
    model.layers[0].norm.register_forward_hook(hook)
    with torch.no_grad():
        expected = float(model(**tokens())["loss"])
    assert expected != pytest.approx(plain, rel=1e-4)
    assert estimate_divergence(model, tokens()).loss == pytest.approx(expected, rel=1e-6)


def test_a_probe_is_known_as_one_on_every_thread_and_only_while_it_runs() -> None:
    model, seen = tiny_lm(), list[bool]()
    model.layers[0].register_full_backward_hook(lambda *_: seen.append(snip_hf.is_probing()))
    model.layers[0].register_forward_hook(lambda *_: seen.append(snip_hf.is_probing()))
    assert not snip_hf.is_probing()
    estimate_divergence(model, tokens())
    measure_divergence(model, tokens(), config=SnipConfig(formats=("fp4", "fp8")))
    assert seen and all(seen) and not snip_hf.is_probing()
    seen.clear()
    model(**tokens())["loss"].backward()
    assert seen == [False, False]


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
def test_hooks_of_all_modules_act_and_stay() -> None:
    model = tiny_lm()

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.LayerNorm) else output

    handle = torch_modules.register_module_forward_hook(double)
    try:
        order = list(torch_modules._global_forward_hooks.values())
        with_hooks = estimate_divergence(model, tokens()).loss
        assert list(torch_modules._global_forward_hooks.values()) == order
        loss = model(**tokens())["loss"].item()
        assert with_hooks == pytest.approx(loss, rel=1e-6)
    finally:
        handle.remove()
    assert estimate_divergence(model, tokens()).loss != pytest.approx(loss, rel=1e-3)


def test_hooks_of_the_model_itself_act_in_the_probe_once() -> None:
    model, batch = tiny_lm(), tokens()
    convert_model(model, fp4_config(start_format="bf16"))
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


def test_hooks_do_not_change_captured_inputs_twice(tmp_path: Path) -> None:
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


def test_aux_losses_of_transformers_models_take_part_in_the_probe() -> None:
    sizes = {**BYTES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0)
    model = MixtralForCausalLM(config).train()
    hooks = {name: dict(module._forward_hooks) for name, module in model.named_modules()}
    estimated = estimate_divergence(model, text(2, 8)).loss
    # Those that the first forward pass installs for good are there after the first one outside the probe.
    assert {name: dict(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert estimated == pytest.approx(model(**text(2, 8)).loss.item(), rel=1e-5)
    assert estimate_divergence(model, text(2, 8)).loss == estimated
