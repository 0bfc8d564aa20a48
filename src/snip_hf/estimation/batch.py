"""One micro-batch, as the probe runs it again: its inputs, and the random state that it was first run with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.random_state import RandomState
from ..text import WITHOUT_PROBE
from .objective import Objective, token_ids

logger = logging.getLogger(__name__)

# What a model's forward takes one row per sequence of: name -> numbers of dimensions, the first of which may also be 1.
_BY_SEQUENCE = {
    "input_ids": (2,),
    "labels": (1, 2),
    "attention_mask": (2, 4),
    "position_ids": (2,),
    "token_type_ids": (2,),
    "inputs_embeds": (3,),
}
LABELS = "labels"
"""The input of Hugging Face models that has the labels."""
# The label of tokens that have no part in the loss, in torch and Hugging Face models.
_NO_LABEL = -100


class Labels(NamedTuple):
    """The labels of a training loop."""

    names: Sequence[str] = ()
    """Inputs that may have them if `labels` is none."""
    advice: str = "say how it is computed (compute_loss=...)"
    """Tells users of a model that does not return the loss what to do."""


LABELS_OF_LOOP = Labels()
"""Those of a loop of one's own."""


class BatchCounts(NamedTuple):
    """How many tokens a batch has, and how many of them have a label (`Batch.labelled`)."""

    tokens: int
    labelled: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch as its loss takes it, and the generators' state with which it was first run."""

    kwargs: Mapping[str, Any]
    """Of the model's forward; with an objective, what that takes."""
    random_state: RandomState
    cut_from: BatchCounts | None = None
    """Counts of the micro-batch that this is a part of (`part`); None: it is a whole one."""
    objective: Objective | None = None
    """The loss; None: the one that the model returns."""
    seen: int = 0
    """Tokens that the model saw of it in training; 0: not known."""
    label_name: str = LABELS
    """The input that has the labels, if there are any."""

    @classmethod
    def of(
        cls,
        kwargs: Mapping[str, Any],
        objective: Objective | None = None,
        seen: int = 0,
        labels: Labels = LABELS_OF_LOOP,
    ) -> Batch:
        """Keeps references to the inputs, not copies.

        `num_items_in_batch` is dropped: without it, Hugging Face models return the mean loss of the micro-batch.

        Args:
            kwargs, objective, seen: as the fields.
            labels: of the training loop.

        Raises:
            ValueError: there are no labels, so that the model gives no loss; or no token ids, so that nothing is known
                of what another loss takes.
        """
        label_name = label_name_of(kwargs, labels.names)
        if objective is not None and kwargs.get(label_name) is None and not token_ids(kwargs):
            raise ValueError(
                f"The batch has no token ids (its keys are {', '.join(kwargs) or 'none'}). Expected `input_ids`, or "
                f"names that end in it, (sequences, tokens). Name them so, or use {WITHOUT_PROBE}."
            )
        if objective is None and kwargs.get(label_name) is None:
            expected = " or ".join(f"`{name}`" for name in dict.fromkeys((LABELS, *labels.names)))
            raise ValueError(
                f"The batch has no labels (its keys are {', '.join(kwargs) or 'none'}), so the model gives no loss to "
                f"probe. Expected a causal LM batch with {expected}. If the model does not return the loss, "
                f"{labels.advice}, or use {WITHOUT_PROBE}."
            )
        kept = {key: value for key, value in kwargs.items() if objective or key != "num_items_in_batch"}
        return cls(kept, RandomState.now(), objective=objective, seen=seen, label_name=label_name)

    def part(self, tokens: int | None) -> Batch:
        """Returns some sequences, as many as hold at most so many tokens but at least one; None: all of them.

        They are spread evenly over the micro-batch, so that ranks that each take a part of theirs take together what
        one process with all their sequences would. A single sequence is kept whole: cut, it would be another text with
        other positions. The whole micro-batch is returned, and the log says why, if an input may belong to several
        sequences at once (packed ones, say), if the chosen sequences have no labels, or if a loss is not known to be a
        mean over sequences.
        """
        if tokens is None or self.tokens <= tokens or self._sequences == 1:
            return self
        labels = self._labels
        if labels is None or not (self.objective is None or self.objective.can_be_cut):
            reason = "its loss may not be a mean over sequences"
            logger.info("snip-hf: the probe takes the whole micro-batch of %d tokens: %s.", self.tokens, reason)
            return self
        kinds = {self.label_name: LABELS}
        packed = [
            name
            for name, value in self.kwargs.items()
            if not _is_by_sequence(kinds.get(name, name), value, labels.shape[0])
        ]
        count = max(1, tokens * labels.shape[0] // self.tokens)
        rows = torch.arange(count) * labels.shape[0] // count
        chosen = labels[rows.to(labels.device)]
        if packed or not (chosen != _NO_LABEL).any():
            reason = f"its input {packed[0]!r} cannot be cut" if packed else f"{count} of its sequences have no labels"
            logger.info("snip-hf: the probe takes the whole micro-batch of %d tokens: %s.", self.tokens, reason)
            return self
        cut = {
            name: value[rows.to(value.device)]
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] > 1
            else value
            for name, value in self.kwargs.items()
        }
        return replace(self, kwargs=cut, cut_from=self.micro_batch)

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(self.tokens, self.labelled)

    @property
    def micro_batch(self) -> BatchCounts:
        """Counts of the micro-batch that this is, or is a part of."""
        return self.cut_from or self.counts

    @property
    def tokens(self) -> int:
        """Number of tokens; of a classifier, which has one label per sequence, those of its inputs."""
        labels, inputs = self._labels, self.kwargs.get("input_ids")
        if labels is None:
            return self.seen or sum(int(ids.numel()) for ids in token_ids(self.kwargs))
        return int((inputs if is_of_sequences(labels) and isinstance(inputs, Tensor) else labels).numel())

    @property
    def is_likelihood(self) -> bool:
        """Whether the loss is a mean over tokens with a label, of minus the logarithms of their probabilities.

        Of any other loss the value says nothing (it may be 0, or negative), and its rise is not taken relative to it.
        """
        return self._labels is not None and (self.objective is None or self.objective.terms is None)

    @property
    def labelled(self) -> int:
        """Number of terms over which the loss is a mean: of tokens with a label, but for other losses (`Objective`)."""
        if self.objective is not None and self.objective.terms is not None:
            return self.objective.terms(self.kwargs)
        if self._labels is None:
            return self._sequences
        return labelled_tokens(self.kwargs, self.label_name)

    @property
    def _labels(self) -> Any:
        return self.kwargs.get(self.label_name)

    @property
    def _sequences(self) -> int:
        labels = self._labels
        return int((token_ids(self.kwargs)[0] if labels is None else labels).shape[0])


def is_of_sequences(labels: Tensor) -> bool:
    """Returns True for the labels of a classifier: one per sequence, or several as numbers between 0 and 1."""
    return labels.dim() == 1 or labels.is_floating_point()


def label_name_of(kwargs: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the name of the input that has the labels: the first of `labels` and these that there is."""
    return next((name for name in (LABELS, *names) if kwargs.get(name) is not None), LABELS)


def labelled_tokens(kwargs: Mapping[str, Any], label_name: str = LABELS) -> int:
    """Returns the number of tokens with a label.

    A causal LM shifts its labels, so that the first one of a sequence does not count, unless the batch has them shifted
    already (`shift_labels`). A model of another kind has at most one more per sequence, a classifier one label per
    sequence.
    """
    shifted = kwargs.get("shift_labels")
    if shifted is not None:
        return int((shifted != _NO_LABEL).sum())
    labels = kwargs[label_name]
    if labels.is_floating_point():
        return int(labels.shape[0])
    every = int((labels != _NO_LABEL).sum())
    return every if labels.dim() == 1 else int((labels[..., 1:] != _NO_LABEL).sum()) or every


def _is_by_sequence(name: str, value: Any, sequences: int) -> bool:
    """Returns True if an input has one row per sequence, or says the same of all of them."""
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, bool | int | float | str)
    return value.dim() == 0 or (value.dim() in _BY_SEQUENCE.get(name, ()) and value.shape[0] in (1, sequences))
