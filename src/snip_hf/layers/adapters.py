"""PEFT's adapters in a model, recognized by their structure: which modules stay in high precision, and why.

Every method of PEFT that changes a layer puts a module of its own in the layer's place. That module holds the layer as
`base_layer`, which still runs and is swapped like any other, and beside it the small matrices that are trained.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# The reason for the trained matrices of adapters.
ADAPTER = "adapter"
# PEFT's packages of methods that multiply the input with a weight computed from `base_layer`'s, whose own forward never
# runs.
_OWN_PRODUCT = ("frod", "hra", "supertuning")
# PEFT's class for `target_parameters`. The adapter's gradients flow through the weight, which only seems frozen.
_OF_PARAMETERS = "ParamWrapper"


def adapter_reasons(model: nn.Module) -> dict[int, str]:
    """Returns the id of a module -> why it stays as it is, for the modules of adapters."""
    return {id(part): reason for module in model.modules() for part, reason in _parts(module)}


def adapter_modules(model: nn.Module) -> set[int]:
    """Returns the ids of the modules that PEFT puts around layers, and of their other children."""
    parts = {part for part, reason in adapter_reasons(model).items() if reason == ADAPTER}
    return parts | {id(module) for module in model.modules() if is_adapted(module)}


def is_adapted(module: nn.Module) -> bool:
    """Returns True for a module that PEFT puts around a layer."""
    return module._modules.get("base_layer") is not None


def switched_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters whose `requires_grad` PEFT sets whenever adapters are switched, on or off."""
    modules = {id(module): module for module in model.modules()}
    reasons = adapter_reasons(model)
    parts = [modules[part] for part, reason in reasons.items() if reason == ADAPTER]
    copies = [module._modules["modules_to_save"] for module in modules.values() if _has_copies(module)]
    found = {id(one): one for part in (*parts, *copies) if part is not None for one in part.parameters()}
    return list(found.values())


def changed_by_adapters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of `target_parameters`, which PEFT parametrizes during each forward pass."""
    found = {}
    for module in model.modules():
        if type(module).__name__ == _OF_PARAMETERS:
            parameter = module.get_param()  # type: ignore[operator]
            found[id(parameter)] = parameter
    return list(found.values())


def _has_copies(module: nn.Module) -> bool:
    return "original_module" in module._modules and "modules_to_save" in module._modules


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    children = module._modules
    base = children.get("base_layer")
    if base is not None:
        method = _method(module)
        if method in _OWN_PRODUCT:
            yield base, f"not run, since {method.upper()} multiplies with a weight of its own"
        if type(module).__name__ == _OF_PARAMETERS:
            yield from ((part, "target_parameters: its adapter changes the weight itself") for part in base.modules())
        yield from _all_of(module, {"base_layer"}, ADAPTER)
    elif _has_copies(module):
        yield from _copies(module)
    elif hasattr(module, "peft_config") and "base_model" in children:  # encoders of prompts
        yield from _all_of(module, {"base_model"}, ADAPTER)


def _copies(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the copies of a module that do not run: each adapter trains its own, and only the active one's runs."""
    active = getattr(module, "active_adapters", [])
    copies = module._modules["modules_to_save"]
    assert copies is not None
    for name, copy in copies.named_children():
        if name not in active:
            yield from ((part, "not run, since another adapter is active") for part in copy.modules())
    original = module._modules["original_module"]
    if original is not None and any(name in active for name, _ in copies.named_children()):
        yield from ((part, "not run, since modules_to_save has a copy in its place") for part in original.modules())


def _all_of(module: nn.Module, but: set[str], reason: str) -> Iterator[tuple[nn.Module, str]]:
    for name, child in module.named_children():
        if name not in but:
            yield from ((part, reason) for part in child.modules())


def _method(module: nn.Module) -> str:
    """Returns the name of PEFT's package that the module's class is from; "" for other classes."""
    path = type(module).__module__.split(".")
    return path[2] if path[:2] == ["peft", "tuners"] else ""
