"""Trains tiny models by TRL's trainers: models, tokenizer, data and arguments, without a hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from configs import fp4_config
from small import tiny_llama
from tiny_runs import SCHEDULE, one_thread
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from snip_hf import SnipCallback, SnipConfig

CONFIG = fp4_config(**SCHEDULE)
# Until a plan is applied, nothing differs from a run without SNIP.
UNTOUCHED = fp4_config(start_format="bf16", **SCHEDULE)
PAD, EOS = 124, 125


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per ASCII character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {chr(code): code for code in range(1, 124)} | {"<unk>": 0, "<pad>": PAD, "<eos>": EOS}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    found.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}A{{ m['content'] }}{% endgeneration %}"
        "{% else %}U{{ m['content'] }}{% endif %}{% endfor %}"
    )
    return found


TEXTS = [{"text": f"this is row {index} of the text " * (1 + index % 3)} for index in range(24)]
PAIRS = [{"prompt": f"what is {index}? ", "completion": f"it is {index * index}"} for index in range(24)]
CHATS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in PAIRS
]
PREFERENCES = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f"no idea {index}"}
    for index, row in enumerate(PAIRS)
]
JUDGED = [row | {"label": index % 3 != 0} for index, row in enumerate(PAIRS)]
PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS]
# Trainer -> rows that it takes.
ROWS: dict[str, list[dict[str, Any]]] = {
    "SFT": TEXTS,
    "DPO": PREFERENCES,
    "KTO": JUDGED,
    "Reward": [{"chosen": row["prompt"] + row["chosen"], "rejected": row["rejected"]} for row in PREFERENCES],
    "GRPO": PROMPTS,
    "RLOO": PROMPTS,
}
_GENERATES = {"num_generations": 2, "max_completion_length": 12, "per_device_train_batch_size": 4}
# Trainer -> arguments that it needs here.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "SFT": {"max_length": 48},
    "DPO": {"max_length": 48},
    "KTO": {"max_length": 48},
    "Reward": {"max_length": 48},
    "GRPO": _GENERATES,
    "RLOO": _GENERATES,
}


def letters(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that differs among completions: how many letters they have, and of which kind."""
    return [sum(letter.isalpha() + letter.islower() for letter in completion) / 8 for completion in completions]


def model_for(trainer: str) -> Any:
    if trainer != "Reward":
        model: Any = tiny_llama(hidden=32)
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, EOS
    else:
        config = LlamaConfig(**tiny_llama(hidden=32).config.to_dict() | {"num_labels": 1, "pad_token_id": PAD})
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config)
    model.config.pad_token_id, model.config.eos_token_id = PAD, EOS
    return model


def saved_model(folder: Path) -> str:
    """A folder that TRL loads the model, and once more its reference, from."""
    model: LlamaForCausalLM = model_for("SFT")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@dataclass
class TRLRun:
    """A run under TRL: its folder and trainer."""

    folder: Path
    trainer: Any

    @property
    def logged(self) -> list[dict[str, Any]]:
        """The figures logged at each step, without times, shares and counts of tokens."""
        rows = (line for line in self.trainer.state.log_history if "loss" in line)
        return [{key: value for key, value in row.items() if not _is_left_out(key)} for row in rows]

    @property
    def refreshes(self) -> list[dict[str, Any]]:
        lines = (self.folder / "snip" / "history.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == "refresh"]

    @property
    def probed_loss(self) -> float:
        """The table of the first refresh."""
        found: float = json.loads((self.folder / "snip" / "divergence-2.json").read_text())["loss"]
        return found


def _is_left_out(key: str) -> bool:
    # TRL counts its tokens anew where a run is resumed.
    return "time" in key or "per_second" in key or key.startswith("fp4_") or key == "num_tokens"


def build(
    folder: Path,
    trainer: str,
    config: SnipConfig | None = None,
    *,
    callback: TrainerCallback | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    model: Any = None,
    rows: list[dict[str, Any]] | None = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Builds a trainer of TRL's: "SFT", "DPO", "KTO", "Reward", "GRPO" or "RLOO".

    Args:
        model: a model or a folder; the trainer's tiny one if None.
        rows: of the data.
        more: further arguments of the trainer.
        changes: of its configuration.
    """
    import trl
    from datasets import Dataset

    if config is not None:
        callback = SnipCallback(config, keep_formats=True)
    common: dict[str, Any] = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }
    args = getattr(trl, f"{trainer}Config")(str(folder), **common | _ARGUMENTS[trainer] | changes)
    needs = {"reward_funcs": letters} if trainer in ("GRPO", "RLOO") else {}
    return getattr(trl, f"{trainer}Trainer")(
        model=model_for(trainer) if model is None else model,
        args=args,
        train_dataset=Dataset.from_list(ROWS[trainer] if rows is None else rows),
        processing_class=tokenizer(),
        callbacks=[*([] if callback is None else [callback]), *callbacks],
        **needs | (more or {}),
    )


def run(folder: Path, trainer: str, config: SnipConfig | None = None, resume: Path | None = None, **how: Any) -> TRLRun:
    """Builds and trains."""
    built = build(folder, trainer, config, **how)
    with one_thread():
        built.train(resume_from_checkpoint=None if resume is None else str(resume))
    return TRLRun(folder, built)
