"""Observes a loss that the Trainer computes instead of the model, and computes it again for the probe.

A Trainer computes the loss in an override of `compute_loss`, as TRL's trainers do, by `compute_loss_func`, or to smooth
labels. During a run, `LossSeam` wraps `trainer.compute_loss` and reports each micro-batch to the run. The probe calls
the original function with the bare model and the same inputs. It leaves no trace in the attributes, collected metrics
and log of the Trainer.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerState

from ..estimation.batch import Objective, label_name_of, labelled_tokens, token_ids
from ..python_state import Wrapped, binding_kept
from ..training.micro_batches import TrainingPasses
from .reference_model import ReferenceModel

_NAME = "compute_loss"
_COUNT = "num_items_in_batch"


@dataclass(frozen=True)
class Call:
    """A call of `Trainer.train` on the stack."""

    trainer: Trainer
    resumes_from: Any
    """Folder of the checkpoint; None for a new run."""
    trial: Any
    """Trial of a hyperparameter search; None without a search."""


def find_call(state: TrainerState) -> Call | None:
    """Finds the Trainer with this state on the stack of this thread, because Trainers do not pass themselves to
    callbacks."""
    for frame, _ in traceback.walk_stack(None):
        found = frame.f_locals if frame.f_code.co_name == "train" else {}
        trainer = found.get("self")
        if isinstance(trainer, Trainer) and trainer.state is state:
            return Call(trainer, found.get("resume_from_checkpoint"), found.get("trial"))
    return None


def find_trainer(state: TrainerState) -> Trainer | None:
    """Returns the Trainer of `find_call`."""
    call = find_call(state)
    return None if call is None else call.trainer


def computes_loss(trainer: Trainer) -> bool:
    """Returns True if the Trainer computes the loss instead of the model."""
    is_own = type(trainer).compute_loss is not Trainer.compute_loss or _NAME in vars(trainer)
    return is_own or trainer.label_smoother is not None or trainer.compute_loss_func is not None


class LossSeam:
    """Reports the losses that a Trainer computes to its run, until `remove`.

    Args:
        trainer: the Trainer.
        passes: the passes of the run, which get the losses.
        reference: the reference model of the Trainer, if it follows the plan.
    """

    def __init__(self, trainer: Trainer, passes: TrainingPasses, reference: ReferenceModel | None = None) -> None:
        self._trainer = trainer
        self._passes = passes
        self._reference = reference
        self._count: Any = None
        """Number of items in the step, as passed by training; None if the loss does not use it."""
        kind = getattr(type(trainer), _NAME)
        # The losses of Trainer and of TRL's SFTTrainer are means over tokens, so sequences can be cut.
        is_of_sft = _is_trl(kind) and kind.__qualname__ == f"SFTTrainer.{_NAME}"
        can_be_cut = _NAME not in vars(trainer) and (kind is Trainer.compute_loss or is_of_sft)
        self._objective = Objective(self._compute, terms_of(trainer), can_be_cut)
        self._wrapped = Wrapped(trainer, _NAME, self._call)

    def remove(self) -> None:
        """Restores the original function."""
        self._wrapped.remove()

    def _call(self, inner: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss of training."""
        self._count = kwargs.get(_COUNT)
        one = self._passes.begin_loss(inputs, self._objective) if isinstance(inputs, Mapping) else None
        loss = None
        try:
            found = inner(model, inputs, *args, **kwargs)
            loss = found[0] if isinstance(found, tuple) else found  # with return_outputs=True
            return found
        finally:
            self._passes.end_loss(one, loss)

    def _compute(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Computes the mean loss of a micro-batch, or of a part of it, for the probe."""
        trainer, factor = self._trainer, 1
        name = label_name_of(inputs, trainer.label_names)
        labels = inputs.get(name)
        count = {} if self._count is None else {_COUNT: self._count}
        if count and labels is not None:
            # The Trainer's evaluation does the same: a loss that counts all processes is multiplied by their number.
            ranks = trainer.args.world_size if trainer.args.average_tokens_across_devices else 1
            count[_COUNT] = torch.tensor(labelled_tokens(inputs, name) * ranks, device=labels.device)
        elif count or _is_scaled_for_step(trainer):
            factor = trainer.current_gradient_accumulation_steps
        with _undisturbed(trainer), nullcontext() if self._reference is None else self._reference.unquantized():
            loss: Tensor = self._wrapped.inner(model, inputs, **count)
        return loss * factor


def _is_scaled_for_step(trainer: Trainer) -> bool:
    """Returns True if a loss without a count is already divided by the number of micro-batches in the step.

    Otherwise `Trainer.training_step`, whose rule this follows, divides it.
    """
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    return trainer.compute_loss_func is not None if declared is None else bool(declared)


def terms_of(trainer: Trainer) -> Callable[[Mapping[str, Any]], int] | None:
    """Returns the function that counts the terms of a TRL trainer's loss, which is their mean.

    None means the default: tokens with a label, or sequences if there are no labels.
    """
    for name, terms in _TERMS.items():
        if any(kind.__name__ == name and _is_trl(kind) for kind in type(trainer).__mro__):
            if name == "GRPOTrainer" and getattr(trainer, "importance_sampling_level", "token") == "sequence":
                return _sequences
            return terms
    return None


def _sequences(inputs: Mapping[str, Any]) -> int:
    return int(token_ids(inputs)[0].shape[0])


def _pairs(inputs: Mapping[str, Any]) -> int:
    """Counts pairs of sequences. The chosen sequences come first, followed by as many rejected ones."""
    return max(1, _sequences(inputs) // 2)


def _completion_tokens(inputs: Mapping[str, Any]) -> int:
    return max(1, int((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()))


# Class of TRL's trainers whose losses are not means over labelled tokens -> function that counts the terms.
_TERMS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "DPOTrainer": _pairs,
    "RewardTrainer": _pairs,
    "KTOTrainer": _sequences,
    "GRPOTrainer": _completion_tokens,
    "RLOOTrainer": _sequences,
}


def _is_trl(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == "trl"


@contextmanager
def _undisturbed(trainer: Trainer) -> Iterator[None]:
    """Restores the Trainer's attributes and TRL's metrics after the context, and disables logging inside it."""
    is_of_trl = any(map(_is_trl, type(trainer).__mro__))
    collected = [
        value
        for name, value in vars(trainer).items()
        if name.endswith("metrics") or (is_of_trl and name.startswith("_"))
    ]
    before = [(one, copy(one)) for one in _containers(collected)]
    try:
        with binding_kept([vars(trainer)]):
            vars(trainer)["log"] = lambda *args, **kwargs: None
            yield
    finally:
        for one, then in before:
            one.clear()
            (one.update if isinstance(one, dict) else one.extend)(then)


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the dicts, lists and deques among values, recursively."""
    for value in values:
        if isinstance(value, dict | list | deque):
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value)
