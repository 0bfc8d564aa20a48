"""One probe of the model: each layer's inputs, output gradients, and their derivatives along moved weights.

Legend: T tokens, I in_features, O out_features, n sampled tokens. A probe runs forward and backward at W + eps * d and
at W - eps * d for one random direction d through all swapped layers, or, where some are frozen, through all that is
trained (`counted`). The mean of the two gives every layer's input X and output gradient G (up to eps^2), their
difference the derivatives Xdot and Gdot along d (docs/method.md, section 3).

The passes leave no trace. They run on FP32 stand-ins for the weights, without autocast and without quantization, on
clones of the buffers, and outside any wrapper (DDP, compile): no parameter, no gradient, no buffer and no optimizer
state is written. The user's hooks run as under activation checkpointing (`passes.is_probing`). Random generators of
torch, numpy and Python, and what the modules' attributes name, are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..layers.state import snip_linears
from ..parallel.ranks import Processes
from ..progress import progress
from .batch import Batch
from .memory import NO_SAVINGS, Savings
from .moved_weights import Draw, MovedWeights
from .nonsmooth import FixedRouting
from .passes import recomputing, run_pass
from .samples import PLACES, LayerSample, Noise, Record, Recorder, SamplePlan, read, recording

logger = logging.getLogger(__name__)

# |eps * d| / |W| over all swapped weights: small enough for first order, large enough for FP32 (section 3 there).
RELATIVE_STEP = 1e-3
# Where other parameters move, what they do decides how far they have to. The first step is so many times
# `relative_step`, per element ...
_FIRST_STEP = 10.0
# ... and another one takes its place if the X and G of the layers change by less than the first or by more than the
# last of these, in units of `relative_step`; the second is then aimed at.
_LEAST_CHANGE, _WANTED_CHANGE, _MOST_CHANGE = 0.5, 2.0, 10.0


@dataclass(frozen=True)
class ProbeSettings:
    """How a probe goes: how often, at how many tokens, along which random directions, how far."""

    probes: int = 1
    """Number of independent directions; 0 runs one pass and takes no derivatives."""
    probe_tokens: int | None = None
    """Tokens kept per layer, in whole runs of 128, by all data ranks together; None keeps all."""
    seed: int = 0
    """Decides, with `step`, the directions and the sampled tokens."""
    step: int = 0
    relative_step: float = RELATIVE_STEP
    """|eps * d| / |W| over all swapped weights."""
    autocast: torch.dtype | None = None
    """Dtype of the passes' products, None for FP32. Rounding noise then needs a larger relative step."""
    whole_amax: bool = False
    """Measure the largest magnitudes of all tokens too, which scales of whole tensors follow."""
    noise: float | None = None
    """Relative size of noise (`noise`). With it no weight moves: a probe is one pass with noise on the inputs of all
    layers and one with noise on their output gradients. Differences to a pass without noise, divided by this size, take
    the place of the derivatives, in this order."""
    savings: Savings = NO_SAVINGS
    """What the passes compute twice in order to hold less; it changes no number."""

    @property
    def draws(self) -> list[Draw]:
        """Probe -> what decides its direction."""
        return [(self.seed, self.step, index) for index in range(self.probes)]


@dataclass(frozen=True)
class Probe:
    """The outcome of a probe: mean loss of the micro-batch, and a sample per layer that took part in it."""

    loss: float
    layers: dict[str, LayerSample]
    shared: list[list[str]]
    """Layers that received the same tensor."""


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

    With `others` a probe may take two more, where the size of its first step turns out to be wrong.

    Beyond the model it holds one FP32 copy of the swapped weights at a time, but for those that it makes again
    (`savings`), and the samples.

    Args:
        model: a converted model, without wrappers.
        batch: the micro-batch to run.
        pullbacks: layer, or one of `others` -> what makes a direction of z ~ N(0, 1), both laid out as the weight. What
            has no entry stays put.
        settings: how the probe goes; None: all defaults.
        processes: those that probe together; the samples are this process's own. None: it is alone.
        tokens: data rank -> tokens of its batch.
        others: parameters that are no swapped weights and may move, by name; None: there are none on any rank.
    """
    settings, processes = settings or ProbeSettings(), processes or Processes()
    every = tuple(tokens or (batch.tokens,))
    plan = SamplePlan(
        settings.probe_tokens, settings.seed, settings.step, processes.data.rank, every, settings.whole_amax
    )
    draws = settings.draws if (pullbacks or others is not None) and settings.noise is None else []
    noises = _noises(settings, processes.data.rank)
    count = 2 * len(draws) if draws else 1 + len(noises)
    with progress("passes of the probe", count, processes.everyone.is_first) as tell:
        passes = _Passes(model, batch, plan, settings, processes, tell)
        samples = _samples(passes, draws, noises, pullbacks, others)
    return Probe(sum(map(float, passes.losses)) / len(passes.losses), samples, passes.shared)


def _samples(
    passes: _Passes,
    draws: Sequence[Draw],
    noises: Sequence[Noise],
    pullbacks: Mapping[str, Callable[[Tensor], Tensor]],
    others: Mapping[str, Tensor] | None,
) -> dict[str, LayerSample]:
    """Runs the passes and returns what they show of each layer."""
    samples: dict[str, LayerSample] = {}
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
    return samples


def _noises(settings: ProbeSettings, rank: int) -> list[Noise]:
    """Returns the noise of each pass that has some; none where weights move."""
    relative = settings.noise
    if relative is None:
        return []
    return [Noise(place, draw, relative, rank) for draw in settings.draws for place in PLACES]


class _Sides(NamedTuple):
    """What the passes at both ends of a step showed."""

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
        plan: which tokens are kept.
        tell: is called after each pass.
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
        """Of each pass whose record is used. Reading one waits for the device."""
        self.shared: list[list[str]] = []
        """Layers that received the same tensor in the last pass."""
        self._model, self._plan, self._settings, self._processes = model, plan, settings, processes
        self._tell = tell
        self._batch = batch
        self._layers = snip_linears(model)
        self._routing = FixedRouting()

    def record(self, moved: MovedWeights | None = None, noise: Noise | None = None) -> Recorder:
        """Runs forward and backward once, on moved weights or with noise if there are any."""
        model, settings, recorder = self._model, self._settings, Recorder(self._plan)
        moving = nullcontext() if moved is None else moved.making()
        choosing = self._routing.one_pass(model, smooth_kinks=moved is not None)
        recorded = recording(self._layers, recorder, settings.autocast is not None, noise)
        with choosing, recorded, moving, recomputing(model, settings.savings.recomputed):
            loss = run_pass(
                model,
                self._batch,
                {} if moved is None else moved.by_parameter,
                settings.autocast,
                True,
                self._processes.run,
            )
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
        """Gives what both sides of each direction show. With `others`, a step that is too small or too large for the
        layers to tell is taken again in another size, and so are the next ones."""
        settings = self._settings

        def both(draw: Draw) -> _Sides:
            moved = MovedWeights(self._layers, pullbacks, draw, step, self._processes, settings.savings.remade, others)
            if self._processes.pipeline.size > 1:
                _ = moved.epsilon  # is collective; a stage that waits for another one is not in the middle of a pass
            plus = self.record(moved)
            moved.turn()
            return _Sides(plus, self.record(moved), moved.epsilon)

        step = settings.relative_step * (1.0 if others is None else _FIRST_STEP)
        for draw in draws:
            sides = both(draw)
            if others is not None:
                self._processes.everyone.check_others()
                change = max(self._processes.everyone.gather(sides.largest_change())) / settings.relative_step
                if change > 0 and not _LEAST_CHANGE <= change <= _MOST_CHANGE:
                    step *= _WANTED_CHANGE / change
                    del sides, self.losses[-2:]
                    sides = both(draw)
            yield sides


def _combine(
    samples: dict[str, LayerSample],
    plus: Recorder,
    minus: Recorder,
    epsilon: float,
) -> list[str]:
    """Adds one probe's central differences to the samples, and X and G where they are still missing.

    Takes the records away one by one, so that little more is held than the samples.

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
    """Adds what a pass with noise of this size changed, per unit of it, to the samples of the pass without noise.

    Raises:
        ValueError: a layer saw other tokens in it.
    """
    for name, sample in samples.items():
        one = noisy.records.pop(name, None)
        if one is None or (one.tokens, one.x.shape) != (sample.tokens, sample.x.shape):
            raise ValueError(
                f"Layer {name!r} saw other tokens in a pass with noise than without it (a router chooses them), so "
                "that its response is not known. Leave it out with skip_modules, or take a policy that adds no noise."
            )
        sample.x_dot.append(one.x.sub_(sample.x).div_(relative))
        sample.grad_output_dot.append(one.grad_output.sub_(sample.grad_output).div_(relative))


def _warn_of_routers(left: Sequence[str]) -> None:
    """Says which layers have no derivative; nothing if all have."""
    if left:
        logger.warning(
            "snip-hf: %d layers, such as %s, saw other tokens on the two sides of the probe, so that no derivative "
            "could be taken: their router chooses neither by torch.topk nor by torch.max along a dimension. Keep them "
            "out of plans with skip_modules.",
            len(left),
            left[0],
        )


def _have_same_tokens(one: Record, other: Record) -> bool:
    """Returns True unless it can be seen that the tokens of two records are others: where rows have no names, it
    cannot."""
    if one.rows is None or other.rows is None:
        return one.x.shape == other.x.shape
    return one.rows.is_same(other.rows)


def _pair(amaxes: Tensor) -> tuple[Tensor, Tensor] | None:
    # Each at the start of its memory, as kernels want it that are launched at once (`kernels.launching`).
    return (amaxes[0], amaxes[1].clone()) if len(amaxes) else None
