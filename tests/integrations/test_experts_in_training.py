"""Mixture-of-experts models under a real Trainer: planned, trained, saved, resumed, restored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from configs import fp4_config
from expert_models import build
from tiny_runs import FAST, Run, data, differing, train, weights
from torch import nn
from transformers import AutoModelForCausalLM

from snip_hf import SnipConfig, restore_model
from snip_hf.layers.state import snip_linears

# Decided without a probe: the last layers in FP4.
CONFIG = fp4_config(policy="layer-position", target_fp4_fraction=0.5)


# One refresh, whose plan is applied after the second step.
PROBED = fp4_config(first_refresh=1, apply_delay=1, refresh_every=9, **FAST)


def run(folder: Path, model: nn.Module, resume: Path | None = None, config: SnipConfig = CONFIG) -> Run:
    return train(folder, config, model=model, resume=resume, max_steps=4, save_strategy="steps", save_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_bit(family: str, tmp_path: Path) -> None:
    whole = run(tmp_path, build(family))
    formats = {name: set(layer.formats.values()) for name, layer in snip_linears(whole.model).items()}
    assert {"fp4"} in (found for name, found in formats.items() if "experts" in name)
    checkpoint = tmp_path / "checkpoint-2"
    # The Trainer does not undo what saving makes of the keys of Qwen3-MoE's experts; `from_pretrained` does.
    model = build(family) if family == "gpt-oss" else AutoModelForCausalLM.from_pretrained(checkpoint)
    resumed = run(tmp_path, model, resume=checkpoint)
    assert not differing(weights(whole.model), weights(resumed.model))
    assert {step: whole.losses[step] for step in (3, 4)} == {step: resumed.losses[step] for step in (3, 4)}


def test_with_a_probe_experts_get_formats_and_lost_weights_are_noticed_at_a_resume(tmp_path: Path) -> None:
    whole = run(tmp_path, build("qwen3-moe"), config=PROBED)
    assert whole.callback is not None and whole.refreshes[0]["status"] == "applied"
    experts = [layer for name, layer in snip_linears(whole.model).items() if "experts" in name]
    assert "fp4" in {name for layer in experts for name in layer.formats.values()}
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(ValueError, match=r"other weights than those that were loaded.*by from_pretrained first"):
        run(tmp_path, build("qwen3-moe"), checkpoint, PROBED)
    resumed = run(tmp_path, AutoModelForCausalLM.from_pretrained(checkpoint), checkpoint, PROBED)
    assert not differing(weights(whole.model), weights(resumed.model))


def test_a_checkpoint_is_one_of_plain_transformers(tmp_path: Path) -> None:
    trained = run(tmp_path, build("mixtral")).model
    restore_model(trained)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert not differing(weights(trained), weights(loaded))
    ids = torch.tensor([row["input_ids"] for row in data(2)])
    with torch.no_grad():
        assert torch.equal(trained.eval()(input_ids=ids).logits, loaded(input_ids=ids).logits)
