"""The optimizer step whose divergences are estimated: its gradients, and how the update answers to errors in them.

An update is seen relative to the norm of the weight that it changes, or, where swapped weights are frozen, relative to
its own norm (docs/method.md, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..layers.layer import SnipLayer
from ..optimizers.response import ElementwiseResponse, Response
from ..parallel.sharding import own_part, sharded_as, squares, whole, with_own_part


@dataclass(frozen=True)
class UpdateChange:
    """The update's change as a function of the gradient's change, where it is not elementwise.

    Both functions take the change of the gradient before clipping. Called, it gives the change to first order.
    """

    first_order: Callable[[Tensor], Tensor]
    """J change"""
    in_full: Callable[[Tensor], Tensor]
    """h(g + change) - h(g)"""

    def __call__(self, change: Tensor) -> Tensor:
        return self.first_order(change)


Pushforward = UpdateChange | Tensor
"""What makes the update's change of a gradient's change; a tensor: its factors, element by element."""


@dataclass(frozen=True)
class OptimizerStep:
    """What a probe wants to know of the optimizer step that is about to be taken."""

    gradients: Mapping[str, Tensor]
    """Layer, or name of another parameter that counts (`counted`) -> the gradient that the optimizer is about to use,
    laid out and sharded as the parameter is."""
    responses: Mapping[str, Response]
    """The same -> how the optimizer's update answers to that gradient."""
    clip_factor: float = 1.0
    """What clipping multiplied the gradients by."""
    micro_batches: int = 1
    """Micro-batches of the step; their errors are independent except for that of the weights."""
    others: Mapping[str, Tensor] | None = None
    """As `Counted.others`."""


@dataclass(frozen=True)
class RelativeUpdates:
    """The derivatives of a step's updates, relative to the norms of the weights, or of the updates themselves."""

    step: OptimizerStep
    norms: Mapping[str, float]
    """Name -> |W|, or the norm of the update, of what the step moves."""
    of_several: frozenset[str] = frozenset()
    """Layers of several matrices."""

    @classmethod
    def of(cls, step: OptimizerStep, layers: Mapping[str, SnipLayer]) -> RelativeUpdates:
        """Measures the weights or the updates. Collective if any is sharded."""
        moving = [name for name in step.responses if name in step.gradients]
        if step.others is None:
            found = squares([layers[name].weight.detach() for name in moving])
        else:
            found = squares(_update(step.responses[name], step.gradients[name]) for name in moving)
        # Not of a weight initialised with zeros: no update of it is small or large against it.
        norms = {name: square**0.5 for name, square in zip(moving, found, strict=True) if square != 0}
        several = (name for name in norms if name in layers and len(_shapes(layers[name])) > 1)
        return cls(step, norms, frozenset(several))

    def pullbacks(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Returns layer -> what multiplies a tensor, laid out as the weight, with the transposed derivative."""
        return {name: partial(self._pulled, name) for name in self.norms}

    def _pulled(self, name: str, tensor: Tensor) -> Tensor:
        """Returns J^T tensor relative to the weight's norm, sharded as the weight is, or whole."""
        response, gradient, norm = self.step.responses[name], self.step.gradients[name], self.norms[name]
        own = response.of_own_part()
        if own is None:
            gradient = whole(gradient)
            return self._at_tokens(name, _relative(response.gathered().pullback, gradient, norm, tensor), gradient)
        part, own_gradient = own_part(sharded_as(tensor, gradient)), own_part(gradient)
        direction = self._at_tokens(name, _relative(own.pullback, own_gradient, norm, part), own_gradient)
        return with_own_part(direction, gradient)

    def _at_tokens(self, name: str, direction: Tensor, gradient: Tensor) -> Tensor:
        """Returns a direction without the matrices that had no tokens in the step: no error changes their gradient.

        Adam's derivative is largest where gradients are rare. Such matrices would fill the direction, and leave no step
        for the other weights.
        """
        return direction * (gradient != 0) if name in self.of_several else direction

    def pushforward(self, name: str, clip_factor: float = 1.0) -> Pushforward | None:
        """Returns how a gradient's change changes the update, laid out as the weight.

        None for a layer that the step does not move. Collective where the layer is sharded.

        Args:
            name: the layer.
            clip_factor: what clipping multiplies a change of the loss's gradient by. Changes of the update are relative
                to it, as products with the derivative are.
        """
        if name not in self.norms:
            return None
        response, gradient, norm = self.step.responses[name], self.step.gradients[name], self.norms[name]
        own = response.of_own_part()
        if own is not None:
            # The factors of a diagonal derivative are worked out once instead of for every product with it, and by
            # each rank for its part.
            part = own_part(gradient)
            factors = _relative(own.pushforward, part, norm, part.new_ones(()).expand_as(part))
            return whole(with_own_part(factors, gradient))
        response, gradient = response.gathered(), whole(gradient)
        if isinstance(response, ElementwiseResponse):
            return _relative(response.pushforward, gradient, norm, gradient.new_ones(()).expand_as(gradient))
        return _change_of(response, gradient, clip_factor or 1.0, norm)


def _update(response: Response, gradient: Tensor) -> Tensor:
    """Returns the next update, sharded as the gradient is, or whole. Collective where it is sharded."""
    own = response.of_own_part()
    if own is None:
        return response.gathered().update(whole(gradient))
    return with_own_part(own.update(own_part(gradient)), gradient)


def of_matrices(pushforward: Pushforward, layer: SnipLayer) -> UpdateChange | tuple[Tensor, ...]:
    """Returns the pushforward of a layer's weight as that of its matrices: the factors of each, (O, I), or functions.

    Functions take and return all of them as one tensor (E, O, I), or (O, I) where there is one.
    """
    if isinstance(pushforward, Tensor):
        return layer.matrices(pushforward)

    def of(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def of_stacked(matrices: Tensor) -> Tensor:
            if matrices.dim() == 2:
                return layer.matrices(change(layer.laid_out([matrices])))[0]
            return torch.stack(layer.matrices(change(layer.laid_out(matrices.unbind()))))

        return of_stacked

    return UpdateChange(of(pushforward.first_order), of(pushforward.in_full))


def _shapes(layer: SnipLayer) -> tuple[Tensor, ...]:
    return layer.matrices(torch.empty(layer.weight.shape, device="meta"))


def _change_of(response: Response, gradient: Tensor, clip_factor: float, norm: float) -> UpdateChange:
    """Returns the changes of an update that is not elementwise, over clip factor and weight's norm."""
    at = gradient.to(torch.float32)
    push, before, meaningful = response.linearized(at), response.update(at), response.meaningful(at)

    def in_full(change: Tensor) -> Tensor:
        return (response.update(at + clip_factor * change) - before) * meaningful / (clip_factor * norm)

    return UpdateChange(lambda change: push(change) / norm, in_full)


def _relative(product: Callable[[Tensor, Tensor], Tensor], gradient: Tensor, norm: float, tensor: Tensor) -> Tensor:
    """Returns a product with the optimizer's derivative at `gradient`, relative to the weight's norm."""
    return product(gradient.to(torch.float32), tensor).div_(norm)
