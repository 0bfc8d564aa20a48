"""Are the benchmarks' other estimators those of their formulas, and does a whole run reach its report? (benchmarks/)"""

from __future__ import annotations

import copy
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import estimate_fidelity
import estimate_fidelity_report
import pytest
import torch
from rounded import fake_quantize
from shared import loss_estimators, small_models, weight_estimators
from small import relative_error, text, tiny_llama, tiny_lm, tokens
from torch import Tensor, nn

from snip_hf.config import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.estimation.samples import LayerSample
from snip_hf.layers.convert import convert_model
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import ROW_TILE, SQUARE_TILE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


UNQUANTIZED = SnipConfig(probe_tokens=None, start_format="bf16")


def point_of(model: nn.Module, batch: dict[str, Tensor], steps: int = 0) -> weight_estimators.Point:
    """The point of a converted copy of the model, after so many steps of AdamW on the batch."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    convert_model(model, UNQUANTIZED)
    return weight_estimators.Point.of(model, batch, optimizer, UNQUANTIZED)


# --- traces

LAYERS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


@pytest.fixture(scope="module")
def curved() -> tuple[nn.Module, dict[str, Tensor], dict[tuple[str, str], Tensor]]:
    """A model, a batch, and (layer, layer) -> block of the exact Hessian of the mean loss, (O I, O' I'), float64."""
    model, batch = tiny_lm(hidden=6, inner=8), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):  # untrained, traces are lost in the rest of the Hessian
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = copy.deepcopy(model).double()
    weights = {f"{name}.weight": exact.get_submodule(name).weight.detach() for name in LAYERS}

    def loss(moved: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(exact, moved, (), batch)["loss"]
        return found

    blocks = torch.func.jacrev(torch.func.grad(loss))(weights)
    return (
        model,
        batch,
        {
            (a, b): blocks[f"{a}.weight"][f"{b}.weight"].detach().reshape(weights[f"{a}.weight"].numel(), -1)
            for a in LAYERS
            for b in LAYERS
        },
    )


def test_hessian_traces_are_products_with_the_exact_hessian(curved: Any) -> None:
    model, batch, blocks = curved
    point = point_of(model, batch)
    _, directions = point.probe(lambda _, z: torch.sign(z), weight_estimators.PROBES)
    assert {len(found) for found in directions.values()} == {4}
    traces = weight_estimators.hessian_traces(point)
    assert set(traces) == set(LAYERS)
    for name in LAYERS:
        products = [
            directions[name][probe].double().flatten() @ block @ directions[other][probe].double().flatten()
            for (own, other), block in blocks.items()
            if own == name
            for probe in range(4)
        ]
        assert traces[name] == pytest.approx(float(sum(products)) / 4, rel=2e-3)


def test_hessian_traces_average_to_the_trace_of_each_block(curved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, blocks = curved
    probes = 240
    monkeypatch.setattr(weight_estimators, "PROBES", probes)
    traces = weight_estimators.hessian_traces(point_of(model, batch))
    for name in LAYERS:
        own, trace = blocks[name, name], float(blocks[name, name].trace())
        # Of z^T H z with z = -1 or 1 (Hutchinson 1990), and of z^T B y with another layer's y.
        variance = 2 * float((own - own.diag().diag()).square().sum())
        variance += sum(float(blocks[name, other].square().sum()) for other in LAYERS if other != name)
        error = (variance / probes) ** 0.5
        assert abs(trace) > 20 * error
        assert traces[name] == pytest.approx(trace, abs=4 * error)


def test_fisher_traces_are_the_mean_squared_gradients_of_single_tokens() -> None:
    model, batch = tiny_lm(), tokens(rows=7, length=1)  # one token per sequence: no token acts on another
    probe = run_probe(point_of(model, batch).model, Batch.of(batch), {}, ProbeSettings(probes=0))
    traces = weight_estimators.fisher_traces(probe)
    for name in LAYERS:
        weight, squares = model.get_submodule(name).weight, []
        for row in range(7):
            loss = model(**{key: ids[row : row + 1] for key, ids in batch.items()})["loss"]
            squares.append(float(torch.autograd.grad(loss, weight)[0].double().square().sum()))
        assert traces[name] == pytest.approx(sum(squares) / 7, rel=1e-4)


# --- loss divergence

ROWS, LENGTH = 6, 8
# Sample size -> the sequences that it holds, evenly spaced.
KEPT = {48: [0, 1, 2, 3, 4, 5], 16: [0, 5], 24: [0, 2, 5]}


@pytest.fixture(scope="module")
def losses() -> tuple[nn.Module, weight_estimators.Point, dict[str, dict[tuple[str, str], float]]]:
    """A model, its point after three steps, and the loss estimates of that point."""
    model, batch = tiny_llama(hidden=16, layers=1), text(ROWS, LENGTH)
    point = point_of(model, batch, steps=3)
    return model, point, loss_estimators.loss_estimates(point, (*KEPT, 96), LENGTH)


def along(sample: LayerSample, weight: Tensor, fmt: str) -> list[float]:
    """G_t . (Q(X_t) Q(W)^T - X_t W^T) of every token, float64."""
    x_rounded = fake_quantize(sample.x, FORMATS[fmt], ROW_TILE).double()
    w_rounded = fake_quantize(weight, FORMATS[fmt], SQUARE_TILE).double()
    found = []
    for x, x_q, g in zip(sample.x.double(), x_rounded, sample.grad_output.double(), strict=True):
        found.append(float(g @ (w_rounded @ x_q - weight.double() @ x)))
    return found


def written_out(a: list[float], count: int) -> dict[str, float]:
    """Those of `loss_estimates` that are made of G_t . E_t alone, from a sample of whole sequences."""
    total = ROWS * LENGTH
    sampled = [[a[row * LENGTH + t] for t in range(LENGTH)] for row in KEPT[count]]
    sums = [sum(row) for row in sampled]
    squares = sum(one**2 for row in sampled for one in row)
    first = total * sum(sums) / count
    means = [total * one / LENGTH for one in sums]
    variance = sum((mean - first) ** 2 for mean in means) / (len(means) - 1) / len(means)
    token_fisher = total**2 / 2 * squares / count
    return {
        "token-fisher": token_fisher,
        "sequence-fisher": total / 2 * sum(one**2 for one in sums) * total / count,
        "first-order": first,
        "first+token": first + token_fisher,
        "shrunk+token": first * max(0.0, 1 - variance / first**2) + token_fisher,
    }


@pytest.mark.parametrize("count", KEPT)
def test_first_and_second_order_loss_figures_are_those_of_loops_over_tokens(losses: Any, count: int) -> None:
    _, point, tables = losses
    samples = run_probe(point.model, point.batch, {}, ProbeSettings(probes=0)).layers
    assert len(samples) == 7
    for name, sample in samples.items():
        weight, kept = point.weight(name), [row * LENGTH + t for row in KEPT[count] for t in range(LENGTH)]
        for fmt in SnipConfig().formats[::-1]:
            wanted = written_out(along(sample, weight, fmt), count)
            error = fake_quantize(weight, FORMATS[fmt], SQUARE_TILE).double() - weight.double()
            slope, trace = torch.zeros_like(error), 0.0
            for t in kept:
                outer = torch.outer(sample.grad_output[t].double(), sample.x[t].double())
                slope += outer * ROWS * LENGTH / count
                trace += float(outer.square().sum()) * (ROWS * LENGTH) ** 2 / count
            wanted["taylor"] = float((slope * error).sum()) + wanted["token-fisher"]
            mean_gradient = point.optimizer.state[point.layers[name].weight]["exp_avg"].double() / (1 - 0.9**3)
            wanted["momentum+token"] = float((mean_gradient * error).sum()) + wanted["token-fisher"]
            wanted["fisher-error"] = trace * float(error.square().mean()) / 2
            for estimator, value in wanted.items():
                found = tables[f"{estimator}/{count}"][name, fmt] * point.loss
                assert found == pytest.approx(value, rel=1e-3, abs=1e-6), (estimator, name, fmt)
            assert tables[f"fisher-trace/{count}"][name, fmt] == pytest.approx(trace, rel=1e-4)


def test_samples_beyond_the_micro_batch_are_left_out_and_hessians_take_all_of_it(losses: Any) -> None:
    _, point, tables = losses
    assert {int(name.rpartition("/")[2]) for name in tables} == set(KEPT)
    assert [name for name in tables if name.startswith("hessian")] == ["hessian-error/48"]
    traces = weight_estimators.hessian_traces(point)
    for (name, fmt), value in tables["hessian-error/48"].items():
        error = fake_quantize(point.weight(name), FORMATS[fmt], SQUARE_TILE) - point.weight(name)
        assert value * point.loss == pytest.approx(traces[name] * float(error.square().mean()) / 2, rel=1e-5)


def test_the_first_order_is_the_slope_of_the_loss_along_the_error() -> None:
    model, batch = tiny_lm(), tokens(rows=4, length=8)
    probe = run_probe(point_of(model, batch).model, Batch.of(batch), {}, ProbeSettings(probes=0))
    exact = copy.deepcopy(model).double()
    for name in LAYERS:
        sample, weight = probe.layers[name], model.get_submodule(name).weight.detach()
        x_rounded = fake_quantize(sample.x, FORMATS["fp4"], ROW_TILE).double()
        w_rounded = fake_quantize(weight, FORMATS["fp4"], SQUARE_TILE).double()
        error = x_rounded @ w_rounded.t() - sample.x.double() @ weight.double().t()
        share = torch.zeros((), dtype=torch.float64, requires_grad=True)
        handle = exact.get_submodule(name).register_forward_hook(
            lambda module, args, output, share=share, error=error: output + share * error.view_as(output)
        )
        slope = torch.autograd.grad(exact(**batch)["loss"], share)[0]
        handle.remove()
        a = loss_estimators._along(sample, weight, "fp4")
        figures = loss_estimators._of_tokens({"own": a, "drawn": a}, 32, 8)
        assert figures["first-order"] == pytest.approx(float(slope), rel=1e-3)


def test_drawn_labels_are_the_models_own_and_make_the_true_fisher(losses: Any) -> None:
    _, point, tables = losses
    drawn = loss_estimators._own_labels(point)
    ids = point.inputs["input_ids"]
    assert torch.equal(drawn["input_ids"], ids) and torch.equal(drawn["labels"][:, 0], ids[:, 0])
    assert not torch.equal(drawn["labels"], ids)
    samples = run_probe(point.model, Batch.of(drawn), {}, ProbeSettings(probes=0)).layers
    for name, sample in samples.items():
        for fmt in SnipConfig().formats[::-1]:
            wanted = written_out(along(sample, point.weight(name), fmt), 24)
            for estimator, form in (("kl-token", "token-fisher"), ("kl-sequence", "sequence-fisher")):
                found = tables[f"{estimator}/24"][name, fmt] * point.loss
                assert found == pytest.approx(wanted[form], rel=1e-3, abs=1e-9)


def test_a_model_that_is_sure_draws_what_it_is_sure_of() -> None:
    model, batch = tiny_llama(hidden=16, layers=1), text(2, 12)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
    drawn = loss_estimators._own_labels(point_of(model, batch))["labels"]
    with torch.no_grad():
        assert torch.equal(drawn[:, 1:], model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1))


def test_the_measured_kl_is_that_of_a_model_whose_linear_sees_rounded_operands() -> None:
    model, batch = tiny_llama(hidden=16, layers=1), text(ROWS, LENGTH)
    point = point_of(model, batch)
    found = loss_estimators.measured_kl(point)
    assert len(found) == 7 * len(SnipConfig().formats[::-1])
    ids = batch["input_ids"]
    with torch.no_grad():
        base = model(input_ids=ids).logits.double().log_softmax(-1)
        # Nothing stays quantized.
        assert relative_error(point.model(input_ids=ids).logits.double().log_softmax(-1), base) < 1e-5
        for (name, fmt), value in found.items():

            def rounded(module: nn.Linear, args: tuple[Tensor], output: Tensor, fmt: str = fmt) -> Tensor:
                x = fake_quantize(args[0].flatten(0, 1), FORMATS[fmt], ROW_TILE)
                return (x @ fake_quantize(module.weight, FORMATS[fmt], SQUARE_TILE).t()).view_as(output)

            handle = model.get_submodule(name).register_forward_hook(rounded)
            other = model(input_ids=ids).logits.double().log_softmax(-1)
            handle.remove()
            wanted = nn.functional.kl_div(
                other.flatten(0, 1), base.flatten(0, 1), reduction="batchmean", log_target=True
            )
            # In FP32, the sum over the vocabulary is no better than this.
            assert value * point.loss == pytest.approx(float(wanted), rel=2e-2, abs=1e-7), (name, fmt)


@pytest.mark.parametrize(
    ("make", "steps", "rel"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-3), 3, 1e-5),
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), 100, 1e-4),
        (lambda p: small_models.Lion(p, lr=1e-4), 1000, 1e-3),
    ],
)
def test_the_running_mean_of_a_gradient_that_stays_is_that_gradient(make: Any, steps: int, rel: float) -> None:
    layer = nn.Linear(3, 2, bias=False)
    gradient = torch.arange(1.0, 7).view(2, 3)
    optimizer = make([layer.weight])
    point: Any = SimpleNamespace(layers={"a": layer}, optimizer=optimizer)
    assert loss_estimators.running_mean(point, "a") is None
    for _ in range(steps):
        layer.weight.grad = gradient.clone()
        optimizer.step()
    found = loss_estimators.running_mean(point, "a")
    assert found is not None and relative_error(found, gradient) < rel


def test_without_a_momentum_there_is_no_running_mean() -> None:
    layer = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD([layer.weight], lr=1e-3)
    layer.weight.grad = torch.ones(2, 3)
    optimizer.step()
    point: Any = SimpleNamespace(layers={"a": layer}, optimizer=optimizer)
    assert loss_estimators.running_mean(point, "a") is None


# --- fidelity


@pytest.mark.slow
def test_a_case_is_measured_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for this process it would stay
    (tmp_path / "text.txt").write_text(inspect.getsource(inspect), encoding="utf-8")
    output = tmp_path / "runs" / "fidelity.jsonl"
    options: dict[str, Any] = {
        "cases": "llama:adamw:1",
        "blocks": 1,
        "rows": 1,
        "loss-rows": 2,
        "held-out": 2,
        "draws": 2,
    }
    options |= {"gemms": "layer", "device": "cpu", "text": tmp_path / "text.txt", "output": output}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["estimate_fidelity.py", *arguments])
    estimate_fidelity.main()
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert {line["case"] for line in lines} == {"llama:adamw:1"}
    assert {line["kind"] for line in lines} == {"raw", "weight", "weight-truth", "loss", "loss-truth", "case"}
    raw, last = lines[0], lines[-1]
    assert len(raw["cells"]) == len(raw["loss_cells"]) == 7 * len(SnipConfig().formats[::-1])
    truth = torch.tensor(raw["weight_truth_squares"][7:])  # FP4: (layers, batches, halves)
    assert truth.shape == (7, 2, 2) and bool((truth > 0).all())
    assert {f"{line['estimator']}/{line['tokens']}" for line in lines if line["kind"] == "loss"} == set(
        raw["loss_estimates"]
    )
    for line in lines:
        if line["kind"] == "weight" and (line["estimator"], line["scope"]) == ("adjoint-4-probes", "own"):
            assert 0.5 < line["ratio_quartiles"][1] < 2
    describe = ["git", "describe", "--always"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=BENCHMARKS).stdout.strip()
    assert (last["commit"] or "").removesuffix("-dirty") == commit
    assert last["machine"] and last["torch"] == torch.__version__ and "llama:adamw:1" in last["command"]
    assert (last["tokens"], last["draws"], last["held_out"]) == (256, 2, 2)

    # A second run finds the case there.
    estimate_fidelity.main()
    assert "0 of 1 cases to do" in capsys.readouterr().out
    assert len(output.read_text(encoding="utf-8").splitlines()) == len(lines)

    report = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["estimate_fidelity_report.py", str(output), "--output", str(report)])
    estimate_fidelity_report.main()
    assert_reported(report.read_text(encoding="utf-8"), lines)


def assert_reported(report: str, lines: list[dict[str, Any]]) -> None:
    """The case's rows are in the tables of both divergences and of the origin, with the figures of its lines."""
    sections = {part.partition("\n")[0]: part for part in report.split("## ")[1:]}

    def rows(title: str) -> list[list[str]]:
        [section] = (part for name, part in sections.items() if name.startswith(title))
        found = [
            [cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if "|" in line
        ]
        return [row for row in found[2:] if row[0] == "llama:adamw:1"]

    weight = rows("Weight divergence, whole layers")
    loss = rows("Loss divergence: truth")
    [origin] = rows("Origin")
    assert [row[1] for row in weight] == [row[1] for row in loss] == list(SnipConfig().formats[::-1])
    for row in weight:
        [line] = (
            line
            for line in lines
            if line["kind"] == "weight"
            and (line["estimator"], line["scope"], line["format"]) == ("adjoint", "all", row[1])
        )
        assert [float(cell) for cell in row[2:4]] == pytest.approx([line["median_error"], line["error_90"]], abs=1e-3)
        assert [float(cell) for cell in row[4].split()] == pytest.approx(line["ratio_quartiles"], abs=1e-2)
        spearman, low, high = (float(number) for number in re.findall(r"-?\d+\.\d+", row[5]))
        assert (spearman, [low, high]) == (
            pytest.approx(line["spearman"], abs=1e-2),
            pytest.approx(line["spearman_90"], abs=1e-2),
        )
    for row in loss:
        [line] = (line for line in lines if (line["kind"], line.get("format")) == ("loss-truth", row[1]))
        assert float(row[2]) == pytest.approx(line["median"], rel=0.1)
        assert all(-1 <= float(cell) <= 1 for cell in row[6:])
    assert lines[-1]["machine"] in origin and str(lines[-1]["commit"]) in origin
