"""The gradients of a step, the optimizer's response to them, clipping and loss scaling, in torch and DeepSpeed's ZeRO.

The probe needs the gradients right before the optimizer's step, and the factor by which they were clipped. A GradScaler
(FP16) multiplies the loss, divides the gradients by the same scale before the step, and skips the step if one of them
is not finite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..estimation.optimizer_step import ComparedParameters, OptimizerStep, compared_parameters
from ..estimation.samples import read
from ..layers.layer import SnipLayer
from ..layers.run_hooks import RunHook
from ..optimizers.deepspeed_zero import ZeroOptimizer
from ..optimizers.response import check_optimizer, groups_of, responses, trained_by
from ..parallel.ranks import Ranks
from ..parallel.sharding import is_fully_sharded, own_part, sum_of_squares
from ..text import WITHOUT_PROBE

if TYPE_CHECKING:
    from .micro_batches import StepWatch

LATE = (
    "before_optimizer_step was called after optimizer.step(): no plan can be made, since the optimizer's state has the "
    "step's gradients by then. Call it before optimizer.step(), once the gradients are complete and clipped."
)
# Modes of torch.compile with CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")


class BackwardEnd(ABC):
    """Calls `note` at the end of each backward pass, before gradients are clipped, until `end`.

    Args:
        parameters: all that get a gradient, since any of them may get it last.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._is_queued = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(RunHook(self._queue))
            for parameter in parameters
            if parameter.requires_grad
        ]

    def end(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @abstractmethod
    def note(self) -> None:
        """Called at the end of a backward pass."""

    def _queue(self, parameter: Tensor) -> None:
        """Queues `note` for the end of the backward pass.

        DDP reduces the gradients in a callback of that end. A callback queued by a callback comes after it.
        """
        if not self._is_queued:
            self._is_queued = True
            queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
            queue(lambda: queue(self._run))

    def _run(self) -> None:
        self._is_queued = False
        self.note()


class Clipping(BackwardEnd):
    """Measures gradients at the end of each backward pass, to compute later how much they were clipped.

    Args:
        layers: the swapped layers, whose weights' gradients are measured.
        parameters: all that get a gradient; none if nothing is to be measured.
        others: other parameters whose gradients are measured, by name.
    """

    def __init__(
        self, layers: Mapping[str, SnipLayer], parameters: Iterable[nn.Parameter], others: Mapping[str, Tensor]
    ) -> None:
        self._layers, self._others = layers, others
        self._squares: dict[str, Tensor] = {}
        super().__init__(parameters)

    def factor(self, gradients: Mapping[str, Tensor], everyone: Ranks) -> float:
        """Returns the factor of clipping: the norm of the gradients after it / before it.

        Args:
            gradients: layer, or name of another parameter -> clipped gradient.
            everyone: all ranks; each may hold a part of the gradients.
        """
        noted = {name: square for name, square in self._squares.items() if name in gradients}
        unclipped = sum(read(list(noted.values())))
        clipped = sum(read([sum_of_squares(own_part(gradients[name])) for name in gradients if name in noted]))
        before, after = (sum(parts) for parts in zip(*everyone.gather([unclipped, clipped]), strict=True))
        return (after / before) ** 0.5 if before > 0 else 1.0

    def note(self) -> None:
        weights = {name: layer.weight for name, layer in self._layers.items()}
        for name, weight in {**weights, **self._others}.items():
            if weight.grad is not None:
                self._squares[name] = sum_of_squares(own_part(weight.grad.detach()))


class LossScaling:
    """The loss scaling of one run.

    Args:
        optimizer: as the controller got it; Accelerate's wrapper has the GradScaler that it steps with.
        accelerator: the Accelerate object of the loop, if there is one.
    """

    def __init__(self, optimizer: Any, accelerator: Any = None) -> None:
        self.scaler: Any = _scaler_of(optimizer) or _scaler_of(accelerator)
        """None if the loss is not scaled, or if a loop did not pass its scaler to `SnipController.use_scaler`."""

    @property
    def is_on(self) -> bool:
        return self.scaler is not None and bool(self.scaler.is_enabled())

    @property
    def scale(self) -> float:
        """The factor of the running step's loss; 1 without a scaler."""
        return float(self.scaler.get_scale()) if self.is_on else 1.0

    def skips_step(self, parameters: Iterable[Tensor], everyone: Ranks) -> bool:
        """Returns True if the scaler is about to skip the step, since gradients are not finite. Collective."""
        if not self.is_on:
            return False
        gradients = [own_part(one.grad.detach()) for one in parameters if one.grad is not None]
        return not all(everyone.gather(all(read([torch.isfinite(gradient).all() for gradient in gradients]))))


def _scaler_of(holder: Any) -> Any:
    """Returns the GradScaler that an object, or one that it wraps, holds as `.scaler`; None if there is none."""
    if isinstance(holder, list | tuple | dict):
        several = holder.values() if isinstance(holder, dict) else holder
        return next((found for one in several if (found := _scaler_of(one)) is not None), None)
    while holder is not None:
        scaler = getattr(holder, "scaler", None)
        if hasattr(scaler, "get_scale"):
            return scaler
        holder = getattr(holder, "optimizer", None)
    return None


def check_gradients(gradients: Mapping[str, Tensor], is_trained: bool, everyone: Ranks) -> None:
    """Refuses, on all ranks, gradients that are not finite on one rank, or that are missing or 0 on all.

    Args:
        gradients: layer -> gradient, or this rank's part of it.
        is_trained: whether any weight here is to get a gradient.
        everyone: all ranks.

    Raises:
        ValueError: names the layer, or the causes.
    """
    with everyone.together():
        parts = {name: part for name, gradient in gradients.items() if (part := own_part(gradient)).numel()}
        # In one launch for many gradients; a NaN is larger than everything.
        largest = read(torch._foreach_norm(list(parts.values()), torch.inf) if parts else [])
        for name, magnitude in zip(parts, largest, strict=True):
            if not math.isfinite(magnitude):
                raise ValueError(f"The gradient of layer {name!r} is not finite; expected finite numbers.")
    columns = zip(*everyone.gather([is_trained, bool(gradients), any(largest)]), strict=True)
    are_expected, are_present, are_nonzero = (any(column) for column in columns)
    if not are_expected or are_nonzero:
        return
    if are_present:
        raise ValueError(
            "Every gradient of the step is 0. The loss has no gradient at this step (in reinforcement learning, if all "
            "rewards of a group are equal; otherwise, if no label counts); or, in a loop of your own, gradients were "
            "zeroed before before_optimizer_step. Call it with the gradients of the whole step in place."
        )
    raise ValueError(
        "No trained weight has a gradient before the optimizer's step: the optimizer steps within the backward pass, "
        "which needs a policy without a probe; or, in a loop of your own, gradients were set to None before "
        "before_optimizer_step. Call it with the gradients of the whole step in place."
    )


def check_weights(optimizer: Any) -> None:
    """Refuses an optimizer that trains weights in FP16.

    Raises:
        ValueError: a GradScaler does not unscale their gradients, and without one these are lost below 2^-24.
    """
    weights = [weight for group in groups_of(optimizer) for weight in group["params"] if weight.requires_grad]
    halves = sum(weight.dtype == torch.float16 for weight in weights)
    if halves:
        raise ValueError(
            f"{halves} of the {len(weights)} trained parameters are in FP16: a GradScaler does not unscale their "
            "gradients, and without one small gradients become 0. Load the model in FP32 "
            f"(from_pretrained(..., dtype=torch.float32)), with which fp16=True still multiplies in FP16, or use "
            f"{WITHOUT_PROBE}."
        )


class GradientSource:
    """The gradients of a run, which torch leaves in `weight.grad`. Policies without a probe never read them.

    Args:
        optimizer: as the controller got it.
        accelerator: the Accelerate object of the loop, if there is one.
    """

    is_inside_step = False
    """True if the optimizer's own step calls back when its gradients are complete (`attach`), as DeepSpeed's does."""

    def __init__(self, optimizer: Any, accelerator: Any = None) -> None:
        self._optimizer = optimizer
        self.scaling = LossScaling(optimizer, accelerator)
        self.is_late = False
        """True if the optimizer had taken the running step before `before_optimizer_step`."""
        self._hooks: list[Any] = []
        self._taken = 0
        """Steps that the optimizer has taken, over all parts of a combined one."""
        self._taken_before: int | None = None
        """`_taken` before the forward passes of the running step."""
        self._are_in_graphs = _are_in_graphs(accelerator)
        self._kept: set[int] = set()
        """Addresses of the gradients that `keep` has copied in the running step."""

    def check(self) -> None:
        """Raises TypeError for an optimizer whose updates cannot be differentiated, ValueError for FP16 weights."""
        check_optimizer(self._optimizer)
        check_weights(self._optimizer)

    def attach(self, before_step: Callable[[], None]) -> None:
        """Puts hooks on the optimizer, until `close`; `before_step` is called in its step if `is_inside_step`."""
        self._hooks = [part.register_step_post_hook(self._count_step) for part in check_optimizer(self._optimizer)]

    def _count_step(self, *_: Any) -> None:
        self._taken += 1

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self) -> None:
        """Call it before the forward passes of a step."""
        self._taken_before = self._taken
        self._kept.clear()

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies the gradients of a step's first micro-batches out of the memory of CUDA graphs.

        torch leaves them where the graph of the backward pass wrote them, and the next replay would overwrite them
        (pytorch#169545). Once they are copied, later micro-batches add to the copies.
        """
        for parameter in parameters if self._are_in_graphs else ():
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() not in self._kept:
                parameter.grad = gradient.clone()
                self._kept.add(parameter.grad.data_ptr())

    def note_step(self) -> None:
        """Sets `is_late`; call it in `before_optimizer_step`."""
        self.is_late = self._taken_before not in (None, self._taken)
        self._taken_before = None

    def takes_no_step(self, everyone: Ranks) -> bool:
        """Returns True if the learning rate is 0, so that no weight is about to change. Collective."""
        return all(everyone.gather(all(group.get("lr") == 0 for group in groups_of(self._optimizer))))

    def unclipped(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """Returns the parameters whose gradients have to be measured before clipping."""
        return model.parameters()

    def read(
        self, model: nn.Module, layers: Mapping[str, SnipLayer], config: SnipConfig, watch: StepWatch, everyone: Ranks
    ) -> OptimizerStep:
        """Returns the step that the optimizer is about to take with the probed parameters. Collective.

        Raises:
            ValueError: there are no gradients, or they are not finite.
        """
        compared = compared_parameters(model, layers, self.trains(), config, everyone)
        return self._read(model, compared, config.objective == "gradients", watch, everyone)

    def _read(
        self, model: nn.Module, compared: ComparedParameters, of_gradients: bool, watch: StepWatch, everyone: Ranks
    ) -> OptimizerStep:
        """Implements `read`; of_gradients: the responses are those of updates that are the gradients themselves."""
        weights = compared.parameters
        gradients = {name: weight.grad.detach() for name, weight in weights.items() if weight.grad is not None}
        if not gradients and is_fully_sharded(model):
            raise ValueError(
                "No parameter has its gradient where the optimizer finds it; FSDP2 with "
                f"set_reshard_after_backward(False) hides them. Leave resharding on, or use {WITHOUT_PROBE}."
            )
        answers = responses(self._optimizer, weights, of_gradients)
        check_gradients(gradients, bool(answers), everyone)
        # The clipping was measured on gradients with the loss scale; these are without it.
        factor = watch.clipping.factor(gradients, everyone) * self.scaling.scale
        return OptimizerStep(gradients, answers, factor, watch.micro_batches, compared.others)

    def trains(self) -> Callable[[Tensor], bool]:
        """Returns a predicate that is True for the parameters that the optimizer trains."""
        return trained_by(self._optimizer)

    def is_trained(self, model: nn.Module) -> bool:
        """Returns True if the optimizer updates any parameter of the model."""
        return any(map(self.trains(), model.parameters()))


class ZeroGradients(GradientSource):
    """Gradients that DeepSpeed partitions over the ranks, read inside its own step.

    Args:
        optimizer: as the controller got it.
        zero: access to DeepSpeed's optimizer.
    """

    is_inside_step = True

    def __init__(self, optimizer: Any, zero: ZeroOptimizer) -> None:
        super().__init__(optimizer)
        self._zero = zero

    def check(self) -> None:
        """Passes: `ZeroOptimizer` has refused what cannot work."""

    def attach(self, before_step: Callable[[], None]) -> None:
        self._hooks = [self._zero.before_step(before_step)]

    def unclipped(self, model: nn.Module) -> Iterable[nn.Parameter]:
        return ()

    def _read(
        self, model: nn.Module, compared: ComparedParameters, of_gradients: bool, watch: StepWatch, everyone: Ranks
    ) -> OptimizerStep:
        weights, factor = compared.parameters, self._zero.clip_factor()
        gradients, answers = self._zero.gradients(weights, factor), self._zero.responses(weights, of_gradients)
        return OptimizerStep(gradients, answers, factor, watch.micro_batches, compared.others)

    def trains(self) -> Callable[[Tensor], bool]:
        return self._zero.holds


def _are_in_graphs(accelerator: Any) -> bool:
    """Returns True if Accelerate compiles a model of one process, so without wrappers, with CUDA graphs."""
    state = getattr(accelerator, "state", accelerator)
    mode = getattr(getattr(state, "dynamo_plugin", None), "mode", None)
    return mode in GRAPH_MODES and state.distributed_type == "NO"
