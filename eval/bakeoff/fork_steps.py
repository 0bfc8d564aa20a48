"""How long a step of a fork takes beside others on one device, with CUDA graphs or without.

    python -m eval.bakeoff.fork_steps recipes/forks-criteria.yaml --processes 1 4 8 --output runs/steps.jsonl \
        --override forks.cuda_graph=true

Every process trains the recipe's model on random tokens from the same first weights, so that lines of runs with and
without graphs hold the same `losses`. No probe and no evaluation is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from .fork_base import Trainee
from .fork_cells import Contender, Fork, contender_of
from .fork_device import set_up_device
from .fork_options import parser_of, read
from .fork_recipe import ForkRecipe
from .fork_run import in_force, make_plan
from .fork_text import ForkText

# Compiled; captured; replayed.
_WARM_STEPS = 3
_FORK = Fork(base_seed=0, point=0, data_seed=0)
_HALF = {"granularity": "gemm", "target_fp4_fraction": 0.5}
# One per backend, without a probe; the emulated products of the last one are FP32.
_CELLS: Sequence[dict[str, Any]] = (
    {"format": "bf16"},
    {"policy": "random", "formats": ["fp4", "fp8"], **_HALF},
    {"format": "mxfp4"},
    {"policy": "random", "formats": ["mxfp4", "mxfp8"], **_HALF},
    {"format": "nvfp4"},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each contender with each number of processes, and adds a line for each."""
    recipe, options = read(_parser(), arguments)
    count, context = max(options.processes), mp.get_context("spawn")
    barrier, seconds = context.Barrier(count), context.Array("d", count)
    with tempfile.TemporaryDirectory() as folder:
        given = (recipe, options, Path(folder, "state.pt"), barrier, seconds)
        mp.start_processes(_measure, given, nprocs=count, start_method="spawn")


def _measure(index: int, recipe: ForkRecipe, options: argparse.Namespace, state: Path, barrier: Any, own: Any) -> None:
    """One of the processes; the first one writes lines."""
    device = set_up_device(0, options.device)  # all on one, which a line's figures per device are of
    text = random_text(recipe, (_WARM_STEPS + options.steps) * recipe.base.sequences)
    trainee = Trainee(recipe, text, device, 0)
    ids = trainee.put(np.array_split(text.train, _WARM_STEPS + options.steps))
    if index == 0:
        trainee.save(state)
    common = {"backend": recipe.backend, "solver": "greedy"}
    for cell in _CELLS:
        barrier.wait()
        trainee.load(state)
        contender = contender_of(cell, common)
        planned = make_plan(trainee, contender, _FORK, recipe.backend, ids[0])
        with in_force(trainee, planned, contender.config(_FORK, recipe.backend), _FORK) as controller:
            losses = [trainee.step(number, one, controller) for number, one in enumerate(ids[:_WARM_STEPS], 1)]
            done = _WARM_STEPS
            for count in sorted(options.processes):
                _wait_for(device)
                barrier.wait()
                if index < count:
                    began = time.perf_counter()
                    losses += [trainee.step(done + n, one, controller) for n, one in enumerate(ids[_WARM_STEPS:], 1)]
                    _wait_for(device)
                    own[index] = time.perf_counter() - began
                    done += options.steps
                barrier.wait()
                if index == 0:
                    _write(options, contender, planned.backend, recipe.cuda_graph, count, list(own)[:count], losses)


def _write(
    options: argparse.Namespace,
    contender: Contender,
    backend: str | None,
    cuda_graph: bool,
    count: int,
    seconds: list[float],
    losses: Sequence[Tensor],
) -> None:
    step = max(seconds) / options.steps
    line = {
        "contender": contender.name,
        "backend": backend,
        "cuda_graph": cuda_graph,
        "processes": count,
        "steps": options.steps,
        "step_ms": round(step * 1e3, 3),
        "step_ms_per_device": round(step / count * 1e3, 3),
        "losses": torch.stack(list(losses[: _WARM_STEPS + options.steps])).tolist(),
        **options.origin,
    }
    with options.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    shown = f"{line['step_ms']:.1f} ms per step, {line['step_ms_per_device']:.2f} per step and device"
    print(f"{contender.name} ({backend}), graphs {cuda_graph}, {count} processes: {shown}", flush=True)


def random_text(recipe: ForkRecipe, sequences: int) -> ForkText:
    """Returns a text of random tokens, the same ones each time."""
    rng, vocabulary = np.random.default_rng(0), recipe.tokenizer.vocab_size
    shapes = [(sequences, recipe.data.sequence_length), (1, 8)]
    return ForkText(*(rng.integers(0, vocabulary, shape).astype(np.uint16) for shape in shapes), vocabulary, 0)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("eval.bakeoff.fork_steps", __doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 8], metavar="N", help="beside each other")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="that are timed")
    return parser


if __name__ == "__main__":
    main()
