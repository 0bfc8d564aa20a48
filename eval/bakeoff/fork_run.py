"""One fork of one contender: its plans, its training from the base's state, and what came of it."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snip_hf import SnipConfig, SnipController, restore_model
from snip_hf.kernels.emulated import Emulated
from snip_hf.numerics.formats import UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PrecisionPlan
from snip_hf.records.events import Event, Refresh

from .fork_base import Trainee, sequences_of, state_path
from .fork_cells import GEMM_SETS, Contender, Fork
from .fork_lines import PLACES
from .fork_recipe import ForkRecipe, ForkRun
from .fork_text import ForkText
from .training import ends_above_its_lowest, flop_shares
from .weight_means import WeightMeans

# The training loss of a fork is the mean over so many of its last steps, and so are the averaged weights.
LAST_STEPS = 25


@dataclass(frozen=True)
class Planned:
    """What a contender starts with."""

    plan: PrecisionPlan | None
    """None: nothing is quantized."""
    state: Mapping[str, Any] | None
    """Of the controller that made the plan, for one that goes on refreshing it; None: the plan is held."""
    backend: str | None
    """Name of the backend that runs the contender's formats; None: nothing is quantized."""


def run_fork(
    recipe: ForkRecipe,
    text: ForkText,
    run: ForkRun,
    device: torch.device,
    folder: Path,
    score: Callable[[Trainee], dict[str, Any]] | None = None,
    trainee: Trainee | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Trains a contender from the start of a fork and yields losses, shares and times after each of its lengths.

    Every contender has its plan before the first step and keeps it, unless it refreshes. A policy that needs a probe
    gets it in a rehearsal of that step, after which the base's state is loaded again.

    Args:
        recipe: model and training.
        text: what is trained and evaluated on.
        run: who decides on the precisions, where it starts, and for how long it trains.
        device: where it runs.
        folder: of the base's states.
        score: says more of the trained model, for a line.
        trainee: of this recipe and text, whatever it has trained before; None: a new one.

    Yields: number of steps, and what a line says of them.
    """
    began = time.perf_counter()
    fork, contender = run.fork, run.contender
    state = state_path(recipe, text, fork, folder)
    trainee = trainee or Trainee(recipe, text, device, fork.base_seed)
    sequences = trainee.put(sequences_of(recipe, text, fork, run.lengths[-1]))
    digest = trainee.load(state)
    planned = make_plan(trainee, contender, fork, recipe.backend, sequences[0])
    if planned.plan is not None:
        trainee.load(state)
    seconds = {"plan": time.perf_counter() - began, "training": 0.0, "evaluation": 0.0}
    with in_force(trainee, planned, contender.config(fork, recipe.backend), fork) as controller:
        training = _Training(trainee, fork, controller, run.lengths, recipe.cools_down)
        for steps in run.lengths:
            began = time.perf_counter()
            training.advance(sequences, steps)
            trained = time.perf_counter()
            found = training.found(steps) | ({} if score is None else score(trainee))
            seconds["training"] += trained - began
            seconds["evaluation"] += time.perf_counter() - trained
            origin = {"state": digest, "backend": planned.backend}
            times = {"seconds": {name: round(value, 3) for name, value in seconds.items()}}
            yield steps, origin | found | _of_plan(training.plan) | times


class _Training:
    """The training of a fork.

    Args:
        trainee: in the state of the fork's start, under the contender's plan.
        fork: where it starts.
        controller: has the plan in force; None: nothing is quantized.
        lengths: after which it is measured.
        cools_down: whether the learning rate falls linearly from the schedule's to zero, over the last length.
    """

    def __init__(
        self,
        trainee: Trainee,
        fork: Fork,
        controller: SnipController | None,
        lengths: Sequence[int],
        cools_down: bool,
    ) -> None:
        self._trainee, self._fork, self._controller = trainee, fork, controller
        self._cooldown = lengths[-1] if cools_down else None
        self._losses: list[float] = []
        self._done = 0
        self._means = {length: WeightMeans(trainee.model) for length in lengths}
        self._plans = [] if controller is None else [(0, controller.plan)]
        torch.manual_seed(fork.seed)

    @property
    def plan(self) -> PrecisionPlan | None:
        """That is in force."""
        return None if self._controller is None else self._controller.plan

    def advance(self, sequences: Sequence[Tensor], end: int) -> None:
        """Trains to step `end`, or until the loss is not finite."""
        pending: list[Tensor] = []
        while self._done < end and all(map(math.isfinite, self._losses[-1:])):
            step, shift = self._done + 1, self._fork.shift
            if shift is not None and step == shift.after + 1:
                self._trainee.shift(shift)
            if self._cooldown is not None:
                self._trainee.scale_rate(1 - self._done / self._cooldown)
            pending.append(self._trainee.step(self._fork.point + step, sequences[self._done], self._controller))
            self._done = step
            self._note(step)
            if step % LAST_STEPS == 0 or step == end:  # seldom, since reading waits for the GPU
                self._losses += torch.stack(pending).tolist()
                pending.clear()

    def _note(self, step: int) -> None:
        """Adds the weights to the means that lengths to come ask for, and keeps a plan that is new."""
        for length, means in self._means.items():
            if length - LAST_STEPS < step <= length:
                means.add()
        if self._controller is not None:
            plan, last = self._controller.plan, self._plans[-1][1]
            if plan.provenance.step != last.provenance.step:  # the step of the refresh that made it
                self._plans.append((step, plan))

    def found(self, length: int) -> dict[str, Any]:
        """Returns losses, as far as the training has come: to this length, unless it diverged before."""
        losses, means = self._losses, self._means.pop(length)
        under_plan = self._trainee.evaluate()
        averaged = math.nan  # of a training that ended before the steps to average
        if means.steps == min(LAST_STEPS, length):
            with means.in_place():
                averaged = self._trainee.evaluate()
        high_precision = under_plan
        if self.plan is not None:
            with self._unquantized(self.plan):
                high_precision = self._trainee.evaluate()
        loss = {
            "train": statistics.fmean(losses[-LAST_STEPS:]),
            "held_out_plan": under_plan,
            "held_out_high_precision": high_precision,
            "held_out_averaged": averaged,
        }
        curve = [statistics.fmean(losses[i : i + LAST_STEPS]) for i in range(0, len(losses), LAST_STEPS)]
        return {
            "loss": {name: _finite(value) for name, value in loss.items()},
            "training_curve": [_finite(value) for value in curve],
            "diverged": not all(map(math.isfinite, (*losses, *loss.values()))),
            "blew_up": ends_above_its_lowest(list(enumerate(curve))),
            "plans": [{"step": step} | _of_plan(plan) for step, plan in self._plans[1:]],
        }

    @contextlib.contextmanager
    def _unquantized(self, plan: PrecisionPlan) -> Iterator[None]:
        """Runs the model in high precision inside, and in the plan again outside."""
        only = replace(plan, assignment={name: dict.fromkeys(GEMMS, UNQUANTIZED.name) for name in plan.assignment})
        only.apply(self._trainee.model)
        try:
            yield
        finally:
            plan.apply(self._trainee.model)


def make_plan(trainee: Trainee, contender: Contender, fork: Fork, backend: str, sequences: Tensor) -> Planned:
    """Returns the plan with which a fork starts. The trainee may have gone on by one step.

    Args:
        trainee: in the state of the fork's start.
        contender: who decides.
        fork: where it starts.
        backend: of contenders that are one format.
        sequences: of its first step.

    Raises:
        RuntimeError: the probe, or the solver, came to nothing; the message has the reason.
    """
    config = contender.config(fork, backend)
    if config.policy == UNQUANTIZED.name:
        return Planned(None, None, None)
    first = fork.point + 1
    torch.manual_seed(fork.seed)
    controller = SnipController(trainee.model, trainee.optimizer, replace(config, apply_delay=0))
    events: list[Event] = []
    controller.add_tracker(events.append)
    try:
        controller.step = fork.point
        if controller.needs_probe:
            if controller.backend == Emulated.name:
                trainee.keep_state_on_host()
            trainee.step(first, sequences, controller)
        plan, state = controller.plan, controller.state_dict() if contender.refreshes else None
    finally:
        controller.close()
        restore_model(trainee.model)
    if controller.needs_probe and plan.provenance.step != first:
        reason = next((event.reason for event in events if isinstance(event, Refresh)), "it did not end")
        raise RuntimeError(f"The refresh of step {first} came to nothing, so there is no plan: {reason}")
    if state is not None:  # The step was a rehearsal: training begins before it, with its plan.
        state = state | {"step": fork.point, "config": going_on(config).to_dict()}
    return Planned(_only(plan, GEMM_SETS[contender.gemms]), state, controller.backend)


def going_on(config: SnipConfig) -> SnipConfig:
    """Returns the configuration that refreshes from the second time on."""
    return replace(config, first_refresh=config.first_refresh + (config.refresh_every or 1))


def _only(plan: PrecisionPlan, gemms: Sequence[str]) -> PrecisionPlan:
    """Returns the plan with every other GEMM in BF16."""
    assignment = {
        layer: {gemm: formats[gemm] if gemm in gemms else UNQUANTIZED.name for gemm in GEMMS}
        for layer, formats in plan.assignment.items()
    }
    return replace(plan, assignment=assignment)


@contextlib.contextmanager
def in_force(trainee: Trainee, planned: Planned, config: SnipConfig, fork: Fork) -> Iterator[SnipController | None]:
    """Runs the model in a plan inside, with the fork's random numbers; outside it is unquantized."""
    if planned.plan is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        planned.plan.save(path)
        if planned.state is None:
            # By name: a plan need not use all of the formats that the contender's backend was chosen for.
            config = SnipConfig(fixed_plan=str(path), backend=planned.backend or config.backend, seed=fork.seed)
        controller = SnipController(trainee.model, trainee.optimizer, going_on(config))
    if planned.state is not None:
        controller.load_state_dict(planned.state)
    controller.step = fork.point
    if controller.backend == Emulated.name:
        trainee.keep_state_on_host()
    try:
        yield controller
    finally:
        controller.close()
        restore_model(trainee.model)


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
        "plan": "".join(PLACES[place] for place in places) if len(names) > 1 else None,
    }


def _finite(loss: float) -> float | None:
    """Returns a loss as lines hold it, with six decimals; None for NaN and infinity."""
    return round(loss, 6) if math.isfinite(loss) else None
