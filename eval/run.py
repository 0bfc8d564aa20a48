"""Scores a checkpoint on lm-eval's stock tasks, on the Hub's data or on local files, as a table and JSON lines.

python eval/run.py MODEL --tasks arc_easy,arc_challenge,mmlu [--data-dir DIR] [--limit N] [--output results.jsonl]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scoring.evaluate import DEFAULT_SEED, EvaluationError, Settings, evaluate, set_environment
from scoring.models import load_model, use_plan
from scoring.rows import Row, table

from snip_hf.extras import MissingExtra, needed_by


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
    add("--answers", action="store_true", help="say in the output which documents were right")
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
    """Runs the command line; returns 0, or 1 after an error that the user can fix."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plan and options.arithmetic != "plan":
        parser.error("--plan needs --arithmetic plan")
    set_environment(options.data_dir, Path(options.model).is_dir())
    try:
        # lm-eval prints to standard output, which is for the table alone.
        with contextlib.redirect_stdout(sys.stderr), needed_by("eval/run.py"):
            rows = _run(options)
    except (EvaluationError, MissingExtra) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0


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
        Settings(
            limit=options.limit,
            batch_size=options.batch_size,
            num_fewshot=options.num_fewshot,
            seed=options.seed,
            answers=options.answers,
        ),
        origin={"model": options.model, "arithmetic": options.arithmetic, "plan": plan},
    )
    if options.output:
        with open(options.output, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
