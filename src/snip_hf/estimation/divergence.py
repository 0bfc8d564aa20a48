"""Loss divergence dL and weight divergence dW of each GEMM in each format, estimated from one probe.

A layer's own row (gemm "layer") is the divergence of quantizing its three GEMMs together. The sums are in
`layer_sums`, the directly measured truth in `ground_truth`, the formulas in docs/method.md, sections 2 and 3.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import POLICIES, SnipConfig
from ..costs.flops import linear_flops
from ..layers.convert import convert_model, restore_model
from ..layers.layer import SnipLayer
from ..layers.state import snip_linears
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from ..numerics.random_streams import stream_key
from ..optimizers.response import AnalyticResponse, responses, trained_by
from ..parallel.ranks import Attempt, Processes, describe, failing_together
from ..parallel.sharding import compute_device, is_sharded, whole
from ..progress import progress
from .batch import Batch, Compute, objective_of
from .criterion import LayerCriterion, Rows
from .extrapolation import BatchSizes, Squares
from .layer_sums import Deferred, LayerSums, Pushforward, read_all
from .memory import MIB, NO_SAVINGS, PassSizes, Savings, find_savings, kept_tokens, step_memory
from .moved_weights import random_directions
from .optimizer_step import OptimizerStep, RelativeUpdates, compared_parameters, of_matrices, without_loss_scale
from .passes import run_pass
from .pooling import pooled
from .probe import Probe, ProbeSettings, run_probe
from .replayed_sums import DenseLayer, Replays, can_be_replayed, replayed_sums
from .samples import LayerSample
from .table import LAYER, ROWS, Divergence, DivergenceTable
from .ties import Ties, ties_of

logger = logging.getLogger(__name__)
# The estimate's own streams of random rounding: other numbers than those of the training step.
_OPERANDS = (len(GEMMS), len(GEMMS) + 1)


def estimate_divergence(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    config: SnipConfig | None = None,
    compute_loss: Compute | None = None,
    terms: int | None = None,
) -> DivergenceTable:
    """Estimates all divergences of one batch from three forward-backward passes (one for the gradient, two per probe).

    Args:
        model: a causal LM without wrappers, converted or not; it is left as it was.
        batch: keyword arguments of its forward, with labels.
        optimizer: the optimizer, in the state before its next step; None means plain SGD with learning rate 1.
        config: `probes`, `probe_tokens`, `probe_batch_tokens`, `loss_estimator`, `seed` and the choice of layers are
            used.
        compute_loss: returns the loss of the model and `batch`, if the model does not return it.
        terms: number of independent terms that this loss is a mean over.

    Raises:
        ValueError: the batch has no labels, or the loss is not finite.
        TypeError: an optimizer that cannot be differentiated.
    """
    config = config or SnipConfig(probe_tokens=None, probe_batch_tokens=None)
    with converted(model, config) as layers:
        captured = Batch.of(batch, objective_of(compute_loss, terms))
        compared = compared_parameters(model, layers, trained_by(optimizer), config)
        POLICIES[config.policy].criterion.check_layers(layers, trained_by(optimizer))
        answers = responses(optimizer, compared.parameters, config.objective == "gradients")
        _, gradients = gradients_of(model, captured, layers, compared.others)
        part = captured.part(config.probe_batch_tokens)
        return divergences_at(model, part, OptimizerStep(gradients, answers, others=compared.others), config)


def divergences_at(
    model: nn.Module,
    batch: Batch,
    optimizer_step: OptimizerStep,
    config: SnipConfig,
    step: int = 0,
    processes: Processes | None = None,
) -> DivergenceTable:
    """Probes a converted model and estimates all divergences of one optimizer step.

    If the policy's criterion asks for it (`LayerCriterion.along_noise`), all weights, also frozen ones, move along z
    itself: the derivatives do not depend on the optimizer, and only the grad_weight part of the weight divergence is
    known. If it asks for noise (`LayerCriterion.noise`), no weight moves, and the criterion computes both divergences.

    With several processes it is collective: each data rank probes a batch of its own, and all return the table of one
    process with all their tokens.

    Args:
        model: a converted model, without wrappers; its weights may be sharded by FSDP2.
        batch: the step's micro-batch to probe, or a `part` of it.
        optimizer_step: the step.
        config: as in `estimate_divergence`.
        step: number of the step; with `config.seed` it decides all random draws.
        processes: the processes that work together; None: only this one.

    Raises:
        ValueError: the loss of the micro-batch is not finite; on one rank is enough.
        RankError: another process did not answer.
    """
    # The caller's autocast may be on.
    with torch.autocast(compute_device(next(model.parameters())).type, enabled=False):
        return _Estimate(model, batch, optimizer_step, config, step, processes or Processes()).table()


class _Estimate:
    """The estimate of one optimizer step; arguments as in `divergences_at`. Collective from the beginning."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        optimizer_step: OptimizerStep,
        config: SnipConfig,
        step: int,
        processes: Processes,
    ) -> None:
        self._model, self._batch, self._optimizer_step = model, batch, optimizer_step
        self._config, self._processes = config, processes
        self._layers = snip_linears(model)
        self._criterion: type[LayerCriterion] = POLICIES[config.policy].criterion
        # The derivatives are then not those along the optimizer's update.
        self._criterion_takes_dots = self._criterion.along_noise or self._criterion.noise is not None
        self._settings = ProbeSettings(
            config.probes,
            config.probe_tokens,
            config.seed,
            step,
            whole_amax=any(FORMATS[name].has_tensor_scale for name in config.quantized_formats),
            noise=self._criterion.noise,
        )
        self._attempt = Attempt()
        self._replays = Replays.on_cuda([layer.weight for layer in self._layers.values()])
        counts = list(zip(*processes.data.gather([*batch.counts, *batch.micro_batch]), strict=True))
        self._tokens, self._labelled, self._step_tokens = counts[0], counts[1], max(counts[2])
        self._sizes = BatchSizes(*map(sum, counts))

    def table(self) -> DivergenceTable:
        """Returns the table, the same on all ranks."""
        processes = self._processes
        updates, probe, loss = self._passes()
        samples = pooled(probe.layers, self._batch.labelled / self._sizes.labelled, self._layers, processes.data)
        clip_factor = self._clip_factor(updates, samples)
        if processes.tensor.size > 1:  # these ranks have the same samples: each takes its share of the layers
            samples = {name: samples[name] for name in list(samples)[processes.tensor.rank :: processes.tensor.size]}
        unit = loss if self._batch.is_likelihood else 1.0
        rows = list[Divergence]()
        with self._attempt:
            if unit <= 0:
                raise ValueError(
                    f"The loss of the probed micro-batch is {loss}; expected a positive number, because the loss "
                    "divergence is relative to it. If it is not a mean over labelled tokens, give capture() its "
                    "terms=...; in a Trainer, rename the input `labels`, so that it counts as a mean over sequences."
                )
            results = self._sums(samples, updates, clip_factor)
            rows = _rows(results, linear_flops(self._model), unit, clip_factor)
            if self._settings.noise is not None:  # its response does not show which part comes back at every step
                rows = [replace(row, weight_bias=None) for row in rows]
        self._processes.everyone.agree(self._attempt.error)
        return DivergenceTable(loss, _gathered(rows, self._layers, self._processes), self._ties(probe))

    def _passes(self) -> tuple[RelativeUpdates, Probe, float]:
        """Runs the probe; returns the derivatives of the updates, the samples, and the mean loss of all ranks."""
        found, everyone = None, self._processes.everyone
        # The user's loss may communicate between ranks.
        gathers = self._batch.objective is not None
        with self._attempt, failing_together(everyone) if gathers else nullcontext():
            found = self._probe()
        if found is None and not gathers:
            self._warn_others_wait()
        own = None if found is None else found[1].loss
        loss = _agreed_loss(own, self._attempt, self._labelled, self._processes)
        assert found is not None
        return *found, loss

    def _clip_factor(self, updates: RelativeUpdates, samples: Mapping[str, LayerSample]) -> float:
        """Returns the factor of clipping, without that of a loss scale."""
        step = self._optimizer_step
        if not POLICIES[self._config.policy].weighs_updates:
            return step.clip_factor
        trained = [name for name in updates.norms if name in self._layers]
        data, attempt = self._processes.data, self._attempt
        return without_loss_scale(step.clip_factor, samples, step.gradients, trained, data, attempt)

    def _sums(self, samples: Mapping[str, LayerSample], updates: RelativeUpdates, clip_factor: float) -> list[_Results]:
        """Launches the sums of all layers that this rank owns."""
        results: list[_Results] = []
        with progress("layers of the probe", len(samples), self._processes.everyone.is_first) as tell:
            for name, matrices, push in self._whole_layers(samples, updates, clip_factor):
                with self._attempt:  # after a failure, this rank still gathers sharded weights for the others
                    results += self._sums_of_layer(name, matrices, push, samples[name])
                tell()
        return results

    def _ties(self, probe: Probe) -> Ties:
        """Returns `DivergenceTable.ties`, from what all ranks saw. Collective."""
        found = self._processes.everyone.gather([probe.shared, list(self._layers)])
        groups, layers = ([part for parts in column for part in parts] for column in zip(*found, strict=True))
        return ties_of(groups, layers)

    def _warn_others_wait(self) -> None:
        """Logs this rank's failure at once if the others may wait for its shards before they can agree."""
        everyone = self._processes.everyone
        if everyone.size > 1 and any(is_sharded(layer.weight) for layer in self._layers.values()):
            assert self._attempt.error is not None
            logger.warning(
                "snip-hf: rank %d of %d failed in the probe: %s. The others may wait for its shards until the timeout "
                "of training's process group, which then ends the run.",
                everyone.rank,
                everyone.size,
                describe(self._attempt.error),
            )

    def _probe(self) -> tuple[RelativeUpdates, Probe]:
        updates = RelativeUpdates.of(self._optimizer_step, self._layers, self._config)
        along_noise, moves = self._criterion.along_noise, self._settings.noise is None
        pullbacks = dict.fromkeys(self._layers, lambda z: z) if along_noise else updates.pullbacks()
        pullbacks = pullbacks if moves else {}
        others = self._optimizer_step.others if moves and not along_noise else None
        savings = self._savings(self._settings.probes if pullbacks else 0, [*(others or {}).values()])
        settings = replace(self._settings, savings=savings)
        return updates, run_probe(self._model, self._batch, pullbacks, settings, self._processes, self._tokens, others)

    def _savings(self, probes: int, others: Sequence[Tensor]) -> Savings:
        """Returns the parts that passes recompute; equal on all ranks, which may gather weights for them."""
        config, layers, tokens = self._config, self._layers, max(self._tokens)
        if self._processes.run is not None:  # which may cut backward passes in ways of its own
            return NO_SAVINGS
        found = self._optimizer_step.responses
        elementwise = (
            layers
            if self._criterion.along_noise
            else [name for name, response in found.items() if name in layers and isinstance(response, AnalyticResponse)]
        )
        ranks = self._processes.data.size
        bound = step_memory(self._model, layers, self._step_tokens, ranks)
        noisy = 0 if self._settings.noise is None else 2 * self._settings.probes
        sizes = PassSizes(tokens, kept_tokens(config, tokens, ranks), probes, ranks, noisy)
        savings = find_savings(self._model, layers, elementwise, bound, sizes, others)
        if savings != NO_SAVINGS and self._processes.everyone.is_first:
            logger.info(
                "snip-hf: to stay within %d MiB, the probe recomputes the activations of %d blocks and the moved "
                "weights of %d layers.",
                bound / MIB,
                len(savings.recomputed),
                len(savings.remade),
            )
        return savings

    def _whole_layers(
        self, owned: Container[str], updates: RelativeUpdates, clip_factor: float
    ) -> Iterator[tuple[str, tuple[Tensor, ...], Pushforward | None]]:
        """Yields name, matrices (O, I) and pushforward of each layer that this rank owns.

        Sharded weights are gathered, by all ranks together, one layer at a time.
        """
        responses = self._optimizer_step.responses
        for name, layer in self._layers.items():
            is_spread = is_sharded(layer.weight) or (name in responses and responses[name].is_spread)
            if name not in owned and not is_spread:
                continue
            weight = whole(layer.weight.detach())
            pushforward = updates.pushforward(name, clip_factor)
            if name in owned:
                yield name, layer.matrices(weight), None if pushforward is None else of_matrices(pushforward, layer)

    def _sums_of_layer(
        self, name: str, matrices: tuple[Tensor, ...], push: Pushforward | None, sample: LayerSample
    ) -> list[_Results]:
        """Launches the sums of one layer, for each format."""
        config, micro_batches = self._config, self._optimizer_step.micro_batches
        key = config.seed, self._settings.step, 0, zlib.crc32(name.encode(errors="surrogatepass"))
        along_o, along_t = (stream_key(*key, operand) for operand in _OPERANDS)
        replays = self._replays if self._criterion is LayerCriterion and can_be_replayed(matrices, sample) else None
        if replays is not None and not callable(push):
            layer = DenseLayer(matrices[0], push, sample, (along_o, along_t))
            formats, form = config.quantized_formats, config.loss_estimator
            found = replayed_sums(replays, layer, micro_batches, self._sizes, formats=formats, form=form)
            return [_Results(name, fmt, *sums, LayerCriterion.no_rows(sample.x)) for fmt, sums in found.items()]
        own = sample.without_dots() if self._criterion_takes_dots else sample
        sums = LayerSums(own, matrices, push, micro_batches, self._sizes, formats=config.quantized_formats)
        whole_layer, of_matrices = self._criteria(name, sums, sample)
        return [
            _Results(
                name,
                fmt,
                whole_layer.weight_divergences(fmt, (along_o, along_t)),
                whole_layer.loss_divergence(fmt, config.loss_estimator),
                sums.errors(fmt),
                _added([one.rows(fmt) for one in of_matrices], sums.x),
            )
            for fmt in config.quantized_formats
        ]

    def _criteria(self, name: str, sums: LayerSums, sample: LayerSample) -> tuple[LayerCriterion, list[LayerCriterion]]:
        """Returns the policy's criterion of a layer, and of each of its matrices: their rows are added."""
        kind, directions = self._criterion, list[tuple[Tensor, ...]]()
        if kind is LayerCriterion:
            return kind(sums), [kind(sums)]
        if kind.along_noise:
            directions = [random_directions(name, self._layers[name], draw) for draw in self._settings.draws]

        def trace(index: int, of_matrix: LayerSample) -> Tensor | None:
            along = [z[index] for z in directions]
            return kind.trace_of(name, of_matrix, along) if self._criterion_takes_dots else None

        if sample.rows is None:
            criterion = kind(sums, trace(0, sample))
            return criterion, [criterion]
        of_matrices = [kind(own_sums, trace(index, own)) for index, own, own_sums in sums.of_matrices(sample)]
        return LayerCriterion(sums), of_matrices


class _Results(NamedTuple):
    """The results of one layer and format, still on the device."""

    layer: str
    format: str
    squares: Deferred[dict[str, Squares]]
    rise: Deferred[float]
    errors: Deferred[dict[str, tuple[float, float]]]
    criterion: Deferred[Rows]


def _added(of_matrices: Sequence[Deferred[Rows]], like: Tensor) -> Deferred[Rows]:
    """Returns the sum of the rows of all matrices; None in all rows of none."""
    counts = [len(one.sums) for one in of_matrices]

    def finish(values: list[float]) -> Rows:
        left = iter(values)
        found = [one.finish([next(left) for _ in range(count)]) for one, count in zip(of_matrices, counts, strict=True)]
        columns = {row: [rows[row] for rows in found] for row in ROWS}
        return {row: sum(map(float, own)) if own and None not in own else None for row, own in columns.items()}  # type: ignore[arg-type]

    return Deferred(torch.cat([like.new_zeros(0), *(one.sums for one in of_matrices)]), finish)


def _rows(
    results: Sequence[_Results], flops: Mapping[str, Mapping[str, float]], unit: float, clip_factor: float
) -> list[Divergence]:
    """Waits for all sums, once, and returns the table's rows, with loss divergences relative to `unit`."""
    deferred: list[Deferred[Any]] = [one for of_layer in results for one in of_layer[2:]]
    read, rows = iter(read_all(deferred)), list[Divergence]()
    for name, fmt, *_ in results:
        squares, rise, errors, criterion = (next(read) for _ in range(4))
        # A frozen weight's gradient is never computed, so its errors do not count.
        errors[LAYER] = tuple(map(sum, zip(*(errors[gemm] for gemm in flops[name]), strict=True)))
        if criterion[LAYER] is not None:
            criterion[LAYER] = sum(criterion[gemm] for gemm in flops[name])
        for gemm in (*flops[name], LAYER):
            rows.append(
                Divergence(
                    name,
                    gemm,
                    fmt,
                    rise / unit if gemm in ("forward", LAYER) else 0.0,
                    clip_factor * _root(squares[gemm].step),
                    sum(flops[name].values()) if gemm == LAYER else flops[name][gemm],
                    clip_factor * _root(squares[gemm].bias),
                    absolute_error=errors[gemm][0],
                    relative_error=errors[gemm][1],
                    criterion=criterion[gemm],
                )
            )
    return rows


def _agreed_loss(own_loss: float | None, attempt: Attempt, labelled: Sequence[float], processes: Processes) -> float:
    """Returns the mean loss over the tokens of all ranks.

    Args:
        own_loss: loss of this rank's batch, NaN on a pipeline's ranks that do not know it; None after a failure.
        attempt: holds this rank's error.
        labelled: rank -> number of tokens that the loss is a mean over.
    """
    with attempt:
        if own_loss is not None and not math.isfinite(own_loss) and processes.run is None:
            raise ValueError(f"The loss of the probed micro-batch is {own_loss}; expected a finite number.")
    processes.everyone.agree(attempt.error)
    known = [loss for loss in processes.pipeline.gather(own_loss) if loss is not None and math.isfinite(loss)]
    means = processes.data.gather(known[0] if known else None)
    if any(mean is None for mean in means):
        raise ValueError(f"The loss of the probed micro-batch is {own_loss} on all stages; expected a finite number.")
    return math.fsum(mean * count for mean, count in zip(means, labelled, strict=True)) / sum(labelled)


def _gathered(
    rows: Sequence[Divergence], layers: Mapping[str, SnipLayer], processes: Processes
) -> tuple[Divergence, ...]:
    """Returns the rows of all ranks, each once, in the model's order, which stages of a pipeline continue."""
    if processes.everyone.size == 1:
        return tuple(rows)
    order = {name: None for names in processes.pipeline.gather(list(layers)) for name in names}
    by_layer: dict[str, list[Divergence]] = {name: [] for name in order}
    for found in processes.everyone.gather(rows):
        for row in found:
            by_layer[row.layer].append(row)
    return tuple(row for rows_of_layer in by_layer.values() for row in rows_of_layer)


def _root(square: float) -> float:
    return math.sqrt(max(square, 0.0))  # NaN stays


def gradients_of(
    model: nn.Module, batch: Batch, layers: Mapping[str, SnipLayer], others: Mapping[str, Tensor] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss, and the FP32 gradients of the compared parameters, under the formats in force.

    `model` is converted and has no wrappers; `others` are those of `ComparedParameters`.
    """
    weights = {**{name: layer.weight for name, layer in layers.items()}, **(others or {})}
    # Linears that share a weight share its gradient.
    leaves = {id(weight): weight.detach().to(torch.float32, copy=True).requires_grad_() for weight in weights.values()}
    names = {name: layers[name].weight_name(name) if name in layers else name for name in weights}
    loss = run_pass(model, batch, {names[name]: leaves[id(weight)] for name, weight in weights.items()})
    gradients = {name: leaves[id(weight)].grad for name, weight in weights.items()}
    return float(loss), {name: gradient for name, gradient in gradients.items() if gradient is not None}


@contextmanager
def converted(model: nn.Module, config: SnipConfig) -> Iterator[dict[str, SnipLayer]]:
    """Yields the model's swapped layers; swaps them only within the context if they were not swapped."""
    was_converted = bool(snip_linears(model))
    if not was_converted:
        convert_model(model, config)
    try:
        yield snip_linears(model)
    finally:
        if not was_converted:
            restore_model(model)
