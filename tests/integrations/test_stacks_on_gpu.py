"""Do the attentions and optimizers that people train with on a GPU train there, and get the plans of torch's own?"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import varlen
from small import adamw_after, text, tiny_llama
from tiny_runs import SCHEDULE, Run, train
from torch import Tensor
from transformers import DataCollatorWithFlattening

from snip_hf import SnipConfig, estimate_divergence
from snip_hf.records.load import read_divergence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = (29, 90, 44, 93)
# BF16 rounds by 2^-9: once each for scores, weights and outputs.
ROUNDING = 2**-7


def packed(device: str) -> dict[str, Any]:
    """One row of four sequences."""
    ids = text(1, sum(LENGTHS))["input_ids"][0].split(LENGTHS)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": one.tolist(), "labels": one.tolist()} for one in ids])
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def train_packs(folder: Path, attention: str, **options: Any) -> Run:
    """Trains five steps, the plan of step 2 being applied after step 4. Weights begin to move in step 2."""
    ids = text(20, max(LENGTHS))["input_ids"].tolist()
    rows = [dict.fromkeys(("input_ids", "labels"), row[: LENGTHS[index % 4]]) for index, row in enumerate(ids)]
    model = tiny_llama(hidden=256)
    model.set_attn_implementation(attention)
    chosen: dict[str, Any] = {
        "model": model,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": True,
        "max_steps": 5,
        "learning_rate": 1e-3,
        # Adam's response to gradients near 0 would magnify roundings.
        "adam_epsilon": 1e-4,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "trainer": {"train_dataset": rows, "data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)},
    }
    run = train(folder, SnipConfig(**SCHEDULE), **chosen | options)
    assert [(line["step"], line["status"]) for line in run.refreshes] == [(2, "applied")], run.refreshes
    return run


def assert_similar(one: Run, other: Run, tolerance: float) -> None:
    """Losses, and the median of the first refresh's divergences, differ by less than the tolerance; plans hardly do."""
    for step, (loss, _) in other.losses.items():
        assert one.losses[step][0] == pytest.approx(loss, rel=tolerance), step
    tables = [read_divergence(run.folder / "snip" / "divergence-2.json")[1].rows for run in (one, other)]
    for figure in ("loss_divergence", "weight_divergence"):
        pairs = [(getattr(a, figure), getattr(b, figure)) for a, b in zip(*tables, strict=True)]
        differences = [abs(a / b - 1) for a, b in pairs if b]
        print(f"{figure}: median {statistics.median(differences):.2e}, largest {max(differences):.2e}")
        assert statistics.median(differences) < tolerance, figure
    chosen = [
        {
            (layer, gemm): fmt
            for layer, formats in run.callback.controller.plan.assignment.items()
            for gemm, fmt in formats.items()
        }
        for run in (one, other)
    ]
    differing = sorted(key for key, fmt in chosen[0].items() if chosen[1][key] != fmt)
    print(f"{len(differing)} of {len(chosen[0])} GEMMs are in other formats: {differing}")
    assert len(differing) <= 0.1 * len(chosen[0])


@pytest.mark.parametrize("by", ["cu_seq_lens", "position_ids"])
def test_torch_s_varlen_attention_is_eager_attention_of_each_sequence_to_rounding(by: str) -> None:
    device, tokens = "cuda" if torch.cuda.is_available() else "cpu", sum(LENGTHS)
    batch = packed(device)
    names = ("cu_seq_lens_q", "max_length_q") if by == "cu_seq_lens" else ("position_ids",)
    shapes = [(1, heads, tokens, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    query, key, value = (one.detach().double().requires_grad_() for one in inputs)
    found, _ = varlen.varlen_attention(torch.nn.Module(), *inputs, None, 0.2, **{name: batch[name] for name in names})
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)).to(device)
    hidden = (owner[:, None] != owner) | torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
    scores = query @ key.repeat_interleave(2, 1).mT * 0.2
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    upstream = torch.randn_like(expected)
    found.backward(upstream.to(found.dtype))
    expected.backward(upstream)
    pairs = [
        (found, expected),
        *((one.grad, other.grad) for one, other in zip(inputs, (query, key, value), strict=True)),
    ]
    for name, (one, other) in zip(("output", "query", "key", "value"), pairs, strict=True):
        assert (one.double() - other).norm() < ROUNDING * other.norm(), name


def test_a_probe_of_a_model_under_varlen_attention_is_that_under_sdpa() -> None:
    device, tables = "cuda" if torch.cuda.is_available() else "cpu", []
    model = tiny_llama(hidden=256)
    optimizer = adamw_after(model, 2)
    model.to(device)
    for state in optimizer.state.values():
        state.update({name: value.to(device) for name, value in state.items() if name != "step"})
    for attention in (varlen.register(), "sdpa"):
        model.set_attn_implementation(attention)
        tables.append(estimate_divergence(model, packed(device), optimizer, SnipConfig()).rows)
    for one, other in zip(*tables, strict=True):
        assert one.loss_divergence == pytest.approx(other.loss_divergence, rel=1e-3), one
        assert one.weight_divergence == pytest.approx(other.weight_divergence, rel=1e-3), one


@pytest.fixture(scope="module")
def under_sdpa(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_packs(tmp_path_factory.mktemp("sdpa"), "sdpa")


@pytest.mark.parametrize("compiles", [False, True])
def test_packs_under_varlen_attention_train_and_are_planned_as_under_sdpa(
    compiles: bool, tmp_path: Path, under_sdpa: Run
) -> None:
    torch._dynamo.reset()
    run = train_packs(tmp_path, varlen.register(), torch_compile=compiles)
    assert run.model.config._attn_implementation == varlen.NAME
    # Weights are equal at the probe; gradients, moments and losses differ by roundings.
    assert_similar(run, under_sdpa, 2 * ROUNDING)


def test_packs_under_flex_attention_train_compiled_and_are_planned_as_under_sdpa(
    tmp_path: Path, under_sdpa: Run
) -> None:
    torch._dynamo.reset()
    run = train_packs(tmp_path, "flex_attention", torch_compile=True)
    assert run.model.config._attn_implementation == "flex_attention"
    assert_similar(run, under_sdpa, 2 * ROUNDING)


def test_adamw_with_states_in_8_bits_by_bitsandbytes_is_probed(tmp_path: Path, under_sdpa: Run) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; its optimizers need a GPU")
    run = train_packs(tmp_path, "sdpa", optim="adamw_bnb_8bit")
    assert any(state["state1"].dtype == torch.uint8 for state in run.trainer.optimizer.optimizer.state.values())
    # Codes of 8 bits err by up to 1/16 of small moments.
    assert_similar(run, under_sdpa, 0.1)
