"""The source of gradients, of an optimizer's answers to them and of the clip factor: torch, or DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..estimation.optimizer_step import OptimizerStep
from ..layers.layer import SnipLayer
from ..optimizers.deepspeed_zero import BeforeStep, ZeroOptimizer, find_zero
from ..optimizers.parts import groups_of
from ..optimizers.response import check_optimizer, responses
from ..parallel.ranks import Ranks
from ..parallel.sharding import is_fully_sharded
from ..text import WITHOUT_PROBE
from .captured_step import StepWatch
from .loop_checks import OptimizerWatch, check_gradients, why_no_update, why_untrained


class GradientSource:
    """The gradients of a run; this one's policy needs no probe, so that nobody asks for any.

    Args:
        optimizer: as the controller was given it.
    """

    is_inside_step = False
    """Whether the optimizer's own step tells the controller that its gradients are there (`attach`)."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def check(self) -> None:
        """Raises TypeError for an optimizer whose updates cannot be differentiated."""

    def attach(self, layers: Mapping[str, SnipLayer], before_step: Callable[[], None]) -> None:
        """Hooks on to the optimizer, until `close`.

        Args:
            layers: the swapped layers.
            before_step: called in the optimizer's step, where `is_inside_step`.
        """

    def close(self) -> None:
        """Takes the hooks off the optimizer."""

    def unclipped(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """Returns the parameters whose gradients are to be noted before clipping."""
        return ()

    def read(self, model: nn.Module, weights: Mapping[str, Tensor], watch: StepWatch, everyone: Ranks) -> OptimizerStep:
        """Returns what the optimizer is about to do with these weights. Collective.

        Args:
            model: what is trained.
            weights: layer -> weight.
            watch: of the step.
            everyone: all ranks.

        Raises:
            ValueError: there are no gradients, or none that are finite.
        """
        raise NotImplementedError

    def holds(self, weight: Tensor) -> bool:
        """Returns True if the optimizer trains this weight, of a swapped layer."""
        return False

    def why_untrained(self, layers: Iterable[SnipLayer]) -> str | None:
        """Returns why no swapped weight is ever updated; None if some are."""
        return why_untrained(layers, self.holds)

    def why_no_update(self, layers: Iterable[SnipLayer]) -> str:
        """Returns why the next update of the swapped weights does not depend on their gradients, which are not 0."""
        return why_no_update(layers, groups_of(self._optimizer))

    def note_step(self) -> None:
        """To be called before each optimizer step."""

    def check_unchanged(self) -> None:
        """Raises ValueError if another optimizer trains the weights by now."""

    def expect_gradients(self) -> None:
        """Notes the gradients as they are: the optimizer is to take its next step with them."""

    def check_gradients_used(self) -> None:
        """Raises ValueError if the optimizer took the step of the last probe with other gradients."""


class TorchGradients(GradientSource):
    """Gradients where torch leaves them, in `weight.grad`."""

    _watch: OptimizerWatch

    def check(self) -> None:
        check_optimizer(self._optimizer)

    def attach(self, layers: Mapping[str, SnipLayer], before_step: Callable[[], None]) -> None:
        self._watch = OptimizerWatch(self._optimizer, layers)

    def close(self) -> None:
        self._watch.close()

    def unclipped(self, model: nn.Module) -> Iterable[nn.Parameter]:
        return model.parameters()

    def read(self, model: nn.Module, weights: Mapping[str, Tensor], watch: StepWatch, everyone: Ranks) -> OptimizerStep:
        gradients = {name: weight.grad.detach() for name, weight in weights.items() if weight.grad is not None}
        if not gradients and is_fully_sharded(model):
            raise ValueError(
                "No swapped layer has a gradient where its weight is; FSDP2 with set_reshard_after_backward(False) "
                f"hides them. Leave resharding on, or use {WITHOUT_PROBE}."
            )
        answers = responses(self._optimizer, weights)
        check_gradients(gradients, bool(answers), everyone)
        return OptimizerStep(gradients, answers, watch.clipping.factor(gradients, everyone), watch.micro_batches)

    def holds(self, weight: Tensor) -> bool:
        return self._watch.holds(weight)

    def note_step(self) -> None:
        self._watch.note_step()

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

    def attach(self, layers: Mapping[str, SnipLayer], before_step: Callable[[], None]) -> None:
        self._hook = self._zero.before_step(before_step)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def read(self, model: nn.Module, weights: Mapping[str, Tensor], watch: StepWatch, everyone: Ranks) -> OptimizerStep:
        factor = self._zero.clip_factor()
        gradients, answers = self._zero.gradients(weights, factor), self._zero.responses(weights)
        return OptimizerStep(gradients, answers, factor, watch.micro_batches)

    def holds(self, weight: Tensor) -> bool:
        return self._zero.holds(weight)


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
        return GradientSource(optimizer)
    zero = find_zero(optimizer, model, accelerator)
    return TorchGradients(optimizer) if zero is None else ZeroGradients(optimizer, zero)
