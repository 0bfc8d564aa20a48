"""The forward passes that count as micro-batches: those that are backpropagated, from the model's own loss or not.

A model runs forward for many reasons: generation, a look at its logits, a reference. Only a pass whose outputs get a
gradient is a micro-batch, which is known when the backward pass begins. Until then the pass is an offer
(`SnipController.offer`), and it counts when a gradient reaches one of its outputs (`SnipController.count`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

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
    """

    def __init__(self, outer: nn.Module, controller: SnipController, mark: RunMark) -> None:
        self.is_open = False
        """Whether the loop is between the beginning of a step and its optimizer step; passes elsewhere never count."""
        self.is_suspended = False
        """Whether the passes are those of a run inside this one."""
        self.own_loss = False
        """Whether training follows the gradient of the loss that the model returns; known when a step ends."""
        self._controller = controller
        self._names = _positional_names(controller.model)
        self._offered: TrainingPass | None = None
        # Of the outputs of the step whose gradient told: whether it is that of the model's loss.
        self._found: list[bool] = []
        # While that question is open: id of a pass -> the outputs that can tell; and whether they are being asked, for
        # which the loss of a pass runs backward to them.
        self._answers: dict[int, _Outputs] = {}
        self._is_asking = False
        # torch.compile runs the hooks of the module that it is given, and those of the wrapper that it returns, before
        # and after the graph. Hooks further inside would break it in two.
        mark.hooks += [
            outer.register_forward_pre_hook(RunHook(self._before_forward), with_kwargs=True),
            outer.register_forward_hook(RunHook(self._after_forward)),
        ]

    def end_step(self) -> None:
        """To be called when the gradients of a step are complete."""
        self.is_open = False
        self.own_loss = self.own_loss or (bool(self._found) and all(self._found))
        self._found.clear()
        self._answers.clear()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._offered = None
        if self.is_suspended or not module.training or not torch.is_grad_enabled():
            return
        if self.is_open:
            self._offered = self._controller.offer(self._by_name(args) | kwargs)
        else:  # what is kept of the weights is of the last step's
            self._controller.keep_weights()

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
        tensors = {name: tensor for name, tensor in _tensors(output) if tensor.grad_fn is not None}
        if loss is not None and self._controller.needs_probe and not self.own_loss:
            # Not those of inner layers, from which the loss's gradient would run back through most of the model.
            others = {name: tensor for name, tensor in tensors.items() if "." not in name and tensor is not loss}
            self._answers[id(one)] = _Outputs(loss, others)
        for name, tensor in tensors.items():
            # Without references to outputs: a hook that holds its own graph would keep it for good.
            tensor.register_hook(partial(self._reached, one, name, tensor is loss))

    @torch.compiler.disable
    def _reached(self, one: TrainingPass, name: str, is_loss: bool, gradient: Tensor | None) -> None:
        # A compiled model's outputs have one backward pass: without a gradient, this one only came out with the others.
        if gradient is None or self._is_asking:
            return
        self._controller.count(one)
        if is_loss:
            self.own_loss = True
            self._answers.clear()
        elif (outputs := self._answers.get(id(one))) is not None and "." not in name:
            self._is_asking = True
            try:
                self._found.append(outputs.follows_loss(name, gradient))
            finally:
                self._is_asking = False


class _Outputs:
    """Outputs of a pass whose loss is computed from them once more, as TRL does from the tokens' log-probabilities."""

    def __init__(self, loss: Tensor, others: dict[str, Tensor]) -> None:
        self._loss = loss
        self._others = others
        self._expected: dict[str, Tensor | None] | None = None

    def follows_loss(self, name: str, gradient: Tensor) -> bool:
        """Returns True if the gradient that training sends into an output is a multiple of that of the model's loss.

        To be asked from the moment on when the first output gets its gradient: what lies behind the outputs must not
        have run backward yet. A gradient that is not finite says nothing and is taken for one.
        """
        if self._expected is None:
            sources = [_before_casts(output) for output in self._others.values()]
            found = torch.autograd.grad(self._loss, sources, retain_graph=True, allow_unused=True)
            self._expected = dict(zip(self._others, found, strict=True))
        got = gradient.detach().to(torch.float32)
        expected = self._expected[name]
        if expected is None:
            expected = _gradient_of_mean(self._loss.detach(), self._others[name].detach())
            got = got if expected is None else got * (expected != 0)
        if expected is None:
            return not bool(got.any())
        # Sums in another order; a loss of other weights per token differs by some percent at least.
        tolerance = max(1e-5, 2 * max(torch.finfo(tensor.dtype).eps for tensor in (gradient, expected)))
        expected = expected.to(torch.float32)
        factor = (got * expected).sum() / expected.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
        differs = (got - factor * expected).norm() > tolerance * got.norm()
        return not bool(differs | (factor < 0))


def _before_casts(output: Tensor) -> GradientEdge:
    """Returns where an output's gradient goes before it was cast: Accelerate casts all outputs to FP32."""
    edge = get_gradient_edge(output)
    while edge.node.name() == "ToCopyBackward0":
        node, number = edge.node.next_functions[0]
        if node is None:
            break
        edge = GradientEdge(node, number)
    return edge


def _gradient_of_mean(loss: Tensor, log_probs: Tensor) -> Tensor | None:
    """Returns the gradient of a loss that is minus the mean of log-probabilities, up to a factor; None if it is not.

    By the values. A compiled model's outputs have one backward pass, which does not tell how the loss was computed from
    another output. Tokens without a label have the log-probability 0 and no part in the mean.
    """
    is_used = log_probs != 0
    mean = -log_probs.to(torch.float32).sum() / is_used.sum().clamp(min=1)
    return -is_used.to(torch.float32) if torch.isclose(loss.to(torch.float32), mean, rtol=1e-5) else None


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


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Returns the tensors in what a model returns, those inside others by names with dots."""
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, Mapping | list | tuple):
        for key, item in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
