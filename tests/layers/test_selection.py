"""The selection of layers: those of the language model's decoder, others only by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import causal_families
import models
import pytest
import torch
import torch.distributed as dist
from causal_families import FAMILIES
from configs import fp4_config
from models import build
from small import text, tiny_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import prune
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from snip_hf import SnipConfig, convert_model, coverage
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.selection import WeightMatrix, describe_unswapped, skip_reasons, weight_matrices
from snip_hf.layers.state import snip_linears

_SMALL = {"vocab_size": 80, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


def classifier() -> PreTrainedModel:
    config = LlamaConfig(**_SMALL, num_hidden_layers=1, num_labels=3, pad_token_id=0)
    return AutoModelForSequenceClassification.from_config(config)


def test_only_the_language_model_of_a_vision_language_model_is_swapped() -> None:
    model = build("llava")
    names = convert_model(model, fp4_config())
    assert len(names) == 14 and all(name.startswith("model.language_model.layers.") for name in names)
    reasons = skip_reasons(model, fp4_config())
    tower = "outside the language model's decoder (include_modules=('model.vision_tower.*',) swaps it)"
    assert reasons["model.vision_tower.encoder.layers.0.mlp.fc1"] == tower
    assert reasons["model.multi_modal_projector.linear_1"] == "outside the transformer blocks"


def test_a_vision_tower_and_its_projector_are_swapped_if_they_are_named() -> None:
    model = build("llava")
    config = fp4_config(include_modules=("model.vision_tower.*", "*_projector.linear_?"), skip_modules=("*.fc2",))
    names = convert_model(model, config)
    assert names == list(snip_linears(model)) and len(names) == 14 + 2 * 5 + 2
    assert "model.vision_tower.encoder.layers.1.self_attn.q_proj" in names
    assert not any(name.endswith("fc2") or name == "lm_head" for name in names)
    assert set(convert_model(model, fp4_config())) < set(names), "another config restores what it does not take"


def test_the_pattern_that_is_advised_swaps_what_it_is_said_of() -> None:
    """Beside the decoder, in a module that has both."""
    model = nn.Module()
    model.outer = nn.ModuleDict({name: nn.ModuleList([nn.Linear(8, 8)]) for name in ("text", "tower")})
    model.get_decoder = lambda: model.outer["text"]
    advised = "outside the language model's decoder (include_modules=('outer.tower.*',) swaps it)"
    assert skip_reasons(model, fp4_config()) == {"outer.text.0": None, "outer.tower.0": advised}
    config = fp4_config(include_modules=("outer.tower.*",))
    assert convert_model(model, config) == ["outer.text.0", "outer.tower.0"]


def test_a_layer_beside_the_decoder_is_advised_by_its_own_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)]))
    model.get_decoder = lambda: model[1]
    advised = "outside the language model's decoder (include_modules=('0',) swaps it)"
    assert skip_reasons(model, fp4_config()) == {"0": advised, "1.0": None}
    assert convert_model(model, fp4_config(include_modules=("0",))) == ["0", "1.0"]


def test_a_classification_head_is_swapped_if_it_is_named() -> None:
    assert "score" not in convert_model(classifier(), fp4_config())
    assert "score" in convert_model(classifier(), fp4_config(include_modules=("score",)))


def test_a_decoder_without_blocks_tells_nothing() -> None:
    """ModernBERT's decoder has an attribute `decoder`, which is the output head."""
    config = ModernBertDecoderConfig(**_SMALL, num_hidden_layers=2, pad_token_id=0)
    names = convert_model(AutoModelForCausalLM.from_config(config), fp4_config())
    assert len(names) == 12 and all(name.startswith("model.layers.") for name in names)


def test_a_model_that_tells_no_decoder_is_swapped_in_all_its_blocks() -> None:
    model = nn.ModuleDict({"tower": nn.ModuleList([nn.Linear(8, 8)]), "layers": nn.ModuleList([nn.Linear(8, 8)])})
    assert convert_model(model, fp4_config()) == ["tower.0", "layers.0"]


@pytest.mark.parametrize(
    ("pattern", "rest"),
    [
        ("vision_tower", "those are named like 'model.vision_tower.encoder.layers.0.self_attn.k_proj'. "),
        ("*.gate_proj", "those are named like 'model.vision_tower.encoder.layers.0.self_attn.k_proj'. "),
    ],
)
def test_a_name_that_is_not_outside_the_decoder_is_refused(pattern: str, rest: str) -> None:
    message = (
        f"include_modules: {pattern!r} matches no linear layer outside the decoder's blocks; {rest}"
        "Linears inside the blocks are swapped without it, and the output head only by its full name."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert_model(build("llava"), fp4_config(include_modules=(pattern,)))
    with pytest.raises(ValueError, match="the model has no other one"):
        convert_model(build("llama"), fp4_config(include_modules=(pattern,)))


def test_an_output_head_that_is_not_tied_is_swapped_by_its_full_name() -> None:
    model, tied = (tiny_llama(tie_word_embeddings=is_tied) for is_tied in (False, True))
    config = fp4_config(include_modules=("lm_head",))
    assert coverage(model, text(2, 16), config).aside["output head"] == 0
    for refused in (model, tied):
        with pytest.raises(ValueError, match="the output head only by its full name"):
            convert_model(refused, fp4_config(include_modules=("lm_*",)))
    assert convert_model(model, config)[-1] == "lm_head"


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_full_name_of_a_layer_that_cannot_be_swapped_is_refused_with_the_reason(is_tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=is_tied)
    rest = "its weight is that of the input embeddings. Leave the name out."
    if not is_tied:
        model.lm_head.__class__ = type("FSDPLinear", (nn.Linear,), {})  # as FSDP2 does
        before = "call snip_hf.convert_model(model, config) before the model is sharded"
        rest = f"class FSDPLinear. Leave the name out, or {before}."
    message = f"include_modules: 'lm_head' names a layer that cannot be swapped: {rest}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert_model(model, fp4_config(include_modules=("lm_head",)))
    assert not snip_linears(model)


def test_an_encoder_alone_is_its_own_stack() -> None:
    model = AutoModelForMaskedLM.from_config(BertConfig(**_SMALL, num_hidden_layers=2))
    names = convert_model(model, fp4_config())
    assert len(names) == 12 and all(name.startswith("bert.encoder.layer.") for name in names)


ROUTERS = {
    "afmoe": "mlp.router.gate",
    "hunyuan_v1_moe": "mlp.gate.wg",
    "jetmoe": "mlp.router.layer",
    "longcat_flash": "mlp.router.classifier",
    "qwen2_moe": "mlp.shared_expert_gate",
}


@pytest.mark.parametrize("family", [family for family in ROUTERS if family in FAMILIES])
def test_routers_that_are_linears_are_left_alone_and_the_gates_of_mlps_are_not(family: str) -> None:
    reasons = skip_reasons(causal_families.build(family), fp4_config())
    routers = {name for name, reason in reasons.items() if reason == "router"}
    assert [name for name in routers if name.endswith(f".{ROUTERS[family]}")]
    assert not [name for name in routers if name.endswith("gate_proj")]


@pytest.mark.skipif("zaya" not in FAMILIES, reason="this transformers has no Zaya")
def test_all_layers_of_a_module_whose_class_is_called_a_router_are_left_alone() -> None:
    reasons = skip_reasons(causal_families.build("zaya"), fp4_config())
    layers = ("down_proj", "router_mlp.fc1", "router_mlp.fc2", "router_mlp.out_proj")
    assert {name for name, reason in reasons.items() if reason == "router"} == {
        f"model.layers.{block}.mlp.gate.{layer}" for block in (0, 1) for layer in layers
    }


@pytest.mark.parametrize("family", [family for family in ("deepseek_v32", "glm_moe_dsa") if family in FAMILIES])
def test_indexers_of_sparse_attention_are_left_alone(family: str) -> None:
    reasons = skip_reasons(causal_families.build(family), fp4_config())
    reason = "chooses the tokens of sparse attention"
    assert {name for name, why in reasons.items() if why == reason} == {
        f"model.layers.{block}.self_attn.indexer.{part}" for block in (0, 1) for part in ("wq_b", "wk", "weights_proj")
    }


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


def summary(model: nn.Module, config: SnipConfig | None = None) -> dict[str, tuple[str, str, int, int]]:
    """Name -> kind, reason, number and elements of the weights that stay in high precision."""
    found: dict[str, tuple[str, str, int, int]] = {}
    for one in weight_matrices(model, config):
        if one.reason is not None and not one.is_aside and one.parameter.dim() > 1:
            before = found.get(one.name, (one.kind, one.reason, 0, 0))
            found[one.name] = one.kind, one.reason, before[2] + 1, before[3] + one.size
    return found


def swapped(model: nn.Module) -> int:
    """Elements of the weights that plans decide on."""
    return sum(one.size for one in weight_matrices(model, None) if one.reason is None)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "high precision" in record.getMessage()]


LINEARS_OF_MIXTURE = LAYERS * HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2)  # q and o; k and v have half the heads
GATE_UP, DOWN, ROUTER = (LAYERS * EXPERTS * size for size in (2 * INNER * HIDDEN, HIDDEN * INNER, HIDDEN))


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_swapped_and_routers_are_not(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build_mixture(family)
    with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        covered = convert_model(model, fp4_config())
    assert (len(covered), swapped(model)) == (6 * LAYERS, LINEARS_OF_MIXTURE + GATE_UP + DOWN)
    assert summary(model) == {"model.layers.*.mlp.gate": ("router", "router", LAYERS, ROUTER)}
    assert lines(caplog) == [
        "snip-hf: these weights stay in high precision (embeddings and output head aside): "
        "model.layers.*.mlp.gate x 2 (router)."
    ]


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_that_are_refused_are_named(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build_mixture(family)
    for block in model.model.layers:
        block.mlp.experts.forward = block.mlp.experts.forward
    with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        covered = convert_model(model, fp4_config())
    experts = "another forward function is set on it (device_map, tensor parallelism)"
    assert (len(covered), swapped(model)) == (4 * LAYERS, LINEARS_OF_MIXTURE)
    assert summary(model) == {
        "model.layers.*.mlp.experts.gate_up_proj": ("MoE experts", experts, 2, GATE_UP),
        "model.layers.*.mlp.experts.down_proj": ("MoE experts", experts, 2, DOWN),
        "model.layers.*.mlp.gate": ("router", "router", 2, ROUTER),
    }
    assert lines(caplog) == [
        "snip-hf: these weights stay in high precision (embeddings and output head aside): "
        f"model.layers.*.mlp.experts.gate_up_proj x 2 (MoE experts, {experts}), "
        f"model.layers.*.mlp.experts.down_proj x 2 (MoE experts, {experts}), "
        "model.layers.*.mlp.gate x 2 (router)."
    ]


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt-neox", "qwen2", "falcon"])
def test_a_model_of_linears_logs_no_other_modules(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = models.build(family)
    with caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        names = convert_model(model, fp4_config())
    modules = dict(model.named_modules())
    assert swapped(model) == sum(modules[name].weight.numel() for name in names)
    assert len(caplog.messages) == 1 and not summary(model)


def test_the_encoder_that_is_left_out_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"vocab_size": 80, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    with torch.device("meta"), caplog.at_level(logging.INFO, "snip_hf.layers.convert"):
        convert_model(T5ForConditionalGeneration(T5Config(**sizes)), fp4_config())
    said, named = caplog.messages
    outside = "outside the language model's decoder (include_modules=('encoder.*',) swaps it)"
    assert said == f"snip-hf swapped 20 layers; skipped 13 ({outside}: 12, output head: 1)."
    for kind in ("SelfAttention.q", "SelfAttention.o", "DenseReluDense.wi", "DenseReluDense.wo"):
        assert named.count(f"encoder.block.*.layer.*.{kind} x 2 (Linear, {outside})") == 1


def test_linears_that_are_skipped_by_rule_have_the_reason_of_the_rule() -> None:
    """OPT's projections between embeddings and blocks, 48 wide."""
    outside = "outside the transformer blocks"
    assert summary(models.build("opt"), fp4_config()) == {
        "model.decoder.project_out": ("Linear", outside, 1, 48 * 64),
        "model.decoder.project_in": ("Linear", outside, 1, 48 * 64),
    }


@pytest.mark.parametrize(
    ("compute", "names"),
    [
        (nn.utils.weight_norm, ("weight_v", "weight_g")),
        (nn.utils.spectral_norm, ("weight_orig",)),
        (partial(prune.l1_unstructured, name="weight", amount=0.5), ("weight_orig",)),
        (
            nn.utils.parametrizations.weight_norm,
            ("parametrizations.weight.original1", "parametrizations.weight.original0"),
        ),
        (nn.utils.parametrizations.orthogonal, ("parametrizations.weight.original",)),
    ],
)
@pytest.mark.parametrize(("family", "layer"), [("llama", "self_attn.q_proj"), ("gpt2", "attn.c_attn")])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_weight_that_is_computed_is_left_alone_and_listed(
    compute: Callable[[nn.Module], nn.Module], names: tuple[str, ...], family: str, layer: str
) -> None:
    model = models.build(family)
    swapped_before = convert_model(models.build(family), fp4_config())
    blocks = "transformer.h" if family == "gpt2" else "model.layers"
    module = model.get_submodule(f"{blocks}.0.{layer}")
    compute(module)
    reason = "its weight is computed from other parameters, e.g. by weight_norm"
    assert convert_model(model, fp4_config()) == [name for name in swapped_before if name != f"{blocks}.0.{layer}"]
    assert skip_reasons(model, fp4_config())[f"{blocks}.0.{layer}"] == reason
    assert not isinstance(module, SnipLayer)
    listed = {(one.name, one.reason) for one in weight_matrices(model, None) if f".{layer}." in one.name}
    assert listed == {(f"{blocks}.*.{layer}.{name}", reason) for name in names}


def test_a_linear_whose_weight_is_a_buffer_is_swapped() -> None:
    model = models.build("llama")
    layer = model.model.layers[0].self_attn.q_proj
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    assert convert_model(model, fp4_config()) == convert_model(models.build("llama"), fp4_config())
    assert isinstance(layer, SnipLayer)


def test_parameters_that_an_output_heads_weight_is_computed_from_have_the_heads_reason() -> None:
    model = models.build("llama")
    nn.utils.parametrizations.weight_norm(model.lm_head)
    listed = [(one.name, one.reason) for one in weight_matrices(model, fp4_config()) if "lm_head" in one.name]
    assert listed == [(f"lm_head.parametrizations.weight.original{n}", "output head") for n in (0, 1)]


def test_conv1d_is_covered_and_a_subclass_of_it_is_named() -> None:
    class Gated(Conv1D):
        """Has another forward."""

    model = models.build("gpt2")
    assert not summary(model)
    for block in model.transformer.h:
        block.mlp.c_fc.__class__ = Gated
    convert_model(model, fp4_config())
    assert summary(model) == {"transformer.h.*.mlp.c_fc": ("Gated", "class Gated", 2, 2 * 64 * 256)}


@pytest.mark.parametrize("inside", [True, False])
def test_convolutions_and_patch_embeddings_are_named_wherever_they_are(inside: bool) -> None:
    model = block_of_linears(conv=nn.Conv1d(8, 8, 3)) if inside else block_of_linears()
    model["patches"] = nn.Conv2d(3, 8, 2)
    expected = {"patches": ("Conv2d", "no registered layer kind handles Conv2d", 1, 96)}
    if inside:
        expected["layers.*.conv"] = "Conv1d", "no registered layer kind handles Conv1d", 1, 192
    assert summary(model) == expected


def test_layers_that_the_user_left_out_are_named_with_that_reason() -> None:
    assert summary(block_of_linears(), fp4_config(skip_modules=("*.down",))) == {
        "layers.*.down": ("Linear", "skip_modules", 1, 64)
    }


def test_a_weight_that_the_model_itself_holds_has_its_own_name() -> None:
    model = block_of_linears()
    model.register_parameter("mixing", nn.Parameter(torch.ones(8, 8)))
    assert summary(model) == {"mixing": ("ModuleDict", "no registered layer kind handles ModuleDict", 1, 64)}


def test_a_tied_weight_is_told_once_and_not_at_all_if_it_is_an_embedding_s() -> None:
    model = block_of_linears(embed=nn.Embedding(8, 8), again=nn.Conv1d(8, 8, 1), late=nn.Conv1d(8, 8, 1))
    block = model["layers"][0]
    block["late"].weight = block["again"].weight
    model["head"] = nn.Conv1d(8, 8, 1)
    model["head"].weight = block["embed"].weight
    assert summary(model) == {"layers.*.again": ("Conv1d", "no registered layer kind handles Conv1d", 1, 64)}


def test_a_weight_that_a_plan_decides_on_in_one_place_is_not_told_for_another() -> None:
    model = block_of_linears(other=nn.Conv1d(8, 8, 1))
    model["layers"][0]["other"].weight = model["layers"][0]["up"].weight
    assert summary(model) == {}


def test_whole_numbers_quantized_and_shapeless_parameters_are_not_told() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
            self.lazy = nn.UninitializedParameter()
            self.first = nn.Parameter(torch.zeros(2, 4))
            self.parts = nn.Parameter(torch.zeros(0))
            self.parts.ds_shape = (3, 4)  # as DeepSpeed leaves a weight that it has partitioned

    found = {one.name: one.size for one in weight_matrices(block_of_linears(odd=Odd()), None) if "odd" in one.name}
    assert found == {"layers.*.odd.first": 8, "layers.*.odd.parts": 12}


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
    assert swapped(model) == 128
    assert summary(model)["layers.*.conv"] == ("Conv1d", "no registered layer kind handles Conv1d", 1, 192)


def test_compiled_blocks_and_conversion_leave_the_names_alone() -> None:
    model = build_mixture("Mixtral", "cpu")
    before = summary(model)
    convert_model(model, fp4_config())
    assert summary(model) == before
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    assert summary(model) == before


def test_long_lists_and_strange_names_are_cut_and_escaped() -> None:
    weights = [nn.Parameter(torch.zeros(1, 1)) for _ in range(50)]
    groups = [WeightMatrix(w, f"n\u202e{'x' * 300}{i}", "Kind", "reason", False) for i, w in enumerate(weights)]
    text = describe_unswapped(groups)
    assert text.endswith(", and 30 more") and text.isprintable() and len(text) < 20 * 400


def test_matrices_of_adapters_are_counted_and_not_listed() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    adapters = [WeightMatrix(weight, f"layers.*.{name}.lora_A", "Linear", "adapter", False) for name in "qkv"]
    conv = WeightMatrix(weight, "conv", "Conv2d", "no registered layer kind handles Conv2d", False)
    assert describe_unswapped([*adapters, conv]) == (
        "conv (Conv2d, no registered layer kind handles Conv2d), 3 matrices of adapters"
    )
    assert describe_unswapped(adapters[:1]) == "1 matrix of adapters"


def test_a_gate_of_no_known_class_is_a_router_only_where_it_has_an_output_for_each_expert() -> None:
    class TopKGate(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(outputs, 8))

    block = nn.ModuleDict(
        {"chooses": TopKGate(4), "weighs": TopKGate(3), "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))}
    )
    found = {one.name: one.reason for one in weight_matrices(nn.ModuleDict({"layers": nn.ModuleList([block])}), None)}
    assert found["layers.*.chooses"] == "router"
    assert found["layers.*.weighs"] == "no registered layer kind handles TopKGate"
