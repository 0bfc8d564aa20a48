r"""How close the estimated divergences, and other estimates, are to the measured ones: the measurements.

    python benchmarks/estimate_fidelity.py --cases small --output runs/estimate_fidelity.jsonl
    python benchmarks/estimate_fidelity_report.py runs/estimate_fidelity.jsonl

A case is a small model (`cases`) at some step of its training, e.g. llama:adamw:300. On micro-batches that training has
not seen, every layer is quantized by itself: the truth. All estimators get the first micro-batch, or all of them. One
JSON line says how an estimator did in a case, a line of kind "raw" keeps every layer's figures (squares for the weight
divergence's truth). A run that was stopped goes on where it was: cases that the output holds are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import small_models, texts
from shared.agreement import Record, WeightTruth, loss_records, raw_record, weight_records
from shared.json_lines import drop_unfinished_line, read_lines
from shared.loss_estimators import loss_estimates, measured_kl
from shared.origin import origin_of
from shared.weight_estimators import Point, weight_estimates
from shared.workers import share_out
from torch import nn

from snip_hf import SnipConfig
from snip_hf.estimation.divergence import converted
from snip_hf.estimation.ground_truth import measure_assignment, measure_loss
from snip_hf.estimation.pending import LAYER, ROWS
from snip_hf.numerics.gemms import GEMMS

SMALL = ("llama:adamw:0", "llama:adamw:200")
ALL = (
    *(f"{family}:adamw:{steps}" for family in small_models.FAMILIES for steps in (0, 300, 3000)),
    *(f"llama:{name}:{steps}" for name in small_models.OPTIMIZERS if name != "adamw" for steps in (0, 300, 2000)),
)
# Option -> its default for small cases, and for all others.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "rows": (8, 16),
    "loss_rows": (16, 64),
    "draws": (2, 4),
    "blocks": (3, 6),
    "gemms": ([LAYER], list(ROWS)),
}
# Sample sizes of the loss divergence's estimators; those beyond a micro-batch are left out.
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Case:
    family: str
    optimizer: str
    steps: int

    @classmethod
    def of(cls, name: str) -> Case:
        family, optimizer, steps = name.split(":")
        if family not in small_models.FAMILIES or optimizer not in small_models.OPTIMIZERS:
            raise ValueError(
                f"Case {name!r}: expected family:optimizer:steps, with a family of "
                f"{', '.join(small_models.FAMILIES)} and an optimizer of {', '.join(small_models.OPTIMIZERS)}."
            )
        return cls(family, optimizer, int(steps))

    @property
    def name(self) -> str:
        return f"{self.family}:{self.optimizer}:{self.steps}"


def main() -> None:
    options = parse()
    done = {record["case"] for record in read_lines(options.output) if record["kind"] == "case"}
    todo = [case for case in map(Case.of, options.cases) if case.name not in done]
    print(f"{len(todo)} of {len(options.cases)} cases to do", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    with tempfile.TemporaryDirectory() as folder:
        options.tokens_file = Path(folder) / "tokens.npy"
        np.save(options.tokens_file, texts.token_ids(options.text))
        share_out(work, options, chains(todo, options.workers))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_text_arguments(parser)
    parser.add_argument("--cases", nargs="+", default=["small"], help="small, all, or names like llama:adamw:300")
    parser.add_argument("--output", type=Path, default=Path("runs/estimate_fidelity.jsonl"))
    parser.add_argument("--rows", type=int, help="sequences of 256 tokens in a micro-batch (default 16; small 8)")
    parser.add_argument("--batches", type=int, default=2, help="micro-batches of the truth (default 2)")
    parser.add_argument(
        "--draws", type=int, help="stochastic-rounding draws per micro-batch, even (default 4; small 2)"
    )
    parser.add_argument("--loss-rows", type=int, help="sequences for the loss estimators (default 64; small 16)")
    parser.add_argument("--gemms", nargs="+", choices=ROWS, help="rows to measure (default all; small: layer)")
    parser.add_argument("--held-out", type=int, help="held-out batches of 16 x 256 (default 64 on CUDA, 8 on CPU)")
    parser.add_argument("--blocks", type=int, help="blocks of the models (default 6; small 3)")
    parser.add_argument("--workers", type=int, default=1, help="processes; the i-th takes the i-th GPU, in turn")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    is_small = options.cases == ["small"]
    for name, (small, other) in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, small if is_small else other)
    if options.held_out is None:
        options.held_out = 64 if options.device.startswith("cuda") else 8
    if options.held_out < 2:
        parser.error(f"--held-out is {options.held_out}; expected at least 2, for two halves of the truth")
    if options.draws % 2 or options.draws < 2:
        parser.error(f"--draws is {options.draws}; expected an even number, for two halves of the truth")
    named = {"small": SMALL, "all": ALL}
    options.cases = [case for name in options.cases for case in named.get(name, (name,))]
    options.deadline = time.time() + 60 * options.minutes
    return options


def chains(todo: Sequence[Case], workers: int) -> list[list[Case]]:
    """Returns lists of cases that one worker does in a row: steps of one training, unless that leaves workers idle."""
    grouped: dict[tuple[str, str], list[Case]] = {}
    for case in sorted(todo, key=lambda case: case.steps):
        grouped.setdefault((case.family, case.optimizer), []).append(case)
    jobs = list(grouped.values())
    if len(jobs) < workers:
        jobs = [[case] for case in todo]
    return sorted(jobs, key=lambda job: -job[-1].steps)


# ------------------------------------------------------------------------------------------------ one worker


def work(index: int, options: argparse.Namespace, jobs: list[list[Case]], taken: Any, lock: Any) -> None:
    """Does the jobs that no other worker took; a case that fails is reported and left."""
    torch.set_num_threads(1)
    device = options.device
    if device == "cuda":
        device = f"cuda:{index % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    text = texts.load_text(options.tokens_file, device)
    while time.time() < options.deadline:
        with taken.get_lock():
            position, taken.value = taken.value, taken.value + 1
        if position >= len(jobs):
            return
        try:
            do(jobs[position], options, text, device, lock)
        except Exception:
            names = ", ".join(case.name for case in jobs[position])
            print(f"{names}: training failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def do(chain: list[Case], options: argparse.Namespace, text: texts.Text, device: str, lock: Any) -> None:
    """Trains through the steps of a chain and writes the lines of each of its cases."""
    first = chain[0]
    state = small_models.new_state(first.family, first.optimizer, device, seed=options.seed, blocks=options.blocks)
    clock = Clock(first.name)
    steps = tuple(case.steps for case in chain)
    for case, reached in zip(chain, small_models.phases(state, text, steps), strict=True):
        clock.case = case.name
        clock.lap("training")
        try:
            records = measure(case, reached, text, options, clock)
        except Exception:
            print(f"{case.name}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            lines = "".join(json.dumps(rounded({"case": case.name, **record})) + "\n" for record in records)
            with lock, options.output.open("a", encoding="utf-8") as stream:
                stream.write(lines)
        if time.time() > options.deadline:
            return
        clock = Clock(case.name)


def rounded(value: Any) -> Any:
    """Returns the value with all numbers in it to six figures, and None for those that are not finite."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


class Clock:
    """Seconds of the parts of a case, printed as they come."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Ends a part."""
        now = time.perf_counter()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._last, 1)
        print(f"{self.case}: {part}, {now - self._last:.1f} s", flush=True)
        self._last = now


def measure(
    case: Case, state: small_models.State, text: texts.Text, options: argparse.Namespace, clock: Clock
) -> list[Record]:
    """Returns all records of one case."""
    seen = -(-state.step * state.rows // options.rows)  # micro-batches of ours that training has touched, rounded up
    batches = [text.batch(seen + index, options.rows) for index in range(options.batches)]
    held_out = [text.batch(index, 16, held_out=True) for index in range(options.held_out)]
    config = SnipConfig(probe_tokens=None, probe_batch_tokens=None, start_format="bf16", seed=options.seed)
    with unquantized(state.model, config) as layers:
        weight_truth = measure_weights(state, batches, layers, config, options)
        clock.lap("truth of the weight divergence")
        points = [
            Point.of(state.model, batch, state.optimizer, replace(config, seed=options.seed + index))
            for index, batch in enumerate(batches)
        ]
        weight = [weight_estimates(point) for point in points]
        clock.lap("estimates of the weight divergence")
        cells = [(layer, fmt) for layer in layers for fmt in SnipConfig().formats[::-1]]
        assignments = [{layer: {"forward": fmt}} for layer, fmt in cells]
        rises = measure_loss(state.model, held_out, assignments, config).numpy()
        loss_truth = dict(zip(cells, rises, strict=True))
        clock.lap("truth of the loss divergence")
        after = -(-(seen + options.batches) * options.rows // options.loss_rows)
        large = [
            Point.of(state.model, text.batch(after + index, options.loss_rows), state.optimizer, config)
            for index in range(options.batches)
        ]
        loss = [loss_estimates(point, TOKENS, texts.LENGTH) for point in large]
        for point, table in zip(large, loss, strict=True):
            own = measure_loss(state.model, [point.inputs], assignments, config)[:, 0].tolist()
            count = point.inputs["input_ids"].numel()
            table[f"measured/{count}"] = dict(zip(cells, own, strict=True))
            table[f"measured-kl/{count}"] = measured_kl(point)
        clock.lap("estimates of the loss divergence")
    tables = {name: [table[name] for table in weight] for name in weight[0]}
    loss_tables = {name: [table[name] for table in loss] for name in loss[0]}
    records = [
        raw_record(weight_truth, tables, loss_truth, loss_tables),
        *weight_records(weight_truth, tables),
        *loss_records(loss_truth, loss_tables),
    ]
    clock.lap("figures")
    return [*records, case_record(case, state, points, options, clock)]


@contextmanager
def unquantized(model: nn.Module, config: SnipConfig) -> Iterator[list[str]]:
    """Converts the model for the time of the context; gives the names of its layers."""
    with converted(model, config) as layers:
        for layer in layers.values():
            # Read by the GEMMs on the host: from the device it would stop the stream at every GEMM.
            layer.snip_state = layer.snip_state.cpu()
        yield list(layers)


def measure_weights(
    state: small_models.State,
    batches: Sequence[dict[str, torch.Tensor]],
    layers: Sequence[str],
    config: SnipConfig,
    options: argparse.Namespace,
) -> WeightTruth:
    """Measures each layer and row alone, in FP4 in two halves with different seeds; FP8 has no randomness."""
    cells = [(layer, row) for layer in layers for row in options.gemms]
    truth: WeightTruth = {}
    for fmt in SnipConfig().formats[::-1]:
        assignments = [{layer: dict.fromkeys(GEMMS if row == LAYER else (row,), fmt)} for layer, row in cells]
        halves, draws = (2, options.draws // 2) if fmt == "fp4" else (1, 1)
        squares = np.array(
            [
                [
                    [
                        weight**2
                        for _, weight in measure_assignment(
                            state.model,
                            batch,
                            state.optimizer,
                            assignments,
                            replace(config, seed=1000 + 2 * options.seed + half),
                            draws,
                        )
                    ]
                    for half in range(halves)
                ]
                for batch in batches
            ]
        )  # (batches, halves, cells)
        truth.update({(*cell, fmt): squares[:, :, index] for index, cell in enumerate(cells)})
    return truth


def case_record(
    case: Case, state: small_models.State, points: list[Point], options: argparse.Namespace, clock: Clock
) -> Record:
    """Returns where the case's figures come from; written last, so that it marks the case as complete."""
    device = next(state.model.parameters()).device
    kept = ("rows", "loss_rows", "batches", "draws", "held_out", "blocks", "seed", "workers")
    return {
        "kind": "case",
        "family": case.family,
        "optimizer": case.optimizer,
        "steps": case.steps,
        "loss": [point.loss for point in points],
        "tokens": points[0].inputs["input_ids"].numel(),
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "seconds": clock.seconds,
        **{name: getattr(options, name) for name in kept},
        **origin_of(str(device)),
    }


if __name__ == "__main__":
    main()
