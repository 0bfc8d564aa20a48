"""Builds the model of a recipe."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .recipe import ModelSection


def build_model(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns the model to train, in training precision, with a vocabulary that holds the tokenizer's.

    Raises:
        ValueError: an unknown field of the architecture's config, or a vocabulary smaller than the tokenizer's.
        ModuleNotFoundError: adapters are asked for, and PEFT is not installed.
    """
    options = {"dtype": section.dtype}
    if section.attn_implementation is not None:
        options["attn_implementation"] = section.attn_implementation
    if section.name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(section.name_or_path, **options)
    else:
        known = AutoConfig.for_model(section.model_type)
        unknown = [key for key in section.config if not hasattr(known, key)]
        if unknown:
            names = ", ".join(sorted(known.to_dict()))
            raise ValueError(
                f"model.config: {unknown[0]!r} is no field of {section.model_type!r}; its fields are {names}."
            )
        follows = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(section.model_type, **(follows | section.config)), **options
        )
    if model.get_input_embeddings().weight.shape[0] < len(tokenizer):
        raise ValueError(
            f"The model has {model.get_input_embeddings().weight.shape[0]} embeddings, the tokenizer {len(tokenizer)} "
            "tokens. Raise model.config.vocab_size, or give the model's own tokenizer."
        )
    return model if section.lora is None else _with_adapters(model, section.lora)


def _with_adapters(model: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel:
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("model.lora needs PEFT: pip install peft.") from error
    adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    return adapted
