"""What one probe of the model measures in each layer: inputs, output gradients, and how they answer to moved weights.

Legend: T tokens, I in_features, O out_features, n sampled tokens. A probe runs forward and backward at W + eps * d and
at W - eps * d for one random direction d through all swapped layers. The mean of the two gives every layer's input X
and output gradient G (up to eps^2), their difference the derivatives Xdot and Gdot along d (docs/method.md, section 3).

The passes leave no trace. They run on FP32 stand-ins for the weights, without autocast and without quantization, on
clones of the buffers, and outside any wrapper (DDP, compile): no parameter, no gradient, no buffer and no optimizer
state is written. Hooks that only observe are left out (`hooks`); all random generators, the modules' attributes and
what other hooks keep are put back (`traces`).
"""

from __future__ import annotations

import logging
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .distributed import Processes, sharded_as, squares, whole, without_sharding_hooks
from .formats import TILE
from .hooks import leave_out_global_observers, leave_out_observers
from .linear import SnipLinear, plain_name, snip_linears
from .products import is_split, product
from .quantize import stream_key
from .traces import Kept, Shared

logger = logging.getLogger(__name__)

# |eps * d| / |W| over all swapped weights: small enough for first order, large enough for FP32 (section 3 there).
RELATIVE_STEP = 1e-3

# What a model's forward takes one row per sequence of: name -> numbers of dimensions, the first of which may also be 1.
_BY_SEQUENCE = {
    "input_ids": (2,),
    "labels": (2,),
    "attention_mask": (2, 4),
    "position_ids": (2,),
    "token_type_ids": (2,),
    "inputs_embeds": (3,),
}
# The label of tokens that have no part in the loss, in torch and Hugging Face models.
_NO_LABEL = -100


@dataclass(frozen=True)
class RandomState:
    """The state of every generator that a forward pass may draw from: torch (CPU, CUDA), numpy, python."""

    cpu: Tensor
    cuda: list[Tensor]
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@dataclass(frozen=True)
class Batch:
    """One micro-batch as the model's forward takes it, and the generators' state with which it was first run."""

    kwargs: Mapping[str, Any]
    random_state: RandomState

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> Batch:
        """Keeps references to the inputs, not copies.

        `num_items_in_batch` is dropped: without it, Hugging Face models return the mean loss of the micro-batch.

        Raises:
            ValueError: there are no labels, so that the model gives no loss.
        """
        if kwargs.get("labels") is None:
            raise ValueError(
                f"The batch has no labels (its keys are {', '.join(kwargs) or 'none'}), so the model gives no loss to "
                "probe. Expected a causal LM batch with `labels`. Label smoothing and a custom compute_loss_func "
                "take them away: turn these off, or use a policy that needs no probe, such as "
                "policy='layer-position'."
            )
        return cls({key: value for key, value in kwargs.items() if key != "num_items_in_batch"}, RandomState.now())

    def part(self, tokens: int | None) -> Batch:
        """Returns some sequences, as many as hold at most so many tokens but at least one; None: all of them.

        They are spread evenly over the micro-batch, so that ranks that each take a part of theirs take together what
        one process with all their sequences would. A single sequence is kept whole: cut, it would be another text with
        other positions. The whole micro-batch is returned, and the log says why, if an input may belong to several
        sequences at once (packed ones, say), or if the chosen sequences have no labels.
        """
        labels = self.kwargs["labels"]
        if tokens is None or labels.numel() <= tokens or labels.shape[0] == 1:
            return self
        packed = [name for name, value in self.kwargs.items() if not _is_by_sequence(name, value, labels.shape[0])]
        count = max(1, tokens * labels.shape[0] // labels.numel())
        rows = torch.arange(count) * labels.shape[0] // count
        chosen = labels[rows.to(labels.device)]
        if packed or not (chosen != _NO_LABEL).any():
            reason = f"its input {packed[0]!r} cannot be cut" if packed else f"{count} of its sequences have no labels"
            logger.info("snip-hf: the probe takes the whole micro-batch of %d tokens: %s.", labels.numel(), reason)
            return self
        cut = {
            name: value[rows.to(value.device)]
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] > 1
            else value
            for name, value in self.kwargs.items()
        }
        return Batch(cut, self.random_state)

    @property
    def tokens(self) -> int:
        return int(self.kwargs["labels"].numel())

    @property
    def labelled(self) -> int:
        """Number of tokens with a label, over which the loss is a mean.

        A causal LM shifts its labels, so that the first one of a sequence does not count, unless the batch has them
        shifted already (`shift_labels`). A model of another kind has at most one more per sequence.
        """
        shifted = self.kwargs.get("shift_labels")
        if shifted is not None:
            return int((shifted != _NO_LABEL).sum())
        labels = self.kwargs["labels"]
        return int((labels[..., 1:] != _NO_LABEL).sum()) or int((labels != _NO_LABEL).sum())


def _is_by_sequence(name: str, value: Any, sequences: int) -> bool:
    """Tells whether an input has one row per sequence, or says the same of all of them."""
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, bool | int | float | str)
    return value.dim() == 0 or (value.dim() in _BY_SEQUENCE.get(name, ()) and value.shape[0] in (1, sequences))


@dataclass
class LayerSample:
    """What one layer showed on the sampled tokens, FP32, for the mean loss of the micro-batch."""

    tokens: int
    """T: all tokens that passed through the layer."""
    x: Tensor
    """(n, I)"""
    grad_output: Tensor
    """(n, O)"""
    x_dot: list[Tensor] = field(default_factory=list)
    """(n, I) per probe"""
    grad_output_dot: list[Tensor] = field(default_factory=list)
    """(n, O) per probe"""
    energies: tuple[float, float] | None = None
    """sum_t |X_t|^2 |G_t|^2 of all tokens and of the sampled ones; None where it was not measured."""

    @property
    def scale(self) -> float:
        """What a sum of squares over the sample is multiplied by to stand for all tokens.

        The ratio of the energies, not of the tokens: a few tokens hold most of such sums, in the sample or not.
        """
        every, sampled = self.energies or (0.0, 0.0)
        if sampled > 0 and math.isfinite(every / sampled):
            return every / sampled
        return self.tokens / max(1, self.x.shape[0])


@dataclass(frozen=True)
class Probe:
    """The outcome of a probe: mean loss of the micro-batch, and a sample per layer that took part in it."""

    loss: float
    layers: dict[str, LayerSample]


def run_probe(
    model: nn.Module,
    batch: Batch,
    pullbacks: Mapping[str, Callable[[Tensor], Tensor]],
    probes: int = 1,
    probe_tokens: int | None = None,
    seed: int = 0,
    step: int = 0,
    relative_step: float = RELATIVE_STEP,
    autocast: torch.dtype | None = None,
    processes: Processes | None = None,
    tokens: Sequence[int] | None = None,
) -> Probe:
    """Probes every swapped layer of the model; `probes` times two forward-backward passes.

    Beyond the model it holds one FP32 copy of the swapped weights at a time, and the samples.

    Args:
        model: a converted model, without wrappers.
        batch: the micro-batch to run.
        pullbacks: layer -> what makes a direction (O, I) of z ~ N(0, 1) (O, I). Layers without an entry stay put.
        probes: number of independent directions; 0 runs one pass and takes no derivatives.
        probe_tokens: tokens kept per layer, in whole runs of 128, by all data ranks together; None keeps all.
        seed: with `step`, decides the directions and the sampled tokens.
        step: see seed.
        relative_step: |eps * d| / |W| over all swapped weights.
        autocast: dtype of the passes' products, None for FP32. Rounding noise then needs a larger relative step.
        processes: those that probe together; the samples are this process's own. None: it is alone.
        tokens: data rank -> tokens of its batch.
    """
    processes = processes or Processes()
    layers = snip_linears(model)
    samples: dict[str, LayerSample] = {}
    losses: list[float] = []
    plan = _SamplePlan(probe_tokens, seed, step, processes.data.rank, tuple(tokens or (batch.tokens,)))

    def record(weights: Mapping[str, Tensor]) -> _Recorder:
        recorder = _Recorder(plan)
        with _recording(layers, recorder, autocast is not None):
            losses.append(float(run_pass(model, batch, weights, autocast, True, processes.run)))
        return recorder

    if probes == 0 or not pullbacks:
        recorder = record({})
        energies = recorder.energies()
        for name, one in recorder.records.items():
            samples[name] = LayerSample(one.tokens, one.x, one.grad_output, energies=energies[name])
    for index in range(probes if pullbacks else 0):
        moved, epsilon = _move(layers, pullbacks, (seed, step, index), relative_step, processes)
        plus = record(moved)
        for name, weight in moved.items():  # from W + eps * d to W - eps * d, in place
            weight.neg_().add_(layers[name.removesuffix(".weight")].weight.detach(), alpha=2.0)
        minus = record(moved)
        del moved
        _combine(samples, plus, minus, epsilon)
    return Probe(sum(losses) / len(losses), samples)


def _move(
    layers: Mapping[str, SnipLinear],
    pullbacks: Mapping[str, Callable[[Tensor], Tensor]],
    draw: tuple[int, int, int],
    relative_step: float,
    processes: Processes,
) -> tuple[dict[str, Tensor], float]:
    """Returns parameter name -> W + eps * d in FP32 for the random direction of this draw, and eps.

    Every layer's numbers are those of its name: which other layers a process holds makes no difference. Sharded
    weights move in place on their shards.
    """
    moved: dict[str, Tensor] = {}
    for name, pullback in pullbacks.items():
        weight = layers[name].weight.detach()
        direction = pullback(random_direction(name, weight, draw))
        moved[f"{name}.weight"] = sharded_as(direction, weight)
    sizes = [sum(squares(tensors)) for tensors in ([layers[name].weight for name in pullbacks], list(moved.values()))]
    totals = processes.pipeline.gather(sizes)
    weights, moves = (sum(column) for column in zip(*totals, strict=True))
    epsilon = relative_step * (weights / moves) ** 0.5 if moves > 0 else 1.0
    for name, direction in moved.items():
        direction.mul_(epsilon).add_(layers[name.removesuffix(".weight")].weight.detach())
    return moved, epsilon


def random_direction(name: str, weight: Tensor, draw: tuple[int, int, int]) -> Tensor:
    """Returns the z ~ N(0, 1) of a layer, (O, I), FP32, whole: the same numbers whenever it is drawn.

    Args:
        name: of the layer.
        weight: gives shape and device.
        draw: seed, step and index of the probe.
    """
    generator = torch.Generator(weight.device).manual_seed(
        stream_key(*draw, zlib.crc32(name.encode(errors="surrogatepass")), 0) >> 1
    )
    return torch.randn(weight.shape, generator=generator, device=weight.device)


def read(figures: Sequence[Tensor]) -> list[float]:
    """Returns tensors of one element as numbers. The device is waited for once, not once per figure."""
    if not figures:
        return []
    together: list[float] = torch.stack([figure.to(figures[0].device) for figure in figures]).tolist()
    return together


def run_pass(
    model: nn.Module,
    batch: Batch,
    weights: Mapping[str, Tensor],
    autocast: torch.dtype | None = None,
    backward: bool = True,
    run: Callable[[Mapping[str, Any]], Tensor | float | None] | None = None,
) -> Tensor:
    """Runs one forward and backward pass in FP32 on stand-ins for the parameters and returns the loss.

    Args:
        model: a model without wrappers.
        batch: the micro-batch; the generators start from its state.
        weights: parameter name (`linear.plain_name`) -> the tensor to use instead; gradients go to its `.grad` if it
            requires them. Parameters that are not named are used as detached FP32 copies. Of sharded parameters these
            are whole, but for the weights of swapped layers: each gathers its own when it runs.
        autocast: dtype of autocast, None for none.
        backward: whether to run the backward pass.
        run: runs the batch forward and backward instead and returns its loss, None if that is known elsewhere (the
            returned tensor is then NaN); for a model that is only a part.
    """
    before = RandomState.now()
    try:
        batch.random_state.restore()
        with (
            _for_all_threads(model),
            _everything_kept(model),
            without_sharding_hooks(model),
        ):
            _stand_in(model, weights)
            return _run(model, dict(batch.kwargs), autocast, backward, run)
    finally:
        before.restore()


def _stand_in(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts stand-ins in the place of the model's parameters, buffers and tensors that are mere attributes.

    A tensor has one stand-in, by whatever names of whatever modules it is known.
    """
    frozen = frozen_in_a_pass(model)
    swapped = {id(layer.weight) for layer in snip_linears(model).values()}
    # These write to their weight in their forward pass.
    written = {id(module.weight) for module in model.modules() if getattr(module, "max_norm", None) is not None}
    stand_ins: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if plain_name(name) in weights:
            stand_ins.setdefault(id(parameter), weights[plain_name(name)])
    for parameter in model.parameters():
        if id(parameter) in stand_ins:
            continue
        copy = parameter.detach() if id(parameter) in swapped else whole(parameter.detach())
        if parameter.is_floating_point():
            # Something before the first layer must ask for gradients, so that the backward pass reaches all of them.
            copy = copy.to(torch.float32, copy=id(parameter) in written).requires_grad_(id(parameter) not in frozen)
        stand_ins[id(parameter)] = copy
    for buffer in model.buffers():
        stand_ins[id(buffer)] = buffer.clone().to(torch.float32) if buffer.is_floating_point() else buffer.clone()
    for module in model.modules():
        every: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for entries in every:
            for name, tensor in entries.items():
                if tensor is not None:
                    entries[name] = stand_ins[id(tensor)]
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if type(value) is Tensor and not value.requires_grad:
                if id(value) not in stand_ins:
                    stand_ins[id(value)] = value.clone()
                attributes[name] = stand_ins[id(value)]


def frozen_in_a_pass(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that get no gradient in `run_pass`: weights of linears."""
    # Not `module.weight`: what parametrizes a weight may write to its buffers when it is asked for.
    linears = {id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, nn.Linear)}
    # An embedding that is tied to the output head is an embedding: it may be all that precedes the first layer.
    return linears - {
        id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, nn.Embedding)
    }


def run_forward(model: nn.Module, batch: Batch) -> float:
    """Returns the loss of one FP32 forward pass under the formats in force; as traceless as `run_pass`."""
    return float(run_pass(model, batch, {}, backward=False))


@contextmanager
def _everything_kept(model: nn.Module) -> Iterator[None]:
    """Leaves out the hooks that only observe, and afterwards puts every module back as it was.

    That is: parameters and buffers under all their names, hooks, and what a forward pass notes, such as the longest
    text that a dynamic RoPE has seen.

    Raises:
        RuntimeError: a parameter of the model itself, and not its stand-in, was written to.
    """
    kept = Kept()
    kept.keep_modules(model)
    versions = [(name, parameter, _version(parameter)) for name, parameter in model.named_parameters()]
    try:
        leave_out_observers(model, kept)
        # Last: a list that a module's method fills does not tell what the hooks do.
        kept.keep_code(model)
        yield
    finally:
        kept.restore()
    for name, parameter, version in versions:
        if _version(parameter) != version:
            raise RuntimeError(
                f"A pass of the probe wrote to the parameter {plain_name(name)!r} in place; expected a forward pass "
                "that leaves parameters alone. Let the forward of its module, or a hook, work on a copy of it, or use "
                "a policy that needs no probe, such as policy='layer-position'."
            )


def _version(parameter: Tensor) -> int:
    """Returns torch's count of the changes of a tensor."""
    return 0 if parameter.is_inference() else parameter._version


@contextmanager
def _patched_torch(model: nn.Module) -> Iterator[None]:
    """Replaces, in torch itself, what the passes cannot have as it is."""
    kept = Kept()
    try:
        leave_out_global_observers(model, kept)
        # Compiled layers would record nothing, and be compiled again for it.
        with torch.compiler.set_stance("force_eager"), _efficient_attention():
            yield
    finally:
        kept.restore()


_for_all_threads = Shared(_patched_torch)


@contextmanager
def _efficient_attention() -> Iterator[None]:
    """Gives torch's attention in FP32 on CUDA one key and value per query head, where heads share them.

    Only so does it take the memory-efficient kernel, which runs on tensor cores and holds no (tokens, tokens) matrices.
    The function itself is replaced, since backward passes that recompute run in threads of their own.
    """
    original = nn.functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("enable_gqa") and query.is_cuda and query.dtype == torch.float32:
            key, value = per_query_head(query, key), per_query_head(query, value)
            kwargs["enable_gqa"] = False
        return original(query, key, value, *args, **kwargs)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def per_query_head(query: Tensor, shared: Tensor) -> Tensor:
    """Returns keys or values (..., fewer heads, L, E) as (..., heads of the query, L, E)."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], dim=-3)


def _run(
    model: nn.Module,
    kwargs: dict[str, Any],
    autocast: torch.dtype | None,
    backward: bool,
    run: Callable[[Mapping[str, Any]], Tensor | float | None] | None,
) -> Tensor:
    """Runs forward and backward and returns the loss; recomputation in backward needs the stand-ins too."""
    if run is not None:
        found = run(kwargs)
        return torch.tensor(math.nan if found is None else float(found))
    original = getattr(model, "_original_forward", None)  # what Accelerate wraps in autocast
    compiled = getattr(original, "_torchdynamo_orig_callable", None)
    if compiled is not None and getattr(compiled, "__self__", None) is model and compiled.__name__ != "forward":
        # Of a compiled wrapper, which calls the model as a whole; the class has its forward.
        vars(model).pop("forward", None)
    elif original is not None:
        vars(model)["forward"] = original
    device = next(model.parameters()).device
    with (
        torch.set_grad_enabled(backward),
        torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
    ):
        # With the model's own hooks, but without what `model.compile()` made of it.
        outputs = model._call_impl(**kwargs)
        loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    if backward:
        with torch.autocast(device.type, enabled=False):  # the caller's may be on
            loss.backward()
    return loss.detach()


class _RecordedLinear(torch.autograd.Function):
    """Y = X W^T + b in high precision; backward hands (X, G) to the recorder and returns the input's gradient only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, recorder: _Recorder) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.recorder = name, recorder
        weight = whole(weight)
        if not is_split(x, weight):
            return torch.nn.functional.linear(x, weight, bias)
        y = product(x, weight.t())  # (T, I) x (I, O)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.recorder.keep(ctx.name, x, grad_output)
        # Under autocast the output's gradient is of lower precision than the weight.
        grad_input = product(grad_output, whole(weight).to(grad_output.dtype)) if ctx.needs_input_grad[0] else None
        return grad_input, None, None, None, None


class _Record(NamedTuple):
    """What one pass showed of one layer: as in `LayerSample`, and the energies (all tokens, sampled), on the device."""

    tokens: int
    x: Tensor
    grad_output: Tensor
    energies: Tensor


class _SamplePlan(NamedTuple):
    """Which tokens the ranks keep of a layer: all, or runs of 128 consecutive ones, spread over all of them."""

    probe_tokens: int | None
    seed: int
    step: int
    rank: int
    every: tuple[int, ...]
    """Rank -> tokens of its batch."""

    def kept(self, tokens: int) -> Tensor:
        """Returns the positions of what this rank keeps of so many tokens.

        The ranks together keep what one process would of all their tokens, one rank's after the other's, if these are
        whole runs of 128.
        """
        every, rank, most = self.every, self.rank, self.probe_tokens
        if tokens != every[rank]:  # a router decides which tokens a layer gets: nothing is known of the other ranks'
            # Or a pipeline cuts the batch into chunks.
            chunks = every[rank] // tokens if tokens > 0 and every[rank] % tokens == 0 else 1
            every, rank, most = (tokens,), 0, None if most is None else max(TILE, most // (len(every) * chunks))
        tiles = [count // TILE for count in every]
        if most is None or sum(every) <= most or sum(tiles) == 0:
            return torch.arange(tokens)
        generator = torch.Generator().manual_seed(stream_key(self.seed, self.step, 0, 0, 1) >> 1)
        # One tile along T from each of as many equal parts of the tokens: no stretch of the text is left out.
        count = min(most // TILE, sum(tiles))
        starts = torch.arange(count) * sum(tiles) // count
        ends = torch.arange(1, count + 1) * sum(tiles) // count
        runs = starts + (torch.rand(count, generator=generator) * (ends - starts)).long() - sum(tiles[:rank])
        runs = runs[(runs >= 0) & (runs < tiles[rank])]
        return (runs[:, None] * TILE + torch.arange(TILE)).flatten()


class _Recorder:
    """Keeps a sample of (X, G) per layer."""

    def __init__(self, plan: _SamplePlan) -> None:
        self.records: dict[str, _Record] = {}
        self._plan = plan
        # (tokens, device) -> which of them are kept; moved there once, since each such move waits for the device.
        self._kept: dict[tuple[int, torch.device], Tensor] = {}

    def energies(self) -> dict[str, tuple[float, float]]:
        """Returns layer -> energy of all tokens, and of the sampled ones."""
        figures = read([energy for record in self.records.values() for energy in record.energies])
        return dict(zip(self.records, zip(figures[::2], figures[1::2], strict=True), strict=True))

    def keep(self, name: str, x: Tensor, grad_output: Tensor) -> None:
        at = x.shape[0], x.device
        if at not in self._kept:
            self._kept[at] = self._plan.kept(x.shape[0]).to(x.device)
        tokens = self._kept[at]
        x, grad_output = x.detach(), grad_output.detach()
        energy = x.to(torch.float32).square().sum(1) * grad_output.to(torch.float32).square().sum(1)
        record = _Record(
            x.shape[0],
            x[tokens].to(torch.float32),
            grad_output[tokens].to(torch.float32),
            torch.stack([energy.sum(), energy[tokens].sum()]),
        )
        if name in self.records:  # a layer that is called twice shows its tokens one after the other
            before = self.records[name]
            record = _Record(
                before.tokens + record.tokens,
                torch.cat([before.x, record.x]),
                torch.cat([before.grad_output, record.grad_output]),
                before.energies + record.energies,
            )
        self.records[name] = record


@contextmanager
def _recording(layers: Mapping[str, SnipLinear], recorder: _Recorder, autocast: bool) -> Iterator[None]:
    """Lets every layer compute through `_RecordedLinear` for the time of the context."""

    def recorded(name: str) -> Callable[[SnipLinear, Tensor], Tensor]:
        def forward(layer: SnipLinear, input: Tensor) -> Tensor:
            if not autocast and torch.is_autocast_enabled(input.device.type):
                raise ValueError("The probe's passes run in FP32; leave autocast out of what Pipeline.run does.")
            x = input.reshape(-1, input.shape[-1])
            y: Tensor = _RecordedLinear.apply(x, layer.weight, layer.bias, name, recorder)
            return y.view(*input.shape[:-1], layer.out_features)

        return forward

    try:
        for name, layer in layers.items():
            layer.snip_recorder = recorded(name)
        yield
    finally:
        for layer in layers.values():
            layer.snip_recorder = None


def _combine(
    samples: dict[str, LayerSample],
    plus: _Recorder,
    minus: _Recorder,
    epsilon: float,
) -> None:
    """Adds one probe's central differences to the samples, and X and G where they are still missing.

    Takes the records away one by one, so that little more is held than the samples.
    """
    energies = plus.energies()
    for name in [name for name in plus.records if name in minus.records]:
        tokens, x_plus, grad_plus, _ = plus.records.pop(name)
        _, x_minus, grad_minus, _ = minus.records.pop(name)
        if x_plus.shape != x_minus.shape:  # a router sent other tokens here; no derivative can be taken
            continue
        x_dot, grad_dot = ((p - m).div_(2 * epsilon) for p, m in ((x_plus, x_minus), (grad_plus, grad_minus)))
        if name not in samples:
            mean_x, mean_grad = x_plus.add_(x_minus).div_(2), grad_plus.add_(grad_minus).div_(2)
            samples[name] = LayerSample(tokens, mean_x, mean_grad, energies=energies[name])
        samples[name].x_dot.append(x_dot)
        samples[name].grad_output_dot.append(grad_dot)
