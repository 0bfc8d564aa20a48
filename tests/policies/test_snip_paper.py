"""Is the policy "snip-paper" what its module says, against autograd, loops and a run?"""

from __future__ import annotations

import copy
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from expert_models import tiny_qwen3_moe
from own_loop import Loop
from rounded import fake_quantize
from small import adamw_after, text, tiny_llama, tiny_lm, tokens, trained_tiny_lm
from thread_ranks import on_ranks
from tiny_runs import SCHEDULE, differing, train, weights, without_seconds
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController, convert_model, estimate_divergence, measure_divergence
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import divergences_at, gradients_of
from snip_hf.estimation.extrapolation import BatchSizes
from snip_hf.estimation.layer_sums import LayerSums, read_all
from snip_hf.estimation.noise import PLACES, Noise
from snip_hf.estimation.optimizer_step import OptimizerStep
from snip_hf.estimation.samples import LayerSample
from snip_hf.estimation.table import LAYER, Divergence, DivergenceTable
from snip_hf.kernels import rounding
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS, ROW_TILE, SQUARE_TILE
from snip_hf.numerics.random_streams import stream_key
from snip_hf.optimizers.response import responses
from snip_hf.parallel.ranks import Processes, Ranks
from snip_hf.planning.program import problem
from snip_hf.planning.solver import ilp
from snip_hf.policies.setting import Setting
from snip_hf.policies.snip_paper import RELATIVE_NOISE, PaperEstimate, quality
from snip_hf.records.load import read_divergence

EVERY: dict[str, Any] = {"probe_tokens": None, "probe_batch_tokens": None}
PAPER = fp4_config(policy="snip-paper", **EVERY)
Rows = dict[tuple[str, str], Divergence]


def of_layers(table: DivergenceTable) -> Rows:
    return {(row.layer, row.format): row for row in table.rows if row.gemm == LAYER}


# ------------------------------------------------------------------------------------------------------ loss divergence


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("n", [300, 128])
def test_the_loss_divergence_is_the_written_out_formula(n: int, fmt: str) -> None:
    """Also where the layer saw 300 of the batch's 500 tokens, a fourth of a micro-batch by its labels."""
    generator = torch.Generator().manual_seed(1)
    sample = LayerSample(300, torch.randn(n, 12, generator=generator), 0.01 * torch.randn(n, 9, generator=generator))
    w = torch.randn(9, 12, generator=generator)
    x, g, scale = sample.x.double(), sample.grad_output.double(), 300 / n
    e_x = fake_quantize(sample.x, FORMATS[fmt], ROW_TILE).double() - x
    e_w = fake_quantize(w, FORMATS[fmt], SQUARE_TILE).double() - w.double()
    dx, dw = g @ w.double(), scale * (g.t() @ x)
    on_x = float((scale * dx.square().sum()) * (scale * e_x.square().sum())) / 12
    on_w = float(dw.square().sum() * e_w.square().sum()) / (9 * 12)
    for batch, count, parts in ((BatchSizes(300, 300, 300, 300), 300, 1), (BatchSizes(500, 70, 1000, 280), 500, 4)):
        estimate = PaperEstimate(LayerSums(sample, [w], None, 1, batch, formats=(fmt,)))
        (found,) = read_all([estimate.loss_divergence(fmt, "saliency")])
        assert found == pytest.approx(math.sqrt(on_x / count / parts + on_w), rel=1e-4)


# -------------------------------------------------------------------------------------------------------------- oracles


class Seen(nn.Module):
    """A linear that keeps its input and its output, with noise added by autograd's own means."""

    def __init__(self, name: str, linear: nn.Linear, noise: Noise | None) -> None:
        super().__init__()
        self.name, self.linear, self.noise = name, linear, noise

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if self.noise is not None and self.noise.place == "input":
            rows = rows + drawn(self.noise, self.name, rows)
        self.x = rows.detach()
        y = self.linear(rows)
        if self.noise is not None and self.noise.place == "grad_output":
            noise = self.noise
            y.register_hook(lambda g: g + drawn(noise, self.name, g))
        y.register_hook(lambda g: setattr(self, "g", g.detach()))
        return y.view(*x.shape[:-1], -1)


def drawn(noise: Noise, name: str, tensor: Tensor) -> Tensor:
    """The numbers of a noise, for a tensor of this shape and size."""
    operand = {"input": 16, "grad_output": 17}[noise.place]
    of_draw = stream_key(*noise.draw, zlib.crc32(name.encode()), operand)
    generator = torch.Generator().manual_seed(stream_key(of_draw, 0, noise.rank, 0, 0) >> 1)
    numbers = torch.randn(tensor.shape, generator=generator)
    return numbers * noise.relative * tensor.detach().pow(2).mean().sqrt()


def seen(model: nn.Module, inputs: dict[str, Tensor], noise: Noise | None) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Layer -> X, G and the gradient of the weight, of one pass by autograd."""
    model = copy.deepcopy(model)
    linears = {}
    for index, block in enumerate(model.layers):
        for kind in ("up", "down"):
            linears[f"layers.{index}.{kind}"] = Seen(f"layers.{index}.{kind}", getattr(block, kind), noise)
            setattr(block, kind, linears[f"layers.{index}.{kind}"])
    model.zero_grad()
    model(**inputs)["loss"].backward()
    return {name: (one.x, one.g, one.linear.weight.grad.clone()) for name, one in linears.items()}


def slope_of_adamw(optimizer: torch.optim.Optimizer, weight: Tensor, gradient: Tensor) -> Tensor:
    """dh/dg by autograd, of AdamW's next update written out, float64."""
    state, (group,) = optimizer.state[weight], optimizer.param_groups
    (b1, b2), g = group["betas"], gradient.double().requires_grad_()
    step = float(state["step"]) + 1
    mean = (b1 * state["exp_avg"].double() + (1 - b1) * g) / (1 - b1**step)
    square = (b2 * state["exp_avg_sq"].double() + (1 - b2) * g**2) / (1 - b2**step)
    update = group["lr"] * mean / (square.sqrt() + group["eps"])
    (slope,) = torch.autograd.grad(update.sum(), g)
    return slope


def test_the_table_is_that_of_loops_over_passes_by_autograd() -> None:
    model, optimizer = trained_tiny_lm()
    inputs = tokens(rows=3, length=11)
    # In high precision also the gradient of the step itself.
    config = fp4_config(policy="snip-paper", seed=5, probes=2, start_format="bf16", **EVERY)
    table = estimate_divergence(model, inputs, optimizer, config)
    base = seen(model, inputs, None)
    draws = [(5, 0, index) for index in range(2)]
    noisy = {place: [seen(model, inputs, Noise(place, draw, RELATIVE_NOISE)) for draw in draws] for place in PLACES}
    rows = of_layers(table)
    assert len(rows) == 4 * 2
    for (layer, name), row in rows.items():
        weight = model.get_submodule(layer).weight
        w, (x, g, gradient) = weight.detach(), base[layer]
        squares = {
            place: sum(float((one[layer][2] - gradient).square().sum()) for one in noisy[place]) / 2 / RELATIVE_NOISE**2
            for place in PLACES
        }
        key = stream_key(5, 0, 0, zlib.crc32(layer.encode()), len(GEMMS)) if name == "fp4" else None
        e_x = fake_quantize(x, FORMATS[name], ROW_TILE) - x
        e_w = fake_quantize(w, FORMATS[name], SQUARE_TILE) - w
        e_g = rounding.fake_quantize(g, FORMATS[name], "gradient", 1, key) - g
        ratio = [float(e.norm() / one.norm()) ** 2 for e, one in ((e_x, x), (e_w, w), (e_g, g))]
        change = squares["input"] * (ratio[0] + ratio[1]) + squares["grad_output"] * (ratio[2] + ratio[1])
        slope = slope_of_adamw(optimizer, weight, gradient)
        expected = float(slope.norm()) / w.numel() ** 0.5 * change**0.5 / float(w.norm())
        assert row.weight_divergence == pytest.approx(expected, rel=1e-3)
        assert row.weight_bias is None and row.criterion is None
        on_x = float((g @ w).square().sum() * e_x.square().sum()) / x.numel()
        on_w = float(gradient.square().sum() * e_w.square().sum()) / w.numel()
        assert row.loss_divergence == pytest.approx((on_x + on_w) ** 0.5 / table.loss, rel=1e-3)


def test_rows_of_gemms_hold_the_two_terms_and_nothing_that_is_counted_twice() -> None:
    model, optimizer = trained_tiny_lm()
    table = estimate_divergence(model, tokens(), optimizer, PAPER)
    for layer in ("layers.0.up", "layers.1.down"):
        rows = {row.gemm: row for row in table.rows if (row.layer, row.format) == (layer, "fp4")}
        squares = {gemm: row.weight_divergence**2 for gemm, row in rows.items()}
        assert squares["forward"] > 0 and squares["grad_input"] > 0 and squares["grad_weight"] == 0
        assert squares[LAYER] == pytest.approx(squares["forward"] + squares["grad_input"])
        assert [rows[gemm].loss_divergence for gemm in ("grad_input", "grad_weight")] == [0, 0]


def test_cost_is_the_sum_of_both_divergences_up_to_a_common_factor() -> None:
    rows = [
        Divergence("layers.0.up", gemm, fmt, loss, weight, 1.0)
        for gemm in (*GEMMS, LAYER)
        for fmt, loss, weight in (("fp8", 0.001, 0.002), ("fp4", 0.01, 0.06))
    ]
    table = DivergenceTable(2.0, (*rows, Divergence("layers.0.down", LAYER, "fp4", 0.1, 0.03, 1.0)))
    cost = quality(fp4_config(policy="snip-paper"), table)
    found = [cost(row) for row in table.rows if row.gemm == LAYER]
    assert found == pytest.approx([one / (0.07 + 0.13) for one in (0.003, 0.07, 0.13)])


# ----------------------------------------------------------------------------------------- what the figures scale with


def test_the_noise_s_size_does_not_matter() -> None:
    model, inputs = trained_tiny_lm()[0], tokens(rows=4, length=16)
    base = seen(model, inputs, None)
    found = {}
    for relative in (1e-3, RELATIVE_NOISE, 3e-2):
        noisy = [seen(model, inputs, Noise(place, (0, 0, 0), relative)) for place in PLACES]
        found[relative] = [float((one[name][2] - base[name][2]).norm()) / relative for one in noisy for name in base]
    for relative, responses_found in found.items():
        assert responses_found == pytest.approx(found[RELATIVE_NOISE], rel=0.05), relative


@pytest.mark.parametrize(
    ("make", "close"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.5), True),
        (lambda p: torch.optim.Adam(p, lr=1e-2), True),
        (lambda p: torch.optim.Muon([one for one in p if one.dim() == 2 and len(one) != 17], lr=1e-2), False),
        (lambda p: torch.optim.Adafactor(p, lr=1e-2), False),
    ],
    ids=["sgd", "adam", "muon", "adafactor"],
)
def test_other_optimizers_answer_by_the_norm_of_their_derivative(make: Any, close: bool) -> None:
    model, inputs = tiny_lm(), tokens(rows=4, length=16)
    optimizer = make(model.parameters())
    for _ in range(3):
        model(**inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = of_layers(estimate_divergence(model, inputs, optimizer, PAPER))
    assert all(row.weight_divergence > 0 for row in rows.values())
    if isinstance(optimizer, torch.optim.SGD):
        plain = of_layers(estimate_divergence(model, inputs, None, PAPER))  # SGD with rate 1
        for key, row in rows.items():
            assert row.weight_divergence == pytest.approx(0.5 * plain[key].weight_divergence, rel=1e-5)
    if close:  # FP4 disturbs every layer by more than FP8 does
        of_fp4 = {layer: row.weight_divergence for (layer, name), row in rows.items() if name == "fp4"}
        assert all(found > rows[layer, "fp8"].weight_divergence for layer, found in of_fp4.items())


def table_of_step(inputs: dict[str, Tensor], ranks: Ranks | None = None, rows: slice = slice(None), **step: Any) -> Any:
    """The table of a step of AdamW on `inputs`, of which this rank has some rows."""
    model = tiny_llama(hidden=32, layers=1)
    optimizer = adamw_after(model, steps=4)
    options = {"probe_tokens": step.pop("probe_tokens", None), "probe_batch_tokens": step.pop("part", None)}
    config = fp4_config(policy="snip-paper", probes=step.pop("probes", 1), **options)
    convert_model(model, config)
    layers = snip_linears(model)
    _, gradients = gradients_of(model, Batch.of(inputs), layers)
    processes = None if ranks is None else Processes(data=ranks, everyone=ranks)
    own = Batch.of({name: value[rows] for name, value in inputs.items()}).part(config.probe_batch_tokens)
    one = OptimizerStep(gradients, responses(optimizer, {name: layer.weight for name, layer in layers.items()}), **step)
    return divergences_at(model, own, one, config, processes=processes)


def test_changes_in_other_micro_batches_are_independent_and_clipping_scales_all() -> None:
    inputs = text(2, 64)
    one, four, clipped = (
        of_layers(table_of_step(inputs, **options)) for options in ({}, {"micro_batches": 4}, {"clip_factor": 0.25})
    )
    for key, row in one.items():
        assert four[key].weight_divergence == pytest.approx(row.weight_divergence / 2, rel=1e-6)
        assert clipped[key].weight_divergence == pytest.approx(row.weight_divergence / 4, rel=1e-6)
        assert four[key].loss_divergence == row.loss_divergence


@pytest.mark.parametrize("options", [{"probe_tokens": 512}, {"part": 512}], ids=["sample", "part"])
def test_sampled_tokens_and_a_part_of_a_micro_batch_stand_for_all(options: dict[str, int]) -> None:
    inputs = text(16, 128)
    whole, some = of_layers(table_of_step(inputs)), of_layers(table_of_step(inputs, **options))
    ratios = torch.tensor([some[key].weight_divergence / row.weight_divergence for key, row in whole.items()])
    # Not half or twice: a quarter of the tokens adds up a quarter of the squares.
    assert 0.65 < float(ratios.median()) < 1.5


def test_ranks_have_one_table_and_nearly_that_of_one_process() -> None:
    inputs = text(4, 128)
    (one, other) = on_ranks(
        2, lambda ranks: table_of_step(inputs, ranks, slice(2 * ranks.rank, 2 * ranks.rank + 2), probes=2)
    )
    assert one == other
    alone = of_layers(table_of_step(inputs, probes=2))
    for key, row in of_layers(one).items():
        assert row.loss_divergence == pytest.approx(alone[key].loss_divergence, rel=1e-3)
        # The noise differs: the response is a mean over many directions.
        assert row.weight_divergence == pytest.approx(alone[key].weight_divergence, rel=0.25)


@pytest.mark.slow
def test_the_estimate_is_of_the_size_of_the_truth() -> None:
    model = tiny_llama(hidden=64, layers=2)
    optimizer = adamw_after(model, steps=30)
    inputs = text(4, 96, 100)
    found = of_layers(estimate_divergence(model, inputs, optimizer, PAPER))
    truth = of_layers(measure_divergence(model, inputs, optimizer, PAPER, draws=1, gemms=("layer",)))
    ratios = torch.tensor([found[key].weight_divergence / row.weight_divergence for key, row in truth.items()])
    assert 0.4 < float(ratios.median()) < 2.5


def test_a_step_decides_the_noise() -> None:
    model, optimizer = trained_tiny_lm()
    first, again = (estimate_divergence(model, tokens(), optimizer, PAPER) for _ in range(2))
    assert first == again
    other = estimate_divergence(model, tokens(), optimizer, fp4_config(policy="snip-paper", seed=1, **EVERY))
    assert [row.loss_divergence for row in first.rows] == [row.loss_divergence for row in other.rows]
    found = [[row.weight_divergence for row in of_layers(table).values()] for table in (first, other)]
    assert all(a != b for a, b in zip(*found, strict=True))


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_run_decides_by_the_two_divergences_that_its_file_has(tmp_path: Path) -> None:
    config = fp4_config(policy="snip-paper", target_fp4_fraction=0.5, **SCHEDULE)
    plan = Loop(config, tmp_path).run(4).controller.plan
    assert (plan.provenance.step, plan.provenance.policy) == (2, "snip-paper")
    assert 0.5 <= plan.fp4_fraction < 0.65
    step, table = read_divergence(tmp_path / "snip" / "divergence-2.json")
    assert step == 2 and all(row.weight_divergence > 0 < row.loss_divergence for row in of_layers(table).values())
    program = problem(Setting(config, plan.flops, plan.stages), table)
    assert Setting(config, plan.flops, plan.stages).assignment(ilp.solve(program)["choices"]) == plan.assignment


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    config = fp4_config(policy="snip-paper", **SCHEDULE | {"refresh_every": 2, "apply_delay": 1})
    full = train(tmp_path / "full", config, max_steps=5, save_strategy="steps", save_steps=3)
    for name in ("snip", "checkpoint-3"):
        shutil.copytree(tmp_path / "full" / name, tmp_path / "resumed" / name)
    resumed = train(tmp_path / "resumed", config, resume=tmp_path / "resumed" / "checkpoint-3", max_steps=5)
    assert differing(weights(resumed.model), weights(full.model)) == []
    last = [run.refreshes[-1] for run in (full, resumed)]
    assert last[0]["step"] == 4 and without_seconds(last[0]) == without_seconds(last[1])


def test_any_formats_are_chosen_from(tmp_path: Path) -> None:
    formats = "nvfp4", "mxfp8"
    config = SnipConfig(policy="snip-paper", formats=formats, target_fp4_fraction=0.5, **SCHEDULE)
    plan = Loop(config, tmp_path).run(4).controller.plan
    used = {name for row in plan.assignment.values() for name in row.values()}
    assert used <= set(formats) and formats[0] in used and plan.fp4_fraction >= 0.5


# ------------------------------------------------------------------------------------------------------------- refusals


def test_the_objective_gradients_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"measures the optimizer's update; got objective='gradients'. Leave objective"
    ):
        SnipConfig(policy="snip-paper", objective="gradients")


def test_experts_and_frozen_weights_are_refused_before_training() -> None:
    experts = tiny_qwen3_moe()
    with pytest.raises(ValueError, match=r"policy='snip-paper' cannot judge layer '.*experts.*', which has several"):
        SnipController(experts, torch.optim.AdamW(experts.parameters()), fp4_config(policy="snip-paper", **SCHEDULE))
    model = tiny_llama(hidden=32, layers=1)
    name = "model.layers.0.mlp.up_proj"
    model.get_submodule(name).weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    message = f"needs the update of every swapped weight, but layer {name!r} is not trained"
    with pytest.raises(ValueError, match=message):
        SnipController(model, optimizer, fp4_config(policy="snip-paper", **SCHEDULE))
    with pytest.raises(ValueError, match=message):
        estimate_divergence(model, text(1, 32), optimizer, PAPER)
    SnipController(model, optimizer, fp4_config(policy="snip-paper", skip_modules=(name,), **SCHEDULE))
