"""Scores of a loaded model on lm-eval's stock tasks, one row per task and group."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .local_tasks import EvaluationError, known_tasks, local_tasks, stock_tasks
from .questions import answers_of
from .rows import Row, git_commit, rows_of, versions

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# lm-eval's own default for few-shot sampling, so that few-shot scores compare with published ones.
DEFAULT_SEED = 1234
# Only for perplexity's standard error; the accuracies' is a formula. lm-eval's 100,000 draws take minutes.
_BOOTSTRAP_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an evaluation."""

    limit: int | None = None
    """Documents per task (per subject for mmlu); None for all."""
    batch_size: int = 16
    num_fewshot: int | None = None
    """Examples in the prompt; None for the stock task's own default (0 for all tasks here)."""
    seed: int = DEFAULT_SEED
    """Seed of few-shot sampling and of the generators of python, numpy and torch."""
    answers: bool = False
    """True: rows list the documents that were answered correctly (`questions.answers_of`)."""


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    settings: Settings | None = None,
    origin: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Scores a loaded model in its own dtype and on its own device; leaves it in eval mode.

    Args:
        tasks: names from `known_tasks`; a group such as "mmlu" also gives a row for each member.
        data_dir: folder in the layout of eval/README.md; None for the Hub's data (or its cache).
        settings: None for the defaults.
        origin: further fields for every row, such as `model` and `arithmetic`.

    Returns: one row per task and group, ready for JSON; eval/README.md describes the fields.

    Raises:
        EvaluationError: unknown task, missing or malformed data, or the Hub cannot be reached.
    """
    from lm_eval.evaluator import simple_evaluate

    from .harness import ContextsOnceHFLM, templates_compiled_once

    settings = settings or Settings()
    with tempfile.TemporaryDirectory() as yaml_folder:
        manager = stock_tasks()
        names = _checked_names(tasks, known_tasks(manager))
        if data_dir is not None:
            if not Path(data_dir).is_dir():
                raise EvaluationError(f"--data-dir {data_dir} is not a folder; see eval/README.md for its layout.")
            manager = local_tasks(manager, Path(data_dir).resolve(), settings.num_fewshot, Path(yaml_folder))
        loaded = _load(manager, names, from_hub=data_dir is None)
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    with templates_compiled_once():
        results = simple_evaluate(
            ContextsOnceHFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=settings.batch_size),
            tasks=[loaded["groups"].get(name) or loaded["tasks"][name] for name in names],
            task_manager=manager,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=_BOOTSTRAP_DRAWS,
            log_samples=settings.answers,
            **dict.fromkeys(seeds, settings.seed),
        )
    common = _common_fields(settings, "hub" if data_dir is None else str(data_dir), model)
    rows = rows_of(results, loaded, names, dict(origin or {}) | common)
    answers = answers_of(results) if settings.answers else {}
    return [row | ({"answers": answers[row["task"]]} if row["task"] in answers else {}) for row in rows]


def _common_fields(settings: Settings, data: str, model: PreTrainedModel) -> Row:
    """Returns the fields that all rows of an evaluation share: settings, data and origin."""
    return {
        "limit": settings.limit,
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "data": data,
        "dtype": str(model.dtype).removeprefix("torch."),
        "git_commit": git_commit(),
        "command": shlex.join(sys.argv),
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _checked_names(tasks: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in tasks:
        if name not in known:
            raise EvaluationError(f"Unknown task {name!r}; known are {', '.join(known)}.")
    return list(dict.fromkeys(tasks))


def _load(manager: TaskManager, names: Sequence[str], from_hub: bool) -> dict[str, Any]:
    """Returns `manager.load(names)`, with errors that say what to do."""
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        try:
            new = manager.load([name])
        except (OSError, ValueError) as error:
            if not from_hub:
                raise
            raise EvaluationError(
                f"{name}: its data could not be loaded from the Hugging Face Hub ({error}). Either give --data-dir DIR "
                "with local files (layout in eval/README.md), or connect to the Hub once, so that the data are in its "
                "cache (HF_HOME)."
            ) from error
        twice = loaded["tasks"].keys() & new["tasks"].keys()
        if twice:
            raise EvaluationError(f"{min(twice)!r} is asked for twice, last by {name!r}; name each task once.")
        loaded["tasks"].update(new["tasks"])
        loaded["groups"].update(new["groups"])
    return loaded


def set_environment(data_dir: str | Path | None, model_is_local: bool) -> None:
    """Sets environment variables that the libraries read on import. Must be called before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Keeps lm-eval from forking a pool under torch's threads for the bootstrap of perplexity.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    if data_dir is not None:
        os.environ["HF_DATASETS_OFFLINE"] = "1"
        if model_is_local:
            os.environ["HF_HUB_OFFLINE"] = "1"
    # lm-eval draws a progress bar per task while it builds prompts; show only those of more than 3 seconds.
    os.environ.setdefault("TQDM_DELAY", "3")
    # Warnings about CUDA extensions that do not load and about the registration of enums, both unused here.
    for name in ("lm_eval", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
