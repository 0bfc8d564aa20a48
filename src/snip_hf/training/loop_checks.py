"""Checks of the training loop in mid-run: its calls come in order, and it trains what it trained at the beginning.

A loop may replace layers, optimizer or gradients in mid-run. A plan made from what is no longer in use would mislead,
so that each check names its cause, and the plan in force stays. What a start refuses is in `checks`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from ..costs.flops import Work
from ..estimation.samples import read
from ..layers.layer import SnipLayer
from ..layers.state import plain_name, snip_linears
from ..optimizers.known import shown_name
from ..optimizers.response import check_optimizer, trained_by
from ..parallel.ranks import Attempt, Ranks
from ..parallel.sharding import own_part
from .schedule import Schedule

# Steps in a row that an optimizer may leave out, as torch's GradScaler makes it where gradients overflow.
_LEFT_OUT = 10
# Gradients that change by more between a probe and the step were not those of the loss; FP16's scale begins at 65,536.
_MOST = 1000.0
_GO_ON = (
    "Save a checkpoint and resume from it with the new optimizer from the beginning (in a loop of one's own: close the "
    "controller and build a new SnipController)."
)
_LATE = (
    "before_optimizer_step was called after optimizer.step(): no plan can be made, since the optimizer's state has the "
    "step's gradients by then. Call it before optimizer.step(), once the gradients are complete and clipped."
)


class StepCalls:
    """Checks that the calls of a training loop come once per optimizer step, in order.

    With an Accelerator, calls while it accumulates gradients do not count, and the numbers that the loop passes are not
    used: they may be those of micro-batches.

    Args:
        accelerator: the Accelerate object of the loop, if there is one.
        schedule: is told if the loop calls in each micro-batch.
        needs_probe: whether the policy probes; without a probe, `before_optimizer_step` has nothing to do.
        log: gets warnings, each once.
    """

    def __init__(self, accelerator: Any, schedule: Schedule, needs_probe: bool, log: logging.Logger) -> None:
        self._accelerator = accelerator if hasattr(accelerator, "sync_gradients") else None
        self._schedule = schedule
        self._needs_probe = needs_probe
        self._log = log
        self._said: set[str] = set()
        self.is_begun = False
        """Whether `before_optimizer_step` was called for a step that has not ended."""
        self.is_closed = False

    def count(self, call: str, step: Any, done: int) -> bool:
        """Returns True if a call with the number `step`, after `done` optimizer steps, is of an optimizer step.

        Raises:
            TypeError, ValueError: that is no number or not the next one, or the step before has not ended.
        """
        self.check_open(call)
        if not isinstance(step, SupportsIndex):
            raise TypeError(f"{call} got the step {step!r} ({type(step).__name__}); expected an int, e.g. {done + 1}.")
        if self._accelerator is not None and not self._accelerator.sync_gradients:
            self._schedule.count_micro_batches(self._accelerator.gradient_accumulation_steps)
            return False
        if self.is_begun and call == "before_optimizer_step":
            raise ValueError(
                f"{call} was called again without after_step, so no plan would ever be applied: call after_step(step) "
                "after each optimizer step."
            )
        if self._accelerator is None and index(step) != done + 1:
            raise ValueError(
                f"{call} got the step {index(step)} after {done} optimizer steps, expected {done + 1}: count optimizer "
                "steps, from 1 and without gaps, and not micro-batches (to go on after step N without a saved state, "
                "set controller.step = N first)."
            )
        return True

    def check_open(self, call: str) -> None:
        """Raises ValueError if the controller has been closed."""
        if self.is_closed:
            raise ValueError(f"{call} was called after close(). Build a new SnipController to train on.")

    def begin(self, is_late: bool) -> None:
        """Notes `before_optimizer_step`; `is_late` if the optimizer has taken its step by then."""
        self.is_begun = True
        if is_late:
            self._say(_LATE)

    def end(self) -> None:
        """Notes `after_step`."""
        if not self.is_begun and self._needs_probe:
            self._say(
                "after_step was called without before_optimizer_step: no plan can be made. Call "
                "before_optimizer_step(step) before each optimizer step, once the gradients are complete and clipped."
            )
        self.is_begun = False

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._log.warning("snip-hf: %s", message)


def check_layers(model: nn.Module, layers: Mapping[str, SnipLayer], flops: Work) -> None:
    """Refuses a model whose swapped layers are not those that the run began with.

    Raises:
        ValueError: says which are gone and what is in their places.
    """
    present = snip_linears(model)
    gone = [name for name, layer in layers.items() if present.get(name) is not layer]
    if gone:
        modules = {plain_name(name): module for name, module in model.named_modules()}
        now = type(modules[gone[0]]).__name__ if gone[0] in modules else "nothing"
        share = sum(sum(flops[name].values()) for name in gone) / sum(sum(row.values()) for row in flops.values())
        raise ValueError(
            f"{len(gone)} of the {len(layers)} swapped layers were replaced or wrapped since training began, e.g. "
            f"{gone[0]!r} (now {now}). No plan can be made for the model as it is, and the FP4 share still counts "
            f"their {share:.1%} of the linear FLOPs. Change a model before training begins."
        )
    if added := [name for name in present if name not in layers]:
        raise ValueError(
            f"The model has {len(added)} more swapped layers than when training began, e.g. {added[0]!r}; the plan "
            "does not cover them. Change a model before training begins."
        )


def check_gradients(gradients: Mapping[str, Tensor], is_trained: bool, everyone: Ranks) -> None:
    """Refuses, on all ranks, gradients that are not finite on one of them, or that none of them has.

    Args:
        gradients: layer -> gradient, or this rank's part of it.
        is_trained: whether any weight here is to get a gradient.
        everyone: all ranks.

    Raises:
        ValueError: names the layer, or the causes.
    """
    attempt, some = Attempt(), False
    with attempt:
        own = [own_part(gradient) for gradient in gradients.values()]
        figures = read([*(torch.isfinite(one).all() for one in own), *(one.any() for one in own)])
        for name, is_finite in zip(gradients, figures, strict=False):
            if not is_finite:
                raise ValueError(f"The gradient of layer {name!r} is not finite; expected finite numbers.")
        some = any(figures[len(own) :])
    everyone.agree(attempt.error)
    columns = zip(*everyone.gather([is_trained, bool(gradients), some]), strict=True)
    expected, are_there, found = (any(column) for column in columns)
    if not expected or found:
        return
    if are_there:
        raise ValueError(
            "Every gradient of the step is 0. The loss has no gradient at this step, as where all rewards of a group "
            "are equal or no label counts; or, in a loop of one's own, gradients were zeroed before "
            "before_optimizer_step, which is to be called with those of the whole step in place."
        )
    raise ValueError(
        "No trained weight has a gradient before the optimizer's step: the optimizer steps within the backward pass, "
        "which needs a policy without a probe; or, in a loop of one's own, gradients were set to None before "
        "before_optimizer_step, which is to be called with those of the whole step in place."
    )


class OptimizerWatch:
    """Notices when the optimizer whose next update is probed is no longer the one that trains the weights.

    Args:
        optimizer: as the controller was given it.
        model: what it trains.
        layers: the swapped layers.
    """

    def __init__(self, optimizer: Any, model: nn.Module, layers: Mapping[str, SnipLayer]) -> None:
        self._parts = check_optimizer(optimizer)
        self._model, self._layers = model, layers
        self._trained = self._now_trained()
        """Parameters that it trained at the beginning, those of the layers first."""
        self._held = self._now_held()
        """Layers whose weights it trained at the beginning."""
        weights = [layers[name].weight for name in self._held] or self._trained
        holding = [part for part in self._parts if any(_holds(part, weight) for weight in weights)]
        # torch neither copies nor saves the hooks of an optimizer. These hold nothing of the run.
        self._steps = [_Steps(part) for part in holding or self._parts]
        """Of the parts of a combination that train the layers."""
        self._kind = " and ".join(shown_name(type(steps.part)) for steps in self._steps)
        self._last: tuple[int, Tensor, int] | None = None
        self._left_out = 0
        self._are_moved = False
        self._taken_before: int | None = None
        self._is_late = False

    def begin_step(self) -> None:
        """To be called before the forward passes of a step."""
        self._taken_before = self._taken

    def note_step(self) -> bool:
        """To be called before each optimizer step; returns True if it was taken already."""
        self._is_late = self._taken_before not in (None, self._taken)
        self._taken_before = None
        weight = next((one for one in self._trained if one.requires_grad), next(iter(self._layers.values())).weight)
        # Those of a combination count as one step.
        taken = min(steps.taken for steps in self._steps)
        version = own_part(weight.detach())._version
        if self._last is not None and self._last[0] == taken:
            self._left_out += 1
            self._are_moved |= self._last[1] is weight and self._last[2] != version
        else:
            self._left_out, self._are_moved = 0, False
        self._last = taken, weight, version
        for steps in self._steps:
            steps.expected = None
        return self._is_late

    def expect_gradients(self) -> None:
        """Notes the gradients as they are: the optimizer is to take its next step with them."""
        weight = next((one for one in self._trained if one.grad is not None), None)
        for steps in self._steps:
            # Another part may change gradients in its step before this one takes its own.
            steps.expect(weight if weight is not None and _holds(steps.part, weight) else None)

    def check(self) -> None:
        """Raises ValueError if another optimizer trains the weights, or the step was taken already."""
        if self._is_late:
            raise ValueError(_LATE)
        self._check_trained()
        has_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
        if has_gradients and self._left_out > 0 and (self._are_moved or self._left_out >= _LEFT_OUT):
            steps = "step" if self._left_out == 1 else f"{self._left_out} steps"
            raise ValueError(
                f"The {self._kind} that training began with has not taken the last {steps}: another optimizer trains "
                f"the model, of whose state nothing is known. {_GO_ON}"
            )
        held = set(self._now_held())
        for name in self._held:
            if name not in held and self._layers[name].weight.requires_grad:
                raise ValueError(
                    f"The weight of layer {name!r} is no longer in the parameter groups of the {self._kind} that "
                    "training began with: the weight or the optimizer was replaced. Replace them before training."
                )

    def check_gradients_used(self) -> None:
        """Raises ValueError if the optimizer took the step of the last probe with other gradients."""
        self._check_trained()
        noted = next((steps.change for steps in self._steps if steps.change is not None), None)
        for steps in self._steps:
            steps.change = None
        change = math.nan if noted is None else float(noted)
        if math.isfinite(change) and not 1 / _MOST < change < _MOST:
            raise ValueError(
                f"The optimizer took its step with gradients {change:.2g} times those that were there in "
                "before_optimizer_step. With a GradScaler, unscale them (scaler.unscale_(optimizer)) before it, and "
                "clip them after that."
            )

    def close(self) -> None:
        for steps in self._steps:
            steps.close()

    @property
    def _taken(self) -> int:
        return sum(steps.taken for steps in self._steps)

    def _now_held(self) -> list[str]:
        is_trained = trained_by(self._parts)
        return [name for name, layer in self._layers.items() if is_trained(layer.weight)]

    def _now_trained(self) -> list[Tensor]:
        weights = [layer.weight for layer in self._layers.values()]
        return list(filter(trained_by(self._parts), [*weights, *self._model.parameters()]))

    def _check_trained(self) -> None:
        """Raises ValueError if all that the optimizer trains is frozen or replaced, as where adapters are added."""
        if self._trained and not self._now_trained():
            raise ValueError(
                f"The {self._kind} that training began with holds no parameter that is still trained: the model's "
                f"parameters were frozen or replaced, as by adapters, or another optimizer trains them. {_GO_ON}"
            )


class _Steps:
    """What an optimizer's hooks note, until `close`."""

    def __init__(self, part: torch.optim.Optimizer) -> None:
        self.part = part
        self.taken = 0
        self.expected: tuple[Tensor, Tensor] | None = None
        """A weight and the norm that its gradient is to have in the next step."""
        self.change: Tensor | None = None
        """Norm of the gradient in the step / before it."""
        self._hooks = [part.register_step_pre_hook(self.before), part.register_step_post_hook(self.after)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def expect(self, weight: Tensor | None) -> None:
        self.expected = None if weight is None else (weight, _norm(weight))
        self.change = None

    def before(self, *_: Any) -> None:
        if self.expected is not None:
            weight, norm = self.expected
            if weight.grad is not None:
                self.change = _norm(weight) / norm
        self.expected = None

    def after(self, *_: Any) -> None:
        self.taken += 1


def _holds(part: torch.optim.Optimizer, weight: Tensor) -> bool:
    return any(one is weight for group in part.param_groups for one in group["params"])


def _norm(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    norm: Tensor = own_part(weight.grad.detach()).to(torch.float32).norm()
    return norm


def why_untrained(parameters: Iterable[Tensor], is_trained: Callable[[Tensor], bool]) -> str | None:
    """Returns why no parameter is ever updated; None if some are.

    Args:
        parameters: the model's.
        is_trained: returns True for a parameter that the optimizer updates.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return "all parameters of the model are frozen"
    return None if any(map(is_trained, trained)) else "the optimizer holds no parameter of the model"


def why_no_update(layers: Iterable[SnipLayer], groups: Iterable[Mapping[str, Any]]) -> str:
    """Returns why the next updates of what is trained do not depend on the gradients, which are not 0.

    Args:
        layers: the swapped layers.
        groups: the optimizer's parameter groups.
    """
    if all(float(group.get("lr", 1.0)) == 0 for group in groups if group["params"]):
        return "the learning rate is 0"
    if not any(layer.weight.detach().any() for layer in layers):
        return "the swapped weights are all 0"
    return "the optimizer's updates do not depend on the gradients"
