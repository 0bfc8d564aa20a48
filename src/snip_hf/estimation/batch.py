"""One micro-batch and its loss, as the probe runs them again: inputs, random state, labels, objective."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..numerics.random_state import RandomState
from ..parallel.context_parallel import ContextMesh, SharedSequences, in_context, whole_inputs
from ..python_state import binding_kept
from ..text import WITHOUT_PROBE

logger = logging.getLogger(__name__)

# Inputs of a model's forward with one row per sequence: name -> numbers of dimensions; the first one may also be 1.
_BY_SEQUENCE = {
    "input_ids": (2,),
    "labels": (1, 2),
    "shift_labels": (2,),
    "attention_mask": (2, 4),
    "position_ids": (2,),
    "token_type_ids": (2,),
    "inputs_embeds": (3,),
}
# Inputs whose names end in "ids" but that hold no tokens.
_NO_TOKENS = ("position_ids", "token_type_ids")
LABELS = "labels"
"""The input of Hugging Face models that holds the labels."""
# Label of tokens that take no part in the loss, in torch and in Hugging Face models.
_NO_LABEL = -100

Compute = Callable[[nn.Module, dict[str, Any]], Tensor]


class _Called(BaseException):
    """Stops the computation of a loss when it calls the model; no `except Exception` on the way catches it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = args, kwargs


@dataclass(frozen=True)
class Objective:
    """The loss that training computes from a model and a micro-batch, if it is not the one that the model returns."""

    compute: Compute
    """Returns the loss of a model and a micro-batch: a mean over the micro-batch's terms."""
    terms: Callable[[Mapping[str, Any]], int] | None = None
    """Returns how many independent terms of a micro-batch the loss is a mean over; None: its tokens with a label, or
    its sequences if it has no labels."""
    can_be_cut: bool = False
    """True if some of the sequences have a loss of the same kind; False if the loss compares pairs of sequences."""

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the loss of a micro-batch; `compute` may change its copy of the inputs.

        Raises:
            TypeError: `compute` returned anything but a tensor of one element.
        """
        found = self.compute(model, copied(inputs))
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(
                f"compute_loss returned {what}; expected the micro-batch's loss, a tensor of one element. Return only "
                f"that, or use {WITHOUT_PROBE}."
            )
        return found.reshape(())

    def forward_inputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs with which the loss first calls the model under gradients, without running that call.

        A single input without a name is the model's main one (`main_input_name`, as Hugging Face models have it).

        Raises:
            ValueError: the loss does not call the model, or gives it several inputs without names.
        """
        original = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                raise _Called(args, kwargs)
            return original(*args, **kwargs)

        try:
            with binding_kept([vars(model)]), torch.enable_grad():
                vars(model)["forward"] = forward
                self.loss(model, inputs)
        except _Called as called:
            args, kwargs = called.inputs
            if len(args) <= 1:
                return dict(zip([getattr(model, "main_input_name", "input_ids")], args, strict=False)) | kwargs
        raise ValueError(
            "The loss does not call the model as a whole, or gives its forward several inputs without names. Call "
            "model(input_ids=..., ...)."
        )


def objective_of(compute_loss: Compute | None, terms: int | None = None) -> Objective | None:
    """Returns the objective of a user's own training loop; None: the loss that the model returns.

    Args:
        compute_loss: `compute_loss(model, batch)` runs the model forward and returns the mean loss of the micro-batch.
            It runs several times per probe, and must leave no trace outside the model. None: the model returns the
            loss.
        terms: how many independent terms (pairs, say) it is a mean over; None: as `Objective.terms`.

    Raises:
        ValueError: `terms` without a loss.
    """
    if compute_loss is not None:
        return Objective(compute_loss, None if terms is None else lambda _: terms)
    if terms is not None:
        raise ValueError(
            f"terms={terms} says what a loss of your own is a mean over, but there is no compute_loss. Give both, or "
            "neither."
        )
    return None


class BatchCounts(NamedTuple):
    """The number of tokens in a batch, and of those with a label (`Batch.labelled`)."""

    tokens: int
    labelled: float


@dataclass(frozen=True)
class Batch:
    """One micro-batch, and the state of the random generators with which it was first run."""

    kwargs: Mapping[str, Any]
    """Keyword arguments of the model's forward; with an objective, the inputs of that."""
    random_state: RandomState
    cut_from: BatchCounts | None = None
    """Counts of the micro-batch that this is a part of (`part`); None: it is a whole one."""
    objective: Objective | None = None
    """The loss; None: the one that the model returns."""
    seen: int = 0
    """Tokens of it that the model saw in training; 0: not known."""
    label_name: str = LABELS
    """The input that holds the labels, if there are any."""
    sequences: SharedSequences | None = None
    """The sequences whose tokens this rank shares with others; None: it has whole ones."""

    @classmethod
    def of(
        cls,
        kwargs: Mapping[str, Any],
        objective: Objective | None = None,
        seen: int = 0,
        label_names: Sequence[str] = (),
    ) -> Batch:
        """Returns a batch that refers to the inputs, not to copies.

        `num_items_in_batch` is dropped: without it, Hugging Face models return the mean loss of the micro-batch.

        Args:
            kwargs, objective, seen: as the fields.
            label_names: inputs that may hold the labels if `labels` does not exist.

        Raises:
            ValueError: there are no labels, so that the model gives no loss; or, with an objective, no token ids, so
                that the number of tokens is unknown.
        """
        label_name = label_name_of(kwargs, label_names)
        if objective is not None and kwargs.get(label_name) is None and not token_ids(kwargs):
            raise ValueError(
                f"The batch has no token ids (its keys are {', '.join(kwargs) or 'none'}). Expected `input_ids`, or "
                f"names that end in it, (sequences, tokens). Name them so, or use {WITHOUT_PROBE}."
            )
        if objective is None and kwargs.get(label_name) is None:
            expected = " or ".join(f"`{name}`" for name in dict.fromkeys((LABELS, *label_names)))
            raise ValueError(
                f"The batch has no labels (its keys are {', '.join(kwargs) or 'none'}), so the model gives no loss to "
                f"probe. Expected a causal LM batch with {expected}. If the model does not return the loss, say how it "
                "is computed: by compute_loss=... in your own loop; in a Trainer by compute_loss_func or an override "
                "of compute_loss, which training_step must call (if it does, name the input with the labels: "
                f"TrainingArguments(label_names=[NAME])). Or use {WITHOUT_PROBE}."
            )
        kept = {key: value for key, value in kwargs.items() if objective or key != "num_items_in_batch"}
        return cls(kept, RandomState.now(), objective=objective, seen=seen, label_name=label_name)

    def part(self, tokens: int | None) -> Batch:
        """Returns a part of the batch: whole sequences with at most so many tokens, at least one; None: all of them.

        They are spread evenly over the micro-batch, so that the parts of several ranks together are the part that one
        process with all their sequences would take. Packed sequences in a single row are chosen alike, up to the last
        of them that fits. A single sequence stays whole: a piece of it would be another text with other positions. The
        whole micro-batch is returned, and the log says why, if an input may belong to several sequences at once, if the
        chosen sequences have no labels, or if the loss is not known to be a mean over sequences.
        """
        if tokens is None or self.tokens <= tokens or (self._sequences == 1 and len(self._pack) < 2):
            return self
        labels = self._labels
        if labels is None or not (self.objective is None or self.objective.can_be_cut):
            return self._whole("its loss may not be a mean over sequences")
        if self._sequences == 1:
            return self._part_of_pack(tokens)
        kinds = {self.label_name: LABELS}
        packed = [
            name
            for name, value in self.kwargs.items()
            if not _is_by_sequence(kinds.get(name, name), value, labels.shape[0])
        ]
        if packed:
            return self._whole(f"its input {packed[0]!r} cannot be cut")
        count = max(1, tokens * labels.shape[0] // self.tokens)
        rows = torch.arange(count) * labels.shape[0] // count
        if not (labels[rows.to(labels.device)] != _NO_LABEL).any():
            return self._whole(f"{count} of its sequences have no labels")
        cut = {
            name: value[rows.to(value.device)]
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] > 1
            else value
            for name, value in self.kwargs.items()
        }
        return replace(self, kwargs=cut, cut_from=self.micro_batch)

    def check_shared(self) -> None:
        """Refuses a batch with parts of sequences that `shared` cannot put together.

        Raises:
            ValueError: an input is missing, or belongs neither to tokens nor to all sequences; the loss compares
                sequences; or torch's context has ended or not begun, so that the sequences are whole.
        """
        missing = [name for name in ("position_ids", "shift_labels") if not isinstance(self.kwargs.get(name), Tensor)]
        if missing:
            raise ValueError(
                f"The batch has no `{missing[0]}` (its keys are {', '.join(self.kwargs)}), which a part of a sequence "
                "needs under context parallelism. Give the model `position_ids` and `shift_labels`, as the Trainer "
                f"does, or use {WITHOUT_PROBE}."
            )
        if self.objective is not None and not self.objective.can_be_cut:
            raise ValueError(
                "Under context parallelism, whose ranks hold parts of sequences, the probe needs a loss that is a mean "
                f"over tokens. Use the model's own loss or TRL's SFTTrainer, or {WITHOUT_PROBE}."
            )
        rows, tokens = self.kwargs["shift_labels"].shape
        for name, value in self.kwargs.items():
            shape = value.shape[:2] if isinstance(value, Tensor) and value.dim() > 1 else (0, 0)
            is_cut = shape == (1, tokens) or (shape[0] == rows and shape[1] % tokens == 0)  # or still to be cut
            if not is_cut and not _is_shared(value):
                raise ValueError(
                    f"The input {name!r} cannot be cut by tokens, as context parallelism needs. Leave it out "
                    f"(attention is causal there, whatever a mask says), or use {WITHOUT_PROBE}."
                )
        if not in_context():
            raise ValueError(
                "A micro-batch was announced outside of the context that cuts its sequences. Call capture, and run the "
                "backward pass, inside accelerator.maybe_context_parallel."
            )

    def shared(self, tokens: int | None, mesh: ContextMesh) -> Batch:
        """Returns this rank's tokens of a `part` of the sequences of which the ranks hold parts. Collective.

        Args:
            tokens: of the part, for this rank; None: all.
            mesh: the ranks, as `context_mesh` returns them.

        Raises:
            ValueError: as `check_shared`, or no token has a label.
        """
        self.check_shared()
        chosen = replace(self, kwargs=whole_inputs(self.kwargs, mesh))
        if chosen._sequences > 1:  # a single one stays whole: attention in training sees all of it
            chosen = chosen.part(None if tokens is None else tokens * mesh.size())
        sequences = SharedSequences(mesh, chosen._labels.shape[1], int(chosen.labelled))
        if sequences.labelled == 0:
            raise ValueError("No token of the probed micro-batch has a label; expected some.")
        own = {name: value if _is_shared(value) else sequences.own(value) for name, value in chosen.kwargs.items()}
        return replace(self, kwargs=own, cut_from=self.counts, sequences=sequences)

    def _part_of_pack(self, tokens: int) -> Batch:
        """Returns the packed sequences, at least one, that `part` chooses."""
        pack, count = self._pack, len(self._pack)
        while count > 1 and sum(pack[row * len(pack) // count] for row in range(count)) > tokens:
            count -= 1
        chosen = [row * len(pack) // count for row in range(count)]
        ends = torch.tensor([0, *pack]).cumsum(0).tolist()
        places = torch.cat([torch.arange(ends[row], ends[row + 1]) for row in chosen])
        lengths = torch.tensor([0, *(pack[row] for row in chosen)])
        cut: dict[str, Any] = {}
        for name, value in self.kwargs.items():
            if isinstance(value, Tensor) and value.shape[:2] == (1, ends[-1]):
                cut[name] = value[:, places.to(value.device)]
            elif name in ("cu_seq_lens_q", "cu_seq_lens_k") and value is not None:
                cut[name] = lengths.cumsum(0).to(value)
            elif name in ("max_length_q", "max_length_k") and value is not None:
                longest = int(lengths.max())
                cut[name] = value.new_tensor(longest) if isinstance(value, Tensor) else longest
            elif _is_shared(value):
                cut[name] = value
            else:
                return self._whole(f"its input {name!r} cannot be cut")
        if not (cut[self.label_name] != _NO_LABEL).any():
            return self._whole(f"{count} of its packed sequences have no labels")
        return replace(self, kwargs=cut, cut_from=self.micro_batch)

    @property
    def _pack(self) -> list[int]:
        """Lengths of the sequences that a single row holds: by `cu_seq_lens_q`, else where `position_ids` jump."""
        ends, position_ids = self.kwargs.get("cu_seq_lens_q"), self.kwargs.get("position_ids")
        if isinstance(ends, Tensor):
            return [int(length) for length in ends.diff().tolist()]
        if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
            return [self.tokens]
        jumps = (position_ids[0].diff() != 1).nonzero().flatten().tolist()
        borders = [0, *(jump + 1 for jump in jumps), position_ids.shape[1]]
        return [end - start for start, end in pairwise(borders)]

    def _whole(self, reason: str) -> Batch:
        logger.info("snip-hf: the probe runs the whole micro-batch of %d tokens: %s.", self.tokens, reason)
        return self

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(self.tokens, self.labelled)

    @property
    def micro_batch(self) -> BatchCounts:
        """Counts of the micro-batch that this is, or is a part of."""
        return self.cut_from or self.counts

    @property
    def tokens(self) -> int:
        """Number of tokens; for a classifier, which has one label per sequence, those of its inputs."""
        labels, inputs = self._labels, self.kwargs.get("input_ids")
        if labels is None:
            return self.seen or sum(int(ids.numel()) for ids in token_ids(self.kwargs))
        return int((inputs if is_of_sequences(labels) and isinstance(inputs, Tensor) else labels).numel())

    @property
    def is_likelihood(self) -> bool:
        """True if the loss is the mean negative log-likelihood of the labelled tokens.

        Any other loss may be 0 or negative, so its rise is not divided by it.
        """
        return self._labels is not None and (self.objective is None or self.objective.terms is None)

    @property
    def labelled(self) -> float:
        """N: the number of terms that the loss is a mean over: labelled tokens, unless an objective counts terms.

        Ranks that share sequences count equal parts of these tokens (`share`).
        """
        if self.sequences is not None:
            return self.sequences.labelled / self.sequences.mesh.size()
        if self.objective is not None and self.objective.terms is not None:
            return self.objective.terms(self.kwargs)
        if self._labels is None:
            return self._sequences
        return labelled_tokens(self.kwargs, self.label_name)

    @property
    def share(self) -> float:
        """Factor of the loss of this rank's tokens, so that the mean over the ranks is that over their sequences."""
        return 1.0 if self.sequences is None else labelled_tokens(self.kwargs, self.label_name) / self.labelled

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
    """Returns the name of the input that holds the labels: the first of `labels` and `names` that exists."""
    return next((name for name in (LABELS, *names) if kwargs.get(name) is not None), LABELS)


def labelled_tokens(kwargs: Mapping[str, Any], label_name: str = LABELS) -> int:
    """Returns the number of tokens with a label.

    A causal LM shifts its labels, so the first one of a sequence does not count, unless the batch holds them shifted
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


def token_ids(inputs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of token ids, (sequences, tokens), among the inputs of any loss."""
    found = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    }
    if "input_ids" in found:
        return [found["input_ids"]]
    return [value for name, value in found.items() if name.endswith("ids") and name not in _NO_TOKENS]


def copied(value: Any) -> Any:
    """Returns copies of dicts and lists, nested ones too; their other elements are the same objects."""
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) is list:
        return [copied(item) for item in value]
    return copy.copy(value) if isinstance(value, Mapping) else value


def _is_by_sequence(name: str, value: Any, sequences: int) -> bool:
    """Returns True if an input has one row per sequence, or is the same for all of them."""
    if _is_shared(value):
        return True
    return isinstance(value, Tensor) and value.dim() in _BY_SEQUENCE.get(name, ()) and value.shape[0] in (1, sequences)


def _is_shared(value: Any) -> bool:
    """Returns True for a scalar input, which all sequences share."""
    return (
        value.dim() == 0 if isinstance(value, Tensor) else value is None or isinstance(value, bool | int | float | str)
    )
