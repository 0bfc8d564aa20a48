"""The forward passes that count as micro-batches: those that are backpropagated, from the model's own loss or not.

A model runs forward for many reasons: generation, a look at its logits, a reference. Only a pass whose outputs get a
gradient is a micro-batch, which is known when the backward pass begins. Until then the pass is an offer
(`SnipController.offer`), and it counts when a gradient reaches one of its outputs (`SnipController.count`).

Where the loop computes its loss itself, it says so (`TrainingPasses.begin_loss`, `end_loss`). All passes in between
then make one micro-batch, which counts when a gradient reaches the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..estimation.batch import LOSS_OF_LOOP
from ..estimation.objective import Objective
from ..layers.run_hooks import RunHook, RunMark
from ..text import WITHOUT_PROBE
from .captured_step import TrainingPass
from .controller import SnipController


class TrainingPasses:
    """Tells a controller the micro-batches of a training loop.

    Args:
        outer: the model as the loop calls it, perhaps wrapped.
        controller: of the model inside.
        mark: gets the hooks.
        advice: what the loop's user can do where the model does not return the loss, as `Batch.of` takes it.
        label_names: inputs that may have the labels if `labels` is none.
    """

    def __init__(
        self,
        outer: nn.Module,
        controller: SnipController,
        mark: RunMark,
        advice: str = LOSS_OF_LOOP,
        label_names: Sequence[str] = (),
    ) -> None:
        self.is_open = False
        """Whether the loop is between the beginning of a step and its optimizer step; passes elsewhere never count."""
        self.is_suspended = False
        """Whether the passes are those of a run inside this one."""
        self.known_loss = False
        """Whether training follows the gradient of the loss that the model returns, or of one that `begin_loss` told
        of; known when a step ends."""
        self._controller = controller
        self._advice, self._label_names = advice, label_names
        self._names = _positional_names(controller.model)
        self._offered: TrainingPass | None = None
        self._in_loss: TrainingPass | None = None
        # torch.compile runs the hooks of the module that it is given, and those of the wrapper that it returns, before
        # and after the graph. Hooks further inside would break it in two.
        mark.hooks += [
            outer.register_forward_pre_hook(RunHook(self._before_forward), with_kwargs=True),
            outer.register_forward_hook(RunHook(self._after_forward)),
        ]

    def suspend(self) -> None:
        """Leaves the model to a run inside this one."""
        self.is_suspended = True
        self._controller.lend()

    def end_step(self) -> None:
        """To be called when the gradients of a step are complete."""
        self.is_open = False

    def begin_loss(self, inputs: Mapping[str, Any], objective: Objective) -> TrainingPass | None:
        """To be called before the loop computes a loss itself; returns what `end_loss` takes.

        Args:
            inputs: what the loss is computed from.
            objective: how.
        """
        if not self.is_open or self.is_suspended or not torch.is_grad_enabled():
            return None
        self._in_loss = self._controller.offer(inputs, objective)
        self._in_loss.label_names = self._label_names
        return self._in_loss

    def end_loss(self, one: TrainingPass | None, loss: Any) -> None:
        """To be called with the loss; None, if there is none that can be trained on."""
        self._in_loss = None
        if one is not None and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(partial(self._reached, one, True))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._offered = None
        if self.is_suspended or not torch.is_grad_enabled():
            return
        if not self.is_open:  # what is kept of the weights is of the last step's
            self._controller.keep_weights()
        elif self._in_loss is None:
            self._offered = self._controller.offer(self._by_name(args) | kwargs)
            self._offered.advice, self._offered.label_names = self._advice, self._label_names
        else:
            self._controller.keep_weights(everything=False)
            self._in_loss.seen += _tokens(dict(zip(self._names, args, strict=False)) | kwargs)

    def _by_name(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if len(args) > len(self._names) and self._controller.needs_probe:
            raise ValueError(
                f"The model was called with {len(args)} positional inputs; its forward names {len(self._names)} "
                f"({', '.join(self._names) or 'none'}). The probe needs all inputs by name: call "
                f"model(input_ids=..., labels=...), or use {WITHOUT_PROBE}."
            )
        return dict(zip(self._names, args, strict=False))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        one, self._offered = self._offered, None
        if one is None:
            return
        loss = _loss(output)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                # Without references to outputs: a hook that holds its own graph would keep it for good.
                tensor.register_hook(partial(self._reached, one, tensor is loss))

    @torch.compiler.disable
    def _reached(self, one: TrainingPass, is_loss: bool, gradient: Tensor | None) -> None:
        # A compiled model's outputs have one backward pass: without a gradient, this one only came out with the others.
        if gradient is not None:
            self._controller.count(one)
            self.known_loss |= is_loss


def _positional_names(model: nn.Module) -> list[str]:
    """Returns the names of the inputs that the model's forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in kinds]


def _loss(output: Any) -> Tensor | None:
    """Returns the loss that a model returns, as the Trainer finds it; None if there is none that can be trained on."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, list | tuple):
        found = output[0] if output else None
    is_loss = isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad
    return found if is_loss else None


def _tensors(output: Any) -> Iterator[Tensor]:
    """Returns the tensors in what a model returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)


def _tokens(inputs: Mapping[str, Any]) -> int:
    """Returns how many tokens a model's inputs have; 0 where that cannot be told."""
    embeds, ids = inputs.get("inputs_embeds"), inputs.get("input_ids")
    if isinstance(ids, Tensor):
        return ids.numel()
    return embeds.numel() // embeds.shape[-1] if isinstance(embeds, Tensor) else 0
