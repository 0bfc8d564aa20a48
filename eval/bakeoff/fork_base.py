"""A model in training, and the base: its training up to the points at which contenders fork.

On CUDA, products run under BF16 autocast, on a CPU in FP32; what a plan quantizes is quantized either way.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_with_min_lr_schedule_with_warmup, masking_utils

from snip_hf import SnipConfig, SnipController
from snip_hf.estimation.replayed_sums import Capture, cuda_graph
from snip_hf.kernels.emulated import Emulated
from snip_hf.kernels.host_copy import on_device
from snip_hf.layers.state import KeysOnDevice, pack_states, snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.planning.plan import PrecisionPlan

from .compiling import compile_parts
from .fork_cells import Fork, uniform_config
from .fork_recipe import ForkRecipe
from .fork_shifts import Shift, batches, sequences_needed
from .fork_text import ForkText
from .step_graphs import StepGraphs
from .training import adamw

_SEQUENCES_PER_EVALUATION = 16


class Trainee:
    """A model, its optimizer and its schedule, at some step of a training.

    Args:
        recipe: model and training.
        text: what it is evaluated on, and its vocabulary.
        device: where.
        seed: of the first weights.
        compile: compiles the model, where the recipe says so.
        capture: captures the passes of a step as a graph, where the recipe says so.
    """

    def __init__(
        self,
        recipe: ForkRecipe,
        text: ForkText,
        device: torch.device,
        seed: int,
        compile: Callable[[nn.Module], object] = compile_parts,
        capture: Capture = cuda_graph,
    ) -> None:
        self.device = device
        self._training = recipe.base
        self._own_held_out, self._other_held_out = map(self._parts, (text.held_out, text.other_held_out))
        self._held_out = self._own_held_out
        torch.manual_seed(seed)
        given = {"vocab_size": text.vocab_size, "bos_token_id": None, "eos_token_id": text.eos_token_id}
        # A cache of keys and values would be copies, and in each compiled layer another one.
        given |= {"use_cache": False}
        config = AutoConfig.for_model(recipe.model.model_type, **(given | recipe.model.config))
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
        self.optimizer = adamw(self.model, self._training.learning_rate, self._training)
        self.schedule = get_cosine_with_min_lr_schedule_with_warmup(
            self.optimizer, self._training.warmup_steps, self._training.steps, min_lr_rate=0.1
        )
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
        self._parameters = list(self.model.parameters())
        # Those that no state has.
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        if recipe.base.compile:
            compile(self.model)
        self._graphs = StepGraphs(self._passes, self._parameters, capture) if recipe.cuda_graph else None
        self._keys: KeysOnDevice | None = None

    def save(self, path: Path) -> None:
        """Writes the state; the file is there as a whole or not at all."""
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        unfinished = path.with_suffix(f".{time.time_ns()}")
        torch.save(state | {"digest": _digest(self.model)}, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> str:
        """Takes a state that `save` wrote, and returns what tells its weights from others. No layer may be swapped.

        Nothing is left of what was trained before.
        """
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self._buffers[name])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.optimizer.zero_grad()
        self.model.train()
        self._held_out = self._own_held_out
        self._keys = None
        if self._graphs is not None:
            self._graphs.forget()
        digest: str = state["digest"]
        return digest

    def put(self, sequences: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """Returns the tokens of steps, (B, L) each, on the device, where a step need not wait for them."""
        ids = on_device(torch.from_numpy(np.concatenate(sequences).astype(np.int64)), self.device)
        return list(ids.split([len(rows) for rows in sequences]))

    def step(self, number: int, ids: Tensor, controller: SnipController | None) -> Tensor:
        """Does optimizer step `number` (from 1) on tokens that `put` gave and returns the loss, on the device."""
        plan, is_watched = None, False
        if controller is not None:
            one = controller.offer({"input_ids": ids, "labels": ids})
            controller.count(one)
            plan, is_watched = controller.plan, one.random_state is not None  # which a probe would begin with
        self.renew_keys()
        with deterministic(self.device):
            loss = self.passes(ids, plan, is_watched)
            if controller is not None:
                controller.before_optimizer_step(number)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        if controller is not None:
            controller.after_step(number)
        return loss

    def renew_keys(self) -> None:
        """Lets graphs of emulated GEMMs draw by the keys that the layers have now."""
        if self._keys is not None:
            self._keys.renew()

    def passes(self, ids: Tensor, plan: PrecisionPlan | None, is_watched: bool = False) -> Tensor:
        """Leaves the clipped gradients of tokens (B, L) in the parameters and returns the loss; from a graph, if so.

        Args:
            ids: that `put` gave.
            plan: in force; None: nothing is quantized.
            is_watched: whether hooks look at the passes.
        """
        return self._passes(ids) if self._graphs is None else self._graphs.run(ids, plan, is_watched)

    def _passes(self, ids: Tensor) -> Tensor:
        """Leaves the clipped gradients of tokens (B, L) in the parameters and returns the loss."""
        with self._autocast(), unpacked():
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._training.max_grad_norm)
        result: Tensor = loss.detach()
        return result

    def keep_state_on_host(self) -> None:
        """To be called when the swapped layers run emulated: `keep_state_on_host`, also where graphs are captured."""
        if self._graphs is None:
            keep_state_on_host(self.model)
        else:
            self._keys = KeysOnDevice(snip_linears(self.model))

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def shift(self, shift: Shift) -> None:
        """Changes learning rate and held-out text for the steps to come."""
        self.scale_rate(shift.learning_rate)
        self.schedule.base_lrs = [rate * shift.learning_rate for rate in self.schedule.base_lrs]
        if shift.other_text:
            self._held_out = self._other_held_out

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss on the held-out text under the arithmetic in force."""
        self.model.eval()
        parts = self._held_out
        with self._autocast(), unpacked():
            losses = [self.model(input_ids=part, labels=part).loss.double() * len(part) for part in parts]
        self.model.train()
        return float(torch.stack(losses).sum()) / sum(map(len, parts))

    def _parts(self, held_out: np.ndarray[Any, Any]) -> list[Tensor]:
        """Returns what is evaluated at a time."""
        return self.put(np.array_split(held_out, max(1, math.ceil(len(held_out) / _SEQUENCES_PER_EVALUATION))))


def train_base(recipe: ForkRecipe, text: ForkText, seed: int, device: torch.device, folder: Path) -> None:
    """Trains a base to its last point and writes its state at each of them; goes on from the last one that is there.

    Raises:
        ValueError: the text is too short, or the loss is not finite at a point.
    """
    training = recipe.base
    paths = {fork.point: state_path(recipe, text, fork, folder) for fork in recipe.forks if fork.base_seed == seed}
    start = max((point for point, path in paths.items() if path.exists()), default=0)
    trainee = Trainee(recipe, text, device, seed)
    if start:
        trainee.load(paths[start])
    controller = None
    if FORMATS[training.format].is_quantized:
        config = SnipConfig.from_dict(uniform_config(training.format, recipe.backend) | {"seed": seed})
        controller = SnipController(trainee.model, trainee.optimizer, config)
        controller.step = start
        if controller.backend == Emulated.name:
            trainee.keep_state_on_host()
    order = _order(text, seed)
    for step in range(start + 1, max(paths) + 1):
        rows = order[(step - 1) * training.sequences : step * training.sequences]
        loss = trainee.step(step, *trainee.put([text.train[rows]]), controller)
        if step in paths:
            if not math.isfinite(float(loss)):
                raise ValueError(f"The loss of the base of seed {seed} is {float(loss)} at step {step}; nothing forks.")
            trainee.save(paths[step])
    if controller is not None:
        controller.close()


def keep_state_on_host(model: nn.Module) -> None:
    """Keeps the formats of the GEMMs, and the keys of their random numbers, in the host's memory.

    The emulated kernels read them there. From a GPU's memory each GEMM would wait for its turn on the GPU to read them.
    """
    layers = snip_linears(model)
    for layer in layers.values():
        layer.snip_state = layer.snip_state.cpu()
    pack_states(layers)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU every kernel inside gives the same bits each time; an operation that has no such kernel is refused.

    Where torch only warns of those, attention's backward pass adds up in any order, and a base that is trained again
    has other weights.
    """
    mode = torch.get_deterministic_debug_mode()
    if device.type == "cuda":
        torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Tells transformers that no row holds several texts, and that no graph is traced.

    It would look for texts on the device, and wait for that. While a stream is captured, transformers 5.17 would make
    a mask of causal attention, for which compiled layers are compiled once more.
    """
    kept = masking_utils.find_packed_sequence_indices, masking_utils.is_tracing
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    masking_utils.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, masking_utils.is_tracing = kept


def state_path(recipe: ForkRecipe, text: ForkText, fork: Fork, folder: Path) -> Path:
    """Returns the file of the state in which a fork starts."""
    return folder / f"base-{recipe.base_id(text.digest, fork.base_seed)}-{fork.point}.pt"


def check_state(path: Path, known: Collection[str]) -> None:
    """Raises ValueError if a state has none of the weights that are known, where any are.

    Args:
        path: of the state.
        known: what `Trainee.load` returned where forks with lines started.
    """
    if not known:
        return
    own = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["digest"]
    if own not in known:
        raise ValueError(
            f"{path.name} has the weights {own}; the lines of the output began with {', '.join(sorted(known))}. Forks "
            "from other weights cannot be compared with them. Continue with the --cache of their run, or give another "
            "--output."
        )


def sequences_of(recipe: ForkRecipe, text: ForkText, fork: Fork, steps: int) -> list[np.ndarray[Any, Any]]:
    """Returns the sequences of each of a fork's first steps, (B, L): in its own order, what its base has not seen.

    A shorter fork sees the same as a longer one sees first.
    """
    count = recipe.base.sequences
    unseen = _order(text, fork.base_seed)[fork.point * count :]
    drawn = np.random.default_rng(fork.seed).permutation(unseen)[: sequences_needed(fork.shift, count, steps)]
    other = np.random.default_rng(fork.seed).permutation(text.other)
    return list(batches(fork.shift, text.train[drawn], other, count, steps))


def check_length(recipe: ForkRecipe, text: ForkText) -> None:
    """Raises ValueError unless the text lasts for the bases and the forks."""
    count = recipe.base.sequences
    needed = max(
        run.fork.point * count + sequences_needed(run.fork.shift, count, run.lengths[-1])
        for run in recipe.runs(text.digest)
    )
    if len(text.train) < needed:
        raise ValueError(
            f"The text has {len(text.train)} sequences; expected {needed} for bases and forks, {count} a step. Raise "
            "train_sequences, or lower forks.points or forks.steps."
        )
    if any(fork.shift is not None and fork.shift.other_text for fork in recipe.forks) and not len(text.other):
        raise ValueError("The text holds no other text, which forks.shifts name; run `text` with this recipe.")


def _digest(model: nn.Module) -> str:
    """Returns what tells weights from others, down to the bit."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().cpu().numpy().tobytes())
    return hashed.hexdigest()[:12]


def _order(text: ForkText, seed: int) -> np.ndarray[Any, Any]:
    """Returns the order in which a base sees the training sequences."""
    return np.random.default_rng(seed).permutation(len(text.train))
