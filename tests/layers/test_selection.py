"""Which layers are swapped: those of the language model's decoder, and others only if they are named?"""

from __future__ import annotations

import re

import pytest
from configs import fp4_config
from families import build
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    PreTrainedModel,
)

from snip_hf import convert_model
from snip_hf.layers.selection import skip_reasons
from snip_hf.layers.state import snip_linears

_SMALL = {"vocab_size": 80, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


def classifier() -> PreTrainedModel:
    config = LlamaConfig(**_SMALL, num_hidden_layers=1, num_labels=3, pad_token_id=0)
    return AutoModelForSequenceClassification.from_config(config)


def test_of_a_vision_language_model_the_language_model_is_swapped() -> None:
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
    """What is called `decoder` in ModernBERT's decoder is the output head."""
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
        ("lm_head", "those are named like 'model.vision_tower.encoder.layers.0.self_attn.k_proj'. "),
    ],
)
def test_a_name_that_is_not_outside_the_decoder_is_refused(pattern: str, rest: str) -> None:
    message = (
        f"include_modules: {pattern!r} matches no linear layer outside the decoder's blocks; {rest}"
        "Linears inside the blocks are swapped without it, and the output head never is."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert_model(build("llava"), fp4_config(include_modules=(pattern,)))
    with pytest.raises(ValueError, match="the model has no other one"):
        convert_model(build("llama"), fp4_config(include_modules=(pattern,)))


def test_an_encoder_alone_is_its_own_stack() -> None:
    model = AutoModelForMaskedLM.from_config(BertConfig(**_SMALL, num_hidden_layers=2))
    names = convert_model(model, fp4_config())
    assert len(names) == 12 and all(name.startswith("bert.encoder.layer.") for name in names)
