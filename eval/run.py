"""How good is a checkpoint? lm-eval's stock tasks, on the Hub's data or on local files, as a table and JSON lines.

python eval/run.py MODEL --tasks arc_easy,arc_challenge,mmlu [--data-dir DIR] [--limit N] [--output results.jsonl]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_tasks import EvaluationError, known_tasks, local_tasks, stock_tasks
from results import Row, git_commit, rows_of, table, versions

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# lm-eval's own default for few-shot sampling, so that few-shot scores compare with published ones.
DEFAULT_SEED = 1234
# Only for perplexity's standard error; the accuracies' is a formula. lm-eval's 100,000 draws take minutes.
_BOOTSTRAP_DRAWS = 1000


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    *,
    limit: int | None = None,
    batch_size: int = 16,
    num_fewshot: int | None = None,
    seed: int = DEFAULT_SEED,
    origin: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Scores a loaded model; it runs in its own dtype, on its own device, and is left in eval mode.

    Args:
        tasks: names from `known_tasks`; a group such as "mmlu" also gives a row for each member.
        data_dir: folder in the layout of eval/README.md; None for the Hub's data (or its cache).
        limit: documents per task (per subject for mmlu); None for all.
        num_fewshot: examples in the prompt; None for the stock task's own default (0 for all tasks here).
        seed: of few-shot sampling and of python's, numpy's and torch's generators, which are all set to it.
        origin: further fields for every row, such as `model` and `arithmetic`.

    Returns: one row per task and group, ready for JSON; eval/README.md describes the fields.

    Raises:
        EvaluationError: unknown task, missing or malformed data, or the Hub cannot be reached.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as yaml_folder:
        manager = stock_tasks()
        names = _checked_names(tasks, known_tasks(manager))
        if data_dir is not None:
            if not Path(data_dir).is_dir():
                raise EvaluationError(f"--data-dir {data_dir} is not a folder; see eval/README.md for its layout.")
            manager = local_tasks(manager, Path(data_dir).resolve(), num_fewshot, Path(yaml_folder))
        loaded = _load(manager, names, from_hub=data_dir is None)
    results = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size),
        tasks=[loaded["groups"].get(name) or loaded["tasks"][name] for name in names],
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=_BOOTSTRAP_DRAWS,
        log_samples=False,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    common = {
        "limit": limit,
        "seed": seed,
        "batch_size": batch_size,
        "data": "hub" if data_dir is None else str(data_dir),
        "dtype": str(model.dtype).removeprefix("torch."),
        "git_commit": git_commit(),
        "command": shlex.join(sys.argv),
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return rows_of(results, loaded, names, dict(origin or {}) | common)


def _checked_names(tasks: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in tasks:
        if name not in known:
            raise EvaluationError(f"Unknown task {name!r}; known are {', '.join(known)}.")
    return list(dict.fromkeys(tasks))


def _load(manager: TaskManager, names: Sequence[str], from_hub: bool) -> dict[str, Any]:
    """What `manager.load(names)` gives, with errors that say what to do."""
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


def load_model(name: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (in the dtype it was saved in) and tokenizer from a folder or the Hub; never runs the model's own code."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"{name!r} could not be loaded as a causal language model with its tokenizer: {error} Expected a folder "
            "written by save_pretrained (both model and tokenizer) or the name of a model on the Hub."
        ) from error
    model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def use_plan(model: PreTrainedModel, name: str, plan_path: str | None) -> str:
    """Makes the model's linears compute in the formats of a plan; returns the path of the plan.

    Args:
        name: the model's folder or Hub name, whose snip/plan.json is taken if `plan_path` is None.
    """
    from transformers.utils.hub import cached_file

    from snip_hf.config import SnipConfig
    from snip_hf.layers.convert import convert_model
    from snip_hf.planning.plan import PrecisionPlan

    try:
        path = plan_path or str(cached_file(name, "plan.json", subfolder="snip"))
        plan = PrecisionPlan.load(path)
        # Of the training run's configuration only this decides which layers are swapped.
        skip_modules = tuple((plan.provenance.config or {}).get("skip_modules", ()))
        convert_model(model, SnipConfig(skip_modules=skip_modules))
        plan.apply(model)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(
            f"--arithmetic plan: {error.args[0] if isinstance(error, KeyError) else error} "
            "Give the plan of this model with --plan PATH, or evaluate with --arithmetic bf16."
        ) from error
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Details: eval/README.md")
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub name of a causal language model with its tokenizer")
    add("--tasks", required=True, help="comma-separated, e.g. arc_easy,arc_challenge,mmlu")
    add("--data-dir", metavar="DIR", help="local files instead of the Hub's data; needs no network")
    add("--limit", type=_positive, metavar="N", help="documents per task (per subject for mmlu)")
    add("--batch-size", type=_positive, default=16, metavar="N")
    add("--num-fewshot", type=_not_negative, metavar="N", help="examples in the prompt (default: the task's own, 0)")
    add("--arithmetic", choices=("bf16", "plan"), default="bf16", help="bf16: as saved; plan: quantized")
    add("--plan", metavar="PATH", help="plan file for --arithmetic plan (default: MODEL/snip/plan.json)")
    add("--output", metavar="FILE", help="JSON lines; added to the end of an existing file")
    add("--seed", type=_not_negative, default=DEFAULT_SEED, metavar="N")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def _not_negative(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 after an error that the user can put right."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plan and options.arithmetic != "plan":
        parser.error("--plan needs --arithmetic plan")
    set_environment(options.data_dir, Path(options.model).is_dir())
    try:
        # lm-eval prints now and then; standard output is for the table.
        with contextlib.redirect_stdout(sys.stderr):
            rows = _run(options)
    except EvaluationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0


def set_environment(data_dir: str | Path | None, model_is_local: bool) -> None:
    """Sets what the libraries read when they are imported, hence before."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Else lm-eval forks a pool for the bootstrap of perplexity, under torch's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    if data_dir is not None:
        os.environ["HF_DATASETS_OFFLINE"] = "1"
        if model_is_local:
            os.environ["HF_HUB_OFFLINE"] = "1"
    # lm-eval draws one progress bar per task while it builds prompts; show only what takes longer than this (seconds).
    os.environ.setdefault("TQDM_DELAY", "3")
    # Of CUDA extensions that do not load and of how enums are registered; nothing here uses either.
    for name in ("lm_eval", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _run(options: argparse.Namespace) -> list[Row]:
    if options.output:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(options.model, options.device)
    plan = use_plan(model, options.model, options.plan) if options.arithmetic == "plan" else None
    rows = evaluate(
        model,
        tokenizer,
        options.tasks.split(","),
        options.data_dir,
        limit=options.limit,
        batch_size=options.batch_size,
        num_fewshot=options.num_fewshot,
        seed=options.seed,
        origin={"model": options.model, "arithmetic": options.arithmetic, "plan": plan},
    )
    if options.output:
        with open(options.output, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
