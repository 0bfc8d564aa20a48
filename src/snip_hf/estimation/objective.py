"""The loss that training takes of a micro-batch, where it is another one than the model returns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..text import WITHOUT_PROBE

# Inputs whose names end in "ids" and that are no tokens.
_NO_TOKENS = ("position_ids", "token_type_ids")


class _Called(BaseException):
    """Ends a loss where it calls the model; no handler of `Exception` on the way is to catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = args, kwargs


Compute = Callable[[nn.Module, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Objective:
    """A loss that is computed from a model and a micro-batch."""

    compute: Compute
    """Takes the model and the micro-batch, and returns the loss: a mean over the micro-batch's terms."""
    terms: Callable[[Mapping[str, Any]], int] | None = None
    """Returns how many independent terms of a micro-batch the loss is a mean over; None: its tokens with a label, or,
    if it has no labels, its sequences."""
    can_be_cut: bool = False
    """Whether the loss of some of the sequences is a loss of the same kind. Pairs of sequences must not be torn."""

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the loss of a micro-batch; the inputs stay as they are, whatever `compute` takes out of them.

        Raises:
            TypeError: `compute` returned anything but a tensor of one element.
        """
        found = self.compute(model, copied(inputs))
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(
                f"compute_loss returned {what}; expected the micro-batch's loss, a tensor of one element. Return that "
                f"alone, or use {WITHOUT_PROBE}."
            )
        return found.reshape(())

    def forward_inputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the model's forward takes where the loss first calls it with gradients; it does not run then.

        Raises:
            ValueError: the loss does not call the model, or gives it inputs without names.
        """
        original, own = model.forward, vars(model).get("forward")
        names = [
            name for name, one in inspect.signature(original).parameters.items() if one.kind is not one.VAR_POSITIONAL
        ]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                raise _Called(args, kwargs)
            return original(*args, **kwargs)

        vars(model)["forward"] = forward
        try:
            with torch.enable_grad():
                self.loss(model, inputs)
        except _Called as called:
            args, kwargs = called.inputs
            if len(args) <= len(names):
                return dict(zip(names, args, strict=False)) | kwargs
        finally:
            del vars(model)["forward"]
            if own is not None:
                vars(model)["forward"] = own
        raise ValueError("The loss does not call the model as a whole, or gives its forward inputs that have no names.")


def objective_of(compute_loss: Compute | None, terms: int | None = None) -> Objective | None:
    """Returns the objective of a loop of the user's own; None: the loss that the model returns.

    Args:
        compute_loss: `compute_loss(model, batch)` runs the model forward and returns the mean loss of the micro-batch.
            It runs several times per probe, and must leave no trace but in the model. None: the model returns the loss.
        terms: how many independent terms it is a mean over (pairs, say); None: as `Objective.terms`.

    Raises:
        ValueError: there are terms, but no loss.
    """
    if compute_loss is not None:
        return Objective(compute_loss, None if terms is None else lambda _: terms)
    if terms is not None:
        raise ValueError(
            f"terms={terms} says what a loss of your own is a mean over, but there is no compute_loss. Give both, or "
            "neither."
        )
    return None


def copied(value: Any) -> Any:
    """Returns dicts and lists as copies, down to their elements, which are the same objects."""
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) is list:
        return [copied(item) for item in value]
    return copy.copy(value) if isinstance(value, Mapping) else value


def token_ids(inputs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of token ids, (sequences, tokens), of inputs of any loss."""
    found = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    }
    if "input_ids" in found:
        return [found["input_ids"]]
    return [value for name, value in found.items() if name.endswith("ids") and name not in _NO_TOKENS]
