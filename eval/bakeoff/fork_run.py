"""One fork of one contender: its plan, its training from the base's state, and what came of it."""

from __future__ import annotations

import contextlib
import math
import statistics
import string
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController, restore_model
from snip_hf.kernels.emulated import Emulated
from snip_hf.layers.state import pack_states, snip_linears
from snip_hf.numerics.formats import UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PrecisionPlan

from .fork_base import Trainee, sequences_of, state_path
from .fork_recipe import GEMM_SETS, Contender, Fork, ForkRecipe
from .fork_text import ForkText
from .training import flop_shares

# The training loss of a fork is the mean over so many of its last steps.
LAST_STEPS = 25
# How a line's plan writes places in its `shares`.
_PLACES = string.digits + string.ascii_letters


def run_fork(
    recipe: ForkRecipe, text: ForkText, contender: Contender, fork: Fork, device: torch.device, folder: Path
) -> dict[str, Any]:
    """Trains a contender from the start of a fork and returns losses, shares and times.

    Every contender has its plan before the first step and keeps it. A policy that needs a probe gets it in a rehearsal
    of that step, after which the base's state is loaded again.

    Args:
        recipe: model, training and steps.
        text: what is trained and evaluated on.
        contender: who decides on the precisions.
        fork: where it starts.
        device: where it runs.
        folder: of the base's states.
    """
    began = time.perf_counter()
    state, sequences = state_path(recipe, text, fork, folder), sequences_of(recipe, text, fork)
    trainee = Trainee(recipe, text, device, fork.base_seed)
    digest = trainee.load(state)
    plan = make_plan(trainee, contender.config(fork, recipe.backend), fork, sequences[0])
    if plan is not None:
        plan = _only(plan, GEMM_SETS[contender.gemms])
        trainee.load(state)
    planned = time.perf_counter()
    with _held(trainee, plan, recipe.backend, fork) as controller:
        losses = _train(trainee, sequences, fork, controller)
        trained = time.perf_counter()
        under_plan = trainee.evaluate()
    high_precision = under_plan if plan is None else trainee.evaluate()
    ended = time.perf_counter()
    curve = [statistics.fmean(losses[i : i + LAST_STEPS]) for i in range(0, len(losses), LAST_STEPS)]
    found = {
        "train": statistics.fmean(losses[-LAST_STEPS:]),
        "held_out_plan": under_plan,
        "held_out_high_precision": high_precision,
    }
    return {
        "state": digest,
        "loss": {name: _finite(loss) for name, loss in found.items()},
        "training_curve": [_finite(loss) for loss in curve],
        "diverged": len(losses) < recipe.steps or not all(map(math.isfinite, (*losses, *found.values()))),
        **_of_plan(plan),
        "seconds": {
            "plan": round(planned - began, 3),
            "training": round(trained - planned, 3),
            "evaluation": round(ended - trained, 3),
        },
    }


def make_plan(
    trainee: Trainee, config: SnipConfig, fork: Fork, sequences: np.ndarray[Any, Any]
) -> PrecisionPlan | None:
    """Returns the plan with which a fork starts, None for BF16. The trainee may have gone on by one step.

    Args:
        trainee: in the state of the fork's start.
        config: who decides.
        fork: where it starts.
        sequences: of its first step.

    Raises:
        RuntimeError: the probe, or the solver, came to nothing.
    """
    if config.policy == UNQUANTIZED.name:
        return None
    first = fork.point + 1
    controller = SnipController(trainee.model, trainee.optimizer, config)
    try:
        controller.step = fork.point
        if controller.needs_probe:
            trainee.step(first, sequences, controller)
        plan = controller.plan
    finally:
        controller.close()
        restore_model(trainee.model)
    if controller.needs_probe and plan.provenance.step != first:
        raise RuntimeError(f"The refresh of step {first} came to nothing (the log says why), so there is no plan.")
    return plan


def _only(plan: PrecisionPlan, gemms: Sequence[str]) -> PrecisionPlan:
    """Returns the plan with every other GEMM in BF16."""
    assignment = {
        layer: {gemm: formats[gemm] if gemm in gemms else UNQUANTIZED.name for gemm in GEMMS}
        for layer, formats in plan.assignment.items()
    }
    return replace(plan, assignment=assignment)


@contextlib.contextmanager
def _held(trainee: Trainee, plan: PrecisionPlan | None, backend: str, fork: Fork) -> Iterator[SnipController | None]:
    """Runs the model in a plan inside, with the fork's random numbers; outside it is unquantized."""
    if plan is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        config = SnipConfig(fixed_plan=str(path), backend=backend, seed=fork.seed)
        controller = SnipController(trainee.model, trainee.optimizer, config)
    controller.step = fork.point
    if controller.backend == Emulated.name:
        keep_state_on_host(trainee.model)
    try:
        yield controller
    finally:
        controller.close()
        restore_model(trainee.model)


def keep_state_on_host(model: nn.Module) -> None:
    """Keeps the formats of the GEMMs, and the keys of their random numbers, in the host's memory.

    The emulated kernels read them there. From a GPU's memory each GEMM would wait for its turn on the GPU to read them.
    """
    layers = snip_linears(model)
    for layer in layers.values():
        layer.snip_state = layer.snip_state.cpu()
    pack_states(layers)


def _train(
    trainee: Trainee, sequences: np.ndarray[Any, Any], fork: Fork, controller: SnipController | None
) -> list[float]:
    """Trains the fork's steps, or until the loss is not finite, and returns the losses."""
    torch.manual_seed(fork.seed)
    losses: list[float] = []
    pending: list[Tensor] = []
    for index, rows in enumerate(sequences, 1):
        pending.append(trainee.step(fork.point + index, rows, controller))
        if index % LAST_STEPS == 0 or index == len(sequences):  # seldom, since reading waits for the GPU
            losses += torch.stack(pending).tolist()
            pending.clear()
            if not math.isfinite(losses[-1]):
                break
    return losses


def _of_plan(plan: PrecisionPlan | None) -> dict[str, Any]:
    """Returns shares and formats of a plan as a line has them."""
    if plan is None:
        return {"shares": {UNQUANTIZED.name: 1.0}, "fp4_fraction": 0.0, "plan": None}
    found = flop_shares(plan)
    names = list(found)
    places = [names.index(formats[gemm]) for formats in plan.assignment.values() for gemm in GEMMS]
    return {
        "shares": found,
        "fp4_fraction": round(plan.fp4_fraction, 6),
        "plan": "".join(_PLACES[place] for place in places) if len(names) > 1 else None,
    }


def _finite(loss: float) -> float | None:
    """Returns a loss as lines hold it, with six decimals; None for NaN and infinity."""
    return round(loss, 6) if math.isfinite(loss) else None
