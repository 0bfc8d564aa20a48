"""Probes leave no trace, to the bit, with a user's callbacks and hooks in the run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from tiny_runs import SCHEDULE, Run, differing, model_with_dropout, solve_with, train, weights
from torch import nn
from transformers import TrainerCallback

from snip_hf import SnipConfig, is_probing

pytestmark = pytest.mark.usefixtures("one_thread_only")

UNTOUCHED = fp4_config(start_format="bf16", **SCHEDULE)


class Generating(TrainerCallback):
    """Samples in training mode, as the model is, and greedily, so that no random numbers are drawn but by dropout."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False)


class Averaging(TrainerCallback):
    """An exponential moving average of the weights in a copy of the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.average = copy.deepcopy(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        assert all(torch.isfinite(parameter).all() for parameter in copy.deepcopy(self.average).parameters())


def observed(model: nn.Module) -> nn.Module:
    """Keeps an activation's norm per pass of training of each block, in a list, and each gradient that a norm gets."""
    model.seen = []  # type: ignore[assignment]

    def note(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not is_probing():
            model.seen.append(hidden.detach().norm())

    def note_gradient(module: nn.Module, grads: Any, outputs: Any) -> None:
        if not is_probing():
            model.seen.append(outputs[0].norm())

    for layer in model.model.layers:
        layer.register_forward_hook(note)
    model.model.norm.register_full_backward_hook(note_gradient)
    return model


def in_company(folder: Path, config: SnipConfig | None) -> Run:
    model = observed(model_with_dropout())
    return train(folder, config, model=model, callbacks=[Generating(), Averaging()], max_steps=8)


def state_of(run: Run) -> tuple[Any, ...]:
    return run.losses, torch.get_rng_state().tolist(), [float(norm) for norm in getattr(run.model, "seen", [])]


def test_probes_whose_solver_always_fails_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = in_company(tmp_path / "plain", None)
    expected = state_of(plain)
    solve_with(monkeypatch, "raise SystemExit('no solver today')")
    run = in_company(tmp_path / "snip", UNTOUCHED)
    assert [(line["step"], line["status"]) for line in run.refreshes] == [(2, "kept"), (6, "kept")]
    assert all("no solver today" in line["reason"] for line in run.refreshes)
    assert state_of(run) == expected
    assert differing(weights(run.model), weights(plain.model)) == []
