"""The micro-batches of a step: forward passes that are backpropagated, and the step that is to be probed.

A model runs forward for many reasons: generation, a look at its logits, a reference. A pass is a micro-batch of the
step if its outputs get a gradient, which is known when the backward pass begins. `SnipController.offer`
announces the pass, and `SnipController.count` counts it when a gradient reaches one of its outputs. A loop that
computes its loss itself brackets it by `TrainingPasses.begin_loss` and `end_loss`. All passes in between make one
micro-batch, which counts when a gradient reaches the loss.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..estimation.batch import Batch, BatchCounts, Objective, copied, is_of_sequences
from ..layers.run_hooks import RunHook, RunMark
from ..layers.state import set_step, snip_linears
from ..numerics.random_state import RandomState
from ..parallel.context_parallel import ContextMesh, in_context
from ..text import WITHOUT_PROBE
from .gradients import Clipping

if TYPE_CHECKING:
    from .controller import SnipController

NOT_CAPTURED = (
    "No micro-batch of this step was given to capture(). Call capture(batch) before each forward pass, and "
    "after_step(step) after each optimizer step."
)


def _autocast() -> torch.dtype | None:
    """Returns the dtype of the active autocast, an accelerator's first; None without one."""
    devices = (device for device in ("cuda", "xpu", "mps", "cpu") if torch.is_autocast_enabled(device))
    return next(map(torch.get_autocast_dtype, devices), None)


@dataclass
class TrainingPass:
    """A forward pass whose loss may be backpropagated; with an objective, all passes that make up its loss."""

    batch: Mapping[str, Any]
    """Keyword arguments of the model's forward, or the objective's inputs; empty if nobody will read them."""
    random_state: RandomState | None
    """The random state that it began with; None unless the probe may run it again."""
    objective: Objective | None = None
    """None: the model returns the loss."""
    seen: int = 0
    """Tokens that the model has seen in passes of an objective."""
    is_counted: bool = False
    """True once it is known to be a micro-batch of the step."""
    label_names: Sequence[str] = ()
    """Inputs that may hold the labels, beside `labels`."""
    autocast: torch.dtype | None = field(default_factory=_autocast)
    """Dtype of the autocast that it began in; None without one."""

    def __post_init__(self) -> None:
        if self.objective is not None:  # computing a loss may remove entries of its inputs
            self.batch = copied(self.batch)

    def check(self, in_pipeline: bool, in_parts: bool = False) -> None:
        """Raises ValueError if the probe cannot run the micro-batch, perhaps `in_parts` of its sequences."""
        if self.objective is not None and in_pipeline:
            raise ValueError("Pipeline.run computes the loss of a pipeline, and not compute_loss. Leave it out.")
        batch = self.to_probe()
        if in_parts:
            batch.check_shared()
        elif in_context():
            raise ValueError(
                "torch's context_parallel cuts the sequences, but the controller has no Accelerator with a cp_size, so "
                "the probe would take parts for whole ones. Give it that of ParallelismConfig(cp_size=...), or use "
                f"{WITHOUT_PROBE}."
            )

    def to_probe(self) -> Batch:
        """Returns the micro-batch as the probe runs it; raises ValueError if it cannot be probed."""
        return Batch.of(self.batch, self.objective, self.seen, self.label_names)


class StepWatch:
    """The step of a refresh while it runs: its first micro-batch, its clipping and its number of micro-batches.

    Args:
        probe_tokens: tokens that the probe may run on (`Batch.part`); None: all.
        clipping: measures the gradients before clipping.
        context: the ranks that hold parts of the same sequences; None: this one has whole ones.
    """

    def __init__(self, probe_tokens: int | None, clipping: Clipping, context: ContextMesh | None = None) -> None:
        self._batch: Batch | Exception = ValueError(NOT_CAPTURED)
        self.counts = BatchCounts(0, 0)
        """Counts of the whole micro-batch."""
        self.micro_batches = 0
        """Number of micro-batches of the step, known when it ends."""
        self._probe_tokens, self._context = probe_tokens, context
        self.clipping = clipping

    def take(self, first: TrainingPass) -> None:
        """Keeps the step's first micro-batch. If it cannot be probed, reading `batch` raises the error."""
        try:
            complete = first.to_probe()
            if first.random_state is not None:
                complete = replace(complete, random_state=first.random_state)
            self.counts, tokens = complete.counts, self._probe_tokens
            self._batch = complete.part(tokens) if self._context is None else complete.shared(tokens, self._context)
        except Exception as error:  # raised again when the probe needs the batch
            self._batch = error

    @property
    def batch(self) -> Batch:
        """The part of the first micro-batch that the probe runs."""
        if isinstance(self._batch, Exception):
            raise self._batch
        return self._batch

    def end(self, micro_batches: int = 0) -> None:
        """Ends the step, which had this number of micro-batches."""
        self.micro_batches = micro_batches
        self.clipping.end()


class TrainingPasses:
    """Reports the micro-batches of a training loop to a controller.

    Args:
        outer: the model as the loop calls it, perhaps wrapped.
        controller: of the model inside.
        mark: gets the hooks.
        label_names: as `Batch.of` takes them.
    """

    def __init__(
        self, outer: nn.Module, controller: SnipController, mark: RunMark, label_names: Sequence[str] = ()
    ) -> None:
        self.is_open = False
        """True between the beginning of a step and its complete gradients; other passes never count."""
        self.known_loss = False
        """True if training follows the gradient of the model's own loss, or of one between `begin_loss` and
        `end_loss`; known when a step ends."""
        self._controller = controller
        self._label_names = label_names
        self._names = _positional_names(controller.model)
        self._offered: TrainingPass | None = None
        self._in_loss: TrainingPass | None = None
        # torch.compile runs the hooks of the module that it is given, and those of the wrapper that it returns, before
        # and after the graph. Hooks further inside would break it in two.
        mark.hooks += [
            outer.register_forward_pre_hook(RunHook(self._before_forward), with_kwargs=True),
            outer.register_forward_hook(RunHook(self._after_forward)),
        ]

    def begin_loss(self, inputs: Mapping[str, Any], objective: Objective) -> TrainingPass | None:
        """Offers a loss that the loop is about to compute itself; returns the argument of `end_loss`.

        Args:
            inputs: the inputs of the loss.
            objective: computes it from them.
        """
        if not self.is_open or not torch.is_grad_enabled():
            return None
        self._in_loss = self._controller.offer(inputs, objective)
        self._in_loss.label_names = self._label_names
        return self._in_loss

    def end_loss(self, one: TrainingPass | None, loss: Any) -> None:
        """Receives the loss that the loop computed; None if it failed."""
        self._in_loss = None
        if one is not None and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(partial(self._reached, one, True))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._offered = None
        if not torch.is_grad_enabled():
            return
        if not self.is_open:  # quantized weights are those of the last step
            self._controller.keep_weights()
        elif self._in_loss is None:
            self._offered = self._controller.offer(dict(zip(self._names, args, strict=False)) | kwargs)
            self._offered.label_names = self._label_names
        else:
            self._controller.keep_weights(everything=False)
            self._in_loss.seen += tokens_of(dict(zip(self._names, args, strict=False)) | kwargs) or 0

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        one, self._offered = self._offered, None
        if one is None:
            return
        loss = _loss(output)
        # pytree does not look into a dict of a class of its own.
        for tensor in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                # The hook holds no output: a hook that holds its own graph would never be freed.
                tensor.register_hook(partial(self._reached, one, tensor is loss))

    @torch.compiler.disable
    def _reached(self, one: TrainingPass, is_loss: bool, gradient: Tensor | None) -> None:
        # All outputs of a compiled model share one backward pass; None: this one has no gradient.
        if gradient is not None:
            self._controller.count(one)
            self.known_loss |= is_loss


def _positional_names(model: nn.Module) -> list[str]:
    """Returns the names of the inputs that the model's forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in kinds]


def _loss(output: Any) -> Tensor | None:
    """Returns the loss that a model returns, as the Trainer finds it; None if it cannot be trained on."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, list | tuple):
        found = output[0] if output else None
    is_loss = isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad
    return found if is_loss else None


def tokens_of(batch: Mapping[str, Any]) -> int | None:
    """Returns the number of tokens in a batch; None if it is unknown."""
    ids, labels, embeds = (batch.get(name) for name in ("input_ids", "labels", "inputs_embeds"))
    in_batch = not isinstance(labels, Tensor) or (is_of_sequences(labels) and isinstance(ids, Tensor))
    found = ids if in_batch else labels
    if found is None and isinstance(embeds, Tensor):
        return embeds.numel() // embeds.shape[-1]
    return int(found.numel()) if isinstance(found, Tensor) else None


class PipelineChunks:
    """Gives each chunk that a pipeline runs through a part of the model its own random numbers, until `close`.

    Args:
        parts: the parts of the model that this process holds; empty for a whole model.
        seed: of the run.
        step: returns the running optimizer step.
    """

    def __init__(self, parts: Iterable[nn.Module], seed: int, step: Callable[[], int]) -> None:
        self._seed = seed
        self._step = step
        self._chunks: Counter[nn.Module] = Counter()
        before = RunHook(self._before)
        self._hooks = [part.register_forward_pre_hook(before) for part in parts]

    def end_step(self) -> None:
        """Counts chunks from 0 again. Called after each optimizer step."""
        self._chunks.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        set_step(snip_linears(part), self._seed, self._step(), self._chunks[part])
        self._chunks[part] += 1
