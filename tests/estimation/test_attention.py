"""Is a model probed whose attention computes in half precision only, with the same masks, and left as it was?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import half_attention
import pytest
import torch
from configs import fp4_config
from half_attention import registered
from small import Batch, adamw_after, text
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from snip_hf import SnipController, estimate_divergence
from snip_hf.estimation import attention
from snip_hf.estimation.batch import Batch as ProbedBatch
from snip_hf.estimation.passes import run_pass

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral, windows of 5": (MistralConfig, {"sliding_window": 5}),
    "gemma2, soft caps and windows of 5": (Gemma2Config, {"sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gpt-oss, sinks and windows of 5": (GptOssConfig, {"sliding_window": 5, "num_local_experts": 4}),
}
LENGTHS = (11, 3, 18)
# Two ways to say the ends.
ENDS = ("cu_seq_lens", "cu_seq_lens, and positions that go on")


@pytest.fixture(autouse=True)
def half() -> Iterator[str]:
    with registered() as name:
        yield name


def model_of(family: str, implementation: str) -> PreTrainedModel:
    kind, options = CONFIGS[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**_SIZES, **options), attn_implementation=implementation)
        for parameter in model.parameters():
            # Attention that is far from uniform.
            parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model.train()


def sequences() -> list[Tensor]:
    return list(text(1, sum(LENGTHS))["input_ids"][0].split(LENGTHS))


def packed(by: str) -> Batch:
    """The sequences in one row, whose ends are said in one of the ways that collators have."""
    parts = sequences()
    ids = torch.cat(parts)[None]
    position_ids = torch.cat([torch.arange(len(part)) for part in parts])[None]
    labels = ids.masked_fill(position_ids == 0, -100)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    says: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": position_ids},
        "position_ids and a mask of ones": {"position_ids": position_ids, "attention_mask": torch.ones_like(ids)},
        "cu_seq_lens": {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 18, "max_length_k": 18},
    }
    says["cu_seq_lens, and positions that go on"] = {
        **says["cu_seq_lens"],
        "position_ids": torch.arange(sum(LENGTHS))[None],
    }
    return {"input_ids": ids, "labels": labels, **says[by]}


def padded() -> Batch:
    parts = sequences()
    ids, labels, mask = (torch.full((len(parts), max(LENGTHS)), value) for value in (0, -100, 0))
    for row, part in enumerate(parts):
        ids[row, : len(part)], labels[row, : len(part)], mask[row, : len(part)] = part, part, 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def loss_one_by_one(model: PreTrainedModel, kept: tuple[int, ...] = (0, 1, 2)) -> float:
    """The mean loss over the labelled tokens of the sequences, each run by itself, in FP32."""
    parts = [sequences()[index][None] for index in kept]
    with torch.no_grad():
        losses = [float(model(input_ids=part, labels=part).loss) * (part.numel() - 1) for part in parts]
    return sum(losses) / sum(part.numel() - 1 for part in parts)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("by", ["padding", "position_ids", "position_ids and a mask of ones", *ENDS])
def test_a_probe_pass_sees_what_training_sees(family: str, by: str, half: str) -> None:
    batch = padded() if by == "padding" else packed(by)
    truth = loss_one_by_one(model_of(family, "eager"))
    model = model_of(family, half)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trained = float(model(**batch).loss)
    assert trained == pytest.approx(truth, rel=2e-2)  # the stand-in is right, in half precision
    assert float(run_pass(model, ProbedBatch.of(batch), {})) == pytest.approx(truth, rel=1e-5)
    assert model.config._attn_implementation == half


def test_a_model_that_makes_its_own_masks_makes_those_of_packs(half: str) -> None:
    """Some families do (Doge, Gemma 4); transformers makes the masks of the others."""
    model, batch, asked = model_of("llama", half), packed("position_ids"), []

    def causal_masks(config: Any, inputs_embeds: Tensor, mask: None, cache: None, position_ids: Tensor) -> Tensor:
        asked.append(position_ids)
        return torch.ones(1, 1, *[position_ids.shape[1]] * 2, dtype=torch.bool).tril()

    model.create_masks_for_generate = causal_masks
    mask = causal_masks(model.config, torch.empty(0), None, None, batch["position_ids"])
    with torch.no_grad():
        expected = float(model_of("llama", "sdpa")(**batch, attention_mask=mask).loss)
    assert float(run_pass(model, ProbedBatch.of(batch), {})) == pytest.approx(expected, rel=1e-5)
    assert len(asked) == 2 and torch.equal(asked[1], batch["position_ids"])


@pytest.mark.parametrize("by", ["position_ids", "position_ids and a mask of ones", "cu_seq_lens"])
@pytest.mark.parametrize(("asked", "kept"), [(31, (0, 1)), (20, (0, 1)), (14, (0, 1)), (13, (0,)), (1, (0,))])
def test_a_part_of_a_pack_ends_where_sequences_end(by: str, asked: int, kept: tuple[int, ...]) -> None:
    whole = {**packed(by), "seq_idx": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]}
    part = ProbedBatch.of(whole).part(asked)
    lengths = torch.tensor([LENGTHS[index] for index in kept])
    assert part.kwargs["input_ids"].tolist() == [torch.cat([sequences()[index] for index in kept]).tolist()]
    assert part.kwargs["seq_idx"].tolist() == [torch.tensor(kept).repeat_interleave(lengths).tolist()]
    assert (part.tokens, part.labelled) == (int(lengths.sum()), int(lengths.sum()) - len(kept))
    assert part.cut_from == (sum(LENGTHS), sum(LENGTHS) - len(LENGTHS))
    if by == "cu_seq_lens":
        ends = part.kwargs["cu_seq_lens_q"]
        assert (ends.tolist(), ends.dtype) == ([0, *lengths.cumsum(0).tolist()], torch.int32)
        assert part.kwargs["max_length_k"] == int(lengths.max())
    else:
        assert part.kwargs["position_ids"].tolist() == [[place for length in lengths for place in range(length)]]
    truth = loss_one_by_one(model_of("mistral, windows of 5", "sdpa"), kept)
    model = model_of("mistral, windows of 5", half_attention.NAME)
    assert float(run_pass(model, part, {})) == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mask": torch.ones(1, 1, 32, 32)}, "its input 'attention_mask' cannot be cut"),
        ({"pixel_values": torch.ones(3, 3, 4, 4)}, "its input 'pixel_values' cannot be cut"),
        ({"labels": torch.tensor([[-100] * 14 + [1] * 18])}, "2 of its packed sequences have no labels"),
    ],
)
def test_a_pack_that_cannot_be_cut_is_taken_whole(change: Batch, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    batch = ProbedBatch.of(packed("position_ids") | change)
    with caplog.at_level("INFO", logger="snip_hf.estimation.batch"):
        assert batch.part(20) is batch
    assert caplog.messages == [f"snip-hf: the probe runs the whole micro-batch of 32 tokens: {reason}."]


@pytest.mark.parametrize(("family", "plain"), list(zip(CONFIGS, ("sdpa", "sdpa", "eager", "eager"), strict=True)))
def test_estimates_equal_those_of_a_model_with_plain_attention(family: str, plain: str, half: str) -> None:
    batch, config, tables = padded(), fp4_config(probe_tokens=None), []
    for implementation in (half, plain):
        model = model_of(family, plain)
        optimizer = adamw_after(model, 2, rows=2, length=32)
        model.config._attn_implementation = implementation
        tables.append(estimate_divergence(model, batch, optimizer, config))
        assert model.config._attn_implementation == implementation
    assert tables[0].rows == tables[1].rows


def test_flex_attention_is_switched_too() -> None:
    batch, config = padded(), fp4_config(probe_tokens=None)
    model = model_of("mistral, windows of 5", "sdpa")
    plain = estimate_divergence(model, batch, None, config)
    model.config._attn_implementation = "flex_attention"  # which fails outside compiled graphs on CPUs
    assert estimate_divergence(model, batch, None, config).rows == plain.rows
    assert model.config._attn_implementation == "flex_attention"


def test_the_log_says_what_probes_use_in_place_of_an_attention_that_may_compute_another_function(
    half: str, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = (
        "snip-hf: probes use 'sdpa' in place of attn_implementation='half_attention'. If the two compute different "
        "functions, use a policy that needs no probe, such as policy='layer-position'."
    )
    names = {half: [foreign], "flash_attention_3": [], "kernels-community/flash-attn": [], "sdpa": []}
    for name, expected in names.items():
        model = model_of("llama", "sdpa")
        model.config._attn_implementation = name
        caplog.clear()
        SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1), fp4_config()).close()
        assert [message for message in caplog.messages if "in place of" in message] == expected


def test_the_attention_of_every_part_is_restored_after_a_failure(half: str) -> None:
    config = LlavaConfig(text_config=LlamaConfig(**_SIZES), vision_config={"model_type": "clip_vision_model"})
    config.vision_config = type(config.vision_config)(hidden_size=24, intermediate_size=32, num_hidden_layers=1)
    model = LlavaForConditionalGeneration._from_config(config)
    model.config._attn_implementation = {"text_config": half, "vision_config": "sdpa", "": half}
    found = []
    with pytest.raises(ZeroDivisionError), attention.plain_attention(model):
        for part in (model.config, model.config.text_config, model.config.vision_config):
            found.append(part._attn_implementation)
        raise ZeroDivisionError
    assert found == ["sdpa"] * 3
    assert (model.config._attn_implementation, model.config.text_config._attn_implementation) == (half, half)
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_a_mask_that_only_trainings_attention_reads_is_refused(half: str) -> None:
    batch = {**packed("position_ids"), "attention_mask": {"full_attention": None}}
    with pytest.raises(ValueError, match="attention_mask is a dict, which only the attention that training uses"):
        float(run_pass(model_of("llama", half), ProbedBatch.of(batch), {}))


@pytest.mark.parametrize(("ends", "rows"), [([0, 11, 14], 1), ([0, 11, 14, 40], 1), ([0, 11, 14, 32], 2)])
def test_ends_that_are_not_those_of_the_row_are_refused(ends: list[int], rows: int, half: str) -> None:
    ids = text(rows, sum(LENGTHS) // rows)["input_ids"]
    batch = ProbedBatch.of({"input_ids": ids, "labels": ids, "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32)})
    found = rf"cu_seq_lens_q ends at {ends[-1]}, but the batch has {rows} row\(s\) of {ids.shape[1]} tokens"
    with pytest.raises(ValueError, match=found):
        float(run_pass(model_of("llama", half), batch, {}))


def test_a_model_that_cannot_switch_is_refused(half: str) -> None:
    attention.check_attention(model_of("llama", half))
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(FalconConfig(**sizes, alibi=True))
    attention.check_attention(model)
    model.config._attn_implementation = "flash_attention_2"
    found = "'flash_attention_2' cannot run the probe's FP32 passes, and FalconForCausalLM .*='sdpa' or 'eager', or use"
    with pytest.raises(ValueError, match=found):
        attention.check_attention(model)
