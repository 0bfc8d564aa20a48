"""The bit-exact invariants hold with a user's callbacks, hooks and aliased modules in the run."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from tiny_runs import SCHEDULE, Run, differing, model_with_dropout, one_thread, solve_with, train, weights
from torch import Tensor, nn
from transformers import TrainerCallback

from snip_hf import SnipConfig, is_probing

CONFIG = fp4_config(**SCHEDULE)
UNTOUCHED = fp4_config(start_format="bf16", **SCHEDULE)
SHORT = {"max_steps": 8}
SAVING = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


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


class Aliased(nn.Module):
    """Holds the model's blocks, one of their norms and the head under second names."""

    _keys_to_ignore_on_save = None  # read by the Trainer on resume

    def __init__(self) -> None:
        super().__init__()
        self.lm = model_with_dropout()
        self.blocks = self.lm.model.layers
        self.norm = self.lm.model.layers[0].input_layernorm
        self.head = self.lm.lm_head
        self.config = self.lm.config

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Tensors under their first names, since safetensors stores no tensor twice."""
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name.startswith("lm.")}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> Any:
        return self.lm(input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch)


COMPANY: dict[str, tuple[Any, list[type[TrainerCallback]]]] = {
    "generation": (model_with_dropout, [Generating]),
    "a moving average": (model_with_dropout, [Averaging]),
    "observing hooks": (lambda: observed(model_with_dropout()), []),
    "aliased modules": (Aliased, []),
}
COMPANY["all of them"] = (lambda: observed(model_with_dropout()), [Generating, Averaging])


def in_company(kind: str, folder: Path, config: SnipConfig | None, **changes: Any) -> Run:
    make, callbacks = COMPANY[kind]
    return train(folder, config, model=make(), callbacks=[callback() for callback in callbacks], **SHORT | changes)


def state_of(run: Run) -> tuple[Any, ...]:
    return run.losses, torch.get_rng_state().tolist(), [float(norm) for norm in getattr(run.model, "seen", [])]


# It has what the others have one by one.
@pytest.mark.parametrize("kind", ["all of them"])
def test_probes_whose_solver_always_fails_leave_no_trace(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = in_company(kind, tmp_path / "plain", None)
    expected = state_of(plain)
    solve_with(monkeypatch, "raise SystemExit('no solver today')")
    run = in_company(kind, tmp_path / "snip", UNTOUCHED)
    assert [(line["step"], line["status"]) for line in run.refreshes] == [(2, "kept"), (6, "kept")]
    assert all("no solver today" in line["reason"] for line in run.refreshes)
    assert state_of(run) == expected
    assert differing(weights(run.model), weights(plain.model)) == []


@pytest.fixture(scope="module")
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    run = in_company(request.param, tmp_path_factory.mktemp("full"), CONFIG, **SAVING)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 4), (6, 8)]
    return request.param, run


@pytest.mark.parametrize(("full", "step"), [("aliased modules", 3), ("all of them", 3)], indirect=["full"])
@pytest.mark.slow
def test_resuming_gives_the_uninterrupted_run(full: tuple[str, Run], step: int, tmp_path: Path) -> None:
    kind, expected = full
    shutil.copytree(expected.folder / "snip", tmp_path / "snip")
    checkpoint = shutil.copytree(expected.folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    run = in_company(kind, tmp_path, CONFIG, resume=checkpoint, **SAVING)
    assert run.losses == expected.losses
    assert differing(weights(run.model), weights(expected.model)) == []
    assert [line["changes"] for line in run.refreshes] == [line["changes"] for line in expected.refreshes]
