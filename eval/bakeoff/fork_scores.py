"""Benchmarks of a fork's model: lm-eval's tasks on its weights, unquantized, in BF16, question by question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.scoring.evaluate import Settings, evaluate

from .fork_base import Trainee
from .fork_text import tokenizer_folder

# Of a row of eval/run.py.
_FIELDS = ("task", "group", "metrics", "chance", "num_fewshot", "num_samples", "task_version", "answers")


def scores(
    trainee: Trainee, tasks: Sequence[str], text: Path, data_dir: Path | None, settings: Settings | None = None
) -> dict[str, Any]:
    """Returns the scores of a model in training, which goes on as if there had been none.

    Args:
        trainee: the model.
        tasks: of eval/run.py.
        text: file of the tokens that it was trained on, which the tokenizer lies beside.
        data_dir: of the benchmarks' files; None: the Hub.
        settings: how; None: all documents, 64 at a time.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(text))
    with torch.random.fork_rng([trainee.device] if trainee.device.type == "cuda" else []):
        model = AutoModelForCausalLM.from_config(trainee.model.config, dtype=torch.bfloat16).to(trainee.device)
        model.load_state_dict(trainee.model.state_dict())
        rows = evaluate(model.eval(), tokenizer, tasks, data_dir, settings or Settings(batch_size=64, answers=True))
    return {"scores": [{name: row[name] for name in _FIELDS if name in row} for row in rows]}
