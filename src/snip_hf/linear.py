"""What runs in place of `nn.Linear`: `SnipLinear`, and how it is swapped into a model and back.

Legend: T tokens, I in_features, O out_features. The swap changes a module's class in place, so that parameters, their
ties, hooks, sharding and state_dict keys stay what they were. What a layer needs to know at run time (its formats and
the key of its random numbers) lives in one small non-persistent buffer that `PrecisionPlan.apply` and the controller
write.
"""

from __future__ import annotations

import fnmatch
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import SnipConfig
from .formats import FORMAT_CODES, FORMAT_NAMES, GEMMS, check_format
from .kernels import STATE_SIZE, forward_gemm, grad_input_gemm, grad_weight_gemm

# On import torchao warns of CUDA extensions that do not load and of how it registers enums; nothing here uses either.
_noisy = {name: logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")}
_levels = {name: noisy.level for name, noisy in _noisy.items()}
try:
    for _name in _noisy:
        _noisy[_name].setLevel(logging.ERROR)
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import quantize_
    from torchao.quantization.transform_module import register_quantize_module_handler
finally:
    for _name in _noisy:
        _noisy[_name].setLevel(_levels[_name])

logger = logging.getLogger(__name__)

# Subclasses of nn.Linear whose forward is the same product. Others (routers with a softmax, adapters) are not swapped.
_KNOWN_SUBCLASSES = ("FalconLinear",)
# Small matrices of adapters, by their names in PEFT; they stay in high precision.
_ADAPTERS = ("*.lora_A.*", "*.lora_B.*")
_SEED, _STEP, _MICRO_BATCH, _LAYER = range(len(GEMMS), STATE_SIZE)


class _ThreeGemms(torch.autograd.Function):
    """Y = X W^T + b with the format of each GEMM read from `state`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
        # A copy: the next forward pass may write the state before this one's backward pass reads it.
        ctx.save_for_backward(x, weight, state.clone())
        y: Tensor = forward_gemm(x, weight, bias, state)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, state = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        return (
            grad_input_gemm(grad_rows, weight, state).view(x.shape) if needs_x else None,
            grad_weight_gemm(grad_rows, x.reshape(-1, x.shape[-1]), state) if needs_weight else None,
            grad_rows.sum(0) if needs_bias else None,
            None,
        )


class SnipLinear(nn.Linear):
    """An `nn.Linear` whose three GEMMs run in the formats that its `snip_state` buffer names.

    Made by `convert_model` (or torchao's `quantize_` with `SnipLinearConfig`), never directly. Takes inputs of any
    number of dimensions, also empty ones; computes in the autocast dtype where autocast is on, else in the input's.
    """

    snip_state: Tensor
    snip_original_class: type[nn.Linear]
    snip_recorder: Callable[[SnipLinear, Tensor], Tensor] | None
    """Set by the probe for the time of its passes: computes the layer's output instead."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns input @ weight^T + bias; (..., I) -> (..., O)."""
        if self.snip_recorder is not None:
            return self.snip_recorder(self, input)
        x = input
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        y: Tensor = _ThreeGemms.apply(x, weight, bias, self.snip_state)
        return y

    @property
    def formats(self) -> dict[str, str]:
        """Returns GEMM -> format name, as in force now."""
        codes = self.snip_state[: len(GEMMS)].tolist()
        return {gemm: FORMAT_NAMES[code] for gemm, code in zip(GEMMS, codes, strict=True)}

    def set_formats(self, formats: Mapping[str, str]) -> None:
        """Writes GEMM -> format name for all three GEMMs.

        Raises:
            ValueError: a GEMM is missing or not known, or a format is not known.
        """
        if set(formats) != set(GEMMS):
            raise ValueError(f"Got formats for {sorted(formats)}; expected exactly {', '.join(GEMMS)}.")
        codes = [FORMAT_CODES[check_format(formats[gemm], gemm)] for gemm in GEMMS]
        self.snip_state[: len(GEMMS)] = torch.tensor(codes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, formats={'/'.join(self.formats.values())}"


@dataclass
class SnipLinearConfig(AOBaseConfig):
    """For torchao's `quantize_(model, SnipLinearConfig(...), filter_fn)`: swaps every linear that the filter passes.

    `quantize_` tells no names and knows no steps: until `convert_model` names the layers and a `SnipController` counts
    the steps, all layers round stochastically with the same random numbers in every step.
    """

    start_format: str = "fp8"
    """Format of the three GEMMs until a plan is applied."""
    seed: int = 0
    """Seed of stochastic rounding."""

    def __post_init__(self) -> None:
        check_format(self.start_format, "start_format")


@register_quantize_module_handler(SnipLinearConfig)
def _swap(module: nn.Module, config: SnipLinearConfig) -> nn.Module:
    """Turns an nn.Linear into a SnipLinear in place and returns it; every layer's key is 0 until it is named."""
    if isinstance(module, SnipLinear):
        return module
    if not _is_linear(module):
        raise TypeError(
            f"Cannot quantize a {type(module).__name__}; expected nn.Linear itself or {', '.join(_KNOWN_SUBCLASSES)}. "
            "Let the filter pass only such modules."
        )
    assert isinstance(module, nn.Linear)
    original_class, device = type(module), module.weight.device
    module.__class__ = SnipLinear
    assert isinstance(module, SnipLinear)
    module.snip_original_class = original_class
    module.snip_recorder = None
    codes = [FORMAT_CODES[config.start_format]] * len(GEMMS)
    state = torch.tensor([*codes, config.seed, 0, 0, 0], dtype=torch.int64, device=device)
    module.register_buffer("snip_state", state, persistent=False)
    return module


def convert_model(model: nn.Module, config: SnipConfig) -> list[str]:
    """Swaps the linears inside the transformer blocks for `SnipLinear`, in place.

    Swapped is every `nn.Linear` (exactly that class) inside a numbered block (`....layers.3....`), except the output
    head, adapters' small matrices and what `config.skip_modules` names. Everything starts in `config.start_format`.
    What is swapped and what is skipped, with the reason, goes to the log. Layers swapped before stay as they are, or
    are restored if this config skips them.

    Returns: the exact names of all swapped layers, in the model's order.

    Raises:
        ValueError: no layer is left to swap, a name in `skip_modules` matches nothing, or the model is already
            quantized by another method.
    """
    _refuse_quantized(model)
    reasons = skip_reasons(model, config)
    chosen = [name for name, reason in reasons.items() if reason is None]
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    if not chosen:
        kinds = sorted(
            {type(module).__name__ for module in model.modules() if getattr(module, "weight", None) is not None}
        )
        raise ValueError(
            f"No layer of {type(model).__name__} can be swapped: {len(skipped)} linears are skipped "
            f"({_summary(skipped)}); modules with weights are of the classes {', '.join(kinds) or 'none'}. "
            "Expected at least one nn.Linear inside a numbered block; check skip_modules."
        )
    for pattern in config.skip_modules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in reasons):
            raise ValueError(
                f"skip_modules: {pattern!r} matches no linear layer; the layers are named like {chosen[0]!r}. "
                "Use exact names or globs over the whole name, such as '*.down_proj'."
            )
    modules = dict(model.named_modules())
    wanted = {id(modules[name]) for name in chosen}
    before = snip_linears(model)
    for layer in before.values():
        if id(layer) not in wanted:
            _restore(layer)
    quantize_(
        model,
        SnipLinearConfig(start_format=config.start_format, seed=config.seed),
        filter_fn=lambda module, name: id(module) in wanted,
    )
    layers = snip_linears(model)
    for name in chosen:
        # Keyed by name, not by position, so that skipping one layer leaves the random numbers of the others alone.
        layers[name].snip_state[_LAYER] = zlib.crc32(name.encode())
    if before.keys() != layers.keys():
        logger.info("snip-hf swapped %d linear layers; skipped %d (%s).", len(chosen), len(skipped), _summary(skipped))
    return chosen


def restore_model(model: nn.Module) -> None:
    """Undoes `convert_model`: every `SnipLinear` becomes again the class that it was."""
    for layer in snip_linears(model).values():
        _restore(layer)


def _restore(layer: SnipLinear) -> None:
    del layer._buffers["snip_state"]
    layer._non_persistent_buffers_set.discard("snip_state")
    original_class = layer.snip_original_class
    del layer.snip_original_class, layer.snip_recorder
    layer.__class__ = original_class  # type: ignore[assignment]


def snip_linears(model: nn.Module) -> dict[str, SnipLinear]:
    """Returns name -> layer for every swapped layer, in the model's order; a layer under two names counts once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SnipLinear)}


def set_step(layers: Mapping[str, SnipLinear], seed: int, step: int, micro_batch: int) -> None:
    """Writes what keys the layers' random numbers, besides their names: one stream per (seed, step, micro-batch)."""
    numbers = torch.tensor([seed, step, micro_batch])
    for layer in layers.values():
        layer.snip_state[_SEED:_LAYER] = numbers


def skip_reasons(model: nn.Module, config: SnipConfig) -> dict[str, str | None]:
    """Returns, for every linear layer by name, why `convert_model` leaves it alone, or None if it is swapped."""
    head = getattr(model, "get_output_embeddings", lambda: None)()

    def reason(name: str, module: nn.Linear) -> str | None:
        if module is head:
            return "output head"
        if not any(part.isdigit() for part in name.split(".")):
            return "outside the transformer blocks"
        if not _is_linear(module) and not isinstance(module, SnipLinear):
            return f"class {type(module).__name__}"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _ADAPTERS):
            return "adapter"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.skip_modules):
            return "skip_modules"
        return None

    return {name: reason(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ in _KNOWN_SUBCLASSES


def _refuse_quantized(model: nn.Module) -> None:
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    if method is not None or getattr(model, "is_quantized", False):
        raise ValueError(
            "The model is already quantized "
            f"({type(method).__name__ if method is not None else 'is_quantized is set'}); expected ordinary weights. "
            "Load it without a quantization_config, or dequantize it first."
        )
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module.weight
        # DTensor: sharded, not quantized. Any other subclass holds something else than its dtype says.
        if type(weight).__name__ not in ("Parameter", "Tensor", "DTensor") or not weight.is_floating_point():
            raise ValueError(
                f"Layer {name!r} has {weight.dtype} weights of the type {type(weight).__name__}; expected ordinary "
                "floating-point weights. Load the model without quantization."
            )


def _summary(skipped: Mapping[str, str | None]) -> str:
    """Returns "reason: names" for every reason, with at most three names each."""
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        names.setdefault(str(reason), []).append(name)
    return (
        "; ".join(f"{reason}: {', '.join(group[:3])}{', ...' * (len(group) > 3)}" for reason, group in names.items())
        or "none"
    )
