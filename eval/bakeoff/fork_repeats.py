"""Whether the passes of a fork's step give the same bits each time, beside others on one device.

    python -m eval.bakeoff.fork_repeats recipes/forks-criteria.yaml --processes 8 --passes 2000 \\
        --output runs/repeats.jsonl --override forks.cuda_graph=true

Every process does the passes of one and the same step again and again: same weights, tokens and random numbers, and no
optimizer step. A line per contender has the passes whose loss or gradients are not those of the first one, and which
parameters they differ in. A single weight speaks of its own GEMM, all parameters from some layer to the first one of
what that layer passes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.shared.origin import origin_of

from .fork_base import Trainee, deterministic
from .fork_cells import Fork, contender_of
from .fork_device import check_graphs, set_up_device
from .fork_recipe import ForkRecipe, load_recipe
from .fork_run import in_force, make_plan
from .fork_text import ForkText

_FORK = Fork(base_seed=0, point=0, data_seed=0)
# One per backend and kind of rounding, without a probe.
_CELLS: dict[str, dict[str, Any]] = {
    "bf16": {"format": "bf16"},
    "fp8": {"format": "fp8"},
    "fp4": {"format": "fp4"},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
}
# The first passes are compiled, and captured.
_WARM = 3
_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs each contender in all processes, and adds a line for each."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe, options.override)
        check_graphs(recipe.cuda_graph, options.device)
    except (ValueError, TypeError, FileNotFoundError) as error:
        parser.error(str(error))
    typed = sys.argv[1:] if arguments is None else arguments
    options.origin = origin_of(options.device) | {
        "command": shlex.join(["python", "-m", "eval.bakeoff.fork_repeats", *typed])
    }
    if options.commit is not None:
        options.origin["commit"] = options.commit
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lock = mp.get_context("spawn").Lock()
    mp.start_processes(_repeat, (recipe, options, lock), nprocs=options.processes, start_method="spawn")


def _repeat(index: int, recipe: ForkRecipe, options: argparse.Namespace, lock: Any) -> None:
    """One of the processes."""
    device = set_up_device(0, options.device)  # all on one
    rng = np.random.default_rng(0)
    shapes = [(recipe.base.sequences, recipe.data.sequence_length), (1, 8)]
    vocabulary = recipe.tokenizer.vocab_size
    text = ForkText(*(rng.integers(0, vocabulary, shape).astype(np.uint16) for shape in shapes), vocabulary, 0)
    trainee = Trainee(recipe, text, device, 0)
    (ids,) = trainee.put([text.train])
    for name in options.contenders:
        contender = contender_of(_CELLS[name], {"backend": recipe.backend, "solver": "greedy"})
        planned = make_plan(trainee, contender, _FORK, recipe.backend, ids)
        with in_force(trainee, planned, contender.config(_FORK, recipe.backend), _FORK):
            differing = _differing(trainee, ids, planned.plan, options.passes)
        line = {
            "contender": contender.name,
            "backend": planned.backend,
            "cuda_graph": recipe.cuda_graph,
            "process": index,
            "processes": options.processes,
            "passes": options.passes,
            "differing": len(differing),
            "first": differing[:_SHOWN],
            **options.origin,
        }
        with lock, options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{contender.name} ({planned.backend}), process {index}: {len(differing)} of {options.passes}", flush=True
        )


def _differing(trainee: Trainee, ids: Tensor, plan: Any, count: int) -> list[dict[str, Any]]:
    """Returns which passes differ from the first one after the warm-up, and in what."""
    names, found, first = ["loss", *(name for name, _ in trainee.model.named_parameters())], [], None
    for done in range(_WARM + count):
        with deterministic(trainee.device):
            loss = trainee.passes(ids, plan)
        sums = _sums(loss, trainee.model)
        trainee.optimizer.zero_grad()
        if done >= _WARM:
            first = sums if first is None else first
            found.append(sums != first)
    rows = torch.stack(found).cpu()
    return [
        {"pass": number, "in": [name for name, differs in zip(names, row.tolist(), strict=True) if differs]}
        for number, row in enumerate(rows)
        if row.any()
    ]


def _sums(loss: Tensor, model: nn.Module) -> Tensor:
    """Returns, on the device, sums of the bits of loss and gradients, which any order of adding up gives alike."""
    parts = [loss.reshape(1), *(parameter.grad for parameter in model.parameters())]
    return torch.stack([part.float().view(torch.int32).sum(dtype=torch.int64) for part in parts if part is not None])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.bakeoff.fork_repeats", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="beside each other")
    parser.add_argument("--passes", type=int, default=1000, metavar="N", help="of each process and contender")
    parser.add_argument("--contenders", nargs="+", choices=_CELLS, default=["bf16", "fp8", "fp4"], metavar="NAME")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines; new ones are added")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", metavar="ID", help="the lines' commit, for code that lies without its .git folder")
    return parser


if __name__ == "__main__":
    main()
