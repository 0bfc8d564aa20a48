"""Is every weight matrix that a plan does not cover named, with its kind, its reason and its share of the model?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.pytorch_utils import Conv1D

from snip_hf import SnipConfig, convert_model
from snip_hf.layers.convert import coverage
from snip_hf.layers.coverage import Coverage, Uncovered, find_coverage

HIDDEN, INNER, EXPERTS, LAYERS = 64, 96, 4, 2
_COMMON: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": INNER,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXTURES: dict[str, PretrainedConfig] = {
    "Mixtral": MixtralConfig(**_COMMON, num_local_experts=EXPERTS),
    "Qwen3Moe": Qwen3MoeConfig(**_COMMON, num_experts=EXPERTS, moe_intermediate_size=INNER, head_dim=16),
    "Olmoe": OlmoeConfig(**_COMMON, num_experts=EXPERTS),
}


def build_mixture(family: str, device: str = "meta") -> PreTrainedModel:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(MIXTURES[family])


def block_of_linears(**others: nn.Module) -> nn.ModuleDict:
    """A model with one block, whose two linears have 128 parameters in their weights."""
    parts = {"up": nn.Linear(8, 8), "down": nn.Linear(8, 8, bias=False), "norm": nn.LayerNorm(8), **others}
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(parts)])})


def summary(found: Coverage) -> dict[str, tuple[str, str, int, int]]:
    return {group.name: (group.kind, group.reason, group.count, group.parameters) for group in found.uncovered}


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level and "cover" in r.getMessage()]


LINEARS_OF_MIXTURE = LAYERS * HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2)  # q and o; k and v have half the heads
GATE_UP, DOWN, ROUTER = (LAYERS * EXPERTS * size for size in (2 * INNER * HIDDEN, HIDDEN * INNER, HIDDEN))


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_covered_and_routers_are_not(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build_mixture(family)
    with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        covered = convert_model(model, SnipConfig())
    found = coverage(model, SnipConfig())
    assert len(covered) == 6 * LAYERS
    assert found.covered == LINEARS_OF_MIXTURE + GATE_UP + DOWN == found.parameters - ROUTER
    router = f"{family}TopKRouter", "not an nn.Linear", LAYERS, ROUTER
    assert summary(found) == {"model.layers.*.mlp.gate": router}
    assert len(lines(caplog, logging.INFO)) == 1 and not lines(caplog, logging.WARNING)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_that_are_refused_are_named_with_their_share_and_warned_of(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_mixture(family)
    for block in model.model.layers:
        block.mlp.experts._is_expert_parallel = True
    with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        covered = convert_model(model, SnipConfig())
    total = LINEARS_OF_MIXTURE + GATE_UP + DOWN + ROUTER
    found = coverage(model, SnipConfig())
    assert len(covered) == 4 * LAYERS
    assert (found.parameters, found.covered) == (total, LINEARS_OF_MIXTURE)
    reason = "experts spread over processes (expert parallelism)"
    assert summary(found) == {
        "model.layers.*.mlp.experts.gate_up_proj": (f"{family}Experts", reason, 2, GATE_UP),
        "model.layers.*.mlp.experts.down_proj": (f"{family}Experts", reason, 2, DOWN),
        "model.layers.*.mlp.gate": (f"{family}TopKRouter", "not an nn.Linear", 2, ROUTER),
    }
    assert [group.share for group in found.uncovered] == [GATE_UP / total, DOWN / total, ROUTER / total]
    text = (
        f"{1 - LINEARS_OF_MIXTURE / total:.1%} of the parameters in weight matrices (embeddings and output head "
        f"aside): model.layers.*.mlp.experts.gate_up_proj x 2 ({family}Experts, {reason}: {GATE_UP / total:.1%}), "
        f"model.layers.*.mlp.experts.down_proj x 2 ({family}Experts, {reason}: {DOWN / total:.1%}), "
        f"model.layers.*.mlp.gate x 2 ({family}TopKRouter, not an nn.Linear: {ROUTER / total:.1%})."
    )
    assert lines(caplog, logging.INFO) == [f"snip-hf: the plan does not cover {text}"]
    assert lines(caplog, logging.WARNING) == [
        "snip-hf: FP4 shares count the swapped layers only. What the plan does not cover stays in high precision: "
        f"{text}"
    ]


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt-neox", "qwen2", "falcon"])
def test_a_model_of_linears_is_covered_and_nothing_is_said(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build(family)
    with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        names = convert_model(model, SnipConfig())
    modules = dict(model.named_modules())
    weights = sum(modules[name].weight.numel() for name in names)
    assert coverage(model, SnipConfig()) == Coverage(weights, weights, ())
    assert len(caplog.messages) == 1 and "the plan does not cover" not in caplog.text


def test_linears_that_are_skipped_by_rule_have_the_reason_of_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    """OPT's projections between embeddings and blocks, 48 wide."""
    with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        convert_model(build("opt"), SnipConfig())
    found = coverage(build("opt"), SnipConfig())
    outside = "outside the transformer blocks"
    assert (
        summary(found)
        == {
            "model.decoder.project_out": ("Linear", outside, 1, 48 * 64),
            "model.decoder.project_in": ("Linear", outside, 1, 48 * 64),
        }
        and found.parameters == found.covered + 2 * 48 * 64
    )
    assert len(lines(caplog, logging.INFO)) == 1
    assert len(lines(caplog, logging.WARNING)) == 0, "6,144 of 63,488 parameters are less than 10%"


def test_conv1d_is_covered_and_a_subclass_of_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Gated(Conv1D):
        """Of another forward."""

    model = build("gpt2")
    whole = coverage(model, SnipConfig())
    assert whole == Coverage(whole.parameters, whole.parameters, ())
    for block in model.transformer.h:
        block.mlp.c_fc.__class__ = Gated
    convert_model(model, SnipConfig())
    found, size = coverage(model, SnipConfig()), 2 * 64 * 256
    assert found.covered == found.parameters - size == whole.parameters - size
    assert summary(found) == {"transformer.h.*.mlp.c_fc": ("Gated", "class Gated", 2, size)}
    (warning,) = lines(caplog, logging.WARNING)
    assert warning.endswith("transformer.h.*.mlp.c_fc x 2 (Gated, class Gated: 33.3%).")


@pytest.mark.parametrize("inside", [True, False])
def test_convolutions_and_patch_embeddings_are_named_wherever_they_are(inside: bool) -> None:
    conv, patches = nn.Conv1d(8, 8, 3), nn.Conv2d(3, 8, 2)
    model = block_of_linears(conv=conv) if inside else block_of_linears()
    model["patches"] = patches
    found = coverage(model, SnipConfig())
    assert (found.covered, found.parameters) == (128, 128 + 8 * 3 * 4 + inside * 8 * 8 * 3)
    expected = {"patches": ("Conv2d", "not an nn.Linear", 1, 96)}
    assert summary(found) == expected | ({"layers.*.conv": ("Conv1d", "not an nn.Linear", 1, 192)} if inside else {})


def test_more_than_a_tenth_is_a_warning_unless_the_user_left_it_out(caplog: pytest.LogCaptureFixture) -> None:
    def warnings(model: nn.Module, *skipped: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
            convert_model(model, SnipConfig(skip_modules=skipped))
        assert len(lines(caplog, logging.INFO)) == 1
        return lines(caplog, logging.WARNING)

    router = nn.Conv1d(7, 2, 1)
    assert warnings(block_of_linears(router=router)) == [], "14 of 142"
    assert len(warnings(block_of_linears(router=nn.Conv1d(8, 2, 1)))) == 1, "16 of 144"
    assert warnings(block_of_linears(router=router), "*.down") == []
    assert "layers.*.down (Linear, skip_modules: 45.1%)" in caplog.text


def test_a_tied_weight_is_counted_once_and_with_the_embedding_if_it_is_its() -> None:
    model = block_of_linears(embed=nn.Embedding(8, 8), again=nn.Conv1d(8, 8, 1), late=nn.Conv1d(8, 8, 1))
    block = model["layers"][0]
    block["late"].weight = block["again"].weight
    block["up"].weight = block["embed"].weight
    found = coverage(model, SnipConfig())
    assert (found.covered, found.parameters) == (64, 128)
    assert summary(found) == {"layers.*.again": ("Conv1d", "not an nn.Linear", 1, 64)}


def test_whole_numbers_quantized_and_shapeless_parameters_are_not_counted() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
            self.lazy = nn.UninitializedParameter()
            self.scale = nn.Parameter(torch.zeros(16))
            self.first = nn.Parameter(torch.zeros(2, 4))
            self.parts = nn.Parameter(torch.zeros(0))
            self.parts.ds_shape = (3, 4)  # as DeepSpeed leaves a weight that it has partitioned

    found = coverage(block_of_linears(odd=Odd()), SnipConfig())
    assert summary(found) == {
        "layers.*.odd.parts": ("Odd", "not an nn.Linear", 1, 12),
        "layers.*.odd.first": ("Odd", "not an nn.Linear", 1, 8),
    }


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is the first of two; the other one does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_sharded_weight_counts_as_a_whole(two_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = block_of_linears(conv=nn.Conv1d(8, 8, 3))
    for module in (model["layers"][0][name] for name in ("up", "conv")):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    assert model["layers"][0]["up"].weight.to_local().shape == (4, 8)
    found = coverage(model, SnipConfig())
    assert (found.covered, found.parameters) == (128, 320)


def test_compiled_blocks_and_conversion_leave_the_figures_alone() -> None:
    model = build_mixture("Mixtral", "cpu")
    before = coverage(model, SnipConfig())
    convert_model(model, SnipConfig())
    assert coverage(model, SnipConfig()) == before
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    assert coverage(model, SnipConfig()) == before


def test_a_model_without_weight_matrices_has_nothing_to_cover() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    names = {id(module): name for name, module in model.named_modules()}
    assert find_coverage(model, None, {}, names) == Coverage(0, 0, ())


def test_long_lists_and_strange_names_are_cut_and_escaped() -> None:
    groups = tuple(Uncovered(f"n\u202e{'x' * 300}{i}", "Kind", "reason", 1, 1, 0.01) for i in range(50))
    text = Coverage(100, 50, groups).describe()
    assert text.endswith(", and 30 more (30.0%)") and text.isprintable() and len(text) < 20 * 300
