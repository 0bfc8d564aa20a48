r"""How fast a probe ages: its ranking of the layers against the truth some steps later.

    python benchmarks/probe_aging.py --output runs/probe_aging.jsonl --scenarios early --blocks 3 --ages 0 10 100
    python benchmarks/probe_aging.py --report runs/probe_aging.jsonl

Scenarios: "early" and "late" in training, and from the late state on with a learning rate of a tenth ("rate") or with
other text ("data"). At each age the weight divergence of whole layers in FP4 is measured again; compared are the ranks
of the old estimate, of a new one, and of the cheap check that `refresh_on_drift` makes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from scipy.stats import spearmanr
from shared import small_models, texts
from shared.origin import origin_of

from snip_hf import SnipConfig, estimate_divergence, measure_divergence
from snip_hf.costs.flops import linear_flops
from snip_hf.estimation.pending import LAYER
from snip_hf.estimation.table import DivergenceTable
from snip_hf.layers.convert import convert_model
from snip_hf.planning.drift import rank_correlation, ranking
from snip_hf.policies.setting import Setting
from snip_hf.policies.stages import find_stages

SCENARIOS = ("early", "late", "rate", "data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_text_arguments(parser)
    parser.add_argument("--other-text", type=Path, help="text of the scenario data (default: Python's own source)")
    parser.add_argument(
        "--tokenizer-text", type=Path, help="text whose tokens a --text of token ids has (scenario data)"
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 10, 30, 100, 300, 1000, 2000])
    parser.add_argument("--early", type=int, default=100, help="steps before the early probe (default 100)")
    parser.add_argument("--late", type=int, default=2000, help="steps before the late probe (default 2000)")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8, help="sequences per micro-batch (default 8)")
    parser.add_argument("--output", type=Path, default=Path("runs/probe_aging.jsonl"), help="lines are added")
    parser.add_argument("--report", type=Path, nargs="+", help="print a Markdown table of these files instead")
    options = parser.parse_args()
    if options.report:
        lines = [json.loads(line) for path in options.report for line in path.read_text().splitlines()]
        print(report(lines))
        return
    if "data" in options.scenarios and options.text and options.text.suffix == ".npy" and not options.tokenizer_text:
        parser.error(
            "the scenario data needs --tokenizer-text, or a --text that is no .npy: both texts need one tokenizer"
        )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    workers = [
        mp.get_context("spawn").Process(target=run, args=(options, scenario, index))
        for index, scenario in enumerate(options.scenarios)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a scenario failed; its error is above")


def run(options: argparse.Namespace, scenario: str, index: int) -> None:
    """Trains one scenario and adds a line per age to the output."""
    torch.set_num_threads(1)
    device = f"cuda:{index % torch.cuda.device_count()}" if options.device == "cuda" else options.device
    text = texts.load_text(options.text, device)
    state = small_models.new_state("llama", "adamw", device, options.rows, blocks=options.blocks)
    state.train(text, options.early if scenario == "early" else options.late)
    convert_model(state.model, SnipConfig(start_format="bf16"))
    flops = linear_flops(state.model)
    config = SnipConfig(granularity="layer", loss_estimator="token-fisher")
    setting = Setting(config, flops, find_stages(list(flops), config))
    start = state.step
    old = estimate(state, text)
    if scenario == "data":
        tokenizer = texts.train_tokenizer(options.tokenizer_text or options.text)
        text = texts.load_text(options.other_text, device, tokenizer=tokenizer)
    if scenario == "rate":
        for group in state.optimizer.param_groups:
            group["base_lr"] *= 0.1
    for age in sorted(options.ages):
        began = time.perf_counter()
        state.train(text, start + age - state.step)
        line = {"scenario": scenario, "step": start, "age": age, **compare(state, text, old, setting)}
        line |= origin_of(device)
        line["seconds"] = time.perf_counter() - began
        with options.output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        print(line, flush=True)


def estimate(state: small_models.State, text: texts.Text) -> DivergenceTable:
    """Returns the estimate on the micro-batch of the next step."""
    batch = text.batch(state.step, state.rows)
    config = SnipConfig(loss_estimator="token-fisher", probe_tokens=None, probe_batch_tokens=None)
    return estimate_divergence(state.model, batch, state.optimizer, config)


def compare(state: small_models.State, text: texts.Text, old: DivergenceTable, setting: Setting) -> dict[str, float]:
    """Returns rank correlations over layers, whole layers in FP4."""
    batch = text.batch(state.step, state.rows)
    truth = measure_divergence(
        state.model,
        batch,
        state.optimizer,
        SnipConfig(probe_tokens=None, probe_batch_tokens=None),
        draws=2,
        gemms=(LAYER,),
    )
    new = estimate(state, text)
    return {
        "old_with_truth": correlate(old, truth, "weight_divergence"),
        "new_with_truth": correlate(new, truth, "weight_divergence"),
        "old_with_new_weight": correlate(old, new, "weight_divergence"),
        "old_with_new_loss": correlate(old, new, "loss_divergence"),
        "cheap_check": rank_correlation(ranking(setting, old), ranking(setting, new)),
        "loss": new.loss,
    }


def correlate(one: DivergenceTable, other: DivergenceTable, column: str) -> float:
    figures = [
        [getattr(row, column) for row in sorted(table.rows, key=lambda row: row.layer) if is_whole_in_fp4(row)]
        for table in (one, other)
    ]
    return float(spearmanr(*figures).statistic)


def is_whole_in_fp4(row: Any) -> bool:
    return (row.gemm, row.format) == (LAYER, "fp4")


def report(lines: list[dict[str, Any]]) -> str:
    """Returns a Markdown table: a row per scenario and age."""
    columns = ("old_with_truth", "new_with_truth", "old_with_new_weight", "old_with_new_loss", "cheap_check")
    names = ("old estimate, truth", "new estimate, truth", "old, new dW", "old, new dL", "cheap check")
    rows = ["| scenario | step | age | " + " | ".join(names) + " |", "|" + "---|" * (3 + len(names))]
    for line in sorted(lines, key=lambda line: (SCENARIOS.index(line["scenario"]), line["age"])):
        figures = " | ".join(f"{np.round(line[column], 2):.2f}" for column in columns)
        rows.append(f"| {line['scenario']} | {line['step']} | {line['age']} | {figures} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
