"""What runs in place of `nn.Linear`: `SnipLinear`, and how it is swapped into a model and back.

Legend: T tokens, I in_features, O out_features. The swap changes a module's class in place, so that parameters, their
ties, hooks, sharding and state_dict keys stay what they were. What a layer needs to know at run time (its formats and
the key of its random numbers) lives in one small non-persistent buffer that `PrecisionPlan.apply` and the controller
write.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import kernels
from .config import SnipConfig
from .coverage import Coverage, find_coverage
from .formats import FORMAT_CODES, FORMAT_NAMES, GEMMS, check_format
from .kernels import STATE_SIZE, forward_gemm, grad_input_gemm, grad_weight_gemm, hopper_lacks
from .quantize import stream_key
from .run_hooks import end_runs
from .tensorcores import TensorCoreGemms, TiedInput, quantize_input

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
_LEFT_OUT = "skip_modules"
# More than this share of a model's weight matrices outside the plan is worth a warning.
_MUCH = 0.1
STATE = "snip_state"
# Where DDP looks for names of parameters and buffers that are not its business.
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
# What wrappers inside a model add to the names of modules.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.|^snip_part_\d+\.")
_KEY = len(GEMMS)
# Number of the output gradient among the operands that a random stream can be for. Both GEMMs that read it round it
# with the same random numbers: what one adds to the layers before, and the other to the own weight's gradient.
_GRAD_OUTPUT = 1


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
    snip_key: int
    """The layer's part of the key of its random numbers, of its name."""
    snip_recorder: Callable[[SnipLinear, Tensor], Tensor] | None
    """Set by the probe for the time of its passes: computes the layer's output instead."""
    snip_backend: str
    """"emulated" or "hopper"; the latter's kernels compute in BF16 only, other dtypes run emulated."""
    snip_device: str
    """Type of the device that the backend was chosen for; on another one the layer runs emulated."""
    snip_high: tuple[bool, bool, bool]
    """Which GEMMs run in BF16; for the "hopper" backend, where this is part of the compiled graph."""
    snip_tied: TiedInput | None
    """Shared with the tied layers that take the same input; None: the input is quantized for this layer alone."""
    snip_weights: tuple[Tensor, ...]
    """The weight as `keep_quantized` quantized it last; empty: every pass quantizes what it needs."""
    snip_weight_version: int
    """torch's count of the weight's changes at that time."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns input @ weight^T + bias; (..., I) -> (..., O)."""
        if self.snip_recorder is not None:
            return self.snip_recorder(self, input)
        x = input
        bias: Tensor | None = self.bias
        casts = torch.is_autocast_enabled(x.device.type)
        if casts:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        if self.snip_backend == "hopper" and x.dtype == torch.bfloat16 and x.device.type == self.snip_device:
            return self._on_hopper(input, x, bias)
        y: Tensor = _ThreeGemms.apply(x, self.weight.to(x.dtype) if casts else self.weight, bias, self.snip_state)
        return y

    def _on_hopper(self, input: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the output for x, which is `input` in BF16."""
        high = self.snip_high
        if all(high):
            return nn.functional.linear(x, self.weight.to(x.dtype), bias)
        keeps_x = torch.is_grad_enabled() and self.weight.requires_grad
        row_gemm, column_gemm = -1 if high[0] else 0, 2 if keeps_x and not high[2] else -1
        if self.snip_tied is None or self.snip_tied.parted:
            quantized = quantize_input(x, self.snip_state, row_gemm, column_gemm)
        else:
            quantized = self.snip_tied.quantized(input, x, self.snip_state, row_gemm, column_gemm)
        # Evaluation, and generation in training mode, may follow a change of the weights that nobody told of; a pass
        # that is trained on does not.
        is_kept = torch.compiler.is_compiling() or self.snip_weight_version == self.weight._version
        weights = self.snip_weights if self.training and torch.is_grad_enabled() and is_kept else ()
        y: Tensor = TensorCoreGemms.apply(x, self.weight, bias, self.snip_state, high, keeps_x, *quantized, *weights)
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
        self._note_formats(codes)

    def _note_formats(self, codes: Sequence[int]) -> None:
        """Keeps what Python has to know of the formats."""
        forward, grad_input, grad_weight = (FORMAT_NAMES[code] == "bf16" for code in codes)
        self.snip_high = (forward, grad_input, grad_weight)
        self.snip_weight_version = -1  # what is kept of the weight is in other formats
        if self.snip_tied is not None:
            self.snip_tied.note(id(self), (codes[0], codes[2]))

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy takes over: formats and key, but nothing that it would share with this layer's run."""
        own = {"snip_recorder": None, "snip_tied": None, "snip_weights": (), "snip_weight_version": -1}
        buffers = self._buffers | {STATE: self.snip_state.clone()}
        state: dict[str, Any] = super().__getstate__() | own | {"_buffers": buffers}
        return state

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
    backend: str = "auto"
    """As `SnipConfig.backend`. What cannot run on the layer's device when it is swapped starts as "emulated"."""

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
    module.register_buffer("snip_state", torch.tensor([*codes, 0, 0, 1], device=device), persistent=False)
    module.snip_key = 0
    set_step({"": module}, config.seed, 0, 0)
    module.snip_tied, module.snip_weights = None, ()
    module._note_formats(codes)
    module.snip_device = device.type
    module.snip_backend = "emulated" if config.backend == "emulated" or hopper_lacks(device) else "hopper"
    return module


def convert_model(model: nn.Module, config: SnipConfig) -> list[str]:
    """Swaps the linears inside the transformer blocks for `SnipLinear`, in place.

    Swapped is every `nn.Linear` (exactly that class) inside a numbered block (`....layers.3....`), except the output
    head, adapters' small matrices and what `config.skip_modules` names. Everything starts in `config.start_format`.
    What is swapped and what is skipped, with the reason, goes to the log, and so does every other weight matrix that
    the plan does not cover (`coverage`). Layers swapped before stay as they are, or are restored if this config skips
    them.

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
    modules = {plain_name(name): module for name, module in model.named_modules()}
    wanted = {id(modules[name]) for name in chosen}
    before = snip_linears(model)
    for layer in before.values():
        if id(layer) not in wanted:
            _restore(layer)
    quantize_(
        model,
        SnipLinearConfig(start_format=config.start_format, seed=config.seed, backend=config.backend),
        filter_fn=lambda module, name: id(module) in wanted,
    )
    layers = snip_linears(model)
    for name in chosen:
        # Keyed by name, not by position, so that skipping one layer leaves the random numbers of the others alone.
        layers[name].snip_key = zlib.crc32(name.encode(errors="surrogatepass"))
    set_step({name: layer for name, layer in layers.items() if name not in before}, config.seed, 0, 0)
    if config.backend == "hopper" and any(layer.snip_backend != "hopper" for layer in layers.values()):
        logger.warning(
            "snip-hf: backend='hopper' cannot run where the model is now (%s); its layers are emulated until a "
            "controller finds it on such a GPU.",
            hopper_lacks(next(iter(layers.values())).weight.device),
        )
    _keep_ddp_out(model)
    if before.keys() != layers.keys():
        logger.info("snip-hf swapped %d linear layers; skipped %d (%s).", len(chosen), len(skipped), _summary(skipped))
        _log_coverage(coverage(model, config))
    return chosen


def coverage(model: nn.Module, config: SnipConfig) -> Coverage:
    """Returns which weight matrices `convert_model` swaps under this config and which it does not, and why."""
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    return find_coverage(model, _head_of(model), skip_reasons(model, config), names)


def _log_coverage(found: Coverage) -> None:
    if found.uncovered:
        logger.info("snip-hf: the plan does not cover %s.", found.describe())
    # What the user left out on purpose is no news.
    missed = math.fsum(group.share for group in found.uncovered if group.reason != _LEFT_OUT)
    if missed > _MUCH:
        logger.warning(
            "snip-hf: FP4 shares count the swapped layers only. What the plan does not cover stays in high precision: "
            "%s.",
            found.describe(3),
        )


def restore_model(model: nn.Module) -> None:
    """Undoes `convert_model`: every `SnipLinear` becomes again the class that it was.

    Ends the run that an error left on the model, and removes its hooks.
    """
    end_runs(model)
    for layer in snip_linears(model).values():
        _restore(layer)
    _keep_ddp_out(model)


def _keep_ddp_out(model: nn.Module) -> None:
    """Tells DDP, which may wrap the model later, not to give the first rank's states to the others."""
    ignored = [name for name in getattr(model, _DDP_IGNORES, ()) if not name.endswith(f".{STATE}")]
    states = [name for name, _ in model.named_buffers() if name.endswith(f".{STATE}")]
    if not ignored and not states:
        vars(model).pop(_DDP_IGNORES, None)
    elif getattr(model, _DDP_IGNORES, None) != ignored + states:
        setattr(model, _DDP_IGNORES, ignored + states)


def _restore(layer: SnipLinear) -> None:
    del layer._buffers["snip_state"]
    layer._non_persistent_buffers_set.discard("snip_state")
    original_class = layer.snip_original_class
    del layer.snip_original_class, layer.snip_key, layer.snip_recorder, layer.snip_backend, layer.snip_high
    del layer.snip_device, layer.snip_tied, layer.snip_weights, layer.snip_weight_version
    layer.__class__ = original_class  # type: ignore[assignment]


def snip_linears(model: nn.Module) -> dict[str, SnipLinear]:
    """Returns name -> layer for every swapped layer, in the model's order; a layer under two names counts once.

    Names are those of the bare model (`plain_name`), so that plans are the same under every launcher.
    """
    return {plain_name(name): module for name, module in model.named_modules() if isinstance(module, SnipLinear)}


def plain_name(name: str) -> str:
    """Returns the name of a module or parameter without the parts that wrappers inside the model put in.

    These are torch.compile's, activation checkpointing's, and those of `launch.ModelParts`.
    """
    return _WRAPPERS.sub("", name)


def pack_states(layers: Mapping[str, SnipLinear]) -> None:
    """Makes the states of all layers on one device rows of one tensor, which `set_step` then writes in one go."""
    devices: dict[torch.device, list[SnipLinear]] = {}
    for layer in layers.values():
        devices.setdefault(layer.snip_state.device, []).append(layer)
    for members in devices.values():
        for layer, row in zip(members, torch.stack([layer.snip_state for layer in members]).unbind(), strict=True):
            layer.snip_state = row


def set_step(layers: Mapping[str, SnipLinear], seed: int, step: int, micro_batch: int) -> None:
    """Keys the layers' random numbers: one stream per (seed, step, micro-batch, layer name)."""
    names = np.array([layer.snip_key for layer in layers.values()], dtype=np.uint64)
    keys = torch.from_numpy(stream_key(seed, step, micro_batch, names, _GRAD_OUTPUT).view(np.int64))
    packed: dict[int, list[int]] = {}
    states = [layer.snip_state for layer in layers.values()]
    for index, state in enumerate(states):
        packed.setdefault(id(state if state._base is None else state._base), []).append(index)
    for members in packed.values():
        base = states[members[0]]._base
        if base is not None and base.shape == (len(members), STATE_SIZE):
            members.sort(key=lambda index: states[index].storage_offset())
            base[:, _KEY] = keys[members].to(base.device, non_blocking=True)
        else:
            for index in members:
                states[index][_KEY] = keys[index]


def set_rank(layers: Mapping[str, SnipLinear], rank: int, ranks: int) -> None:
    """Tells the layers which part of a batch that `ranks` processes share is theirs, counted from 0.

    They then draw other random numbers than other ranks do for other tokens, and, where every rank has as many tokens,
    a multiple of 4, together those of one process that has them all (`quantize.rank_stream`).
    """
    for layer in layers.values():
        layer.snip_state[_KEY + 1 :] = torch.tensor([rank, ranks])


def keep_quantized(layers: Mapping[str, SnipLinear], everything: bool = True) -> None:
    """Quantizes the weights of the layers that run on Hopper, for all passes until the next call.

    To be called whenever weights or formats have changed. Sharded weights are left to the passes.

    Args:
        layers: the layers.
        everything: False leaves out layers whose weight has not changed since the last call as far as torch knows
            (it does not see what fused optimizers do, nor what is written through `weight.data`).
    """
    for layer in layers.values():
        weight, uses = layer.weight, tuple(not high for high in layer.snip_high[:2])
        if layer.snip_backend != "hopper" or type(weight) is not nn.Parameter or not any(uses):
            layer.snip_weights = ()
            continue
        used = tuple(tensor.numel() > 0 for tensor in layer.snip_weights[::2])
        if used != uses or layer.snip_weights[0].device != weight.device:
            layer.snip_weights = kernels.hopper.quantize_weight(weight.detach(), layer.snip_state, *uses)
            for tensor in layer.snip_weights:  # so that CUDA graphs read them where they are
                torch._dynamo.mark_static_address(tensor)
        elif everything or layer.snip_weight_version != weight._version:
            kernels.hopper.quantize_weight_into(weight.detach(), layer.snip_state, layer.snip_weights)
        layer.snip_weight_version = weight._version


def share_inputs(layers: Mapping[str, SnipLinear], groups: Sequence[Sequence[str]]) -> None:
    """Lets the layers of each group quantize a common input once, wherever they have the same formats."""
    for group in groups:
        tied = TiedInput(len(group))
        for name in group:
            layers[name].snip_tied = tied
            layers[name].set_formats(layers[name].formats)


def forget_inputs(layers: Mapping[str, SnipLinear]) -> None:
    """Lets go of the inputs that `share_inputs` made layers hold and that were not asked for to the end."""
    for layer in layers.values():
        if layer.snip_tied is not None:
            layer.snip_tied.forget()


def drop_quantized(layers: Mapping[str, SnipLinear]) -> None:
    """Ends `keep_quantized` and `share_inputs`: every pass of every layer quantizes what it needs again."""
    for layer in layers.values():
        layer.snip_weights, layer.snip_tied = (), None


def skip_reasons(model: nn.Module, config: SnipConfig) -> dict[str, str | None]:
    """Returns, for every linear layer by name, why `convert_model` leaves it alone, or None if it is swapped."""
    head = _head_of(model)

    def reason(name: str, module: nn.Linear) -> str | None:
        if module is head:
            return "output head"
        if not any(part.isdigit() for part in name.split(".")):
            return "outside the transformer blocks"
        if not _is_linear(module) and not isinstance(module, SnipLinear):
            return f"class {type(module).__name__}"
        if "forward" in vars(module):  # which a swap of the class would not replace
            return "another forward function is set on it (device_map, tensor parallelism)"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _ADAPTERS):
            return "adapter"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.skip_modules):
            return _LEFT_OUT
        return None

    linears = ((plain_name(name), module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: reason(name, module) for name, module in linears}


def _head_of(model: nn.Module) -> object:
    return getattr(model, "get_output_embeddings", lambda: None)()


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
        # Not `module.weight`: what parametrizes a weight may write to its buffers when it is asked for.
        weight = module._parameters.get("weight")
        if not isinstance(module, nn.Linear) or weight is None:
            continue
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
