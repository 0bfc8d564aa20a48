"""Loss and weight divergence of each GEMM in each format, estimated from one probe.

A layer's own row (gemm "layer") is the divergence of quantizing its three GEMMs together. The sums are in
`layer_sums`, the directly measured truth in `ground_truth`, the formulas in docs/method.md, sections 2 and 3.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import POLICIES, SnipConfig
from ..costs.flops import linear_flops
from ..layers.convert import convert_model, restore_model
from ..layers.layer import SnipLayer
from ..layers.state import snip_linears
from ..numerics.gemms import GEMMS
from ..numerics.random_streams import stream_key
from ..optimizers.response import ElementwiseResponse, Response, responses
from ..parallel.ranks import Attempt, Processes
from ..parallel.sharding import is_sharded, own_part, sharded_as, squares, whole, with_own_part
from .batch import Batch
from .criterion import LayerCriterion
from .gradient_scale import unscaled
from .layer_sums import LAYER, ROWS, BatchSizes, LayerSums, Pending, Squares, read_all
from .passes import run_pass
from .pooling import pooled
from .probe import random_direction, run_probe
from .table import Divergence, DivergenceTable

Pushforward = Callable[[Tensor], Tensor] | Tensor
# The estimate's own streams of random rounding: other numbers than those of the training step.
_OPERANDS = (len(GEMMS), len(GEMMS) + 1)


def estimate_divergence(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    config: SnipConfig | None = None,
) -> DivergenceTable:
    """Estimates all divergences of one batch from three forward-backward passes (one for the gradient, two per probe).

    Args:
        model: a causal LM without wrappers, converted or not; it is left as it was.
        batch: keyword arguments of its forward, with labels.
        optimizer: the optimizer, in the state before its next step; None means plain SGD with learning rate 1.
        config: `probes`, `probe_tokens`, `probe_batch_tokens`, `loss_form`, `seed` and the choice of layers are used.

    Raises:
        ValueError: the batch has no labels, or the loss is not finite.
        TypeError: an optimizer that cannot be differentiated.
    """
    config = config or SnipConfig(probe_tokens=None, probe_batch_tokens=None)
    with converted(model, config) as layers:
        captured = Batch.of(batch)
        answers = responses(optimizer, weights_of(layers))
        _, gradients = gradients_of(model, captured, layers)
        part = captured.part(config.probe_batch_tokens)
        return divergences_at(
            model,
            part,
            answers,
            gradients,
            config,
            labelled=captured.labelled,
            micro_batch_tokens=captured.tokens,
        )


def divergences_at(
    model: nn.Module,
    batch: Batch,
    answers: Mapping[str, Response],
    gradients: Mapping[str, Tensor],
    config: SnipConfig,
    step: int = 0,
    gradient_scale: float = 1.0,
    micro_batches: int = 1,
    probes: int | None = None,
    labelled: int | None = None,
    processes: Processes | None = None,
    micro_batch_tokens: int | None = None,
) -> DivergenceTable:
    """Probes a converted model and estimates all divergences of one optimizer step.

    Where the policy's criterion asks for it (`LayerCriterion.along_noise`), all weights, also frozen ones, move along z
    itself: the optimizer has no part in the derivatives, and of the weight divergence only the part of grad_weight is
    known.

    With several processes it is collective: data ranks each probe a batch of their own, and all get the same table,
    which is that of one process with all their tokens.

    Args:
        model: a converted model, without wrappers; its weights may be sharded by FSDP2.
        batch: the step's micro-batch to probe, or a `part` of it.
        answers: layer -> the optimizer's response (`optimizers.responses`).
        gradients: layer -> the gradient that the optimizer is about to use, laid out and sharded as the weight is.
        config: as in `estimate_divergence`.
        step: decides, with `config.seed`, all random draws.
        gradient_scale: what clipping multiplied the gradients by.
        micro_batches: micro-batches of the step; their errors are independent except for that of the weights.
        probes: in place of `config.probes`. 0 takes one pass and no derivatives: of the weight divergence only the part
            of grad_weight is then known, also in the layers' rows.
        labelled: tokens with a label of the whole micro-batch that `batch` is a part of; None: it is the whole one.
        processes: those that work together; None: this one is alone.
        micro_batch_tokens: all tokens of the whole micro-batch; None as for `labelled`.

    Raises:
        ValueError: the loss of the micro-batch is not finite; on one rank is enough.
        RankError: another process did not answer.
    """
    processes = processes or Processes()
    layers = snip_linears(model)
    own = [batch.tokens, batch.labelled, micro_batch_tokens or batch.tokens, labelled or batch.labelled]
    counts = list(zip(*processes.data.gather(own), strict=True))
    tokens, kept, sizes = counts[0], counts[1], BatchSizes(*map(sum, counts))
    norms: dict[str, float] = {}
    probe, attempt = None, Attempt()
    count = config.probes if probes is None else probes
    kind: type[LayerCriterion] = POLICIES[config.policy].criterion
    by_trace = kind.along_noise
    with attempt:
        moving = [name for name in answers if name in gradients]
        found = [square**0.5 for square in squares([layers[name].weight.detach() for name in moving])]
        # Not of a weight initialised with zeros: no update of it is small or large against it.
        norms |= {name: norm for name, norm in zip(moving, found, strict=True) if norm != 0}
        pullbacks: dict[str, Callable[[Tensor], Tensor]] = (
            dict.fromkeys(layers, _same)
            if by_trace
            else {name: partial(_pulled, answers[name], gradients, name, norm) for name, norm in norms.items()}
        )
        probe = run_probe(
            model,
            batch,
            pullbacks,
            count,
            config.probe_tokens,
            config.seed,
            step,
            processes=processes,
            tokens=tokens,
        )
    loss = _agreed_loss(None if probe is None else probe.loss, attempt, kept, processes)
    assert probe is not None
    samples = pooled(probe.layers, batch.labelled / sizes.labelled, layers, processes.data)
    quantized = config.quantized_formats
    sums: list[_Sums] = []
    if POLICIES[config.policy].weighs_updates:
        gradient_scale = unscaled(gradient_scale, samples, gradients, list(norms), processes.data, attempt)
    with attempt:
        for name, weight, gradient, pushforward in _gathered(layers, samples, answers, gradients, norms, config):
            with attempt:  # the others go on gathering what is sharded, and so does this rank
                sample, trace = samples[name], None
                if by_trace:
                    draws = ((config.seed, step, index) for index in range(count))
                    trace = kind.trace_of(name, sample, [random_direction(name, weight, draw) for draw in draws])
                    sample = replace(sample, x_dot=[], grad_output_dot=[])
                layer_sums = LayerSums(sample, weight, pushforward, micro_batches, sizes, formats=quantized)
                unclipped = None if gradient is None else gradient.to(torch.float32) / (gradient_scale or 1.0)
                criterion = kind(layer_sums, trace)
                sums += _start_sums(name, layer_sums, criterion, config, step, unclipped, quantized)
    rows: list[Divergence] = []
    with attempt:
        rows = _rows(sums, linear_flops(model), loss, gradient_scale)
    processes.everyone.agree(attempt.error)
    return DivergenceTable(loss, _of_all(rows, layers, processes))


def _gathered(
    layers: Mapping[str, SnipLayer],
    owned: Container[str],
    answers: Mapping[str, Response],
    gradients: Mapping[str, Tensor],
    norms: Mapping[str, float],
    config: SnipConfig,
) -> Iterator[tuple[str, Tensor, Tensor | None, Pushforward | None]]:
    """Gives name, weight, gradient (where the loss's form needs it) and pushforward of each layer that this rank owns.

    All are given as matrices (O, I). What is sharded is made whole, by all ranks together, one layer at a time.
    """
    for name, layer in layers.items():
        is_spread = is_sharded(layer.weight) or (name in answers and answers[name].is_spread)
        if name not in owned and not is_spread:
            continue
        weight = whole(layer.weight.detach())
        gradient = whole(gradients[name]) if config.loss_form == "taylor" and name in gradients else None
        pushforward = _pushforward(answers[name], gradients[name], norms[name]) if name in norms else None
        if name in owned:
            (matrix,) = layer.matrices(weight)
            of_gradient = None if gradient is None else layer.matrices(gradient)[0]
            yield name, matrix, of_gradient, None if pushforward is None else _of_matrix(pushforward, layer)


def _start_sums(
    name: str,
    layer_sums: LayerSums,
    criterion: LayerCriterion,
    config: SnipConfig,
    step: int,
    gradient: Tensor | None,
    formats: Sequence[str],
) -> Iterator[_Sums]:
    """Sets the sums of one layer under way, for each format."""
    layer_key = zlib.crc32(name.encode(errors="surrogatepass"))
    row_key, column_key = (stream_key(config.seed, step, 0, layer_key, operand) for operand in _OPERANDS)
    for fmt in formats:
        of_rows = layer_sums.pending_weight_divergences(fmt, (row_key, column_key))
        rise = layer_sums.pending_loss_divergence(fmt, config.loss_form, gradient)
        yield _Sums(name, fmt, of_rows, rise, layer_sums.pending_errors(fmt), criterion.pending_rows(fmt))


def _rows(
    sums: Sequence[_Sums], flops: Mapping[str, Mapping[str, float]], loss: float, gradient_scale: float
) -> list[Divergence]:
    """Waits for all sums, once, and returns what they mean."""
    parts = zip(*(read_all(part) for part in zip(*(one[2:] for one in sums), strict=True)), strict=True)
    rows: list[Divergence] = []
    for (name, fmt, *_), (of_rows, rise, errors, criterion) in zip(sums, parts, strict=True):
        for gemm in ROWS:
            rows.append(
                Divergence(
                    name,
                    gemm,
                    fmt,
                    rise / loss if gemm in ("forward", LAYER) else 0.0,
                    gradient_scale * _root(of_rows[gemm].step),
                    sum(flops[name].values()) if gemm == LAYER else flops[name][gemm],
                    gradient_scale * _root(of_rows[gemm].bias),
                    absolute_error=errors[gemm][0],
                    relative_error=errors[gemm][1],
                    criterion=criterion[gemm],
                )
            )
    return rows


def _agreed_loss(own: float | None, attempt: Attempt, labelled: Sequence[int], processes: Processes) -> float:
    """Returns the mean loss over the tokens of all ranks.

    Args:
        own: of this rank's batch, NaN on a pipeline's ranks that do not know it; None after a failure.
        attempt: has what went wrong here.
        labelled: rank -> number of tokens that the loss is a mean over.
    """
    with attempt:
        if own is not None and not math.isfinite(own) and processes.run is None:
            raise ValueError(f"The loss of the probed micro-batch is {own}; expected a finite number.")
    processes.everyone.agree(attempt.error)
    known = [loss for loss in processes.pipeline.gather(own) if loss is not None and math.isfinite(loss)]
    means = processes.data.gather(known[0] if known else None)
    if any(mean is None for mean in means):
        raise ValueError(f"The loss of the probed micro-batch is {own} on all stages; expected a finite number.")
    return math.fsum(mean * count for mean, count in zip(means, labelled, strict=True)) / sum(labelled)


def _of_all(
    rows: Sequence[Divergence], layers: Mapping[str, SnipLayer], processes: Processes
) -> tuple[Divergence, ...]:
    """Returns the rows of all ranks, each once, in the model's order, which stages of a pipeline continue."""
    if processes.everyone.size == 1:
        return tuple(rows)
    order = {name: None for names in processes.pipeline.gather(list(layers)) for name in names}
    by_layer: dict[str, list[Divergence]] = {name: [] for name in order}
    for found in processes.everyone.gather([list(astuple(row)) for row in rows]):
        for values in found:
            by_layer[values[0]].append(Divergence(*values))
    return tuple(row for rows_of_layer in by_layer.values() for row in rows_of_layer)


class _Sums(NamedTuple):
    """What one layer and format still have on the device."""

    layer: str
    format: str
    squares: Pending[dict[str, Squares]]
    loss: Pending[float]
    errors: Pending[dict[str, tuple[float, float]]]
    criterion: Pending[dict[str, float | None]]


def _root(square: float) -> float:
    return math.sqrt(square) if square > 0 or math.isnan(square) else 0.0


def _pulled(answer: Response, gradients: Mapping[str, Tensor], name: str, norm: float, tensor: Tensor) -> Tensor:
    """Returns J^T tensor relative to the weight's norm, sharded as the weight is, or whole."""
    gradient, own = gradients[name], answer.of_own_part()
    if own is None:
        return _relative(answer.gathered().pullback, whole(gradient), norm, tensor)
    part = own_part(sharded_as(tensor, gradient))
    return with_own_part(_relative(own.pullback, own_part(gradient), norm, part), gradient)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _relative(product: Callable[[Tensor, Tensor], Tensor], gradient: Tensor, norm: float, tensor: Tensor) -> Tensor:
    """Returns a product with the optimizer's derivative at `gradient`, relative to the weight's norm."""
    return product(gradient.to(torch.float32), tensor) / norm


def _pushforward(answer: Response, gradient: Tensor, norm: float) -> Pushforward:
    """Returns how a gradient's change changes the update, relative to the weight's norm, laid out as the weight.

    A function, or the factor of every element, as `LayerSums` takes it.
    """
    own = answer.of_own_part()
    if own is not None:
        # The factors of a diagonal derivative are worked out once instead of for every product with it, and by each
        # rank for its part.
        part = own_part(gradient)
        factors = _relative(own.pushforward, part, norm, part.new_ones(()).expand_as(part))
        return whole(with_own_part(factors, gradient))
    answer, gradient = answer.gathered(), whole(gradient)
    push = partial(_relative, answer.pushforward, gradient, norm)
    return push(gradient.new_ones(()).expand_as(gradient)) if isinstance(answer, ElementwiseResponse) else push


def _of_matrix(pushforward: Pushforward, layer: SnipLayer) -> Pushforward:
    """Returns the pushforward of a layer's weight as that of its matrix (O, I)."""
    if isinstance(pushforward, Tensor):
        (factors,) = layer.matrices(pushforward)
        return factors
    return lambda change: layer.matrices(pushforward(layer.laid_out([change])))[0]


def gradients_of(model: nn.Module, batch: Batch, layers: Mapping[str, SnipLayer]) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and the swapped layers' FP32 gradients under the formats that the layers hold now."""
    leaves = {
        name: layer.weight.detach().to(torch.float32, copy=True).requires_grad_() for name, layer in layers.items()
    }
    loss = run_pass(model, batch, {layers[name].weight_name(name): leaf for name, leaf in leaves.items()})
    return float(loss), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def weights_of(layers: Mapping[str, SnipLayer]) -> dict[str, Tensor]:
    return {name: layer.weight for name, layer in layers.items()}


@contextmanager
def converted(model: nn.Module, config: SnipConfig) -> Iterator[dict[str, SnipLayer]]:
    """Gives the model's swapped layers, and swaps them only for the time of the context if they were not."""
    was_converted = bool(snip_linears(model))
    if not was_converted:
        convert_model(model, config)
    try:
        yield snip_linears(model)
    finally:
        if not was_converted:
            restore_model(model)
