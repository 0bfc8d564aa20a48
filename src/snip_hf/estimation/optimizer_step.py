"""The optimizer step whose divergences are estimated: its gradients, and how updates respond to errors in them.

h(g) is the optimizer's update for a gradient g, J its derivative (docs/method.md, section 3). An update is compared
with the norm of the weight that it changes, or, if swapped weights are frozen, with its own norm. Under the objective
"gradients" h(g) is g, and changes are compared with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..layers.layer import SnipLayer
from ..layers.state import plain_name
from ..optimizers.response import ElementwiseResponse, Response
from ..parallel.ranks import Attempt, Ranks
from ..parallel.sharding import on_compute_device, own_part, sharded_as, squares, whole, with_own_part
from .products import product
from .samples import LayerSample

# Samples of tokens, sums over micro-batches and terms added to the loss change a gradient's norm by less; the loss
# scale of FP16 begins at 65,536.
_LARGEST_RATIO = 1000.0


@dataclass(frozen=True)
class UpdateChange:
    """The update's change as a function of the gradient's change, if it is not elementwise.

    Both functions take the change of the gradient before clipping. Called, it gives the change to first order.
    """

    first_order: Callable[[Tensor], Tensor]
    """J change"""
    in_full: Callable[[Tensor], Tensor]
    """h(g + change) - h(g)"""

    def __call__(self, change: Tensor) -> Tensor:
        return self.first_order(change)


Pushforward = UpdateChange | Tensor
"""Maps a gradient's change to the update's change; a tensor holds its factors, element by element."""


@dataclass(frozen=True)
class OptimizerStep:
    """The optimizer step that is about to be taken, as a probe needs it."""

    gradients: Mapping[str, Tensor]
    """Layer, or name of another compared parameter -> the gradient that the optimizer is about to use,
    laid out and sharded as the parameter is."""
    responses: Mapping[str, Response]
    """The same -> how the optimizer's update responds to that gradient."""
    clip_factor: float = 1.0
    """Factor of clipping."""
    micro_batches: int = 1
    """Micro-batches of the step; their errors are independent except for that of the weights."""
    others: Mapping[str, Tensor] | None = None
    """See `ComparedParameters.others`."""


@dataclass(frozen=True)
class RelativeUpdates:
    """The derivatives of a step's updates, relative to the norms of the weights, or of the updates themselves."""

    step: OptimizerStep
    norms: Mapping[str, float]
    """Parameter that the step moves -> |W|, the norm of its update, or 1 under the objective "gradients"."""
    of_several: frozenset[str] = frozenset()
    """Layers of several matrices."""

    @classmethod
    def of(cls, step: OptimizerStep, layers: Mapping[str, SnipLayer], config: SnipConfig) -> RelativeUpdates:
        """Measures the weights or the updates, unless the objective is "gradients". Collective if any is sharded."""
        moving = [name for name in step.responses if name in step.gradients]
        if config.objective == "gradients":
            found = [1.0] * len(moving)
        elif step.others is None:
            found = squares([layers[name].weight.detach() for name in moving])
        else:
            found = squares(_update(step.responses[name], step.gradients[name]) for name in moving)
        # Weights initialised with zeros are left out: no update is small or large relative to them.
        norms = {name: square**0.5 for name, square in zip(moving, found, strict=True) if square != 0}
        several = (name for name in norms if name in layers and len(_shapes(layers[name])) > 1)
        return cls(step, norms, frozenset(several))

    def pullbacks(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Returns layer -> product with J^T of a tensor laid out as the weight."""
        return {name: partial(self._pulled, name) for name in self.norms}

    def _pulled(self, name: str, tensor: Tensor) -> Tensor:
        """Returns J^T tensor relative to the weight's norm, sharded as the weight is, or whole."""
        response, norm = self.step.responses[name], self.norms[name]
        gradient = on_compute_device(self.step.gradients[name])
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

        None for a layer that the step does not move. Collective if the layer is sharded.

        Args:
            name: the layer.
            clip_factor: factor by which clipping scales a change of the gradient. Changes of the update are relative
                to it, as products with the derivative are.
        """
        if name not in self.norms:
            return None
        response, norm = self.step.responses[name], self.norms[name]
        gradient = on_compute_device(self.step.gradients[name])
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
    """Returns the next update, sharded as the gradient is, or whole. Collective if it is sharded."""
    own, gradient = response.of_own_part(), on_compute_device(gradient)
    if own is None:
        return response.gathered().update(whole(gradient))
    return with_own_part(own.update(own_part(gradient)), gradient)


def of_matrices(pushforward: Pushforward, layer: SnipLayer) -> UpdateChange | tuple[Tensor, ...]:
    """Returns the pushforward of a layer's weight as that of its matrices: the factors of each, (O, I), or functions.

    Functions take and return all of them as one tensor (E, O, I), or (O, I) if there is one.
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


# --------------------------------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class ComparedParameters:
    """The parameters whose next updates the weight divergence compares, by name.

    If the optimizer trains every swapped weight, these are the swapped weights, and each change is relative to the
    weight. Otherwise, as under adapters, they are all parameters that it trains, and each change is relative to the
    next update of that parameter (docs/method.md, section 3). Under the objective "gradients" they are all parameters
    that it trains. Swapped weights have their layers' names.
    """

    weights: Mapping[str, Tensor]
    others: Mapping[str, Tensor] | None = None
    """Trained parameters beside the swapped weights; None if only swapped weights count."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All of them."""
        return {**self.weights, **(self.others or {})}


def compared_parameters(
    model: nn.Module,
    layers: Mapping[str, SnipLayer],
    is_trained: Callable[[Tensor], bool],
    config: SnipConfig,
    stages: Ranks | None = None,
) -> ComparedParameters:
    """Returns the parameters to compare. Collective over the stages of a pipeline, which decide together.

    Args:
        model: a converted model, without wrappers.
        layers: its swapped layers.
        is_trained: returns True for a parameter that the optimizer updates.
        config: its `objective` counts.
        stages: stages of a pipeline; None: this process holds the whole model.
    """
    weights = {name: layer.weight for name, layer in layers.items()}
    is_full = config.objective != "gradients" and all(map(is_trained, weights.values()))
    if all((stages or Ranks()).gather(is_full)):
        return ComparedParameters(weights)
    swapped = {id(weight) for weight in weights.values()}
    others = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in swapped and parameter.is_floating_point() and is_trained(parameter)
    }
    return ComparedParameters(weights, others)


# ---------------------------------------------------------------------------------------------------------- loss scale


def without_loss_scale(
    clip_factor: float,
    samples: Mapping[str, LayerSample],
    gradients: Mapping[str, Tensor],
    trained: list[str],
    data: Ranks,
    attempt: Attempt,
) -> float:
    """Returns the factor of clipping only, even if a loss scale was divided out at the same time.

    Compares the gradient of the last layer with that of the probed loss: the optimizer must use its gradients, and not
    those of a multiple of it. Collective.

    Args:
        clip_factor: norm of the gradients that the optimizer uses / norm of those of the backward pass.
        samples: layer -> sample, of the layers that this rank owns.
        gradients: layer -> the optimizer's gradient, laid out as the weight.
        trained: layers with a gradient, the same on all ranks that share them.
        data: those ranks.
        attempt: gets a ValueError if the gradients are those of a multiple of the loss, by a factor that no batch
            explains.
    """
    ratio = None
    with attempt:
        ratio = _ratio(samples, gradients, trained)
    known = [found for found in data.gather(ratio) if found is not None]
    if not known:
        return clip_factor
    before, after = known[0] / (clip_factor or 1.0), known[0]
    with attempt:
        if after > _LARGEST_RATIO or before < 1 / _LARGEST_RATIO:
            raise ValueError(
                f"The gradients are about {after if after > _LARGEST_RATIO else before:.2g} times those of the model's "
                f"loss (norms at layer {trained[-1]!r}), expected about 1. With a GradScaler, unscale them "
                "(scaler.unscale_(optimizer)) before before_optimizer_step; otherwise train on the loss that the model "
                "returns."
            )
    # Loss scales are powers of two.
    return clip_factor * 2.0 ** round(math.log2(before)) if before > _LARGEST_RATIO else clip_factor


def _ratio(samples: Mapping[str, LayerSample], gradients: Mapping[str, Tensor], trained: list[str]) -> float | None:
    """Returns norm of the optimizer's gradient / norm of the loss's; None if this rank does not know it."""
    if not trained:
        return None
    norm, sample = squares([gradients[trained[-1]]])[0] ** 0.5, samples.get(trained[-1])
    if sample is None or not sample.x.shape[0]:
        return None
    # (O, n) x (n, I), from the sample to all tokens.
    of_loss = float(product(sample.grad_output.t(), sample.x).norm()) * sample.tokens / sample.x.shape[0]
    return norm / of_loss if of_loss > 0 and norm > 0 and math.isfinite(of_loss) else None
