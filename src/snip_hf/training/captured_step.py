"""The optimizer step that is to be probed, as noted while it runs: its first micro-batch, its clipping, its counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..estimation.batch import LOSS_OF_LOOP, Batch, BatchCounts
from ..estimation.objective import Objective, copied
from ..layers.layer import SnipLayer
from ..numerics.random_state import RandomState
from .clipping import Clipping

NOT_CAPTURED = (
    "No micro-batch of this step was given to capture(). Call capture(batch) before each forward pass, and "
    "after_step(step) after each optimizer step."
)


def _autocast() -> torch.dtype | None:
    """Returns the dtype of the autocast that is on, an accelerator's first; None: none is."""
    devices = (device for device in ("cuda", "xpu", "mps", "cpu") if torch.is_autocast_enabled(device))
    return next(map(torch.get_autocast_dtype, devices), None)


@dataclass
class TrainingPass:
    """A forward pass whose loss may be backpropagated. Only then is it one of the step's micro-batches.

    With an objective, all passes of which that makes its loss.
    """

    batch: Mapping[str, Any]
    """Keyword arguments of the model's forward, or what the objective takes; empty if nothing will read them."""
    random_state: RandomState | None
    """With which it began; None unless the probe may run it again."""
    objective: Objective | None = None
    """None: the loss is the one that the model returns."""
    seen: int = 0
    """Tokens that the model has seen, where that was counted."""
    counted: bool = False
    advice: str = LOSS_OF_LOOP
    """As `Batch.of` takes it, and so what follows."""
    label_names: Sequence[str] = ()
    autocast: torch.dtype | None = field(default_factory=_autocast)
    """Of the autocast that was on when it began; None: none was."""

    def __post_init__(self) -> None:
        if self.objective is not None:  # what computes a loss may take entries out of its inputs
            self.batch = copied(self.batch)

    def check(self, in_pipeline: bool) -> None:
        """Raises ValueError if the probe cannot run the micro-batch."""
        if self.objective is not None and in_pipeline:
            raise ValueError("Pipeline.run computes the loss of a pipeline, and not compute_loss. Leave it out.")
        self.to_probe()

    def to_probe(self) -> Batch:
        """Returns the micro-batch as the probe runs it; raises ValueError if it cannot be probed."""
        return Batch.of(self.batch, self.objective, self.seen, self.advice, self.label_names)


class StepWatch:
    """The step of a refresh or a check.

    Args:
        probe_tokens: tokens that the probe may run on (`Batch.part`); None: all.
        layers: the swapped layers, whose gradients' size is noted before clipping.
        parameters: all that get a gradient; none where nothing is to be noted.
        others: other parameters whose gradients' size is noted, by name.
    """

    def __init__(
        self,
        probe_tokens: int | None,
        layers: Mapping[str, SnipLayer],
        parameters: Iterable[nn.Parameter],
        others: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._batch: Batch | Exception = ValueError(NOT_CAPTURED)
        self.counts = BatchCounts(0, 0)
        """Of the whole micro-batch."""
        self.micro_batches = 0
        """Of the step, known when it ends."""
        self._probe_tokens = probe_tokens
        self.clipping = Clipping(layers, parameters, others or {})

    def take(self, first: TrainingPass) -> None:
        """Takes the step's first micro-batch. One that cannot be probed raises when `batch` is asked for."""
        try:
            complete = first.to_probe()
            if first.random_state is not None:
                complete = replace(complete, random_state=first.random_state)
            self._batch = complete.part(self._probe_tokens)
            self.counts = complete.counts
        except Exception as error:  # raised again, and dealt with, when the probe needs it
            self._batch = error

    @property
    def batch(self) -> Batch:
        """The part of the first micro-batch that the probe runs."""
        if isinstance(self._batch, Exception):
            raise self._batch
        return self._batch

    def end(self, micro_batches: int = 0) -> None:
        """Ends it, with the number of micro-batches that the step had."""
        self.micro_batches = micro_batches
        self.clipping.end()
