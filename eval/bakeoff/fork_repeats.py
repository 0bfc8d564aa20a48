"""Whether the passes of a fork's step give the same bits each time, beside others on one device.

    python -m eval.bakeoff.fork_repeats recipes/forks-criteria.yaml --processes 8 --passes 2000 \\
        --output runs/repeats.jsonl --override forks.cuda_graph=true

Every process does the passes of one and the same step again and again: same weights, tokens and random numbers (those
that the plan is applied with), and no optimizer step. A line per process and contender has the passes whose loss or
gradients are not those of most passes, and which parameters they differ in. Of the first pass that differs from the
very first one it also has in how many elements, between which indices, and by how much (`where`). A single weight
speaks of its own GEMM, all parameters from some layer to the first one of what that layer passes on. `most` tells those
of most passes from others: it is equal in all processes and runs on one kind of machine, or something does not repeat
there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from snip_hf.cli.commands import at_least_one

from .fork_base import Trainee, deterministic
from .fork_cells import Fork, contender_of
from .fork_device import set_up_device
from .fork_options import parser_of, read
from .fork_recipe import ForkRecipe
from .fork_run import in_force, make_plan
from .fork_steps import random_text

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
    recipe, options = read(_parser(), arguments)
    lock = mp.get_context("spawn").Lock()
    mp.start_processes(_repeat, (recipe, options, lock), nprocs=options.processes, start_method="spawn")


def _repeat(index: int, recipe: ForkRecipe, options: argparse.Namespace, lock: Any) -> None:
    """One of the processes."""
    device = set_up_device(0, options.device)  # all on one
    text = random_text(recipe, recipe.base.sequences)
    trainee = Trainee(recipe, text, device, 0)
    (ids,) = trainee.put([text.train])
    for name in options.contenders:
        contender = contender_of(_CELLS[name], {"backend": recipe.backend, "solver": "greedy"})
        planned = make_plan(trainee, contender, _FORK, recipe.backend, ids)
        with in_force(trainee, planned, contender.config(_FORK, recipe.backend), _FORK):
            found = _compared(trainee, ids, planned.plan, options.passes)
        line = {
            "contender": contender.name,
            "backend": planned.backend,
            "cuda_graph": recipe.cuda_graph,
            "process": index,
            "processes": options.processes,
            "passes": options.passes,
            **found,
            **options.origin,
        }
        with lock, options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        told = f"{found['differing']} of {options.passes}"
        print(f"{contender.name} ({planned.backend}), process {index}: {told}", flush=True)


def _compared(trainee: Trainee, ids: Tensor, plan: Any, count: int) -> dict[str, Any]:
    """Returns what a line says of passes after the warm-up. Between passes nothing waits for the device."""
    parameters = dict(trainee.model.named_parameters())
    names, sums, first = ["loss", *parameters], [], {}
    for number in range(-_WARM, count):
        with deterministic(trainee.device):
            loss = trainee.passes(ids, plan)
        if number >= 0:
            sums.append(_sums(loss, trainee.model))
            gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            if number == 0:
                first = {name: gradient.clone() for name, gradient in gradients.items()}
                others, is_kept = {name: gradient.clone() for name, gradient in first.items()}, sums[0].new_zeros(())
            is_new = (sums[-1] != sums[0]).any() & (is_kept == 0)
            for name, gradient in gradients.items():
                others[name].copy_(torch.where(is_new, gradient, others[name]))
            is_kept += is_new
        trainee.optimizer.zero_grad()
    rows = [tuple(row) for row in torch.stack(sums).tolist()]
    ((most, _),) = Counter(rows).most_common(1)
    differing = [
        {"pass": number, "in": [name for name, own, usual in zip(names, row, most, strict=True) if own != usual]}
        for number, row in enumerate(rows)
        if row != most
    ]
    told = hashlib.sha256(repr(most).encode()).hexdigest()[:12]
    return {"most": told, "differing": len(differing), "first": differing[:_SHOWN], "where": _where(others, first)}


def _where(gradients: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns, for each parameter whose gradient differs from the first pass's: how many elements, where, how much."""
    found = {}
    for name, gradient in gradients.items():
        usual = first[name]
        places = (gradient != usual).nonzero()
        if len(places):
            found[name] = {
                "elements": len(places),
                "from": places.amin(0).tolist(),
                "to": places.amax(0).tolist(),
                "in_norm": float((gradient - usual).norm() / usual.norm()),
            }
    return found


def _sums(loss: Tensor, model: nn.Module) -> Tensor:
    """Returns, on the device, sums of the bits of loss and gradients, which any order of adding up gives alike."""
    parts = [loss.reshape(1), *(parameter.grad for parameter in model.parameters())]
    return torch.stack([part.float().view(torch.int32).sum(dtype=torch.int64) for part in parts if part is not None])


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("eval.bakeoff.fork_repeats", __doc__)
    parser.add_argument("--processes", type=at_least_one, default=1, metavar="N", help="beside each other")
    parser.add_argument("--passes", type=at_least_one, default=1000, metavar="N", help="of each process and contender")
    parser.add_argument("--contenders", nargs="+", choices=_CELLS, default=["bf16", "fp8", "fp4"], metavar="NAME")
    return parser


if __name__ == "__main__":
    main()
