"""Ways to estimate the loss divergence; `loss_estimates` lists them.

Legend: as in `weight_estimators`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from snip_hf import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.layer_sums import LayerSums
from snip_hf.estimation.pending import read_all
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.estimation.samples import LayerSample
from snip_hf.kernels.rounding import fake_quantize
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.optimizers.update_rules import UpdateContext
from snip_hf.policies.snip_paper import PaperEstimate

from .weight_estimators import Point, hessian_traces, mean_square

LOSS_BASELINES = ("absolute-error", "relative-error", "fisher-trace")


def loss_estimates(point: Point, tokens: tuple[int, ...], sequence: int) -> dict[str, dict[tuple[str, str], float]]:
    """Returns "estimator/n" -> (layer, format) -> relative rise of the loss, forward GEMM quantized, from n tokens.

    With a_t = G_t . E_t, S the n tokens of a sample:

        token-fisher          T^2 / 2 * mean over S of a_t^2: the product's, every token taken to have a label
        sequence-fisher       T / 2 * sum over sequences of (sum_t a_t)^2, from S to all
        first-order           T * mean over S of a_t, signed
        first+token           first-order + token-fisher
        taylor                <G^T X, eW> + token-fisher: of the first order, only what the weight's error does
        shrunk+token          first-order * max(0, 1 - (its standard error over sequences / itself)^2) + token-fisher
        momentum+token        <M, eW> + token-fisher, M the optimizer's running mean of W's gradient, if it keeps one
        kl-token, kl-sequence as the Fisher forms, but labels drawn from the model: the true Fisher, so that the second
                              half of the Kullback-Leibler divergence's expansion is what they estimate
        norm                  docs/method.md, section 2: also that of the policy "snip-paper"
        fisher-error          half of it, for tokens of S; hessian-error likewise, all tokens only
        absolute-error, relative-error, fisher-trace

    Args:
        tokens: sample sizes n; those beyond the micro-batch are left out. Whole sequences, evenly spaced.
        sequence: tokens per sequence.
    """
    samples = {
        "own": run_probe(point.model, point.batch, {}, ProbeSettings(probes=0)).layers,
        "drawn": run_probe(point.model, Batch.of(_own_labels(point)), {}, ProbeSettings(probes=0)).layers,
    }
    hessian = hessian_traces(point)
    total = next(iter(samples["own"].values())).tokens
    tables: dict[str, dict[tuple[str, str], float]] = {}
    for name, sample in samples["own"].items():
        weight, mean_gradient = point.weight(name), running_mean(point, name)
        for fmt in SnipConfig().formats[::-1]:
            weight_error = fake_quantize(weight, FORMATS[fmt], "weight", 1) - weight
            error = mean_square(weight_error)
            along = {kind: _along(layers[name], weight, fmt) for kind, layers in samples.items()}
            for count in (count for count in tokens if count <= total):
                kept = _spaced(total, count, sequence).to(sample.x.device)
                part = LayerSample(total, sample.x[kept], sample.grad_output[kept])
                figures = _of_sample(part, weight, fmt, error)
                slope = part.grad_output.t() @ part.x * (total / count)
                figures["taylor"] = figures["token-fisher"] + float((slope * weight_error).sum())
                figures.update(_of_tokens({kind: a[kept] for kind, a in along.items()}, total, sequence))
                if mean_gradient is not None:
                    figures["momentum+token"] = float((mean_gradient * weight_error).sum()) + figures["token-fisher"]
                if count == total:
                    figures["hessian-error"] = hessian[name] * error / 2
                for estimator, value in figures.items():
                    scale = 1.0 if estimator in LOSS_BASELINES else point.loss
                    tables.setdefault(f"{estimator}/{count}", {})[name, fmt] = value / scale
    return tables


def running_mean(point: Point, name: str) -> Tensor | None:
    """Returns the mean of a weight's (clipped) gradients as the optimizer holds it, (O, I), None if it holds none."""
    weight = point.layers[name].weight
    group = next(g for g in point.optimizer.param_groups if any(p is weight for p in g["params"]))
    at = UpdateContext(group, point.optimizer.state.get(weight, {}), weight.detach())
    if at.state.get("exp_avg") is not None:
        # Adam's; Lion's has forgotten its start, and counts no steps.
        taken = 1 - group["betas"][0] ** float(at.state["step"]) if "step" in at.state else 1.0
        return at.held("exp_avg", weight.detach()) / taken
    if at.state.get("momentum_buffer") is not None:
        is_sum = isinstance(point.optimizer, torch.optim.SGD)
        return at.held("momentum_buffer", weight.detach()) * (1 - group["momentum"] if is_sum else 1.0)
    return None


def _of_sample(part: LayerSample, weight: Tensor, fmt: str, error: float) -> dict[str, float]:
    terms = LayerSums(part, weight, None, 1, formats=[fmt])
    absolute, relative = terms.errors(fmt)["forward"]
    squares = part.grad_output.square().sum(1) * part.x.square().sum(1)
    trace = part.tokens**2 * float(squares.mean())
    return {
        "token-fisher": terms.loss_divergence(fmt, "token-fisher"),
        "norm": read_all([PaperEstimate(terms).pending_loss_divergence(fmt, "")])[0],
        "absolute-error": absolute,
        "relative-error": relative,
        "fisher-trace": trace,
        "fisher-error": trace * error / 2,
    }


def _of_tokens(along: Mapping[str, Tensor], total: int, sequence: int) -> dict[str, float]:
    by_token = {kind: total**2 / 2 * float(a.square().mean()) for kind, a in along.items()}
    by_sequence = {
        kind: total**2 / 2 * float(a.view(-1, sequence).sum(1).square().sum() / len(a)) for kind, a in along.items()
    }
    of_sequences = total * along["own"].view(-1, sequence).mean(1)
    first, variance = float(of_sequences.mean()), float(of_sequences.var() / len(of_sequences))
    return {
        "sequence-fisher": by_sequence["own"],
        "first-order": first,
        "first+token": first + by_token["own"],
        "shrunk+token": (first * max(0.0, 1 - variance / first**2) if first else 0.0) + by_token["own"],
        "kl-token": by_token["drawn"],
        "kl-sequence": by_sequence["drawn"],
    }


def _along(sample: LayerSample, w: Tensor, fmt: str) -> Tensor:
    """Returns G_t . E_t, (T,)."""
    x = fake_quantize(sample.x, FORMATS[fmt], "activation", 1)
    w_rounded = fake_quantize(w, FORMATS[fmt], "weight", 1)
    g = sample.grad_output
    return ((g @ w_rounded) * x - (g @ w) * sample.x).sum(1)  # (T, O) x (O, I)


def _spaced(total: int, count: int, sequence: int) -> Tensor:
    """Returns the positions of `count` of `total` tokens: whole sequences, evenly spaced."""
    chosen = torch.linspace(0, total // sequence - 1, count // sequence).round().to(torch.int64)
    return (chosen[:, None] * sequence + torch.arange(sequence)).flatten()


@torch.no_grad()
def _own_labels(point: Point) -> dict[str, Any]:
    """Returns the inputs with labels that the model itself draws, each given the real tokens before it."""
    ids = point.inputs["input_ids"]
    logits = point.model(input_ids=ids).logits[:, :-1].to(torch.float32)
    generator = torch.Generator(logits.device).manual_seed(point.config.seed)
    drawn = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=generator).view(ids.shape[0], -1)
    return {**point.inputs, "labels": torch.cat([ids[:, :1], drawn], 1)}


@torch.no_grad()
def measured_kl(point: Point) -> dict[tuple[str, str], float]:
    """Returns (layer, format) -> KL divergence from the unquantized model, relative to the loss.

    The forward GEMM is quantized. Mean over the micro-batch's tokens: what second-order estimates mean to find.
    """

    def log_probabilities() -> Tensor:
        logits: Tensor = point.model(input_ids=point.inputs["input_ids"]).logits
        return logits.to(torch.float32).log_softmax(-1)

    base, high = log_probabilities(), dict.fromkeys(GEMMS, "bf16")
    result = {}
    for name, layer in point.layers.items():
        for fmt in SnipConfig().formats[::-1]:
            layer.set_formats({**high, "forward": fmt})
            result[name, fmt] = float((base.exp() * (base - log_probabilities())).sum(-1).mean()) / point.loss
        layer.set_formats(high)
    return result
