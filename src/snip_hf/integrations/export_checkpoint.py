"""Exports a checkpoint for inference, with weights quantized by torchao so that transformers can load them.

Inference only runs the forward GEMM, so its format decides. `WEIGHT_KINDS` maps each format to a way of storing weights
in torchao. Activations are not quantized.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
)
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from ..layers.selection import refuse_quantized
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from ..planning.plan import PrecisionPlan
from .export import NotExpressible

# Files to copy: those of the tokenizer and chat templates.
_COPIED = (*("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"), "chat_template*")
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class WeightKind:
    """A weight-only configuration of torchao."""

    label: str
    config: Callable[[], Any]
    """Builds torchao's configuration."""
    multiples: tuple[int, int] = (1, 1)
    """Numbers that must divide the rows and the columns of the weight."""


_ROWS = WeightKind("E4M3, a scale per row", partial(Float8WeightOnlyConfig, granularity=PerRow()))
_TENSOR = WeightKind("E4M3, a scale per tensor", partial(Float8WeightOnlyConfig, granularity=PerTensor()))
_BLOCKS = WeightKind("E2M1, an E4M3 scale per 16 values", NVFP4WeightOnlyConfig, multiples=(16, 16))


def _integers(group: int) -> WeightKind:
    config = partial(IntxWeightOnlyConfig, weight_dtype=torch.int4, granularity=PerGroup(group))  # type: ignore[attr-defined]
    return WeightKind(f"4-bit integers in bytes, a scale per {group} values", config, multiples=(1, group))


WEIGHT_KINDS = {
    "fp8": _ROWS,
    "fp8-tensor": _TENSOR,
    "fp8-tensor-e5m2": _TENSOR,
    "fp8-delayed": _TENSOR,
    "mxfp8": _ROWS,
    "int8": WeightKind("8-bit integers, a scale per row", Int8WeightOnlyConfig),
    **dict.fromkeys(("fp4", "fp4-46", "mxfp4", "mxfp4-32x32", "mxfp4-rht"), _BLOCKS),
    **dict.fromkeys(("nvfp4", "nvfp4-1x16", "nvfp4-46", "nvfp4-rht", "nvfp4-rht128"), _BLOCKS),
    "int4": _integers(128),
    **dict.fromkeys(("ufp4", "ufp4-rht"), _integers(32)),
}
"""Format of the forward GEMM -> weights with the same elements and the nearest scales that torchao supports. Other
formats are refused."""


def export_checkpoint(plan: PrecisionPlan, model_dir: Path, output: Path) -> dict[str, str]:
    """Writes a checkpoint whose weights are quantized by a plan, and loads it back.

    Args:
        plan: the plan, whose layers must be those of the model (check with `snip-hf inspect`).
        model_dir: folder of a causal LM.
        output: a new or empty folder.

    Returns: format of the plan -> description of the stored weights.

    Raises:
        NotExpressible: torchao cannot store a layer.
        OSError, ValueError: a folder is missing or unusable; nothing is written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already, expected a new or an empty folder.")
    model = _load(model_dir)
    refuse_quantized(model)
    kinds = _weight_kinds(plan, model)
    del model
    # Creates the parents of the output last, so that a refusal leaves nothing behind.
    above = next(folder for folder in output.absolute().parents if folder.exists())
    folder = above / f".{output.name}.{secrets.token_hex(8)}.tmp"
    folder.mkdir()
    try:
        _write(kinds, model_dir, folder)
        quantized = _load(folder)
        _check_quantized(quantized, kinds)
        _check_runs(quantized)
        output.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {plan.assignment[layer][GEMMS[0]]: kind.label for layer, kind in kinds.items()}


def _load(folder: Path, **settings: Any) -> PreTrainedModel:
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPE, trust_remote_code=False, local_files_only=True, **settings
        )
    except Exception as error:  # A foreign checkpoint may raise anything.
        raise ValueError(f"Cannot load the model in {folder}: {error}") from error
    loaded.eval()
    return loaded


def _weight_kinds(plan: PrecisionPlan, model: nn.Module) -> dict[str, WeightKind]:
    """Returns layer -> kind of stored weight, for layers in a quantized format."""
    kinds: dict[str, WeightKind] = {}
    reasons: dict[str, str] = {}
    modules = dict(model.named_modules())
    for layer, formats in plan.assignment.items():
        name = formats[GEMMS[0]]
        if not FORMATS[name].is_quantized:
            continue
        kind = WEIGHT_KINDS.get(name)
        reason = f"torchao cannot store weights in {name}" if kind is None else _misfit(modules.get(layer), kind)
        if kind is None or reason is not None:
            reasons[layer] = str(reason)
        else:
            kinds[layer] = kind
    if reasons:
        raise NotExpressible("checkpoint", reasons)
    if not kinds:
        raise ValueError("No layer of the plan has a forward GEMM whose weights can be quantized.")
    return kinds


def _misfit(module: nn.Module | None, kind: WeightKind) -> str | None:
    if module is None or type(module).__name__ != "Linear":  # other classes may use their weight differently
        return f"its class is {type(module).__name__}, expected nn.Linear itself"
    shape = tuple(module.get_parameter("weight").shape)
    if any(size % multiple for size, multiple in zip(shape, kind.multiples, strict=True)):
        return f"its shape {shape} is not a multiple of {kind.multiples}, which {kind.label!r} needs"
    return None


def _write(kinds: Mapping[str, WeightKind], model_dir: Path, folder: Path) -> None:
    # Names of weights, because under the name of a layer transformers would also quantize its bias.
    config = FqnToConfig(OrderedDict((f"{layer}.weight", kind.config()) for layer, kind in kinds.items()))
    # Otherwise transformers would leave out an output head that the config names.
    quantized = TorchAoConfig(config, include_input_output_embeddings=True)
    model = _load(model_dir, quantization_config=quantized)
    _check_quantized(model, kinds)
    model.save_pretrained(folder)
    for path in (path for pattern in _COPIED for path in model_dir.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def _check_quantized(model: nn.Module, kinds: Mapping[str, WeightKind]) -> None:
    for layer in kinds:
        weight = model.get_submodule(layer).weight
        if not isinstance(weight, TorchAOBaseTensor):
            raise ValueError(
                f"The weight of layer {layer!r} is a {type(weight).__name__} after quantization, expected a torchao "
                "tensor. transformers may exclude the layer for this model."
            )


def _check_runs(model: nn.Module) -> None:
    try:
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
    except Exception as error:  # A foreign model may raise anything.
        raise ValueError(f"The model does not run with its quantized weights: {error}") from error
