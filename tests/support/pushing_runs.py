"""Trains tiny models and pushes them to a hub, each in another way; run as a program with a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from configs import fp4_config
from hub_server import TOKEN, USER
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from snip_hf import SnipCallback
from snip_hf.integrations.hub import keep_model_card

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def train_and_push(folder: str) -> None:
    """Trains once for each way to push. Prints as JSON what only this process can know."""
    run(f"{folder}/every-save", hub_strategy="every_save")
    run(f"{folder}/last-checkpoint", hub_strategy="checkpoint")
    trainer = run(f"{folder}/at-the-end", hub_strategy="end")
    trainer.push_to_hub(tags="mine")
    refused = run(f"{folder}/read-only", hub_strategy="every_save")
    try:
        refused.push_to_hub()
    except Exception as raised:
        error = str(raised)
    trainer = run(f"{folder}/kept-card", hub_strategy="end")
    keep_model_card(trainer)
    trainer.push_to_hub()
    trainer.push_to_hub()
    model = LlamaForCausalLM.from_pretrained(f"{USER}/kept-card", token=TOKEN)
    pairs = zip(model.parameters(), trainer.model.parameters(), strict=True)
    same = all(torch.equal(pushed, trained) for pushed, trained in pairs)
    print(json.dumps({"same weights": same, "refused at step": refused.state.global_step, "error": error}))


def run(output_dir: str, **arguments: Any) -> Trainer:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = list(range(8))
    # One refresh: probe at step 1, applied after step 2, which is when the checkpoint is saved and pushed.
    snip = fp4_config(target_fp4_fraction=0.5, first_refresh=1, apply_delay=1, solver="greedy")
    figure = Path(output_dir) / "snip" / "plan.png"
    figure.parent.mkdir(parents=True)
    figure.write_bytes(PNG)
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            output_dir=output_dir,
            max_steps=2,
            # One push: a second save would change files under the first one's upload, which runs in the background.
            save_steps=2,
            per_device_train_batch_size=1,
            push_to_hub=True,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 2,
        callbacks=[SnipCallback(snip)],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    train_and_push(sys.argv[1])
