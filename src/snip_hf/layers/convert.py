"""Conversion of a model: swaps its linears, and layers of other kinds, in place, and restores them."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_
from torchao.quantization.transform_module import register_quantize_module_handler

from ..config import SnipConfig, check_config
from ..kernels.backend import BACKENDS, Backend, select_backend
from ..numerics.formats import FORMATS, REFERENCE, check_format
from ..numerics.gemms import GEMMS
from ..parallel.sharding import compute_device
from ..parallel.tensor_parallel import split_of
from .gated import remove_gates
from .kinds import LAYER_KINDS, kind_of
from .layer import STATE, SnipLayer
from .run_hooks import end_runs
from .selection import (
    LEFT_OUT,
    check_patterns,
    describe_unswapped,
    known_layers,
    refuse_quantized,
    skip_reasons,
    summary,
    weight_matrices,
)
from .state import set_step, snip_linears

logger = logging.getLogger(__name__)

# The attribute of a model with the names of parameters and buffers that DDP ignores.
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


@dataclass
class SnipLinearConfig(AOBaseConfig):
    """For torchao's `quantize_(model, SnipLinearConfig(...), filter_fn)`: swaps every layer that the filter passes.

    `quantize_` passes on neither names nor steps. Until `convert_model` names the layers and a `SnipController` counts
    the steps, all layers round stochastically with the same random numbers in every step.
    """

    start_format: str = REFERENCE.name
    """Format of the three GEMMs until a plan is applied."""
    seed: int = 0
    """Seed of stochastic rounding."""
    backend: str = "auto"
    """`SnipConfig.backend`. Another backend stands in until it can run on the layer's device."""

    formats: tuple[str, ...] = ()
    """Other formats that the layers will get; "auto" chooses a backend that knows them."""

    def __post_init__(self) -> None:
        for name in (self.start_format, *self.formats):
            check_format(name, "start_format" if name == self.start_format else "formats")


@register_quantize_module_handler(SnipLinearConfig)
def _swap(module: nn.Module, config: SnipLinearConfig) -> nn.Module:
    """Swaps a module in place and returns it; the key of every layer is 0 until it is named."""
    if isinstance(module, SnipLayer):
        return module
    kind = kind_of(module)
    refusal = None if kind is None else kind.refuses(module)
    if kind is None or refusal is not None:
        described = type(module).__name__
        why = "" if refusal in (None, f"class {described}") else f" ({refusal})"
        raise TypeError(
            f"Cannot quantize a {described}{why}; expected "
            f"{'; or '.join(kind.accepts for kind in LAYER_KINDS.values())}. Let the filter pass only such modules."
        )
    for layer in kind.swap(module):
        _begin(layer, config)
    return module


def _begin(layer: SnipLayer, config: SnipLinearConfig) -> None:
    """Gives a new layer its state and its kernels."""
    layer.snip_recorder, layer.snip_is_plain = None, False
    start, device = FORMATS[config.start_format], compute_device(layer.weight)
    state = torch.tensor([*[start.code] * len(GEMMS), 0, 0, 1], device=device)
    layer.register_buffer(STATE, state, persistent=False)
    layer.snip_key = 0
    set_step({"": layer}, config.seed, 0, 0)
    layer.use_backend(_backend_now(config.backend, device, [start.name, *config.formats]))


def _backend_now(requested: str, device: torch.device, formats: list[str]) -> Backend:
    """Returns the requested backend if it can run on the device, else the best one that can."""
    asked = BACKENDS.get(requested)
    return select_backend("auto" if asked is None or asked.lacks(device) else requested, device, formats)


def _backend_to_start(config: SnipConfig) -> str:
    """Returns `config.backend`; "auto" if it lacks the config's formats, which a plan file will replace."""
    asked, names = BACKENDS.get(config.backend), (config.format_at_start, *config.formats)
    if config.fixed_plan is None or asked is None:
        return config.backend
    formats = [FORMATS[name] for name in names if FORMATS[name].is_quantized]
    return config.backend if all(map(asked.runs, formats)) else "auto"


def convert_model(model: nn.Module, config: SnipConfig) -> list[str]:
    """Swaps the linears inside the transformer blocks for `SnipLinear`, in place.

    Replaces every `nn.Linear` (and registered subclasses), transformers' `Conv1D`, the projections of experts, and
    modules of kinds that `register_layer_kind` added: inside the numbered blocks (`....layers.3....`) of the language
    model's decoder, and elsewhere if `config.include_modules` names them. Skips an output head that is not named
    or is tied to the embeddings, routers, adapters' small matrices and what `config.skip_modules` names.

    The layers compute exactly as before until a controller or `PrecisionPlan.apply` gives them formats. Layers that
    were swapped before stay as they are, or are restored if this config skips them. The log tells what is swapped, what
    is skipped and why, and which other weights stay in high precision. `coverage` tells the share of the model's FLOPs.

    Returns: the exact names of all swapped layers, in the model's order.

    Raises:
        TypeError: the config is not a `SnipConfig`.
        ValueError: no layer is left to swap, a name in `skip_modules` or `include_modules` matches nothing or a layer
            that cannot be swapped, the model is already quantized by another method. The model is as before.
    """
    check_config(config)
    refuse_quantized(model)
    reasons = skip_reasons(model, config)
    chosen = [name for name, reason in reasons.items() if reason is None]
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    if not chosen:
        raise _nothing_left(model, skipped)
    check_patterns(model, config, reasons)
    modules = known_layers(model)
    wanted = {id(modules[name][0]) for name in chosen}
    before = snip_linears(model)
    swapping = SnipLinearConfig(config.format_at_start, config.seed, _backend_to_start(config), config.formats)
    quantize_(model, swapping, filter_fn=lambda module, name: id(module) in wanted)
    for name, layer in snip_linears(model).items():
        if reasons.get(name, LEFT_OUT) is not None:
            layer.restore()
    layers = snip_linears(model)
    for name, layer in layers.items():
        # Keyed by name, not by position, so that skipping one layer does not change the others' random numbers.
        # Ranks that compute other output features, or experts, draw other numbers for their gradients.
        split = split_of(layer.holder[0])
        part = f"@{split.part}" if split is not None and split.part else ""
        layer.snip_key = zlib.crc32(f"{name}{part}".encode(errors="surrogatepass"))
    new = {name: layer for name, layer in layers.items() if name not in before}
    set_step(new, config.seed, 0, 0)
    for layer in new.values():
        layer.compute_plainly()
    _keep_ddp_out(model)
    if before.keys() != layers.keys():
        counts = ", ".join(f"{reason}: {count}" for reason, count in Counter(skipped.values()).items())
        logger.info("snip-hf swapped %d layers; skipped %d (%s).", len(layers), len(skipped), counts or "none")
        if rest := describe_unswapped(weight_matrices(model, config)):
            logger.info("snip-hf: these weights stay in high precision (embeddings and output head aside): %s.", rest)
    return list(layers)


def _nothing_left(model: nn.Module, skipped: Mapping[str, str]) -> ValueError:
    kinds = sorted({type(module).__name__ for module in model.modules() if getattr(module, "weight", None) is not None})
    return ValueError(
        f"No layer of {type(model).__name__} can be swapped: {len(skipped)} linears are skipped "
        f"({summary(skipped)}); modules with weights are of the classes {', '.join(kinds) or 'none'}. "
        "Expected at least one nn.Linear inside a numbered block: check skip_modules, name linears elsewhere in "
        "include_modules, or add another class of modules with register_layer_kind (docs/extending.md)."
    )


def restore_model(model: nn.Module) -> None:
    """Undoes `convert_model`: every `SnipLayer` gets its original class back.

    Also ends a run that an error left on the model, and removes its hooks.
    """
    end_runs(model)
    remove_gates(model)
    for layer in snip_linears(model).values():
        layer.restore()
    _keep_ddp_out(model)


def keep_states_apart(models: Sequence[nn.Module]) -> None:
    """Keeps DDP wrappers of these models from broadcasting the first rank's layer states to the others."""
    for wrapper in (module for model in models for module in model.modules()):
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            names = (name for name, _ in wrapper.module.named_buffers())
            wrapper.parameters_to_ignore.update(name for name in names if name.endswith(f".{STATE}"))


def _keep_ddp_out(model: nn.Module) -> None:
    """Does the same for DDP that wraps the model later."""
    ignored = [name for name in getattr(model, _DDP_IGNORES, ()) if not name.endswith(f".{STATE}")]
    states = [name for name, _ in model.named_buffers() if name.endswith(f".{STATE}")]
    if not ignored and not states:
        vars(model).pop(_DDP_IGNORES, None)
    elif getattr(model, _DDP_IGNORES, None) != ignored + states:
        setattr(model, _DDP_IGNORES, ignored + states)
