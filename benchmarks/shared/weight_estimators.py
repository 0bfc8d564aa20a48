"""Other ways to estimate the weight divergence: variants of the adjoint form, and the baselines.

Legend: T tokens, I in_features, O out_features of a layer with weight W (O, I), input X (T, I), output gradient G (T,
O) of the mean loss; Xdot, Gdot their derivatives along the probe's direction d; eX, eG, eW quantization errors; J the
derivative of the optimizer's update divided by |W|; sums of squares unless a formula says otherwise.

    elements        as in docs/method.md, section 3, but errors of different elements are all taken as independent
    token-sums      sum_t (terms of token t)^2, terms Gdot_t . E_t, Xdot_t . (eG W)_t, <d, (eG^T X)_t>
    inner-product   (sum_t terms of token t)^2
    operand-norms   |Gdot W|^2 |eX|^2 / (T I) + |Xdot W^T|^2 |eG|^2 / (T O) + |S|^2 |eW|^2 / (O I)
                    + |J|^2 |eD|^2 / (O I), S = Gdot^T X + G^T Xdot, eD the error of G^T X, |J|^2 from one random vector
    product-norms   |Gdot|^2 |E|^2 / (T O) + |Xdot|^2 |eG W|^2 / (T I) + |J|^2 |eD|^2 / (O I), E the error of X W^T
    fisher-trace    T sum_t |G_t|^2 |X_t|^2: the trace of the empirical Fisher of W, tokens taken as independent
    hessian-trace   z^T H z, z Rademacher: the trace of W's block of the Hessian (Hutchinson), 4 probes
    snip-paper      the estimate of the policy of this name, whole layers only
    *-error         that trace / (O I) * |eW|^2 (with the Hessian: HAWQ-V2, arXiv:1911.03852)

The loss divergence's estimators are those of `loss_estimators`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from snip_hf import SnipConfig, estimate_divergence
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import gradients_of, weights_of
from snip_hf.estimation.layer_sums import LayerSums
from snip_hf.estimation.pending import LAYER
from snip_hf.estimation.probe import RELATIVE_STEP, Probe, ProbeSettings, run_probe
from snip_hf.estimation.samples import LayerSample
from snip_hf.estimation.table import DivergenceTable
from snip_hf.kernels.rounding import fake_quantize
from snip_hf.layers.linear import SnipLinear
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.random_streams import stream_key
from snip_hf.optimizers.response import Response, responses

# (layer, row, format) -> estimate
Table = dict[tuple[str, str, str], float]

PROBES = 4
# Name -> probes and probe_tokens of `estimate_divergence`.
ADJOINT: dict[str, tuple[int, int | None]] = {
    "adjoint": (1, None),
    "adjoint-2-probes": (2, None),
    "adjoint-4-probes": (4, None),
    "adjoint-1024-tokens": (1, 1024),
    "adjoint-512-tokens": (1, 512),
    "adjoint-4-probes-1024-tokens": (4, 1024),
}
# Name -> autocast and relative step of the probe passes; "adjoint" is FP32 at 1e-3.
STEPS: dict[str, tuple[torch.dtype | None, float]] = {
    "adjoint-fp32-1e-4": (None, 1e-4),
    "adjoint-fp32-1e-2": (None, 1e-2),
    "adjoint-bf16-1e-3": (torch.bfloat16, 1e-3),
    "adjoint-bf16-1e-2": (torch.bfloat16, 1e-2),
    "adjoint-bf16-3e-2": (torch.bfloat16, 3e-2),
}
FORMS = ("elements", "token-sums", "inner-product", "operand-norms", "product-norms")
# Not on the scale of a divergence: only their ranks can be compared.
WEIGHT_BASELINES = (
    "absolute-error",
    "relative-error",
    "fisher-trace",
    "fisher-error",
    "hessian-trace",
    "hessian-error",
)
# Rows that quantize the weight.
_WEIGHT_ROWS = ("forward", "grad_input", LAYER)
# Streams of random rounding that neither training nor the product's estimate uses.
_OPERANDS = (7, 8)


@dataclass(frozen=True)
class Point:
    """A converted, unquantized model in training and one micro-batch: what every estimator starts from."""

    model: nn.Module
    inputs: Mapping[str, Any]
    optimizer: torch.optim.Optimizer
    config: SnipConfig
    batch: Batch
    layers: dict[str, SnipLinear]
    loss: float
    gradients: dict[str, Tensor]
    answers: dict[str, Response]
    norms: dict[str, float]

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Mapping[str, Any], optimizer: torch.optim.Optimizer, config: SnipConfig
    ) -> Point:
        batch, layers = Batch.of(inputs), snip_linears(model)
        loss, gradients = gradients_of(model, batch, layers)
        norms = {name: float(torch.linalg.vector_norm(layer.weight.detach())) for name, layer in layers.items()}
        answers = responses(optimizer, weights_of(layers))
        return cls(model, inputs, optimizer, config, batch, layers, loss, gradients, answers, norms)

    def weight(self, name: str) -> Tensor:
        return self.layers[name].weight.detach()

    def pushforward(self, name: str) -> Callable[[Tensor], Tensor]:
        return lambda tangent: self.answers[name].pushforward(self.gradients[name], tangent) / self.norms[name]

    def pullback(self, name: str, cotangent: Tensor) -> Tensor:
        return self.answers[name].pullback(self.gradients[name], cotangent) / self.norms[name]

    def keys(self, name: str) -> tuple[int, int]:
        """Returns the keys that G is rounded with in FP4, along O and along T."""
        row, column = (stream_key(self.config.seed, 0, 0, zlib.crc32(name.encode()), operand) for operand in _OPERANDS)
        return row, column

    def probe(
        self,
        direction: Callable[[str, Tensor], Tensor],
        probes: int,
        autocast: torch.dtype | None = None,
        relative_step: float = RELATIVE_STEP,
    ) -> tuple[Probe, dict[str, list[Tensor]]]:
        """Returns a probe over all tokens, and layer -> its direction d (O, I) in each of the probes.

        Args:
            direction: (layer, z ~ N(0, 1)) -> d.
        """
        kept: dict[str, list[Tensor]] = {name: [] for name in self.layers}

        def keep(name: str, z: Tensor) -> Tensor:
            kept[name].append(direction(name, z))
            return kept[name][-1].clone()  # the probe scales it in place

        pullbacks = {name: partial(keep, name) for name in self.layers}
        found = run_probe(
            self.model,
            self.batch,
            pullbacks,
            ProbeSettings(probes, None, self.config.seed, relative_step=relative_step, autocast=autocast),
        )
        return found, kept


def weight_estimates(point: Point) -> dict[str, Table]:
    """Returns estimator -> table of weight divergences (for baselines: of what stands for them)."""
    tables: dict[str, Table] = {}
    for name, (probes, tokens) in ADJOINT.items():
        config = replace(point.config, probes=probes, probe_tokens=tokens)
        found = estimate_divergence(point.model, point.inputs, point.optimizer, config)
        tables[name] = _column(found, "weight_divergence")
        if name == "adjoint":
            for column in ("absolute_error", "relative_error"):
                tables[column.replace("_", "-")] = _column(found, column)
    paper = estimate_divergence(
        point.model, point.inputs, point.optimizer, replace(point.config, policy="snip-paper", granularity="layer")
    )
    tables["snip-paper"] = {
        cell: value for cell, value in _column(paper, "weight_divergence").items() if cell[1] == LAYER
    }
    for name, (autocast, relative_step) in STEPS.items():
        tables[name] = _adjoint(point, point.probe(point.pullback, 1, autocast, relative_step)[0])
    probe, directions = point.probe(point.pullback, PROBES)
    tables.update(_forms(point, probe, directions))
    traces = {"fisher": fisher_traces(probe), "hessian": hessian_traces(point)}
    for name, trace in traces.items():
        cells = [(layer, row, fmt) for layer in trace for row in _WEIGHT_ROWS for fmt in SnipConfig().formats[::-1]]
        tables[f"{name}-trace"] = {cell: trace[cell[0]] for cell in cells}
        tables[f"{name}-error"] = {
            (layer, row, fmt): trace[layer] * _mean_square_error(point.weight(layer), fmt) for layer, row, fmt in cells
        }
    return tables


def _column(table: DivergenceTable, name: str) -> Table:
    return {(row.layer, row.gemm, row.format): getattr(row, name) for row in table.rows}


def _adjoint(point: Point, probe: Probe) -> Table:
    """The product's sums on a probe of our own."""
    table: Table = {}
    for name, sample in probe.layers.items():
        terms = LayerSums(sample, point.weight(name), point.pushforward(name), 1, formats=point.config.formats)
        for fmt in SnipConfig().formats[::-1]:
            for row, squares in terms.weight_divergences(fmt, point.keys(name)).items():
                table[name, row, fmt] = squares.step**0.5
    return table


class _Rounded(NamedTuple):
    """A layer's operands in one format, FP32."""

    w: Tensor
    x: Tensor
    g: Tensor
    x_column: Tensor
    g_column: Tensor


def _forms(point: Point, probe: Probe, directions: Mapping[str, list[Tensor]]) -> dict[str, Table]:
    """Returns "form" (one probe) and "form-4-probes" -> table."""
    tables: dict[str, Table] = {}
    for name, sample in probe.layers.items():
        weight, pushforward = point.weight(name), point.pushforward(name)
        z = torch.randn(weight.shape, generator=torch.Generator().manual_seed(point.config.seed)).to(weight.device)
        norm_of_j = float(pushforward(torch.sign(z)).square().sum())
        for fmt in SnipConfig().formats[::-1]:
            row_key, column_key = point.keys(name)
            rounded = _Rounded(
                fake_quantize(weight, FORMATS[fmt], "weight", 1),
                fake_quantize(sample.x, FORMATS[fmt], "activation", 1),
                fake_quantize(sample.grad_output, FORMATS[fmt], "gradient", 1, row_key),
                fake_quantize(sample.x, FORMATS[fmt], "activation", 0),
                fake_quantize(sample.grad_output, FORMATS[fmt], "gradient", 0, column_key),
            )
            error = rounded.g_column.t() @ rounded.x_column - sample.grad_output.t() @ sample.x  # (O, T) x (T, I)
            shared = (float(pushforward(error).square().sum()), norm_of_j * mean_square(error))
            per_probe = [
                {
                    **_by_token(sample, weight, rounded, x_dot, g_dot, d),
                    **_by_operand(sample, weight, rounded, x_dot, g_dot, *shared),
                }
                for x_dot, g_dot, d in zip(sample.x_dot, sample.grad_output_dot, directions[name], strict=True)
            ]
            for (form, row), square in per_probe[0].items():
                tables.setdefault(form, {})[name, row, fmt] = square**0.5
                mean = sum(squares[form, row] for squares in per_probe) / len(per_probe)
                tables.setdefault(f"{form}-{len(per_probe)}-probes", {})[name, row, fmt] = mean**0.5
    return tables


def _by_token(
    sample: LayerSample, w: Tensor, rounded: _Rounded, x_dot: Tensor, g_dot: Tensor, d: Tensor
) -> dict[tuple[str, str], float]:
    """Returns (form, row) -> square, for the forms that add the terms of a token first."""
    x, g = sample.x, sample.grad_output
    terms = {  # (T,) each
        "forward": ((g_dot @ rounded.w) * rounded.x - (g_dot @ w) * x).sum(1),
        "grad_input": ((rounded.g @ rounded.w - g @ w) * x_dot).sum(1),
        "grad_weight": ((rounded.g_column @ d) * rounded.x_column - (g @ d) * x).sum(1),
    }
    terms[LAYER] = terms["forward"] + terms["grad_input"] + terms["grad_weight"]
    squares = {}
    for row, term in terms.items():
        squares["token-sums", row] = float(term.square().sum())
        squares["inner-product", row] = float(term.sum().square())
    return squares


def _by_operand(
    sample: LayerSample, w: Tensor, rounded: _Rounded, x_dot: Tensor, g_dot: Tensor, exact: float, isotropic: float
) -> dict[tuple[str, str], float]:
    """Returns (form, row) -> square, for the forms that add operands' parts.

    Args:
        exact: |J eD|^2.
        isotropic: |J|^2 |eD|^2 / (O I).
    """
    x, g = sample.x, sample.grad_output
    e_w, e_x, e_g = rounded.w - w, rounded.x - x, rounded.g - g
    on_w = {"forward": g_dot.t() @ x, "grad_input": g.t() @ x_dot}  # (O, T) x (T, I)
    on_w[LAYER] = on_w["forward"] + on_w["grad_input"]
    on_x, on_g = g_dot @ w, x_dot @ w.t()
    squares: dict[tuple[str, str], float] = {}
    for form, part, last in (("elements", _aligned, exact), ("operand-norms", _isotropic, isotropic)):
        of_x, of_g = part(on_x, e_x), part(on_g, e_g)
        squares[form, "forward"] = of_x + part(on_w["forward"], e_w)
        squares[form, "grad_input"] = of_g + part(on_w["grad_input"], e_w)
        squares[form, "grad_weight"] = last
        squares[form, LAYER] = of_x + of_g + part(on_w[LAYER], e_w) + last
    squares["product-norms", "forward"] = _isotropic(g_dot, rounded.x @ rounded.w.t() - x @ w.t())
    squares["product-norms", "grad_input"] = _isotropic(x_dot, rounded.g @ rounded.w - g @ w)
    squares["product-norms", "grad_weight"] = isotropic
    squares["product-norms", LAYER] = (
        sum(squares["product-norms", row] for row in ("forward", "grad_input")) + isotropic
    )
    return squares


def _aligned(meets: Tensor, error: Tensor) -> float:
    return float((meets * error).square().sum())


def _isotropic(meets: Tensor, error: Tensor) -> float:
    return float(meets.square().sum() * error.square().mean())


def mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean())


def _mean_square_error(weight: Tensor, fmt: str) -> float:
    """|eW|^2 / (O I)"""
    return mean_square(fake_quantize(weight, FORMATS[fmt], "weight", 1) - weight)


def fisher_traces(probe: Probe) -> dict[str, float]:
    """Returns layer -> trace of the empirical Fisher, from all tokens of the probe."""
    return {
        name: sample.tokens * float((sample.grad_output.square().sum(1) * sample.x.square().sum(1)).sum())
        for name, sample in probe.layers.items()
    }


def hessian_traces(point: Point) -> dict[str, float]:
    """Returns layer -> z^T H z averaged over the probes, H its block of the mean loss's Hessian.

    All layers move together; the blocks between them have mean 0, since their vectors are independent.
    """
    probe, directions = point.probe(lambda _, z: torch.sign(z), PROBES)
    traces = {}
    for name, sample in probe.layers.items():
        dots = zip(sample.x_dot, sample.grad_output_dot, directions[name], strict=True)
        products = [
            float(((g_dot.t() @ sample.x + sample.grad_output.t() @ x_dot) * z).sum()) for x_dot, g_dot, z in dots
        ]
        traces[name] = sum(products) / len(products)
    return traces
