"""How much damage does each format do to each GEMM? Loss and weight divergence, estimated from one probe.

A layer's own row (gemm "layer") is the divergence of quantizing its three GEMMs together. The sums are in `terms`, the
directly measured truth in `truth`, the formulas in docs/method.md, sections 2 and 3.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .config import SnipConfig
from .cost import linear_flops
from .formats import GEMMS
from .linear import SnipLinear, convert_model, restore_model, snip_linears
from .optimizers import ElementwiseResponse, Response, responses
from .probe import Batch, read, run_pass, run_probe
from .quantize import stream_key
from .terms import LAYER, ROWS, LayerTerms, Pending, Squares, read_all

# What the program chooses between.
CHOICES = ("fp8", "fp4")
# The estimate's own streams of random rounding: other numbers than those of the training step.
_OPERANDS = (len(GEMMS), len(GEMMS) + 1)


@dataclass(frozen=True)
class Divergence:
    """One row: what quantizing one GEMM (or, for gemm "layer", all three) of one layer to one format does."""

    layer: str
    gemm: str
    format: str
    loss_divergence: float
    """Relative increase of the loss."""
    weight_divergence: float
    """sqrt(sum over all swapped layers m of |change of m's next update|^2 / |W_m|^2)."""
    flops: float
    """FLOPs per token of what is quantized."""
    weight_bias: float | None = None
    """The part of the weight divergence that comes back at every step (its square is a part of the whole's square);
    None where it was not measured."""
    absolute_error: float | None = None
    """Sum of the Frobenius norms of the operands' quantization errors; None where it was not asked for."""
    relative_error: float | None = None
    """The same, each error divided by its operand's Frobenius norm."""


@dataclass(frozen=True)
class DivergenceTable:
    """Rows for every layer, GEMM and format, and the loss (mean over the micro-batch's tokens) that they belong to."""

    loss: float
    rows: tuple[Divergence, ...]

    def to_records(self) -> list[dict[str, Any]]:
        """Returns the rows as plain dicts."""
        return [asdict(row) for row in self.rows]

    def totals(self, fmt: str) -> dict[str, float]:
        """Returns the sums of the loss and weight divergence over all layers, each wholly in `fmt`."""
        rows = [row for row in self.rows if row.format == fmt and row.gemm == LAYER]
        return {
            "loss": sum(row.loss_divergence for row in rows),
            "weight": sum(row.weight_divergence for row in rows),
        }


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
        return divergences_at(model, captured.front(config.probe_batch_tokens), answers, gradients, config)


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
) -> DivergenceTable:
    """Probes a converted model and estimates all divergences of one optimizer step.

    Args:
        model: a converted model, without wrappers.
        batch: the step's micro-batch to probe, or the `front` of it.
        answers: layer -> the optimizer's response (`optimizers.responses`).
        gradients: layer -> the gradient that the optimizer is about to use, (O, I).
        config: as in `estimate_divergence`.
        step: decides, with `config.seed`, all random draws.
        gradient_scale: what clipping multiplied the gradients by.
        micro_batches: micro-batches of the step; their errors are independent except for that of the weights.
        probes: in place of `config.probes`. 0 takes one pass and no derivatives: of the weight divergence only the part
            of grad_weight is then known, also in the layers' rows.

    Raises:
        ValueError: the loss of the micro-batch is not finite.
    """
    layers = snip_linears(model)
    moving = [name for name in answers if name in gradients]
    # Not vector_norm, whose FP32 sum on a CPU is off by 2e-3 at 20 million numbers.
    found = read([layers[name].weight.detach().to(torch.float32).square().sum().sqrt() for name in moving])
    # Not of a weight initialised with zeros: no update of it is small or large against it.
    norms = {name: norm for name, norm in zip(moving, found, strict=True) if norm != 0}
    pullbacks = {
        name: partial(_relative, answers[name].pullback, gradients[name], norm) for name, norm in norms.items()
    }
    probes = config.probes if probes is None else probes
    probe = run_probe(model, batch, pullbacks, probes, config.probe_tokens, config.seed, step)
    if not math.isfinite(probe.loss):
        raise ValueError(f"The loss of the probed micro-batch is {probe.loss}; expected a finite number.")
    flops = linear_flops(model)
    sums: list[_Sums] = []
    for name, sample in probe.layers.items():
        pushforward = _pushforward(answers[name], gradients[name], norms[name]) if name in norms else None
        terms = LayerTerms(sample, layers[name].weight.detach(), pushforward, micro_batches, batch.parts)
        row_key, column_key = (
            stream_key(config.seed, step, 0, zlib.crc32(name.encode()), operand) for operand in _OPERANDS
        )
        unclipped = None
        if config.loss_form == "taylor" and name in gradients:
            unclipped = gradients[name].to(torch.float32) / (gradient_scale or 1.0)
        for fmt in CHOICES:
            squares = terms.pending_weight_divergences(fmt, (row_key, column_key))
            loss = terms.pending_loss_divergence(fmt, config.loss_form, unclipped)
            sums.append(_Sums(name, fmt, squares, loss, terms.pending_errors(fmt)))
    # All sums are under way; now they are waited for, once.
    parts = zip(*(read_all(part) for part in zip(*(one[2:] for one in sums), strict=True)), strict=True)
    rows: list[Divergence] = []
    for (name, fmt, *_), (squares, loss, errors) in zip(sums, parts, strict=True):
        for gemm in ROWS:
            rows.append(
                Divergence(
                    name,
                    gemm,
                    fmt,
                    loss / probe.loss if gemm in ("forward", LAYER) else 0.0,
                    gradient_scale * _root(squares[gemm].step),
                    sum(flops[name].values()) if gemm == LAYER else flops[name][gemm],
                    gradient_scale * _root(squares[gemm].bias),
                    *errors[gemm],
                )
            )
    return DivergenceTable(probe.loss, tuple(rows))


class _Sums(NamedTuple):
    """What one layer and format still have on the device."""

    layer: str
    format: str
    squares: Pending[dict[str, Squares]]
    loss: Pending[float]
    errors: Pending[dict[str, tuple[float, float]]]


def _root(square: float) -> float:
    return math.sqrt(square) if square > 0 or math.isnan(square) else 0.0


def _relative(product: Callable[[Tensor, Tensor], Tensor], gradient: Tensor, norm: float, tensor: Tensor) -> Tensor:
    """Returns a product with the optimizer's derivative at `gradient`, relative to the weight's norm."""
    return product(gradient.to(torch.float32), tensor) / norm


def _pushforward(answer: Response, gradient: Tensor, norm: float) -> Callable[[Tensor], Tensor] | Tensor:
    """Returns how a gradient's change changes the update, relative to the weight's norm, as `LayerTerms` takes it."""
    push = partial(_relative, answer.pushforward, gradient, norm)
    # The factors of a diagonal derivative are worked out once instead of for every product with it.
    return push(gradient.new_ones(()).expand_as(gradient)) if isinstance(answer, ElementwiseResponse) else push


def gradients_of(model: nn.Module, batch: Batch, layers: Mapping[str, SnipLinear]) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and the swapped layers' FP32 gradients under the formats that the layers hold now."""
    leaves = {
        name: layer.weight.detach().to(torch.float32, copy=True).requires_grad_() for name, layer in layers.items()
    }
    loss = run_pass(model, batch, {f"{name}.weight": leaf for name, leaf in leaves.items()})
    return float(loss), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def weights_of(layers: Mapping[str, SnipLinear]) -> dict[str, Tensor]:
    return {name: layer.weight for name, layer in layers.items()}


@contextmanager
def converted(model: nn.Module, config: SnipConfig) -> Iterator[dict[str, SnipLinear]]:
    """Gives the model's swapped layers, and swaps them only for the time of the context if they were not."""
    was_converted = bool(snip_linears(model))
    if not was_converted:
        convert_model(model, config)
    try:
        yield snip_linears(model)
    finally:
        if not was_converted:
            restore_model(model)
