r"""How close the SNIP paper's own estimates (policy "snip-paper") and ours ("snip") come to the measured truth.

    python benchmarks/paper_fidelity.py run --output runs/paper_fidelity.jsonl
    python benchmarks/paper_fidelity.py report runs/paper_fidelity.jsonl

A case is a small model of one family and one seed after some hundred steps. Both estimators get the same micro-batches
that training has not seen. The truth quantizes each layer alone: the change of all next updates on these micro-batches,
and the rise of the loss on held-out batches and on the micro-batches themselves. Then plans by layer at some share are
compared by their held-out rise: those of both policies, and random ones. One JSON line per case; a run that was stopped
goes on with the cases that its output lacks. `report` prints means over cases with 95% intervals (Student's t over
seeds).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from estimate_fidelity import rounded, unquantized
from scipy.stats import spearmanr, t
from shared import small_models, texts
from shared.agreement import Array
from shared.json_lines import drop_unfinished_line, read_lines
from shared.origin import origin_of

from snip_hf import SnipConfig, estimate_divergence
from snip_hf.costs.flops import linear_flops
from snip_hf.estimation.ground_truth import measure_assignment, measure_loss
from snip_hf.estimation.pending import LAYER
from snip_hf.estimation.table import DivergenceTable
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.program import problem
from snip_hf.planning.solver import ilp
from snip_hf.policies.registry import rule_assignment
from snip_hf.policies.setting import Setting
from snip_hf.policies.stages import find_stages

ESTIMATORS = ("snip", "snip-paper")
FORMATS = ("fp8", "fp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    texts.add_text_arguments(run)
    run.add_argument("--families", nargs="+", default=["llama", "gpt-neox"], choices=small_models.FAMILIES)
    run.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    run.add_argument("--steps", type=int, default=300)
    run.add_argument("--hidden", type=int, default=64)
    run.add_argument("--blocks", type=int, default=3)
    run.add_argument("--rows", type=int, default=4, help="sequences of 256 tokens in a micro-batch")
    run.add_argument("--batches", type=int, default=2, help="micro-batches of the estimates and of the weights' truth")
    run.add_argument("--held-out", type=int, default=8, help="held-out batches of 8 sequences")
    run.add_argument("--draws", type=int, default=2, help="draws of stochastic rounding")
    run.add_argument("--share", type=float, default=0.75, help="of the FLOPs that plans have in FP4")
    run.add_argument("--random", type=int, default=8, help="random plans")
    run.add_argument("--output", type=Path, default=Path("runs/paper_fidelity.jsonl"))
    run.add_argument("--minutes", type=float, default=1e9, help="start no case after this time")
    report = commands.add_parser("report")
    report.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        measure_all(options)
    else:
        print(text_of([line for file in options.files for line in read_lines(file)]))


def measure_all(options: argparse.Namespace) -> None:
    """Measures the cases that the output lacks."""
    torch.set_num_threads(1)
    done = {(line["family"], line["seed"]) for line in read_lines(options.output)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    text, began = texts.load_text(options.text, options.device), time.time()
    for seed in options.seeds:
        for family in options.families:
            if (family, seed) in done or time.time() > began + 60 * options.minutes:
                continue
            line = measure(family, seed, text, options)
            with options.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(rounded(line)) + "\n")
            print(f"{family}, seed {seed}: {line['seconds']} s", flush=True)


def measure(family: str, seed: int, text: texts.Text, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the line of one case: figures of (batch, layer) or (layer,) by format, and of plans."""
    began = time.time()
    state = small_models.new_state(family, "adamw", options.device, options.rows, seed, options.hidden, options.blocks)
    # Other seeds see other text.
    state.step = 10_000 * seed
    state.train(text, options.steps, warmup=state.step + 50)
    batches = [text.batch(state.step + index, options.rows) for index in range(options.batches)]
    held_out = [text.batch(options.held_out * seed + index, 8, held_out=True) for index in range(options.held_out)]
    config = SnipConfig(
        loss_estimator="token-fisher", probe_tokens=None, probe_batch_tokens=None, start_format="bf16", seed=seed
    )
    with unquantized(state.model, config) as layers:
        tables = {
            name: [
                estimate_divergence(state.model, one, state.optimizer, replace(config, policy=name)) for one in batches
            ]
            for name in ESTIMATORS
        }
        whole = {fmt: [{layer: dict.fromkeys(GEMMS, fmt)} for layer in layers] for fmt in FORMATS}
        truth_config = replace(config, seed=1000 + seed)
        weight = {
            fmt: [
                [
                    change
                    for _, change in measure_assignment(
                        state.model, one, state.optimizer, whole[fmt], truth_config, draws
                    )
                ]
                for one in batches
            ]
            for fmt, draws in zip(FORMATS, (1, options.draws), strict=True)
        }
        rises = {fmt: measure_loss(state.model, held_out, whole[fmt], config).tolist() for fmt in FORMATS}
        own = {fmt: measure_loss(state.model, batches, whole[fmt], config).T.tolist() for fmt in FORMATS}
        plans = plans_of(state.model, tables, options)
        damage = measure_loss(state.model, held_out, plans.values(), config).mean(1).tolist()
    return {
        "family": family,
        "seed": seed,
        "layers": layers,
        "estimates": {name: [columns(table) for table in found] for name, found in tables.items()},
        "weight_truth": weight,
        "held_out_rise": rises,
        "own_rise": own,
        "plans": dict(zip(plans, damage, strict=True)),
        "plan_overlap": overlap(plans["snip"], plans["snip-paper"]),
        **{name: getattr(options, name) for name in ("steps", "hidden", "blocks", "rows", "batches", "draws", "share")},
        "seconds": round(time.time() - began),
        **origin_of(options.device),
    }


def columns(table: DivergenceTable) -> dict[str, dict[str, list[float]]]:
    """Returns format -> dL and dW of the whole layers, in the order of the model."""
    return {
        fmt: {
            "loss": [row.loss_divergence for row in table.rows if (row.gemm, row.format) == (LAYER, fmt)],
            "weight": [row.weight_divergence for row in table.rows if (row.gemm, row.format) == (LAYER, fmt)],
        }
        for fmt in FORMATS
    }


def plans_of(
    model: torch.nn.Module, tables: Mapping[str, Sequence[DivergenceTable]], options: argparse.Namespace
) -> dict[str, dict[str, dict[str, str]]]:
    """Returns the plan of each estimator from its first table, random ones and the uniform formats."""
    flops = linear_flops(model)
    plans = {}
    for name in (*ESTIMATORS, *(f"random-{index}" for index in range(options.random))):
        policy, _, draw = name.partition("-") if name.startswith("random") else (name, "", "0")
        by_layer: dict[str, Any] = {"granularity": "layer", "target_fp4_fraction": options.share}
        config = SnipConfig(policy=policy, **by_layer, seed=int(draw), solver="highs")
        setting = Setting(config, flops, find_stages(list(flops), config))
        if name in tables:
            start = {layer: dict.fromkeys(GEMMS, "fp8") for layer in flops}
            plans[name] = setting.assignment(ilp.solve(problem(setting, tables[name][0], start))["choices"])
        else:
            plans[name] = rule_assignment(setting)
    for fmt in FORMATS:
        plans[f"uniform-{fmt}"] = {layer: dict.fromkeys(GEMMS, fmt) for layer in flops}
    return plans


def overlap(one: Mapping[str, Mapping[str, str]], other: Mapping[str, Mapping[str, str]]) -> float:
    """Returns the share of layers that have the same format in both plans."""
    return sum(one[layer] == other[layer] for layer in one) / len(one)


# -------------------------------------------------------------------------------------------------------------- report


def interval(values: Sequence[float], digits: int = 2) -> str:
    """Returns mean and 95% interval of the mean over cases."""
    found = np.array(values)
    if len(found) < 2:
        return f"{found.mean():.{digits}f}"
    half = t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return f"{found.mean():.{digits}f} ± {half:.{digits}f}"


def root_mean_square(values: Any) -> Array:
    """Over the micro-batches, (batches, layers) -> (layers,)."""
    squares: Array = np.sqrt(np.square(np.array(values)).mean(0))
    return squares


def figures(line: Mapping[str, Any], estimator: str, fmt: str) -> dict[str, float]:
    """Returns what one case says of one estimator and format."""
    tables = line["estimates"][estimator]
    weight = root_mean_square([table[fmt]["weight"] for table in tables])
    loss = np.mean([table[fmt]["loss"] for table in tables], 0)
    true = root_mean_square(line["weight_truth"][fmt])
    rise = np.array(line["held_out_rise"][fmt]).mean(1)
    own = root_mean_square(line["own_rise"][fmt])
    return {
        "dW Spearman": float(spearmanr(weight, true)[0]),
        "dW median error": float(np.median(np.abs(weight / true - 1))),
        "dW median ratio": float(np.median(weight / true)),
        "dL Spearman, held out": float(spearmanr(loss, rise)[0]),
        "dL ratio of means, held out": float(loss.mean() / rise.mean()),
        "dL Spearman, size on own": float(spearmanr(loss, own)[0]),
        "dL median ratio, size on own": float(np.median(loss / own)),
    }


def text_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables in Markdown."""
    families = list(dict.fromkeys(line["family"] for line in lines))
    cells = [(family, fmt) for family in families for fmt in FORMATS]

    def of(family: str) -> list[Mapping[str, Any]]:
        return [line for line in lines if line["family"] == family]

    heads = [f"{family}, {fmt.upper()}" for family, fmt in cells]
    parts = [row(["figure", "estimator", *heads]), "|---" * (2 + len(cells)) + "|"]
    for name in figures(lines[0], ESTIMATORS[0], FORMATS[0]):
        found = {
            estimator: [[figures(line, estimator, fmt)[name] for line in of(family)] for family, fmt in cells]
            for estimator in ESTIMATORS
        }
        for estimator in ESTIMATORS:
            parts.append(row([name, estimator, *map(interval, found[estimator])]))
        if "Spearman" in name or "error" in name:
            differences = [
                [ours - theirs for ours, theirs in zip(*pair, strict=True)]
                for pair in zip(*found.values(), strict=True)
            ]
            parts.append(row(["", "difference", *map(interval, differences)]))
    parts += ["", *of_plans(families, of)]
    sizes = ", ".join(f"{family} {len(of(family))}" for family in families)
    first = lines[0]
    parts += ["", f"Cases: {sizes}; commit {first['commit']}, {first['machine']}.", f"`{first['command']}`"]
    return "\n".join(parts)


def of_plans(families: Sequence[str], of: Callable[[str], list[Mapping[str, Any]]]) -> list[str]:
    """Returns the table of the plans' held-out rises, in percent of the loss."""
    parts = [row(["held-out rise of a plan, %", *families]), "|---" * (1 + len(families)) + "|"]

    def shown(label: str, figure: Callable[[Mapping[str, Any]], float], digits: int = 3) -> None:
        parts.append(row([label, *(interval([figure(line) for line in of(family)], digits) for family in families)]))

    def random(line: Mapping[str, Any]) -> float:
        return 100 * float(np.mean([rise for name, rise in line["plans"].items() if name.startswith("random")]))

    for name in (*ESTIMATORS, *(f"uniform-{fmt}" for fmt in FORMATS)):
        shown(name, lambda line, name=name: 100 * line["plans"][name])
    shown("random (mean)", random)
    shown("snip-paper less snip", lambda line: 100 * (line["plans"]["snip-paper"] - line["plans"]["snip"]))
    shown("snip-paper less random", lambda line: 100 * line["plans"]["snip-paper"] - random(line))
    shown("same format in both plans, share of layers", lambda line: line["plan_overlap"], 2)
    return parts


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
