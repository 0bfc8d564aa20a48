"""The source of gradients, of an optimizer's answers to them and of the clip factor: torch, or DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..estimation.counted import Counted, find_counted, trained_beside
from ..estimation.optimizer_step import OptimizerStep
from ..layers.layer import SnipLayer
from ..optimizers.deepspeed_zero import BeforeStep, ZeroOptimizer, find_zero
from ..optimizers.parts import groups_of
from ..optimizers.response import check_optimizer, responses, trained_by
from ..parallel.ranks import Ranks
from ..parallel.sharding import is_fully_sharded
from ..text import WITHOUT_PROBE
from .captured_step import StepWatch
from .checks import check_weights
from .loop_checks import OptimizerWatch, check_gradients, why_no_update, why_untrained
from .loss_scaling import LossScaling


class GradientSource:
    """The gradients of a run; this one's policy needs no probe, so that nobody asks for any.

    Args:
        optimizer: as the controller was given it.
        accelerator: the Accelerate object of the loop, if there is one.
    """

    is_inside_step = False
    """Whether the optimizer's own step tells the controller that its gradients are there (`attach`)."""

    def __init__(self, optimizer: Any, accelerator: Any = None) -> None:
        self._optimizer = optimizer
        self.scaling = LossScaling(optimizer, accelerator)
        """By what the loss is multiplied."""

    def check(self) -> None:
        """Raises TypeError for an optimizer whose updates cannot be differentiated."""

    def attach(self, model: nn.Module, layers: Mapping[str, SnipLayer], before_step: Callable[[], None]) -> None:
        """Hooks on to the optimizer, until `close`.

        Args:
            model: what is trained.
            layers: the swapped layers.
            before_step: called in the optimizer's step, where `is_inside_step`.
        """

    def close(self) -> None:
        """Takes the hooks off the optimizer."""

    def unclipped(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """Returns the parameters whose gradients are to be noted before clipping."""
        return ()

    def read(
        self, model: nn.Module, layers: Mapping[str, SnipLayer], watch: StepWatch, everyone: Ranks
    ) -> OptimizerStep:
        """Returns what the optimizer is about to do with the parameters that count (`counted`). Collective.

        Args:
            model: what is trained.
            layers: the swapped layers.
            watch: of the step.
            everyone: all ranks.

        Raises:
            ValueError: there are no gradients, or none that are finite.
        """
        return self._read(model, find_counted(model, layers, self.trains(), everyone), watch, everyone)

    def _read(self, model: nn.Module, counted: Counted, watch: StepWatch, everyone: Ranks) -> OptimizerStep:
        raise NotImplementedError

    def beside(self, model: nn.Module, layers: Mapping[str, SnipLayer]) -> dict[str, Tensor]:
        """Returns the other parameters that count, as far as this process knows."""
        is_trained = self.trains()
        is_full = all(is_trained(layer.weight) for layer in layers.values())
        return {} if is_full else trained_beside(model, layers, is_trained)

    def trains(self) -> Callable[[Tensor], bool]:
        """Returns what tells whether the optimizer trains a parameter."""
        return lambda parameter: False

    def why_untrained(self, model: nn.Module) -> str | None:
        """Returns why no parameter of the model is ever updated; None if some are."""
        return why_untrained(model.parameters(), self.trains())

    def why_no_update(self, layers: Iterable[SnipLayer]) -> str:
        """Returns why the next updates of what is trained do not depend on the gradients, which are not 0."""
        return why_no_update(layers, groups_of(self._optimizer))

    def use_scaler(self, scaler: Any) -> None:
        """Takes the GradScaler that scales the loss in a loop of one's own."""
        self.scaling.scaler = scaler

    def leaves_out_step(self, model: nn.Module, everyone: Ranks) -> bool:
        """Returns True if a GradScaler is about to leave the step out, since gradients are not finite. Collective."""
        return False

    def begin_step(self) -> None:
        """To be called before the forward passes of a step."""

    def note_step(self) -> bool:
        """To be called before each optimizer step; returns True if the optimizer has taken it already."""
        return False

    def check_unchanged(self) -> None:
        """Raises ValueError if another optimizer trains the weights by now, or the step was taken already."""

    def expect_gradients(self) -> None:
        """Notes the gradients as they are: the optimizer is to take its next step with them."""

    def check_gradients_used(self) -> None:
        """Raises ValueError if the optimizer took the step of the last probe with other gradients."""


class TorchGradients(GradientSource):
    """Gradients where torch leaves them, in `weight.grad`."""

    _watch: OptimizerWatch

    def check(self) -> None:
        check_optimizer(self._optimizer)
        check_weights(self._optimizer)

    def leaves_out_step(self, model: nn.Module, everyone: Ranks) -> bool:
        return self.scaling.leaves_out(model.parameters(), everyone)

    def attach(self, model: nn.Module, layers: Mapping[str, SnipLayer], before_step: Callable[[], None]) -> None:
        self._watch = OptimizerWatch(self._optimizer, model, layers)

    def close(self) -> None:
        self._watch.close()

    def unclipped(self, model: nn.Module) -> Iterable[nn.Parameter]:
        return model.parameters()

    def _read(self, model: nn.Module, counted: Counted, watch: StepWatch, everyone: Ranks) -> OptimizerStep:
        weights = counted.parameters
        gradients = {name: weight.grad.detach() for name, weight in weights.items() if weight.grad is not None}
        if not gradients and is_fully_sharded(model):
            raise ValueError(
                "No parameter has its gradient where the optimizer finds it; FSDP2 with "
                f"set_reshard_after_backward(False) hides them. Leave resharding on, or use {WITHOUT_PROBE}."
            )
        answers = responses(self._optimizer, weights)
        check_gradients(gradients, bool(answers), everyone)
        # The gradients were noted in the scale of the loss, and are read without it.
        factor = watch.clipping.factor(gradients, everyone) * self.scaling.scale
        return OptimizerStep(gradients, answers, factor, watch.micro_batches, counted.others)

    def trains(self) -> Callable[[Tensor], bool]:
        return trained_by(self._optimizer)

    def begin_step(self) -> None:
        self._watch.begin_step()

    def note_step(self) -> bool:
        return self._watch.note_step()

    def check_unchanged(self) -> None:
        self._watch.check()

    def expect_gradients(self) -> None:
        self._watch.expect_gradients()

    def check_gradients_used(self) -> None:
        self._watch.check_gradients_used()


class ZeroGradients(GradientSource):
    """Gradients that DeepSpeed partitions over the ranks, and gathers for whoever asks in its own step.

    Args:
        optimizer: as the controller was given it.
        zero: access to DeepSpeed's.
    """

    is_inside_step = True

    def __init__(self, optimizer: Any, zero: ZeroOptimizer) -> None:
        super().__init__(optimizer)
        self._zero = zero
        self._hook: BeforeStep | None = None

    def attach(self, model: nn.Module, layers: Mapping[str, SnipLayer], before_step: Callable[[], None]) -> None:
        self._hook = self._zero.before_step(before_step)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _read(self, model: nn.Module, counted: Counted, watch: StepWatch, everyone: Ranks) -> OptimizerStep:
        weights, factor = counted.parameters, self._zero.clip_factor()
        gradients, answers = self._zero.gradients(weights, factor), self._zero.responses(weights)
        return OptimizerStep(gradients, answers, factor, watch.micro_batches, counted.others)

    def trains(self) -> Callable[[Tensor], bool]:
        return self._zero.holds


def find_source(needs_gradients: bool, optimizer: Any, model: Any, accelerator: Any) -> GradientSource:
    """Returns the source of a run's gradients.

    Args:
        needs_gradients: whether the policy needs a probe.
        optimizer: the optimizer that trains the model, wrapped or not.
        model: the model as the loop has it, perhaps DeepSpeed's engine.
        accelerator: the Accelerate object of the loop, if there is one.

    Raises:
        ValueError: DeepSpeed is in use in a way that cannot be supported.
    """
    if not needs_gradients:
        return GradientSource(optimizer, accelerator)
    zero = find_zero(optimizer, model, accelerator)
    return TorchGradients(optimizer, accelerator) if zero is None else ZeroGradients(optimizer, zero)
