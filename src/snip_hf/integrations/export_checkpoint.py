"""A checkpoint for inference: weights quantized by a plan, in a form that transformers loads back (torchao).

Only the forward GEMM's format of a layer matters, since inference has no other GEMM. Weights are quantized to the kind
that torchao stores (`export_targets.WEIGHT_KINDS`), or to the nearest one where that is asked for; activations stay as
they are.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TorchAoConfig

from ..json_io import open_regular
from ..layers.selection import modules_of_layers, refuse_quantized
from ..layers.state import without_group
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from ..planning.plan import PrecisionPlan
from .export import NotExpressible
from .export_names import CHECKPOINT
from .export_targets import WEIGHT_KINDS, WeightKind

_WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
# What a tokenizer consists of, besides files of its own that it names in its configuration.
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
_OTHER_FILES = (*_TOKENIZER_FILES, "chat_template*")
_DTYPE = torch.bfloat16
# Tokens per window of a text, if the model takes as many.
_WINDOW = 1024
_MOST_TEXT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ExportedCheckpoint:
    """Figures of a checkpoint before and after."""

    kinds: Mapping[tuple[str, str], int]
    """Format of the plan, and how a weight is stored -> the number of layers."""
    changed: Mapping[str, str]
    """Layer whose weight has scales of another kind or by another rule than the plan's format -> what became of it."""
    kept: Mapping[str, str]
    """Layer that is not quantized, though the plan has a low format for it -> why."""
    fp4_fractions: tuple[float, float]
    """Share (0..1) of the forward FLOPs in FP4, of the plan and of the checkpoint."""
    bytes: tuple[int, int, int]
    """Size of the weight files of the model that was given, of its parameters in BF16, and of the new weight files."""
    perplexity: tuple[float, float] | None
    """Of the text, with BF16 weights and with the new ones; None: no text."""


def export_checkpoint(
    plan: PrecisionPlan, model_dir: Path, output: Path, nearest: bool = False, text: Path | None = None
) -> ExportedCheckpoint:
    """Writes a checkpoint whose weights are quantized by a plan, and loads it back.

    Args:
        plan: the plan; its layers are those of the model (`snip-hf inspect` compares).
        model_dir: folder of a causal LM.
        output: a folder that does not exist yet, or is empty.
        nearest: store layers with other scales than their format has, or keep them in BF16, where torchao lacks it.
        text: UTF-8 text to measure perplexity on.

    Raises:
        NotExpressible: without `nearest`, a layer cannot be stored.
        OSError, ValueError: a folder or a file is not what it has to be. Nothing is written.
    """
    if not model_dir.is_dir():
        raise ValueError(f"--model is {str(model_dir)!r}, expected the folder of a model.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already, expected a new or an empty folder.")
    passage = None if text is None else _tokens(text, model_dir)
    model = _load(model_dir)
    refuse_quantized(model)
    chosen, kept, changed = _chosen(plan, model)
    if (changed or kept) and not nearest:
        others = {layer: _other_scales(plan.assignment[layer][GEMMS[0]], chosen[layer]) for layer in changed}
        raise NotExpressible(CHECKPOINT, others | kept, nearest)
    if not chosen:
        raise ValueError("No layer of the plan has a forward GEMM whose weights can be quantized.")
    before = None if passage is None else perplexity(model, passage)
    in_bf16 = _DTYPE.itemsize * sum(parameter.numel() for parameter in model.parameters())
    del model
    # Folders above the output are made at the end, so that nothing is left behind if something is refused before.
    above = next(folder for folder in output.absolute().parents if folder.exists())
    folder = above / f".{output.name}.{secrets.token_hex(8)}.tmp"
    folder.mkdir()
    try:
        _write(chosen, model_dir, folder)
        quantized = _load(folder)
        _check_quantized(quantized, chosen)
        _check_runs(quantized)
        after = None if passage is None else perplexity(quantized, passage)
        output.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kinds = Counter((plan.assignment[layer][GEMMS[0]], kind.label) for layer, kind in chosen.items())
    figures = None if before is None or after is None else (before, after)
    shares = _fp4_fraction(plan, plan.assignment), _fp4_fraction(plan, chosen)
    return ExportedCheckpoint(kinds, changed, kept, shares, (_size(model_dir), in_bf16, _size(output)), figures)


def _fp4_fraction(plan: PrecisionPlan, layers: Iterable[str]) -> float:
    """Returns the share of the plan's forward FLOPs that these layers run in FP4."""
    forward = GEMMS[0]
    low = [layer for layer in layers if FORMATS[plan.assignment[layer][forward]].counts_as_fp4]
    work = plan.executed
    return math.fsum(work[layer][forward] for layer in low) / math.fsum(row[forward] for row in work.values())


def perplexity(model: nn.Module, tokens: torch.Tensor) -> float:
    """Returns exp of the mean negative log-likelihood of tokens (1-D), in windows that share no tokens."""
    window = min(_WINDOW, getattr(model.config, "max_position_embeddings", None) or _WINDOW)
    total, count = 0.0, 0
    with torch.no_grad():
        for part in tokens.split(window):
            if len(part) > 1:
                logits = model(part[None]).logits[0, :-1].float()
                total += nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
                count += len(part) - 1
    mean = total / count
    return math.exp(mean) if mean < 700 else math.inf


def _load(folder: Path, **settings: Any) -> PreTrainedModel:
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPE, trust_remote_code=False, local_files_only=True, **settings
        )
    except Exception as error:  # Whatever a foreign checkpoint makes of it.
        raise ValueError(f"Cannot load the model in {folder}: {error}") from error
    loaded.eval()
    return loaded


def _chosen(plan: PrecisionPlan, model: nn.Module) -> tuple[dict[str, WeightKind], dict[str, str], dict[str, str]]:
    """Returns how each layer's weight is stored, why others stay in BF16 though the plan has them low, and which of the
    stored ones get other scales than the plan's."""
    chosen, kept, changed = {}, {}, {}
    modules = modules_of_layers(model)
    for layer, formats in plan.assignment.items():
        name = formats[GEMMS[0]]
        if not FORMATS[name].is_quantized:
            continue
        kind, why = WEIGHT_KINDS.get(name), _unfit(modules.get(without_group(layer)), WEIGHT_KINDS.get(name))
        if kind is None or why:
            kept[layer] = why or f"torchao stores no weights in {name}"
        else:
            chosen[layer] = kind
            if not kind.keeps(FORMATS[name]):
                changed[layer] = f"{name} -> {kind.label}"
    return chosen, kept, changed


def _other_scales(name: str, kind: WeightKind) -> str:
    return f"torchao cannot store weights with the scales of {name}; the nearest that it can is {kind.label!r}"


def _unfit(module: nn.Module | None, kind: WeightKind | None) -> str | None:
    if module is None:
        return "the model has no layer of this name"
    if type(module).__name__ != "Linear":  # others may multiply in another way than the quantized weights can
        return f"class {type(module).__name__}, expected nn.Linear itself"
    shape = tuple(module.get_parameter("weight").shape)
    if kind and any(size % multiple for size, multiple in zip(shape, kind.multiples, strict=True)):
        return f"its shape {shape} is not a multiple of {kind.multiples}, which {kind.label!r} needs"
    return None


def _write(chosen: Mapping[str, WeightKind], model_dir: Path, folder: Path) -> None:
    from torchao.quantization import FqnToConfig

    # By the names of the weights: under that of a layer, transformers quantizes its bias too.
    config = FqnToConfig(OrderedDict((f"{layer}.weight", kind.config()) for layer, kind in chosen.items()))
    model = _load(model_dir, quantization_config=TorchAoConfig(config))
    _check_quantized(model, chosen)
    model.save_pretrained(folder)
    for pattern in _OTHER_FILES:
        for path in model_dir.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _check_quantized(model: nn.Module, chosen: Mapping[str, WeightKind]) -> None:
    from torchao.utils import TorchAOBaseTensor

    for layer in chosen:
        weight = model.get_submodule(layer).weight
        if not isinstance(weight, TorchAOBaseTensor):
            raise ValueError(
                f"Layer {layer!r} has a weight of the type {type(weight).__name__} after quantization, expected one of "
                "torchao's. transformers may exclude the layer for this model."
            )


def _check_runs(model: nn.Module) -> None:
    try:
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
    except Exception as error:  # Whatever the model makes of quantized weights.
        raise ValueError(f"The model does not run with its quantized weights: {error}") from error


def _tokens(text: Path, model_dir: Path) -> torch.Tensor:
    with open_regular(text) as file:
        data = file.read(_MOST_TEXT_BYTES + 1)
    if len(data) > _MOST_TEXT_BYTES:
        raise ValueError(f"{text} is larger than {_MOST_TEXT_BYTES} bytes.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ValueError(f"Cannot load the tokenizer in {model_dir}, which --text needs: {error}") from error
    tokens = torch.tensor(tokenizer(data.decode("utf-8"), verbose=False).input_ids, dtype=torch.long)
    if len(tokens) < 2:
        raise ValueError(f"{text} has {len(tokens)} tokens, expected at least 2.")
    return tokens


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
