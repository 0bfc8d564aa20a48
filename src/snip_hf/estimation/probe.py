"""One probe of the model: each layer's input X, output gradient G, and their derivatives along moved weights.

Legend: T tokens, I in_features, O out_features, n sampled tokens. A probe runs forward and backward at W + eps * d and
at W - eps * d, d = J^T z a random direction through all swapped weights, or, if some are frozen, through all trained
parameters (`optimizer_step.ComparedParameters`). The mean of the two gives X and G of every layer (up to eps^2), their
difference the derivatives Xdot and Gdot along d (docs/method.md, section 3).

The probe in one page: `batch` is the micro-batch; `passes` runs it forward and backward; `samples` records X and G in
each layer; this file runs the two sides and takes differences; `layer_sums` turns samples into sums; `divergence`
returns the table.

The passes leave no trace. They run on FP32 stand-ins for the weights, without autocast and without quantization, on
clones of the buffers, and outside any wrapper (DDP, compile): no parameter, no gradient, no buffer and no optimizer
state is written. The user's hooks run as under activation checkpointing (`passes.is_probing`). Random generators of
torch, numpy and Python, and the modules' attributes, are restored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..layers.state import snip_linears
from ..parallel.ranks import Processes
from ..parallel.tensor_parallel import without_tensor_parallelism
from ..progress import progress
from .batch import Batch
from .memory import NO_SAVINGS, Savings
from .moved_weights import Draw, MovedWeights
from .noise import PLACES, Noise
from .nonsmooth import FixedRouting
from .passes import recomputing, run_pass
from .samples import LayerSample, Record, Recorder, SamplePlan, read, recording

logger = logging.getLogger(__name__)

# |eps * d| / |W| over all swapped weights: small enough for first order, large enough for FP32 (section 3 there).
RELATIVE_STEP = 1e-3
# If other parameters move too, the step is found by trial. The first one is `relative_step` per element, times this if
# not every swapped weight moves.
_FIRST_STEP = 10.0
# A step that changes X and G of the layers by less than the first or more than the last of these, in units of
# `relative_step`, is replaced by one that aims at the second.
_LEAST_CHANGE, _WANTED_CHANGE, _MOST_CHANGE = 0.5, 2.0, 10.0


@dataclass(frozen=True)
class ProbeSettings:
    """Number of directions and tokens of a probe, its random numbers, and the size of its step."""

    probes: int = 1
    """Number of independent directions; 0 runs one pass and takes no derivatives."""
    probe_tokens: int | None = None
    """Tokens kept per layer, in whole runs of 128, by all data ranks together; None keeps all."""
    seed: int = 0
    """With `step`, decides the directions and the sampled tokens."""
    step: int = 0
    relative_step: float = RELATIVE_STEP
    """|eps * d| / |W| over all swapped weights."""
    whole_amax: bool = False
    """True to measure the largest magnitudes over all tokens, for scales of whole tensors."""
    noise: float | None = None
    """Relative size of noise (`noise.Noise`). With noise no weight moves: a probe is one pass with noise on the
    inputs of all layers and one with noise on their output gradients. Their differences from a pass without noise,
    divided by this size, take the place of the derivatives, in this order."""
    savings: Savings = NO_SAVINGS
    """The parts that passes recompute to save memory; they change no number."""

    @property
    def draws(self) -> list[Draw]:
        """Seed, step and index of each probe."""
        return [(self.seed, self.step, index) for index in range(self.probes)]


@dataclass(frozen=True)
class Probe:
    """The result of a probe: mean loss of the micro-batch, and a sample of each layer that took part in it."""

    loss: float
    layers: dict[str, LayerSample]
    shared: list[list[str]]
    """Groups of layers that received the same tensor."""


def run_probe(
    model: nn.Module,
    batch: Batch,
    pullbacks: Mapping[str, Callable[[Tensor], Tensor]],
    settings: ProbeSettings | None = None,
    processes: Processes | None = None,
    tokens: Sequence[int] | None = None,
    others: Mapping[str, Tensor] | None = None,
) -> Probe:
    """Probes every swapped layer of the model; `probes` times two forward-backward passes.

    With `others` a probe may take two more, if the size of its first step turns out to be wrong.

    Beyond the model it holds the samples and one FP32 copy of the parameters that move, except those that it makes
    again (`savings`).

    Args:
        model: a converted model, without wrappers.
        batch: the micro-batch to run.
        pullbacks: layer, or one of `others` -> function from z ~ N(0, 1) to the direction, both laid out as the weight.
            Weights without an entry do not move.
        settings: settings of the probe; None: all defaults.
        processes: the processes that probe together; the samples are this process's own. None: only this one.
        tokens: data rank -> tokens of its batch.
        others: parameters beside the swapped weights that may move, by name; None: none on any rank.
    """
    settings, processes = settings or ProbeSettings(), processes or Processes()
    every = tuple(tokens or (batch.tokens,))
    plan = SamplePlan(
        settings.probe_tokens, settings.seed, settings.step, processes.data.rank, every, settings.whole_amax
    )
    draws = settings.draws if (pullbacks or others is not None) and settings.noise is None else []
    noises = []
    if settings.noise is not None:
        rank = processes.data.rank
        noises = [Noise(place, draw, settings.noise, rank) for draw in settings.draws for place in PLACES]
    count = 2 * len(draws) if draws else 1 + len(noises)
    samples: dict[str, LayerSample] = {}
    with progress("passes of the probe", count, processes.everyone.is_first) as tell:
        passes = _Passes(model, batch, plan, settings, processes, tell)
        if not draws:
            recorder = passes.record()
            energies = recorder.energies()
            for name, one in recorder.records.items():
                amaxes = _pair(one.amaxes)
                samples[name] = LayerSample(
                    one.tokens, one.x, one.grad_output, energies=energies[name], amaxes=amaxes, rows=one.rows
                )
        for noise in noises:
            _add_differences(samples, passes.record(noise=noise), noise.relative)
        for sides in passes.sides_of(draws, pullbacks, others):
            _warn_of_routers(_combine(samples, *sides))
    return Probe(sum(map(float, passes.losses)) / len(passes.losses), samples, passes.shared)


class _Sides(NamedTuple):
    """The records of the passes at both ends of a step."""

    plus: Recorder
    minus: Recorder
    epsilon: float

    def largest_change(self) -> float:
        """Returns the largest change of a layer's X or G by eps * d, relative to it."""
        pairs = [(plus, self.minus.records.get(name)) for name, plus in self.plus.records.items()]
        changes = [
            torch.nan_to_num((one - other).norm() / (one + other).norm())
            for plus, minus in pairs
            if minus is not None and _have_same_tokens(plus, minus)
            for one, other in ((plus.x, minus.x), (plus.grad_output, minus.grad_output))
        ]
        return max(read(changes), default=0.0)


class _Passes:
    """The passes of one probe; arguments as in `run_probe`.

    Args:
        plan: the tokens to keep.
        tell: called after each pass.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        plan: SamplePlan,
        settings: ProbeSettings,
        processes: Processes,
        tell: Callable[[], object],
    ) -> None:
        self.losses: list[Tensor] = []
        """Losses of the passes whose records are used. Reading one waits for the device."""
        self.shared: list[list[str]] = []
        """Groups of layers that received the same tensor in the last pass."""
        self._model, self._plan, self._settings, self._processes = model, plan, settings, processes
        self._tell = tell
        self._batch = batch
        self._layers = snip_linears(model)
        self._routing = FixedRouting()

    def record(self, moved: MovedWeights | None = None, noise: Noise | None = None) -> Recorder:
        """Runs forward and backward once, on moved weights or with noise if there are any."""
        model, settings, recorder = self._model, self._settings, Recorder(self._plan)
        choosing = self._routing.one_pass(model, smooth_kinks=moved is not None)
        recorded = recording(self._layers, recorder, noise)
        # First, since some of the others wrap the forward that a module has.
        with without_tensor_parallelism(model), choosing, recorded, recomputing(model, settings.savings.recomputed):
            loss = run_pass(model, self._batch, {} if moved is None else moved.by_parameter, run=self._processes.run)
        self.shared = recorder.inputs.groups()
        if noise is None:
            self.losses.append(loss)
        self._tell()
        return recorder

    def sides_of(
        self,
        draws: Sequence[Draw],
        pullbacks: Mapping[str, Callable[[Tensor], Tensor]],
        others: Mapping[str, Tensor] | None,
    ) -> Iterator[_Sides]:
        """Yields the records of both sides of each direction.

        With `others`, a step that turns out too small or too large is repeated in another size, which the next ones
        keep.
        """
        settings = self._settings

        def both(draw: Draw) -> _Sides:
            moved = MovedWeights(self._layers, pullbacks, draw, step, self._processes, settings.savings.remade, others)
            if self._processes.pipeline.size > 1:
                _ = moved.epsilon  # collective: no stage must wait for another one in the middle of a pass
            plus = self.record(moved)
            moved.turn()
            return _Sides(plus, self.record(moved), moved.epsilon)

        step, everyone = settings.relative_step, self._processes.everyone
        if others is not None:
            everyone.check_others()
            step *= 1.0 if all(everyone.gather(self._layers.keys() <= pullbacks.keys())) else _FIRST_STEP
        for draw in draws:
            sides = both(draw)
            if others is not None:
                everyone.check_others()
                change = max(everyone.gather(sides.largest_change())) / settings.relative_step
                if change > 0 and not _LEAST_CHANGE <= change <= _MOST_CHANGE:
                    step *= _WANTED_CHANGE / change
                    del sides, self.losses[-2:]
                    sides = both(draw)
            yield sides


def _combine(samples: dict[str, LayerSample], plus: Recorder, minus: Recorder, epsilon: float) -> list[str]:
    """Adds one probe's central differences to the samples, and X and G if they are still missing.

    Removes the records one by one, so that little more than the samples is held.

    Returns: the layers that saw other tokens on one side than on the other.
    """
    left = []
    energies = plus.energies()
    for name in [name for name in plus.records if name in minus.records]:
        one, other = plus.records.pop(name), minus.records.pop(name)
        if not _have_same_tokens(one, other):
            left.append(name)
            continue
        tokens, x_plus, grad_plus, _, amax_plus, rows = one
        _, x_minus, grad_minus, _, amax_minus, _ = other
        x_dot, grad_dot = ((p - m).div_(2 * epsilon) for p, m in ((x_plus, x_minus), (grad_plus, grad_minus)))
        if name not in samples:
            mean_x, mean_grad = x_plus.add_(x_minus).div_(2), grad_plus.add_(grad_minus).div_(2)
            # Up to eps^2, as the means are.
            amaxes = _pair(amax_plus.add_(amax_minus).div_(2))
            samples[name] = LayerSample(tokens, mean_x, mean_grad, energies=energies[name], amaxes=amaxes, rows=rows)
        samples[name].x_dot.append(x_dot)
        samples[name].grad_output_dot.append(grad_dot)
    return left


def _add_differences(samples: dict[str, LayerSample], noisy: Recorder, relative: float) -> None:
    """Adds the changes of a pass with noise of this size, per unit of it, to the samples of the pass without noise.

    Raises:
        ValueError: a layer saw other tokens in it.
    """
    for name, sample in samples.items():
        one = noisy.records.pop(name, None)
        if one is None or (one.tokens, one.x.shape) != (sample.tokens, sample.x.shape):
            raise ValueError(
                f"Layer {name!r} saw different tokens in a pass with noise than without it (a router chooses them), so "
                "its response is unknown. Leave it out with skip_modules, or use a policy that adds no noise."
            )
        sample.x_dot.append(one.x.sub_(sample.x).div_(relative))
        sample.grad_output_dot.append(one.grad_output.sub_(sample.grad_output).div_(relative))


def _warn_of_routers(left: Sequence[str]) -> None:
    """Logs which layers have no derivative, if any."""
    if left:
        logger.warning(
            "snip-hf: %d layers, such as %s, saw different tokens on the two sides of the probe, so they have no "
            "derivative: their router chooses neither by torch.topk nor by torch.max along a dimension. Keep them "
            "out of plans with skip_modules.",
            len(left),
            left[0],
        )


def _have_same_tokens(one: Record, other: Record) -> bool:
    """Returns False if two records are known to be of different tokens; dense layers only know their number."""
    if one.rows is None or other.rows is None:
        return one.x.shape == other.x.shape
    return one.rows.is_same(other.rows)


def _pair(amaxes: Tensor) -> tuple[Tensor, Tensor] | None:
    # Each at the start of its own memory, as the kernels need it (`kernels.launching`).
    return (amaxes[0], amaxes[1].clone()) if len(amaxes) else None
