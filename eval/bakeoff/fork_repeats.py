"""Whether the passes of a fork's step give the same bits each time, beside others on one device.

    python -m eval.bakeoff.fork_repeats recipes/forks-criteria.yaml --processes 8 --passes 2000 \\
        --output runs/repeats.jsonl --override forks.cuda_graph=true

Every process does the passes of two steps in turns, again and again: same weights and tokens, the random numbers of
either step, whose keys the host writes before each pass, and no optimizer step. A line per process and contender has
the passes whose loss or gradients are not those of most passes of their step, and which parameters they differ in. Of
the first pass that differs from the first one of its step it also has in how many elements, between which indices, and
by how much (`where`). A single weight speaks of its own GEMM, all parameters from some layer to the first one of what
that layer passes on. `most` tells those of most passes from others: it is equal in all processes and runs on one kind
of machine, or something does not repeat there.
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
from snip_hf.layers.state import set_step, snip_linears

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
# In turns, so that keys that come too late, or too early, are seen.
_STEPS = 2


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
    layers, names = snip_linears(trainee.model), ["loss", *dict(trainee.model.named_parameters())]
    sums, kept = list[Tensor](), [_Kept(), _Kept()]
    for number in range(-_WARM, count):
        set_step(layers, _FORK.seed, number % _STEPS, 0)
        trainee.renew_keys()
        with deterministic(trainee.device):
            loss = trainee.passes(ids, plan)
        if number >= 0:
            sums.append(_sums(loss, trainee.model))
            kept[number % _STEPS].take(sums[-1], trainee.model)
        trainee.optimizer.zero_grad()
    rows = [tuple(row) for row in torch.stack(sums).tolist()]
    most = [Counter(rows[step::_STEPS]).most_common(1)[0][0] for step in range(min(_STEPS, count))]
    differing = [
        {
            "pass": number,
            "in": [name for name, own, usual in zip(names, row, most[number % _STEPS], strict=True) if own != usual],
        }
        for number, row in enumerate(rows)
        if row != most[number % _STEPS]
    ]
    places = [_where(one.others, one.first) for one in kept]
    where = [{"step": step, "in": found} for step, found in enumerate(places) if found]
    told = hashlib.sha256(repr(most).encode()).hexdigest()[:12]
    return {"most": told, "differing": len(differing), "first": differing[:_SHOWN], "where": where}


class _Kept:
    """Gradients of the first pass of a step, and of the first one that differs from it. All stays on the device."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}
        self._sums: Tensor | None = None
        self._is_kept: Tensor | None = None

    def take(self, sums: Tensor, model: nn.Module) -> None:
        """Looks at the gradients that a pass has left, of which these are the sums."""
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        if self._sums is None or self._is_kept is None:
            self._sums, self._is_kept = sums, sums.new_zeros(())
            self.first = {name: gradient.clone() for name, gradient in gradients.items()}
            self.others = {name: gradient.clone() for name, gradient in gradients.items()}
        is_new = (sums != self._sums).any() & (self._is_kept == 0)
        for name, gradient in gradients.items():
            self.others[name].copy_(torch.where(is_new, gradient, self.others[name]))
        self._is_kept += is_new


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
