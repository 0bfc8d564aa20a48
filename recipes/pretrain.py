"""Trains a model by a recipe: `accelerate launch recipes/pretrain.py RECIPE.yaml [--override key=value ...]`."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before transformers, because it hides the warnings of torchao's import.
import snip_hf  # noqa: F401

# isort: split
import torch
from accelerate import PartialState
from huggingface_hub import HfApi
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from snip_hf import SnipCallback, SnipConfig, keep_model_card, restore_model
from snip_hf.cli import add_import, import_modules
from snip_hf.config import DoesNotFit
from snip_hf.extras import needed_by
from snip_hf.policies.target import describe_target

with needed_by("recipes/pretrain.py"):
    import datasets
    import psutil
    from parts.data import Documents, collate, load_documents, load_tokenizer, pack
    from parts.model import build_model
    from parts.recipe import EvalSection, Recipe, load_recipe, to_plain
    from rich.console import Console

    from snip_hf.reporting.run_report import run_report

_ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Reads the command line, runs the recipe, and returns the content of OUTPUT/result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="YAML file; its keys are in recipes/README.md")
    parser.add_argument(
        "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="e.g. training.max_steps=10"
    )
    add_import(parser)
    options = parser.parse_args(arguments)
    try:
        import_modules(options.modules)
        recipe = load_recipe(options.recipe, options.override)
    except (ValueError, TypeError, FileNotFoundError) as error:
        parser.error(str(error))
    try:
        result = run(recipe)
    except DoesNotFit as error:  # e.g. too little text, or a policy that needs more blocks than the model has
        parser.error(str(error))
    PartialState().destroy_process_group()
    return result


def run(recipe: Recipe) -> dict[str, Any]:
    """Trains, saves, evaluates and reports; returns the losses and times of OUTPUT/result.json."""
    start = time.perf_counter()
    has_gpu = torch.accelerator.is_available()
    # Without use_cpu, several processes on a machine without GPUs would each believe that they are the only one.
    args = TrainingArguments(**({"dataloader_pin_memory": has_gpu, "use_cpu": not has_gpu} | recipe.training))
    console = Console(quiet=args.process_index != 0, soft_wrap=True, highlight=False, markup=False)
    if args.process_index == 0:  # logs swapped and skipped layers, and every refresh
        logging.basicConfig(format="%(message)s")
        logging.getLogger("snip_hf").setLevel(logging.INFO)
    _use_all_cores(recipe, args)
    try:
        tokenizer, train, validation = prepare_data(recipe, args)
        set_seed(args.seed)
        model = build_model(recipe.model, tokenizer)
    except (OSError, ValueError) as error:
        raise DoesNotFit(str(error)) from error
    console.print(_setup(recipe, args, model, tokenizer, train, validation))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=collate,
        processing_class=tokenizer,
        # The held-out loss is taken in the formats of the plan too, after training.
        callbacks=[SnipCallback(recipe.snip, keep_formats=True)] if recipe.snip else None,
    )
    if recipe.snip:
        keep_model_card(trainer)
    seconds = {"prepare": time.perf_counter() - start} | train_and_save(trainer)
    result = {
        "validation_loss": final_losses(trainer, quantized=recipe.snip is not None),
        "steps": trainer.state.global_step,
        "parameters": model.num_parameters(),
        "seconds": seconds,
    } | _origin(recipe)
    if trainer.is_world_process_zero():
        output = Path(args.output_dir)
        (output / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        report(console, output, trainer, result["validation_loss"], snip=recipe.snip is not None)
        run_benchmarks(console, output, recipe.eval)
        console.print(f"All of it is in {output}; it took {time.perf_counter() - start:.0f} s.")
    return result


def prepare_data(
    recipe: Recipe, args: TrainingArguments
) -> tuple[PreTrainedTokenizerBase, Documents, datasets.Dataset]:
    """Returns tokenizer, training and validation rows; the other processes read the first one's cache."""
    with args.main_process_first(desc="text and tokenizer"):
        if args.process_index != 0:
            datasets.disable_progress_bars()
        documents = load_documents(recipe.data)
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model.name_or_path, documents[0])
        return tokenizer, *pack(*documents, tokenizer, recipe.data)


def train_and_save(trainer: Trainer) -> dict[str, float]:
    """Trains, writes model, tokenizer and trainer_state.json, and returns the seconds it took, wall clock and CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    # Empty (None, False) starts anew; true finds the last checkpoint in the output folder.
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint or None)
    seconds = {"train": time.perf_counter() - wall, "train_cpu": time.process_time() - cpu}
    if trainer.is_fsdp_enabled:  # Checkpoints may be shards; the final model is for from_pretrained.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    trainer.save_state()
    return seconds


def final_losses(trainer: Trainer, quantized: bool) -> dict[str, float]:
    """Returns the held-out loss by arithmetic: "plan" (as trained; only with SNIP) and "high_precision"."""
    losses = {}
    if quantized:
        losses["plan"] = trainer.evaluate(metric_key_prefix="eval_plan")["eval_plan_loss"]
        restore_model(trainer.model)
    losses["high_precision"] = trainer.evaluate(metric_key_prefix="eval_high_precision")["eval_high_precision_loss"]
    return losses


def report(console: Console, output: Path, trainer: Trainer, final: dict[str, float], snip: bool) -> None:
    """Prints the losses and, with SNIP, the refreshes and the plan; writes the figures."""
    if snip:
        console.print("Figures: " + ", ".join(map(str, run_report(output))))
    else:
        curve = [f"{row['step']}: {row['eval_loss']:.4f}" for row in trainer.state.log_history if "eval_loss" in row]
        console.print("Validation loss by step: " + ", ".join(curve))
    for name, loss in final.items():
        console.print(f"Final validation loss, {name}: {loss:.4f} (perplexity {math.exp(loss):.2f})")
    if snip:
        console.print(
            "Both losses are of the model that was trained under the plan; only the evaluation differs. "
            "To compare with a run without SNIP, train with `--override snip=null training.output_dir=FOLDER`, then "
            "use snip-hf compare."
        )


def run_benchmarks(console: Console, output: Path, section: EvalSection | None) -> None:
    """Scores the saved model through `eval/run.py` in a separate process; prints the reason if it cannot."""
    if section is None or not section.tasks:
        return
    script, tasks = _ROOT / "eval" / "run.py", ",".join(section.tasks)
    command = [sys.executable, str(script), str(output), "--tasks", tasks, "--output", str(output / "benchmarks.jsonl")]
    if section.data_dir is not None:
        command += ["--data-dir", section.data_dir]
    elif not _hub_answers():
        console.print(
            f"Benchmarks skipped: no local data was given and the Hugging Face Hub does not answer. For "
            f"{', '.join(section.tasks)}: --override eval.data_dir=DIR here, or later\n  python eval/run.py {output} "
            f"--tasks {','.join(section.tasks)} --data-dir DIR",
        )
        return
    if section.limit is not None:
        command += ["--limit", str(section.limit)]
    # A launcher's variables would make the child wait for the other ranks.
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MASTER_", "TORCHELASTIC_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"):
        mine.pop(name, None)
    mine["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if subprocess.run(command, env=mine, check=False).returncode != 0:
        console.print(f"The benchmarks failed (see above); the model is saved. Run again: {' '.join(command)}")


def _use_all_cores(recipe: Recipe, args: TrainingArguments) -> None:
    """Sets the threads of a CPU run: `accelerate launch` without a config leaves one (OMP_NUM_THREADS=1)."""
    if args.device.type != "cpu":
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = min(psutil.cpu_count(logical=False) or 1, len(psutil.Process().cpu_affinity() or [0]))
    torch.set_num_threads(recipe.cpu_threads or max(1, cores // processes))


def _hub_answers() -> bool:
    """Returns True if a short request to the Hub succeeds."""
    try:
        HfApi().dataset_info("allenai/ai2_arc", timeout=5)
    except Exception:  # Offline mode, no route, a proxy's page, a refusal: in any case there is no data.
        return False
    return True


def _setup(
    recipe: Recipe,
    args: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Documents,
    validation: datasets.Dataset,
) -> str:
    length = recipe.data.sequence_length
    text = f"{len(train) * length:,} tokens" if isinstance(train, datasets.Dataset) else "a stream"
    return (
        f"{model.config.model_type}, {model.num_parameters() / 1e6:.2f}M parameters · vocabulary {len(tokenizer):,} · "
        f"training text {text} · held out {len(validation) * length:,} tokens · {args.device}, "
        f"{torch.get_num_threads()} threads\nprecision: {_describe(recipe.snip)} · output: {args.output_dir}"
    )


def _describe(snip: SnipConfig | None) -> str:
    if snip is None:
        return "as in `training`, nothing quantized (no SNIP)"
    if snip.fixed_plan is not None:
        return f"plan {snip.fixed_plan}, held fixed"
    target = describe_target(snip.to_dict())
    return f"policy {snip.policy}" if target is None else f"policy {snip.policy}, target {target}"


def _origin(recipe: Recipe) -> dict[str, Any]:
    """Returns the origin of the numbers: recipe, command, commit, versions, machine."""
    git = subprocess.run(["git", "-C", str(_ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    packages = ("torch", "torchao", "transformers", "accelerate", "datasets", "tokenizers")
    return {
        "recipe": to_plain(recipe),
        "command": " ".join(sys.argv),
        "commit": git.stdout.strip() or None,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "machine": {"platform": platform.platform(), "threads": torch.get_num_threads()},
    }


if __name__ == "__main__":
    main()
