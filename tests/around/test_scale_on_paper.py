"""The arithmetic of docs/scale.md (benchmarks/scale_on_paper.py, scale_program.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import scale_on_paper
import scale_program
import torch
from scale_on_paper import SEVEN, SEVENTY, SHAPE_8B, TINY, Layout, Model
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, convert_model
from snip_hf.estimation.memory import probe_memory
from snip_hf.estimation.samples import SamplePlan
from snip_hf.layers.layer import SnipLayer
from snip_hf.planning.solver.ilp import parse

DOCS = Path(__file__).resolve().parents[2] / "docs"
PRICES = {
    gemm: {"mean": -2.0, "deviation": 1.0, "mean_of_fp8": -3.0, "deviation_of_fp8": 0.2}
    for gemm in ("forward", "grad_input", "grad_weight")
}


def small_model() -> tuple[Model, LlamaForCausalLM]:
    shape = Model("small", hidden=64, inner=96, blocks=2, keys=32, vocabulary=50)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return shape, LlamaForCausalLM(config)


def test_the_page_is_what_the_script_writes() -> None:
    assert (DOCS / "scale.md").read_text(encoding="utf-8") == scale_on_paper.page(scale_on_paper.parts())


def test_a_probe_of_the_timed_models_takes_what_was_measured() -> None:
    part = scale_on_paper.parts()
    lines = scale_on_paper.read_lines(scale_on_paper.RESULTS / "speed_trainer.jsonl")
    for model in (TINY, SHAPE_8B):
        measured = scale_on_paper.statistics.median(scale_on_paper._probes(lines, model.name))
        assert part.per_linear * model.linears + part.per_weight * model.weights / 1e9 == pytest.approx(measured)


def test_shapes_have_the_weights_and_features_of_the_model() -> None:
    shape, model = small_model()
    names = convert_model(model, SnipConfig())
    layers = [model.get_submodule(name) for name in names]
    assert shape.linears == len(names)
    assert shape.weights == sum(layer.weight.numel() for layer in layers)
    assert shape.features == sum(layer.in_features + layer.out_features for layer in layers)
    assert all(isinstance(layer, SnipLayer) for layer in layers)


def test_memory_on_one_gpu_is_what_the_package_predicts() -> None:
    shape, model = small_model()
    convert_model(model, SnipConfig())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    predicted = probe_memory(model, probes=1, tokens=1024) * 2**20 - buffers
    _, probe = scale_on_paper.memory(Layout(shape, 1))
    assert probe * 2**30 == pytest.approx(predicted)


def test_more_ranks_share_the_sums_and_lengthen_the_notes() -> None:
    part = scale_on_paper.parts()
    few, many = (scale_on_paper.refresh(Layout(SEVEN, gpus), part) for gpus in (16, 256))
    assert many["sums"] < few["sums"] and many["notes"] == pytest.approx(16 * few["notes"])
    assert many["passes"] == few["passes"]


def test_a_pipeline_keeps_a_tile_of_every_micro_batch_on_every_rank() -> None:
    layout = Layout(SEVENTY, gpus=4, stages=2)
    plan = SamplePlan(1024, seed=0, step=1, rank=1, every=(layout.micro_batches * scale_on_paper.LENGTH,) * 2)
    own = layout.micro_batches * len(plan.kept(scale_on_paper.LENGTH))
    assert layout.kept == (own, 2 * own) == (1024, 2048)


def test_a_speed_up_without_refreshes_and_waiting_is_the_measured_one() -> None:
    part = scale_on_paper.parts()
    found = scale_on_paper.speedup(Layout(SEVENTY, 64), part, "mxfp4", exposed=0.0, every=10**9)
    assert found == pytest.approx(part.speedups["mxfp4"], rel=1e-6)
    slower = replace(part, speedups={"mxfp4": 1.0})
    assert scale_on_paper.speedup(Layout(SEVENTY, 64), slower, "mxfp4", 0.2, 100) < 1


@pytest.mark.parametrize("stages", [1, 80])
@pytest.mark.parametrize(("formats", "options"), [(2, 2), (5, 5)])
def test_the_program_has_560_linears_by_gemm_and_shares_that_add_up(stages: int, formats: int, options: int) -> None:
    problem = scale_program.make_program(PRICES, formats, stages, seed=0)
    parse(problem)
    assert [len(group["options"]) for group in problem["groups"]] == [options] * 1680
    assert len(problem["constraints"]) == stages
    most = {group["name"]: max(option["weight"] for option in group["options"]) for group in problem["groups"]}
    for row in problem["constraints"]:
        attainable = math.fsum(most[name] for name in row["groups"])
        assert row["minimum"] < attainable <= 1 + 1e-9
    torch.manual_seed(0)  # draws are the problem's own
    assert problem == scale_program.make_program(PRICES, formats, stages, seed=0)
