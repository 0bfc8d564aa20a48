"""Gated MLPs, down(silu(gate(x)) * up(x)), which some backends run as one operator in compiled code.

During a run, each module of a registered class has a forward of its own. When compiled, it asks the backend first,
unless the module has hooks inside or a linear was replaced, by an adapter for example.
"""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

import torch
from torch import nn

from .layer import SnipLayer

_LAYERS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATION = "act_fn"
_SILU_OF_TRANSFORMERS = "SiLUActivation"
# The attribute of a module that holds its class at the time of `put_gates`.
_CLASS = "snip_gated_class"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# transformers' text MLPs whose forward, in modeling_<folder>.py, is this formula. Named, since nothing here imports
# transformers.
_OF_TRANSFORMERS = """
    afmoe.AfmoeMLP bamba.BambaMLP cohere.CohereMLP cohere2.Cohere2MLP csm.CsmMLP cwm.CwmMLP deepseek_v2.DeepseekV2MLP
    deepseek_v3.DeepseekV3MLP diffllama.DiffLlamaMLP dots1.Dots1MLP emu3.Emu3MLP ernie4_5.Ernie4_5MLP
    ernie4_5_moe.Ernie4_5_MoeMLP exaone4.Exaone4MLP exaone_moe.ExaoneMoeMLP flex_olmo.FlexOlmoMLP glm4_moe.Glm4MoeMLP
    glm4_moe_lite.Glm4MoeLiteMLP granite.GraniteMLP helium.HeliumMLP hunyuan_v1_dense.HunYuanDenseV1MLP
    hunyuan_v1_moe.HunYuanMoEV1MLP jamba.JambaMLP llama.LlamaMLP longcat_flash.LongcatFlashMLP
    mimo_v2_flash.MiMoV2FlashMLP ministral.MinistralMLP ministral3.Ministral3MLP mistral.MistralMLP
    mistral4.Mistral4MLP mllama.MllamaTextMLP olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP olmo_hybrid.OlmoHybridMLP
    olmoe.OlmoeMLP qwen2.Qwen2MLP qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP qwen3_5.Qwen3_5MLP qwen3_5_moe.Qwen3_5MoeMLP
    qwen3_moe.Qwen3MoeMLP qwen3_next.Qwen3NextMLP smollm3.SmolLM3MLP solar_open.SolarOpenMLP
    stablelm.StableLmMLP youtu.YoutuMLP
"""


GATED_MLPS = {
    f"transformers.models.{folder}.modeling_{folder}.{cls}"
    for folder, cls in (name.split(".") for name in _OF_TRANSFORMERS.split())
}
"""Full names of the registered classes."""


def register_gated_mlp(cls: type[nn.Module]) -> type[nn.Module]:
    """Registers a class of gated MLPs. Returns it, as a decorator does.

    Args:
        cls: its forward takes only x and returns `self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))`.
            Modules with another `act_fn` than `nn.SiLU`, and modules of subclasses, run linear by linear.
    """
    GATED_MLPS.add(f"{cls.__module__}.{cls.__qualname__}")
    return cls


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a gated MLP in a run. A deep copy of the module has it too; a pickled one has its class's."""
    # torch.compile evaluates these conditions once, and guards them.
    is_known = len(args) == 1 and not kwargs and vars(self).get(_CLASS) is type(self)
    if is_known and torch.compiler.is_compiling() and _runs_as_one(self):
        layers = gate_up_down(self)
        y = layers[-1].snip_backend.gated_forward(layers, args[0])
        if y is not None:
            return y
    return type(self).forward(self, *args, **kwargs)


def gate_up_down(module: nn.Module) -> tuple[Any, ...]:
    """Returns the linears of a gated MLP."""
    return tuple(getattr(module, name) for name in _LAYERS)


def is_gated(module: nn.Module) -> bool:
    """Returns True if `put_gates` gave the module its forward."""
    return getattr(vars(module).get("forward"), "__func__", None) is forward


def put_gates(model: nn.Module, log: logging.Logger) -> int:
    """Gives each gated MLP whose backend runs such its forward; returns how many have it, and logs them."""
    before, found = sum(map(is_gated, model.modules())), list[str]()
    for name, module in model.named_modules():
        if is_gated(module):
            continue
        _remove(module)  # left over in a pickled module
        if _is_of_class(module) and _runs_as_one(module):
            # torch.compile guards a method's function, so that equal blocks are compiled once.
            vars(module).update({_CLASS: type(module), "forward": MethodType(forward, module)})
            found.append(name)
    if found:
        log.info("snip-hf: %d gated MLPs run as one where they are compiled, such as %s.", len(found), found[0])
    return before + len(found)


def remove_gates(model: nn.Module) -> None:
    """Undoes `put_gates`."""
    for module in model.modules():
        _remove(module)


def _remove(module: nn.Module) -> None:
    own = getattr(vars(module).get("forward"), "__func__", None)
    # A forward that something else has set since stays.
    if vars(module).pop(_CLASS, None) is not None and own in (forward, type(module).forward):
        del vars(module)["forward"]


def _is_of_class(module: nn.Module) -> bool:
    """Returns True for a module of a registered class with that class's original forward."""
    cls = type(module)
    is_own = "forward" not in vars(module) and cls.forward.__module__ == cls.__module__
    is_own = is_own and not hasattr(cls.forward, "__wrapped__")
    return is_own and f"{cls.__module__}.{cls.__qualname__}" in GATED_MLPS


def _runs_as_one(module: nn.Module) -> bool:
    """Returns True if a module has no hooks inside, and consists of swapped linears and a SiLU."""
    activation: Any = getattr(module, _ACTIVATION, None)
    if type(activation) is not nn.SiLU and type(activation).__name__ != _SILU_OF_TRANSFORMERS:
        return False
    # Reads `forward` first, since torch.compile guards only the attribute.
    has_own = activation.forward is None or "forward" in vars(activation)
    if has_own or any(map(_is_watched, module.children())):
        return False
    return all(_can_join(getattr(module, name, None)) for name in _LAYERS)


def _can_join(layer: Any) -> bool:
    """Returns True for an unmodified swapped linear that is not recorded, on a backend that runs gated MLPs."""
    if not isinstance(layer, SnipLayer) or type(layer).forward is not SnipLayer.forward or "forward" in vars(layer):
        return False
    return layer.snip_recorder is None and layer.snip_backend.runs_gates


def _is_watched(module: nn.Module) -> bool:
    return any(len(getattr(module, hooks)) > 0 for hooks in _HOOKS)
