"""How much damage does each format do to each GEMM? Loss and weight divergence, estimated or directly measured.

Legend: T tokens of the micro-batch, n of them sampled, I in_features, O out_features. X (n, I), G (n, O) and W (O, I)
are a layer's input, output gradient and weight in high precision; eX, eG, eW their quantization errors; Xdot, Gdot the
derivatives along the probe's direction; D (O, I) = h'(g) / |W| the sensitivity of the optimizer's update, relative to
the weight's norm. Formulas: docs/method.md, sections 2 and 3.

A layer's own row (gemm "layer") is the divergence of quantizing its three GEMMs together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import SnipConfig
from .cost import linear_flops
from .formats import FORMATS, GEMMS, NumberFormat
from .linear import SnipLinear, convert_model, restore_model, set_step, snip_linears
from .optimizers import Response, responses
from .probe import Batch, LayerSample, run_pass, run_probe
from .quantize import COLUMN_TILE, ROW_TILE, SQUARE_TILE, fake_quantize, stream_key

LAYER = "layer"
ROWS = (*GEMMS, LAYER)
# What the program chooses between.
CHOICES = ("fp8", "fp4")


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
        config: `probes`, `probe_tokens`, `loss_form`, `seed` and the choice of layers are used.

    Raises:
        ValueError: the batch has no labels, or the loss is not finite.
        TypeError: an optimizer that cannot be differentiated.
    """
    config = config or SnipConfig(probe_tokens=None)
    with _converted(model, config) as layers:
        captured = Batch.of(batch)
        answers = responses(optimizer, _weights(layers))
        _, gradients = _gradients(model, captured, layers)
        return divergences_at(model, captured, answers, gradients, config)


def divergences_at(
    model: nn.Module,
    batch: Batch,
    answers: Mapping[str, Response],
    gradients: Mapping[str, Tensor],
    config: SnipConfig,
    step: int = 0,
    gradient_scale: float = 1.0,
    micro_batches: int = 1,
) -> DivergenceTable:
    """Probes a converted model and estimates all divergences of one optimizer step.

    Args:
        model: a converted model, without wrappers.
        batch: the step's micro-batch to probe.
        answers: layer -> the optimizer's response (`optimizers.responses`).
        gradients: layer -> the gradient that the optimizer is about to use, (O, I).
        config: as in `estimate_divergence`.
        step: decides, with `config.seed`, all random draws.
        gradient_scale: what clipping multiplied the gradients by.
        micro_batches: micro-batches of the step; their errors are independent except for that of the weights.

    Raises:
        ValueError: the loss of the micro-batch is not finite.
    """
    layers = snip_linears(model)
    sensitivity = {
        name: answer.derivative(gradients[name])
        / torch.linalg.vector_norm(layers[name].weight.detach().to(torch.float32))
        for name, answer in answers.items()
        if name in gradients
    }
    probe = run_probe(model, batch, sensitivity, config.probes, config.probe_tokens, config.seed, step)
    if not torch.isfinite(torch.tensor(probe.loss)):
        raise ValueError(f"The loss of the probed micro-batch is {probe.loss}; expected a finite number.")
    flops = linear_flops(model)
    rows: list[Divergence] = []
    for name, sample in probe.layers.items():
        layer = layers[name]
        terms = _LayerTerms(sample, layer.weight.detach(), sensitivity.get(name), micro_batches)
        key = stream_key(config.seed, step, 0, len(rows), 2)
        for fmt in CHOICES:
            parts = terms.weight_divergences(FORMATS[fmt], key)
            loss = terms.loss_divergence(FORMATS[fmt], config.loss_form) / probe.loss
            errors = terms.errors(FORMATS[fmt])
            for gemm in ROWS:
                rows.append(
                    Divergence(
                        name,
                        gemm,
                        fmt,
                        loss if gemm in ("forward", LAYER) else 0.0,
                        gradient_scale * parts[gemm],
                        sum(flops[name].values()) if gemm == LAYER else flops[name][gemm],
                        *errors[gemm],
                    )
                )
    return DivergenceTable(probe.loss, tuple(rows))


class _LayerTerms:
    """The sums of one layer, prepared once for all formats."""

    def __init__(self, sample: LayerSample, weight: Tensor, sensitivity: Tensor | None, micro_batches: int) -> None:
        self.x, self.g, self.w = sample.x, sample.grad_output, weight.to(torch.float32)
        self.sensitivity = sensitivity
        self.tokens = sample.tokens
        self.scale = sample.tokens / max(1, self.x.shape[0])
        # Sums of squares over independent tokens: from the sample to all tokens, and to the mean of all micro-batches.
        self.token_scale = self.scale / micro_batches
        self.g_w = self.g @ self.w  # (n, O) x (O, I)
        self.probes = [self._meetings(sample, index) for index in range(len(sample.x_dot))]

    def _meetings(self, sample: LayerSample, index: int) -> tuple[Tensor, ...]:
        """Returns the squares of what each error meets along one probe's direction, in `weight_divergences`' order."""
        x_dot, g_dot = sample.x_dot[index], sample.grad_output_dot[index]
        forward, forward_halves = self._sum_over_tokens(g_dot, self.x)
        grad_input, grad_input_halves = self._sum_over_tokens(self.g, x_dot)
        # One and the same quantized weight serves both GEMMs, so its parts add before the square.
        both = sample.gradient_dot[index] if sample.gradient_dot else forward + grad_input
        return (
            forward_halves,  # (O, I): eW in the forward GEMM
            grad_input_halves,  # (O, I): eW in grad_input
            both.square(),  # (O, I): eW in both
            (g_dot @ self.w).square_(),  # (n, O) x (O, I): eX in the forward GEMM
            (x_dot @ self.w.t()).square_(),  # (n, I) x (I, O): eG in grad_input
        )

    def _sum_over_tokens(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Returns left^T right, summed over all tokens (O, I), and its elementwise square.

        The square of a sample's sum would add the sample's noise; the product of two halves' sums does not.
        """
        half = left.shape[0] // 2
        if self.scale == 1 or half == 0:
            total = self.scale * (left.t() @ right)
            return total, total.square()
        first = self.scale * (left[:half].t() @ right[:half])
        second = self.scale * (left[half:].t() @ right[half:])
        return first + second, 4 * first * second

    def weight_divergences(self, fmt: NumberFormat | None, key: int) -> dict[str, float]:
        """Returns GEMM (and "layer") -> weight divergence; mean over the probes' squares."""
        random = key if fmt is FORMATS["fp4"] else None
        weight_error = (fake_quantize(self.w, fmt, SQUARE_TILE) - self.w).square_()
        x_error = (fake_quantize(self.x, fmt, ROW_TILE) - self.x).square_()
        g_error = (fake_quantize(self.g, fmt, ROW_TILE, random) - self.g).square_()
        forward = grad_input = both = 0.0
        for in_forward, in_grad_input, in_both, meets_x, meets_g in self.probes:
            forward_x = self.token_scale * _dot(meets_x, x_error)
            grad_input_g = self.token_scale * _dot(meets_g, g_error)
            forward += forward_x + max(0.0, _dot(in_forward, weight_error))
            grad_input += grad_input_g + max(0.0, _dot(in_grad_input, weight_error))
            both += forward_x + grad_input_g + _dot(in_both, weight_error)
        grad_weight = self._grad_weight(fmt, random)
        count = max(1, len(self.probes))
        squares = {
            "forward": forward / count,
            "grad_input": grad_input / count,
            "grad_weight": grad_weight,
            LAYER: both / count + grad_weight,
        }
        return {gemm: square**0.5 for gemm, square in squares.items()}

    def _grad_weight(self, fmt: NumberFormat | None, random: int | None) -> float:
        """Returns |D * (Q(G)^T Q(X) - G^T X)|^2: exact, no derivative needed."""
        if self.sensitivity is None:
            return 0.0
        g = fake_quantize(self.g, fmt, COLUMN_TILE, None if random is None else random + 1)
        error = g.t() @ fake_quantize(self.x, fmt, COLUMN_TILE) - self.g.t() @ self.x
        return self.token_scale * float((self.sensitivity * error).square().sum())

    def loss_divergence(self, fmt: NumberFormat | None, form: str) -> float:
        """Returns the estimated rise of the loss (not yet relative) from quantizing the forward GEMM."""
        x, w = fake_quantize(self.x, fmt, ROW_TILE), fake_quantize(self.w, fmt, SQUARE_TILE)
        if form == "norm":
            on_x = (
                _dot(self.g_w.square().sum(), (x - self.x).square().sum())
                * self.scale**2
                / (self.tokens * self.x.shape[1])
            )
            grad_weight = self.scale * (self.g.t() @ self.x)
            on_w = _dot(grad_weight.square().sum(), (w - self.w).square().sum()) / self.w.numel()
            return float((on_x + on_w) ** 0.5)
        # G_t . E_t with E = Q(X) Q(W)^T - X W^T
        along = ((self.g @ w) * x - self.g_w * self.x).sum(1)
        return float(self.tokens / 2 * self.scale * along.square().sum())

    def errors(self, fmt: NumberFormat | None) -> dict[str, tuple[float, float]]:
        """Returns GEMM (and "layer") -> (absolute, relative) error of its operands, rounded to nearest."""
        x_row = _error(self.x, fmt, ROW_TILE, self.scale)
        w = _error(self.w, fmt, SQUARE_TILE, 1.0)
        g_row = _error(self.g, fmt, ROW_TILE, self.scale)
        g_column = _error(self.g, fmt, COLUMN_TILE, self.scale)
        x_column = _error(self.x, fmt, COLUMN_TILE, self.scale)
        pairs = {"forward": (x_row, w), "grad_input": (g_row, w), "grad_weight": (g_column, x_column)}
        sums = {gemm: (left[0] + right[0], left[1] + right[1]) for gemm, (left, right) in pairs.items()}
        return {**sums, LAYER: (sum(value[0] for value in sums.values()), sum(value[1] for value in sums.values()))}


def measure_divergence(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    config: SnipConfig | None = None,
    draws: int = 2,
    gemms: tuple[str, ...] = ROWS,
) -> DivergenceTable:
    """Measures all divergences of one batch: the truth that `estimate_divergence` estimates. Slow.

    Every layer, GEMM and format is quantized alone, and the model's gradients and the optimizer's next updates are
    compared with those in high precision. Takes `draws` passes for FP4 (stochastic rounding; root mean square over
    the draws), one for FP8.

    Args:
        model, batch, optimizer, config: as in `estimate_divergence`.
        draws: stochastic-rounding draws per FP4 row.
        gemms: which rows to measure, of "forward", "grad_input", "grad_weight", "layer".
    """
    config = config or SnipConfig(probe_tokens=None)
    rows: list[Divergence] = []
    with _converted(model, config) as layers:
        captured = Batch.of(batch)
        answers = responses(optimizer, _weights(layers))
        in_force = {name: layer.snip_state.clone() for name, layer in layers.items()}
        try:
            for layer in layers.values():
                layer.set_formats(dict.fromkeys(GEMMS, "bf16"))
            flops = linear_flops(model)
            base_loss, base = _gradients(model, captured, layers)
            for name, layer in layers.items():
                for fmt in CHOICES:
                    for gemm in gemms:
                        chosen = GEMMS if gemm == LAYER else (gemm,)
                        layer.set_formats({g: fmt if g in chosen else "bf16" for g in GEMMS})
                        squares, losses = [], []
                        for draw in range(draws if fmt == "fp4" else 1):
                            set_step(layers, config.seed, draw, 0)
                            loss, gradients = _gradients(model, captured, layers)
                            squares.append(_update_distance(answers, layers, gradients, base))
                            losses.append(loss)
                        rise = sum(losses) / len(losses) / base_loss - 1
                        weight = (sum(squares) / len(squares)) ** 0.5
                        cost = sum(flops[name][g] for g in chosen)
                        rows.append(Divergence(name, gemm, fmt, rise, weight, cost))
                layer.set_formats(dict.fromkeys(GEMMS, "bf16"))
        finally:
            for name, layer in layers.items():
                layer.snip_state.copy_(in_force[name])
    return DivergenceTable(base_loss, tuple(rows))


def _update_distance(
    answers: Mapping[str, Response],
    layers: Mapping[str, SnipLinear],
    gradients: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
) -> float:
    """Returns the sum over layers of |h(gradient) - h(base)|^2 / |W|^2."""
    total = 0.0
    for name, answer in answers.items():
        if name not in base or name not in gradients:  # took no part in the pass (an expert without tokens)
            continue
        moved = answer.update(gradients[name]) - answer.update(base[name])
        moved *= answer.derivative(base[name]) != 0  # elements whose update has no meaningful derivative
        total += float(moved.square().sum() / layers[name].weight.detach().to(torch.float32).square().sum())
    return total


def _gradients(model: nn.Module, batch: Batch, layers: Mapping[str, SnipLinear]) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and the swapped layers' FP32 gradients under the formats that the layers hold now."""
    leaves = {
        name: layer.weight.detach().to(torch.float32, copy=True).requires_grad_() for name, layer in layers.items()
    }
    loss = run_pass(model, batch, {f"{name}.weight": leaf for name, leaf in leaves.items()})
    return float(loss), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _weights(layers: Mapping[str, SnipLinear]) -> dict[str, Tensor]:
    return {name: layer.weight for name, layer in layers.items()}


@contextmanager
def _converted(model: nn.Module, config: SnipConfig) -> Iterator[dict[str, SnipLinear]]:
    """Gives the model's swapped layers, and swaps them only for the time of the context if they were not."""
    was_converted = bool(snip_linears(model))
    if not was_converted:
        convert_model(model, config)
    try:
        yield snip_linears(model)
    finally:
        if not was_converted:
            restore_model(model)


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())


def _error(x: Tensor, fmt: NumberFormat | None, tile: tuple[int, int], scale: float) -> tuple[float, float]:
    """Returns the Frobenius norm of x's quantization error, from the sample to all tokens, and relative to |x|."""
    absolute = float(torch.linalg.vector_norm(fake_quantize(x, fmt, tile) - x))
    norm = float(torch.linalg.vector_norm(x))
    return absolute * scale**0.5, absolute / norm if norm > 0 else 0.0
