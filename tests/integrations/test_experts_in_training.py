"""Mixture-of-experts models under a real Trainer: planned, trained, saved, resumed, restored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mixtures import build
from slow_cases import slow_but
from tiny_runs import Run, data, differing, train, weights
from torch import nn
from transformers import AutoModelForCausalLM

from snip_hf import SnipConfig, restore_model
from snip_hf.layers.state import snip_linears

# Decided without a probe: the last layers in FP4.
CONFIG = SnipConfig(policy="layer-position", target_fp4_fraction=0.5)


def run(folder: Path, model: nn.Module, resume: Path | None = None) -> Run:
    return train(folder, CONFIG, model=model, resume=resume, max_steps=4, save_strategy="steps", save_steps=2)


@pytest.mark.parametrize("family", slow_but(["qwen3-moe", "gpt-oss"], "qwen3-moe"))
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


def test_a_checkpoint_is_one_of_plain_transformers(tmp_path: Path) -> None:
    trained = run(tmp_path, build("mixtral")).model
    restore_model(trained)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert not differing(weights(trained), weights(loaded))
    ids = torch.tensor([row["input_ids"] for row in data(2)])
    with torch.no_grad():
        assert torch.equal(trained.eval()(input_ids=ids).logits, loaded(input_ids=ids).logits)
