"""A run whose plan stays "bf16" computes, to the bit, what it computes without the callback."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import fp4_config
from slow_cases import slow_but
from tiny_runs import SCHEDULE, Run, data, differing, model_with_dropout, solve_with, train, weights
from transformers import LlamaForCausalLM

UNTOUCHED = fp4_config(start_format="bf16", **SCHEDULE)


def outcome(run: Run) -> dict[str, Any]:
    """Everything that training leaves: figures, optimizer state, and where the random generators stand."""
    optimizer = run.trainer.optimizer.state_dict()["state"]
    return {
        "losses": run.losses,
        "eval_losses": run.eval_losses,
        "optimizer": {
            f"{i}.{key}": torch.as_tensor(value).tolist() for i, s in optimizer.items() for key, value in s.items()
        },
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
    }


def checkpointing() -> LlamaForCausalLM:
    model = model_with_dropout()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": True})
    return model


def in_bf16_with_bias() -> LlamaForCausalLM:
    return model_with_dropout(attention_bias=True, mlp_bias=True).to(torch.bfloat16)


# Every case has gradient accumulation over 2, an epoch that ends in the middle of it, clipping, warm-up and cosine
# schedule, dropout, masked labels (num_items_in_batch).
CASES: dict[str, dict[str, Any]] = {
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
    "recomputed activations, reentrant, autocast to bf16": {"model": checkpointing, "bf16": True},
    "weights in bf16, biases": {"model": in_bf16_with_bias},
    "SGD, no accumulation, no clipping": {
        "optim": "sgd",
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 0.0,
        "learning_rate": 0.1,
    },
}


@pytest.mark.parametrize("case", slow_but(CASES, *list(CASES)[:1]))
def test_probes_whose_solver_always_fails_leave_no_trace(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = dict(CASES[case])
    model = changes.pop("model", model_with_dropout)
    changes = {"gradient_accumulation_steps": 2, "max_steps": 8, "trainer": {"train_dataset": data(14)}} | changes
    expected = train(tmp_path / "plain", model=model(), **changes)
    expected_outcome = outcome(expected)

    solve_with(monkeypatch, "raise SystemExit('no solver today')")
    run = train(tmp_path / "snip", UNTOUCHED, model=model(), **changes)

    assert [(line["step"], line["status"]) for line in run.refreshes] == [(2, "kept"), (6, "kept")]
    assert all("no solver today" in line["reason"] for line in run.refreshes)
    assert len(run.losses) == 8
    assert outcome(run) == expected_outcome
    assert differing(weights(run.model), weights(expected.model)) == []


def test_the_comparison_notices_a_plan_that_is_applied(tmp_path: Path) -> None:
    expected = train(tmp_path / "plain", max_steps=6)
    run = train(tmp_path / "snip", UNTOUCHED, max_steps=6)
    same = [step for step in run.losses if run.losses[step] == expected.losses[step]]
    # The first plan is applied after step 4; until then nothing differs.
    assert same == [1, 2, 3, 4]
    assert len(differing(weights(run.model), weights(expected.model))) == len(weights(run.model))
