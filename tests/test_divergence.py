"""Are the estimated divergences those of the formulas, and those that really happen?"""

from __future__ import annotations

import copy
import math
import re
import statistics
from typing import Any

import pytest
import torch
from small import text, tiny_llama, tiny_lm, tokens
from torch import Tensor, nn

from snip_hf.config import SnipConfig
from snip_hf.divergence import CHOICES, ROWS, DivergenceTable, divergences_at, estimate_divergence, measure_divergence
from snip_hf.formats import FORMATS, GEMMS
from snip_hf.linear import convert_model, set_step, snip_linears
from snip_hf.optimizers import responses
from snip_hf.probe import Batch, LayerSample, run_probe
from snip_hf.quantize import COLUMN_TILE, ROW_TILE, SQUARE_TILE, fake_quantize

LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
Values = dict[tuple[str, str, str], float]


def weight_divergences(table: DivergenceTable) -> Values:
    return {(row.layer, row.gemm, row.format): row.weight_divergence for row in table.rows}


def loss_divergences(table: DivergenceTable) -> Values:
    return {(row.layer, row.gemm, row.format): row.loss_divergence for row in table.rows}


def adamw_after(model: nn.Module, steps: int, lr: float = 3e-3, rows: int = 4, length: int = 96) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        model(**text(rows, length, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def trained_tiny_lm(**options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    model = tiny_lm(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        model(**tokens(seed=step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


# ------------------------------------------------------------------------------------------- estimate against the truth


def test_the_weight_divergence_of_a_trained_llama_is_right_to_a_tenth_for_the_typical_layer() -> None:
    """Over 3 models and 2 batches each: single batches of 384 tokens lie between 0.02 and 0.13."""
    ratios: dict[str, list[float]] = {fmt: [] for fmt in CHOICES}
    for seed in range(3):
        model = tiny_llama(seed=seed)
        optimizer = adamw_after(model, steps=60)
        for index in (60, 61):
            batch = text(4, 96, index)
            truth = weight_divergences(measure_divergence(model, batch, optimizer, gemms=("layer",)))
            estimate = weight_divergences(estimate_divergence(model, batch, optimizer))
            assert len(truth) == 14 * 2
            for key, value in truth.items():
                ratios[key[2]].append(estimate[key] / value)
    for fmt, found in ratios.items():
        assert len(found) == 3 * 2 * 14
        assert statistics.median(abs(ratio - 1) for ratio in found) <= 0.10, fmt
        assert 0.9 < statistics.median(found) < 1.1, fmt


def test_formats_differ_as_their_grids_do() -> None:
    model, optimizer = trained_tiny_lm()
    values = weight_divergences(estimate_divergence(model, tokens(), optimizer))
    for layer in LAYERS:
        for gemm in ROWS:
            if values[layer, gemm, "fp8"] > 0:
                # One mantissa bit against three: four times the spacing, and FP8 has more small numbers.
                assert 2 < values[layer, gemm, "fp4"] / values[layer, gemm, "fp8"] < 20


@pytest.mark.parametrize("rule", ["adamw", "sgd", "none"])
def test_the_grad_weight_part_is_exact(rule: str) -> None:
    model, optimizer = trained_tiny_lm()
    if rule != "adamw":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3) if rule == "sgd" else None
    truth = weight_divergences(measure_divergence(model, tokens(), optimizer, gemms=("grad_weight",)))
    estimate = weight_divergences(estimate_divergence(model, tokens(), optimizer))
    for layer in LAYERS:
        # AdamW's update is no linear function of the gradient; SGD's is.
        tolerance = 0.03 if rule == "adamw" else 1e-3
        assert estimate[layer, "grad_weight", "fp8"] == pytest.approx(truth[layer, "grad_weight", "fp8"], rel=tolerance)


def test_the_grad_weight_part_in_fp4_has_the_same_mean_square_over_draws() -> None:
    model, _ = trained_tiny_lm()
    batch, draws = tokens(rows=4, length=32), 24
    truth = weight_divergences(measure_divergence(model, batch, draws=draws, gemms=("grad_weight",)))
    squares = dict.fromkeys(LAYERS, 0.0)
    for seed in range(draws):
        found = weight_divergences(estimate_divergence(model, batch, config=SnipConfig(seed=seed, probe_tokens=None)))
        for layer in LAYERS:
            squares[layer] += found[layer, "grad_weight", "fp4"] ** 2 / draws
    for layer, square in squares.items():
        assert math.sqrt(square) == pytest.approx(truth[layer, "grad_weight", "fp4"], rel=0.05)


def test_quantizing_a_layer_changes_no_update_through_the_grad_input_of_the_first_layer() -> None:
    model, optimizer = trained_tiny_lm()
    for table in (estimate_divergence(model, tokens(), optimizer), measure_divergence(model, tokens(), optimizer)):
        assert weight_divergences(table)["layers.0.up", "grad_input", "fp4"] == 0
        assert weight_divergences(table)["layers.1.up", "grad_input", "fp4"] > 0


# ------------------------------------------------------------------------------------------------ the truth's own truth


def next_weights(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layers' weights after the optimizer's real next step, taken by a copy in float64."""
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    copies = [nn.Parameter(weight.clone()) for weight in weights.values()]
    twin = type(optimizer)(copies, lr=1.0)  # type: ignore[call-arg]
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, parameter in zip(weights, copies, strict=True):
        parameter.grad = gradients[name].double()
    twin.step()
    found = dict(zip(weights, copies, strict=True))
    return {layer: found[f"{layer}.weight"].detach() for layer in LAYERS}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("gemm", ROWS)
def test_measured_is_what_the_next_steps_of_copies_really_differ_by(gemm: str, kind: Any) -> None:
    model = tiny_lm()
    optimizer = kind(model.parameters(), lr=1e-2)
    for step in range(4):
        model(**tokens(seed=step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    inputs, draws = tokens(seed=9), 2
    config = SnipConfig(start_format="bf16", seed=5)
    table = measure_divergence(model, inputs, optimizer, config, draws=draws, gemms=(gemm,))

    worker = copy.deepcopy(model)
    convert_model(worker, config)
    layers = snip_linears(worker)

    def run() -> tuple[float, dict[str, Tensor]]:
        worker.zero_grad()
        loss = worker(**inputs)["loss"]
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in worker.named_parameters()}

    base_loss, base_gradients = run()
    base = next_weights(model, optimizer, base_gradients)
    assert table.loss == pytest.approx(base_loss, rel=1e-6)
    assert [(row.layer, row.format) for row in table.rows] == [(layer, fmt) for layer in LAYERS for fmt in CHOICES]
    for row in table.rows:
        squares, losses = [], []
        for draw in range(draws if row.format == "fp4" else 1):
            on = GEMMS if gemm == "layer" else (gemm,)
            layers[row.layer].set_formats({name: row.format if name in on else "bf16" for name in GEMMS})
            set_step(layers, config.seed, draw, 0)
            loss, gradients = run()
            after = next_weights(model, optimizer, gradients)
            distance = {
                m: (after[m] - base[m]).norm() / model.get_submodule(m).weight.detach().double().norm() for m in LAYERS
            }
            squares.append(sum(float(value) ** 2 for value in distance.values()))
            losses.append(loss)
        layers[row.layer].set_formats(dict.fromkeys(GEMMS, "bf16"))
        assert row.weight_divergence == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-3, abs=1e-9)
        assert row.loss_divergence == pytest.approx(sum(losses) / len(losses) / base_loss - 1, abs=1e-6)
        if gemm not in ("forward", "layer"):
            assert row.loss_divergence == 0


# ------------------------------------------------------------------------------------------------- written-out formulas


def with_sample(
    inputs: dict[str, Tensor], config: SnipConfig, model: nn.Module | None = None, **options: Any
) -> tuple[DivergenceTable, dict[str, LayerSample], dict[str, Tensor], dict[str, Tensor], float]:
    """Rows of `divergences_at`, and what went into them: samples, weights, D and the loss, from a probe of its own."""
    model = model or tiny_lm()
    convert_model(model, config)
    layers = snip_linears(model)
    weights = {name: layer.weight for name, layer in layers.items()}
    generator = torch.Generator().manual_seed(2)
    gradients = {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1, betas=(0.5, 0.5), eps=0.5)
    answers = responses(optimizer, weights)
    table = divergences_at(model, Batch.of(inputs), answers, gradients, config, **options)
    fixed = {name: weight.detach() for name, weight in weights.items()}
    sensitivity = {name: answer.derivative(gradients[name]) / fixed[name].norm() for name, answer in answers.items()}
    step = options.get("step", 0)
    probe = run_probe(model, Batch.of(inputs), sensitivity, config.probes, config.probe_tokens, config.seed, step)
    assert table.loss == probe.loss
    return table, probe.layers, fixed, sensitivity, probe.loss


def square_of_sum(per_token: Tensor, tokens: int, error: Tensor) -> float:
    """sum_oi (sum over all tokens * error)^2; from a sample, the product of two halves' sums, which is unbiased."""
    count = per_token.shape[0]
    if count == tokens:
        return ((per_token.sum(0) * error) ** 2).sum().item()
    halves = [part.mean(0) * tokens * error for part in per_token.split(count // 2)]
    return max(0.0, (halves[0] * halves[1]).sum().item())


def squares_written_out(
    sample: LayerSample, w: Tensor, d: Tensor, fmt: str, micro_batches: int = 1
) -> dict[str, float]:
    """docs/method.md, section 3, in float64 with every index visible; output gradients rounded to nearest.

    Sums over tokens stand for those of all T tokens; what errs anew for every token averages over micro-batches.
    """
    grid = FORMATS[fmt]
    x, g, weight = sample.x.double(), sample.grad_output.double(), w.double()
    e_w = fake_quantize(w, grid, SQUARE_TILE).double() - weight
    e_x = fake_quantize(sample.x, grid, ROW_TILE).double() - x
    e_g = fake_quantize(sample.grad_output, grid, ROW_TILE).double() - g
    g_columns = fake_quantize(sample.grad_output, grid, COLUMN_TILE).double()
    x_columns = fake_quantize(sample.x, grid, COLUMN_TILE).double()
    scale = sample.tokens / x.shape[0]
    totals = dict.fromkeys(ROWS, 0.0)
    for index, (x_dot, g_dot) in enumerate(zip(sample.x_dot, sample.grad_output_dot, strict=True)):
        per_token_forward = torch.einsum("to,ti->toi", g_dot.double(), x)
        per_token_grad_input = torch.einsum("to,ti->toi", g, x_dot.double())
        s_both = scale * (per_token_forward + per_token_grad_input).sum(0)
        if sample.tokens > x.shape[0]:
            s_both = sample.gradient_dot[index].double()
        on_x = torch.einsum("to,oi->ti", g_dot.double(), weight) * e_x
        on_g = torch.einsum("ti,oi->to", x_dot.double(), weight) * e_g
        by_token = scale / micro_batches
        forward_tokens = by_token * torch.einsum("ti,ti->", on_x, on_x).item()
        grad_input_tokens = by_token * torch.einsum("to,to->", on_g, on_g).item()
        totals["forward"] += forward_tokens + square_of_sum(per_token_forward, sample.tokens, e_w)
        totals["grad_input"] += grad_input_tokens + square_of_sum(per_token_grad_input, sample.tokens, e_w)
        totals["layer"] += forward_tokens + grad_input_tokens + ((s_both * e_w) ** 2).sum().item()
    totals = {gemm: total / len(sample.x_dot) for gemm, total in totals.items()}
    error = torch.einsum("to,ti->oi", g_columns, x_columns) - torch.einsum("to,ti->oi", g, x)
    totals["grad_weight"] = scale / micro_batches * ((d.double() * error) ** 2).sum().item()
    totals["layer"] += totals["grad_weight"]
    return totals


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SnipConfig(probe_tokens=None), {}),
        (SnipConfig(probe_tokens=None, probes=3, seed=4), {"step": 7}),
        (SnipConfig(probe_tokens=128), {"step": 2}),
        (SnipConfig(probe_tokens=None), {"micro_batches": 4}),
        (SnipConfig(probe_tokens=128, probes=2), {"micro_batches": 8, "gradient_scale": 0.25}),
    ],
)
def test_weight_divergence_is_the_written_out_formula(config: SnipConfig, options: dict[str, Any]) -> None:
    table, samples, weights, sensitivity, _ = with_sample(tokens(rows=2, length=150), config, **options)
    values = weight_divergences(table)
    scale = options.get("gradient_scale", 1.0)
    assert set(values) == {(layer, gemm, fmt) for layer in LAYERS for gemm in ROWS for fmt in CHOICES}
    for layer in LAYERS:
        for fmt in CHOICES:
            squares = squares_written_out(
                samples[layer], weights[layer], sensitivity[layer], fmt, options.get("micro_batches", 1)
            )
            # In FP4 output gradients are rounded stochastically: only the forward part is the same to the bit.
            for gemm in ROWS if fmt == "fp8" else ("forward",):
                assert values[layer, gemm, fmt] == pytest.approx(scale * math.sqrt(squares[gemm]), rel=1e-4, abs=1e-12)


def test_a_sample_of_the_tokens_gives_nearly_the_weight_divergences_of_all() -> None:
    model, optimizer = trained_tiny_lm()
    batch = tokens(rows=24, length=128)
    whole = weight_divergences(estimate_divergence(model, batch, optimizer, SnipConfig(probe_tokens=None)))
    ratios: dict[str, list[float]] = {gemm: [] for gemm in ROWS}
    for seed in range(4):
        config = SnipConfig(probe_tokens=512, seed=seed)
        found = weight_divergences(estimate_divergence(model, batch, optimizer, config))
        for key, value in whole.items():
            if value > 0:
                ratios[key[1]].append(found[key] / value)
    assert abs(statistics.median(ratios["layer"]) - 1) < 0.1
    # Without the halves' product the sums' noise would add a third here.
    assert abs(statistics.median(ratios["forward"]) - 1) < 0.2
    assert abs(statistics.median(ratios["grad_input"]) - 1) < 0.2


@pytest.mark.parametrize("probe_tokens", [None, 128])
def test_token_fisher_is_the_written_out_formula(probe_tokens: int | None) -> None:
    config = SnipConfig(probe_tokens=probe_tokens, loss_form="token-fisher")
    table, samples, weights, _, loss = with_sample(tokens(rows=2, length=150), config)
    values = loss_divergences(table)
    for layer, sample in samples.items():
        x, w, g = sample.x, weights[layer], sample.grad_output.double()
        assert sample.tokens == 300
        for fmt in CHOICES:
            q_x = fake_quantize(x, FORMATS[fmt], ROW_TILE).double()
            q_w = fake_quantize(w, FORMATS[fmt], SQUARE_TILE).double()
            e = torch.einsum("ti,oi->to", q_x, q_w) - torch.einsum("ti,oi->to", x.double(), w.double())
            along = torch.einsum("to,to->t", g, e)
            expected = 300 / 2 * (300 / x.shape[0]) * torch.einsum("t,t->", along, along).item() / loss
            assert values[layer, "forward", fmt] == pytest.approx(expected, rel=1e-3)
            assert values[layer, "layer", fmt] == values[layer, "forward", fmt]
            assert values[layer, "grad_input", fmt] == values[layer, "grad_weight", fmt] == 0


@pytest.mark.parametrize("probe_tokens", [None, 128])
def test_the_norm_form_is_the_written_out_formula(probe_tokens: int | None) -> None:
    config = SnipConfig(probe_tokens=probe_tokens, loss_form="norm")
    table, samples, weights, _, loss = with_sample(tokens(rows=2, length=150), config)
    values = loss_divergences(table)
    for layer, sample in samples.items():
        x, w, g = sample.x.double(), weights[layer].double(), sample.grad_output.double()
        scale, count, (out_features, in_features) = 300 / x.shape[0], 300, w.shape
        for fmt in CHOICES:
            e_x = fake_quantize(sample.x, FORMATS[fmt], ROW_TILE).double() - x
            e_w = fake_quantize(weights[layer], FORMATS[fmt], SQUARE_TILE).double() - w
            dx = torch.einsum("to,oi->ti", g, w)
            dw = scale * torch.einsum("to,ti->oi", g, x)
            square = (scale * dx.square().sum()) * (scale * e_x.square().sum()) / (count * in_features)
            square += dw.square().sum() * e_w.square().sum() / (out_features * in_features)
            assert values[layer, "forward", fmt] == pytest.approx(math.sqrt(square.item()) / loss, rel=1e-4)
            assert values[layer, "grad_weight", fmt] == 0


def test_errors_are_the_norms_of_what_rounding_changes() -> None:
    table, samples, weights, _, _ = with_sample(tokens(rows=2, length=60), SnipConfig(probe_tokens=None))
    rows = {(row.layer, row.gemm, row.format): row for row in table.rows}
    for layer, sample in samples.items():
        for fmt in CHOICES:

            def change(tensor: Tensor, tile: tuple[int, int], fmt: str = fmt) -> tuple[float, float]:
                error = (fake_quantize(tensor, FORMATS[fmt], tile).double() - tensor.double()).norm().item()
                return error, error / tensor.double().norm().item()

            w = change(weights[layer], SQUARE_TILE)
            pairs = {
                "forward": (change(sample.x, ROW_TILE), w),
                "grad_input": (change(sample.grad_output, ROW_TILE), w),
                "grad_weight": (change(sample.grad_output, COLUMN_TILE), change(sample.x, COLUMN_TILE)),
            }
            for kind, name in enumerate(("absolute_error", "relative_error")):
                expected = {gemm: left[kind] + right[kind] for gemm, (left, right) in pairs.items()}
                for gemm in GEMMS:
                    assert getattr(rows[layer, gemm, fmt], name) == pytest.approx(expected[gemm], rel=1e-4)
                assert getattr(rows[layer, "layer", fmt], name) == pytest.approx(sum(expected.values()), rel=1e-4)


# ------------------------------------------------------------------------------------------------ optimizer and scaling


def test_clipping_scales_the_weight_divergence_and_leaves_the_loss_alone() -> None:
    inputs, config = tokens(rows=2, length=60), SnipConfig()
    plain, clipped = (with_sample(inputs, config, gradient_scale=scale)[0] for scale in (1.0, 0.3))
    for a, b in zip(plain.rows, clipped.rows, strict=True):
        assert b.weight_divergence == pytest.approx(0.3 * a.weight_divergence, rel=1e-6)
        assert (b.loss_divergence, b.absolute_error) == (a.loss_divergence, a.absolute_error)


def test_micro_batches_average_the_token_errors_and_not_that_of_the_weight() -> None:
    inputs, config = tokens(rows=2, length=60), SnipConfig()
    one, many, four = (
        weight_divergences(with_sample(inputs, config, micro_batches=count)[0]) for count in (1, 10**12, 4)
    )
    for layer in LAYERS:
        assert four[layer, "grad_weight", "fp8"] == pytest.approx(one[layer, "grad_weight", "fp8"] / 2, rel=1e-6)
        weight_part = many[layer, "forward", "fp8"] ** 2
        assert weight_part > 0
        token_part = one[layer, "forward", "fp8"] ** 2 - weight_part
        assert four[layer, "forward", "fp8"] ** 2 == pytest.approx(weight_part + token_part / 4, rel=1e-5)


def test_no_optimizer_means_sgd_with_learning_rate_1_and_sgd_is_linear_in_it() -> None:
    model, inputs = tiny_lm(), tokens()
    config = SnipConfig(probe_tokens=None)
    without = estimate_divergence(model, inputs, None, config)
    assert without == estimate_divergence(model, inputs, torch.optim.SGD(model.parameters(), lr=1.0), config)
    half = estimate_divergence(model, inputs, torch.optim.SGD(model.parameters(), lr=0.5), config)
    for a, b in zip(without.rows, half.rows, strict=True):
        assert b.weight_divergence == pytest.approx(a.weight_divergence / 2, rel=1e-3)
        assert b.loss_divergence == pytest.approx(a.loss_divergence, rel=1e-3)


@pytest.mark.parametrize("ask", [estimate_divergence, measure_divergence])
def test_a_frozen_layer_has_no_update_that_could_diverge(ask: Any) -> None:
    model, inputs = tiny_lm(), tokens()
    model.layers[1].down.weight.requires_grad_(False)
    rows = {(row.layer, row.gemm, row.format): row for row in ask(model, inputs).rows}
    for fmt in CHOICES:
        assert rows["layers.1.down", "grad_weight", fmt].weight_divergence == 0
        assert rows["layers.1.down", "grad_weight", fmt].flops == 0
        assert rows["layers.1.down", "forward", fmt].weight_divergence > 0
        assert rows["layers.0.down", "grad_weight", fmt].weight_divergence > 0


def test_a_layer_that_takes_no_part_does_no_damage() -> None:
    model, inputs = tiny_lm(), tokens()
    without = measure_divergence(model, inputs, gemms=("layer",))
    model.layers[0].spare = nn.Linear(12, 12)
    table = measure_divergence(model, inputs, gemms=("layer",))
    spare = [row for row in table.rows if row.layer == "layers.0.spare"]
    assert [(row.weight_divergence, row.loss_divergence) for row in spare] == [(0, 0)] * 2
    assert [row for row in table.rows if row not in spare] == list(without.rows)
    assert {row.layer for row in estimate_divergence(model, inputs).rows} == set(LAYERS)


def test_skipped_layers_have_no_rows() -> None:
    config = SnipConfig(skip_modules=("*.up",), probe_tokens=None)
    for ask in (estimate_divergence, measure_divergence):
        table = ask(tiny_lm(), tokens(), config=config)
        assert {row.layer for row in table.rows} == {"layers.0.down", "layers.1.down"}


# -------------------------------------------------------------------------------------------------- table and bad input


def test_estimate_and_measure_give_the_same_rows_with_the_flops_of_what_is_quantized() -> None:
    model, inputs = tiny_lm(), tokens()
    estimate, truth = estimate_divergence(model, inputs), measure_divergence(model, inputs)
    assert estimate.loss == pytest.approx(truth.loss, rel=1e-5)
    assert estimate.loss == pytest.approx(model(**inputs)["loss"].item(), rel=1e-5)

    def keys(table: DivergenceTable) -> dict[tuple[str, str, str], float]:
        found = {(row.layer, row.gemm, row.format): row.flops for row in table.rows}
        assert len(found) == len(table.rows)
        return found

    gemm = 2.0 * 12 * 20
    assert keys(estimate) == keys(truth)
    assert keys(estimate) == {
        (layer, name, fmt): 3 * gemm if name == "layer" else gemm
        for layer in LAYERS
        for name in ROWS
        for fmt in CHOICES
    }


def test_records_are_plain_data_and_totals_add_up_the_layers() -> None:
    table = estimate_divergence(tiny_lm(), tokens())
    records = table.to_records()
    assert len(records) == len(table.rows)
    assert set(records[0]) == {
        "layer",
        "gemm",
        "format",
        "loss_divergence",
        "weight_divergence",
        "flops",
        "absolute_error",
        "relative_error",
    }
    assert all(type(value) in (str, float) for record in records for value in record.values())
    for fmt in CHOICES:
        chosen = [record for record in records if record["gemm"] == "layer" and record["format"] == fmt]
        assert len(chosen) == 4
        assert table.totals(fmt) == {
            "loss": pytest.approx(sum(record["loss_divergence"] for record in chosen)),
            "weight": pytest.approx(sum(record["weight_divergence"] for record in chosen)),
        }


def test_the_same_seed_gives_the_same_table_and_another_seed_another() -> None:
    model, inputs = tiny_lm(), tokens()
    tables = [estimate_divergence(model, inputs, config=SnipConfig(seed=seed)) for seed in (0, 0, 1)]
    assert tables[0] == tables[1]
    assert weight_divergences(tables[0]) != weight_divergences(tables[2])
    assert loss_divergences(tables[0]) == pytest.approx(loss_divergences(tables[2]), rel=0.02)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_and_the_model_left_unconverted(broken: float) -> None:
    model = tiny_lm()
    with torch.no_grad():
        model.embed.weight[:] = broken
    with pytest.raises(ValueError, match=r"^The loss of the probed micro-batch is nan; expected a finite number\.$"):
        estimate_divergence(model, tokens())
    assert snip_linears(model) == {}


@pytest.mark.parametrize("ask", [estimate_divergence, measure_divergence])
def test_a_batch_without_labels_is_refused_and_the_model_left_unconverted(ask: Any) -> None:
    model = tiny_lm()
    message = (
        "The batch has no labels (its keys are input_ids), so the model gives no loss to probe. Expected a causal LM "
        "batch with `labels`. Label smoothing and a custom compute_loss_func take them away: turn these off, or use a "
        "policy that needs no probe, such as policy='layer-position'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ask(model, {"input_ids": tokens()["input_ids"]})
    assert snip_linears(model) == {}
    assert type(model.layers[0].up) is nn.Linear


@pytest.mark.parametrize("ask", [estimate_divergence, measure_divergence])
def test_an_optimizer_that_cannot_be_differentiated_is_refused(ask: Any) -> None:
    model = tiny_lm()
    with pytest.raises(TypeError, match=r"^Cannot differentiate the update of torch\.optim\.rmsprop\.RMSprop;"):
        ask(model, tokens(), torch.optim.RMSprop(model.parameters()))
    assert snip_linears(model) == {}


@pytest.mark.parametrize("ask", [estimate_divergence, measure_divergence])
def test_a_converted_model_keeps_its_formats_and_an_unconverted_one_its_class(ask: Any) -> None:
    model, inputs = tiny_lm(), tokens()
    keys = list(model.state_dict())
    ask(model, inputs)
    assert {type(module) for name, module in model.named_modules() if name in LAYERS} == {nn.Linear}
    assert list(model.state_dict()) == keys
    convert_model(model, SnipConfig())
    formats = {"forward": "fp4", "grad_input": "bf16", "grad_weight": "fp8"}
    layers = snip_linears(model)
    layers["layers.0.down"].set_formats(formats)
    states = {name: layer.snip_state.clone() for name, layer in layers.items()}
    ask(model, inputs)
    assert layers["layers.0.down"].formats == formats
    assert all(torch.equal(layer.snip_state, states[name]) for name, layer in snip_linears(model).items())
