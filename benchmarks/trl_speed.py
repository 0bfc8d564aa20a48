"""Measures steps of TRL's trainers on one GPU: SFT, DPO and GRPO, with a line per run as it ends.

The recipes are BF16, torchao's tensorwise FP8, and SNIP at 75%, whose first plan is applied before the timed steps.
All recipes time the same steps. Models are untrained Llamas on random tokens:

    SFT, packing        packs of 2,048 tokens, four documents each; torch's varlen FlashAttention
    SFT, LoRA           the same with adapters of rank 16 on all linears of the blocks
    SFT, padding-free   documents of many lengths in one row, so shapes change at every step
    DPO                 pairs of up to 512 tokens, padded to 512, with a second model as reference; SDPA
    GRPO                8 prompts, 4 completions of 32 tokens each, by transformers' `generate`; SDPA

All but GRPO compile the decoder layers one by one. Generation would compile them again for each length of the cache.
Activations are kept (`gradient_checkpointing=False`; TRL's default is True).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from shared import llamas, varlen
from shared.lines import Line, append_line, origin_of, table
from shared.timing import BF16, WARM_UP, allocated, compared, graph_counts, guarded, release
from speed import TORCHAO, Clock, train_by
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, logging

from snip_hf import SnipCallback, SnipConfig

OURS = "snip-hf"
LARGE, SMALL = "TinyLlama-1.1B", "100M"
# The most important first: --minutes cuts off the end.
CELLS = (
    ("SFT, packing", LARGE, (BF16, TORCHAO, OURS)),
    ("SFT, packing", SMALL, (BF16, TORCHAO, OURS)),
    ("SFT, LoRA", LARGE, (BF16, TORCHAO, OURS)),
    ("DPO", LARGE, (BF16, TORCHAO, OURS)),
    ("SFT, padding-free", SMALL, (BF16, OURS)),
    ("GRPO", SMALL, (BF16, OURS)),
)
PROBE, DELAY = WARM_UP + 1, 2
# The plan is applied at the end of step PROBE + DELAY. The step after that may compile kernels.
FIRST_TIMED = PROBE + DELAY + 2
COLUMNS = {
    "task": ("TRL", "{}"),
    "model": ("model", "{}"),
    "recipe": ("recipe", "{}"),
    "step_ms": ("step, ms (median)", "{:.1f}"),
    "mean_step_ms": ("mean", "{:.1f}"),
    "speedup": ("speed / BF16", "{:.3f}"),
    "peak_gib": ("peak, GiB", "{:.2f}"),
    "peak_ratio": ("/ BF16", "{:.3f}"),
    "refresh_steps": ("refresh, BF16 steps", "{:.1f}"),
    "recompilations": ("recompilations", "{}"),
    "share": ("in 4 bits", "{:.2f}"),
    "loss": ("mean loss", "{:.4f}"),
}


def main() -> None:
    """Measures, prints and writes a line per run, then prints the table."""
    options = parse()
    source, rows = {**origin_of(options.device), "trl": trl.__version__}, []
    for task, model, recipes in CELLS:
        if task not in options.tasks or model not in options.models:
            continue
        found: list[Line] = []
        for recipe in recipes:
            print(f"{task}, {model}, {recipe}: {options.deadline - time.monotonic():.0f} s left", flush=True)
            identity = {"task": task, "model": model, "recipe": recipe}
            found += guarded(identity, partial(train, task, model, recipe, options), options.deadline)
            found = compared(found)
            if "refresh_ms" in found[-1] and "step_ms" in found[0]:
                found[-1]["refresh_steps"] = found[-1]["refresh_ms"] / found[0]["step_ms"]
            append_line(options.output, {**found[-1], **source})
        rows += found
    print(f"\n{source['machine']}, torch {source['torch']}, commit {source['commit']}, {source['command']}\n")
    print(table(COLUMNS, rows))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = list(dict.fromkeys(task for task, _, _ in CELLS))
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, metavar="TASK", help="(all)")
    parser.add_argument("--models", nargs="+", choices=[LARGE, SMALL], default=[LARGE, SMALL])
    parser.add_argument("--rows", type=int, default=8, help="packs, documents or pairs per step (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a pack (default 2048)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps (default 12)")
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no run later than this (default 4)")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args(arguments)
    options.deadline = time.monotonic() + 60 * options.minutes
    return options


def train(task: str, model_name: str, recipe: str, options: argparse.Namespace) -> Iterator[Line]:
    """Trains once and yields the figures of the steps after the first plan."""
    began, device, steps = time.monotonic(), options.device, range(FIRST_TIMED, FIRST_TIMED + options.steps)
    release(device)
    before = allocated(device)
    model = llamas.build_model(llamas.SHAPES[model_name], options.length, 0, device)
    if recipe == TORCHAO:
        llamas.TORCHAO[recipe](model)
    clock = Clock(device)
    config = SnipConfig(target_fp4_fraction=0.75, first_refresh=PROBE, apply_delay=DELAY, refresh_every=steps.stop)
    ours = [SnipCallback(config)] if recipe == OURS else []
    loss, _ = train_by(partial(trainer_for, task, model, options, [*ours, clock]))
    times = clock.milliseconds()
    timed, peaks = ([figures[number] for number in steps] for figures in (times, clock.peaks))
    row = {
        "step_ms": statistics.median(timed),
        "mean_step_ms": statistics.fmean(timed),
        "each_ms": [round(one, 2) for one in times.values()],
        "peak_gib": (max(peaks) - before) / 2**30,
        "wall_s": time.monotonic() - began,
        "recompilations": graph_counts()["graphs"] - clock.graphs,
        "graphs": clock.graphs,
        "loss": loss,
    }
    if ours:
        row["refresh_ms"] = times[PROBE] + times[PROBE + DELAY] - 2 * row["step_ms"]
        row |= {"backend": ours[0].controller.backend, "share": ours[0].controller.plan.fp4_fraction}
    yield row


def trainer_for(task: str, model: Any, options: argparse.Namespace, callbacks: list[Any], folder: str) -> Any:
    """Returns TRL's trainer of a task, with the arguments that a user would give."""
    on_gpu, steps = options.device.type == "cuda", FIRST_TIMED + options.steps - 1
    compiler = None if task == "GRPO" else llamas.COMPILER
    common: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": options.rows, "bf16": True, "use_cpu": not on_gpu,
        "torch_compile": compiler is not None, "torch_compile_backend": compiler,
        "gradient_checkpointing": False, "optim": "adamw_torch_fused", "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "report_to": [], "dataloader_pin_memory": on_gpu,
    }  # fmt: skip
    words, generator = llamas.VOCABULARY - 2, torch.Generator().manual_seed(0)

    given: dict[str, Any] = {"model": model, "processing_class": tokenizer(words), "callbacks": callbacks}
    count, quarter = options.rows * steps, options.length // 4

    def documents(shortest: int, longest: int, count: int = count) -> list[list[int]]:
        lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
        return [torch.randint(words, (length,), generator=generator).tolist() for length in lengths]

    def texts(*lengths: int) -> list[str]:
        return ["".join(f" {word}" for word in document) for document in documents(*lengths)]

    if task.startswith("SFT"):
        model.set_attn_implementation(varlen.register())
        how, data = {"packing": True, "max_length": options.length}, documents(quarter, quarter, 4 * count)
        if task == "SFT, padding-free":
            how, data = {"padding_free": True, "max_length": None}, documents(quarter // 4, options.length)
        if task == "SFT, LoRA":
            given["peft_config"] = LoraConfig(r=16, target_modules="all-linear")
        args = trl.SFTConfig(folder, **common | how)
        return trl.SFTTrainer(args=args, train_dataset=Dataset.from_dict({"input_ids": data}), **given)
    columns = {"prompt": texts(quarter // 4, quarter // 4)}
    if task == "DPO":
        columns |= {name: texts(quarter // 2, 3 * quarter // 4 - 1) for name in ("chosen", "rejected")}
        args = trl.DPOConfig(folder, max_length=quarter, pad_to_multiple_of=quarter, **common)
        return trl.DPOTrainer(args=args, ref_model=deepcopy(model), train_dataset=Dataset.from_dict(columns), **given)
    common["per_device_train_batch_size"] *= 4
    args = trl.GRPOConfig(folder, num_generations=4, max_completion_length=options.length // 64, **common)
    return trl.GRPOTrainer(args=args, train_dataset=Dataset.from_dict(columns), reward_funcs=sum_of_words, **given)


def sum_of_words(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between completions."""
    return [sum(completion) / 1e5 for completion in completion_ids]


def tokenizer(words: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of so many words, each the number of its token; two tokens more are padding and the end."""
    ends = {"<pad>": words, "<eos>": words + 1}
    known = Tokenizer(models.WordLevel({str(word): word for word in range(words)} | ends, unk_token="<pad>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    disable_progress_bars()
    logging.set_verbosity_error()
    main()
