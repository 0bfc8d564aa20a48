"""The kinds of layers that can be swapped: the modules that they recognize, and their replacements.

Kinds are entries of the registry `LAYER_KINDS`. Selection, conversion, estimation and training name no kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from ..parallel.tensor_parallel import change_class
from ..registry import Registry
from .layer import SnipLayer

# The reason for modules whose `weight` is not a parameter.
COMPUTED_WEIGHT = "its weight is computed from other parameters, e.g. by weight_norm"


class LayerKind(ABC):
    """Modules of one kind. One object per kind, without state of its own."""

    name: ClassVar[str]
    layer: ClassVar[type[SnipLayer]]
    """The class that a swapped module has. It derives from `SnipLayer` and from the class that is swapped."""

    @property
    @abstractmethod
    def accepts(self) -> str:
        """The modules that it swaps, in words, for error messages. May be a plain attribute."""

    @abstractmethod
    def knows(self, module: nn.Module) -> bool:
        """Returns True for a module of this kind, also if it is refused or swapped already."""

    def refuses(self, module: nn.Module) -> str | None:
        """Returns why a known module that is not swapped yet cannot be; None if it can."""
        return None

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        """Returns the suffixes of the names of the module's layers; ("",) if the module itself is the layer."""
        return ("",)

    def weights(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        """Returns the weights of a module, swapped or not, that plans decide on."""
        # Not `module.weight`: reading a parametrized weight may write to buffers.
        weight = module._parameters.get("weight")
        return () if weight is None else (weight,)

    def swap(self, module: nn.Module) -> tuple[SnipLayer, ...]:
        """Swaps a module in place, and returns its new layers.

        Changes the module's class. Parameters, ties, hooks and state_dict keys do not change. Some of a module's
        `parts` may be swapped already.
        """
        original_class = type(module)
        change_class(module, self.layer, takes_parts=True)
        assert isinstance(module, SnipLayer)
        module.snip_original_class = original_class
        return (module,)


LAYER_KINDS: Registry[LayerKind] = Registry("layer kind", "snip_hf.layers")


def register_layer_kind(kind: LayerKind) -> LayerKind:
    """Registers a kind of layers, which `convert_model` then swaps. Returns it."""
    return LAYER_KINDS.register(kind)


def kind_of(module: nn.Module) -> LayerKind | None:
    """Returns the kind of a module, swapped or not; None if there is none."""
    return next((kind for kind in LAYER_KINDS.values() if kind.knows(module)), None)


def has_computed_weight(module: nn.Module) -> bool:
    """Returns True if the module's weight is computed from other parameters, which are trained instead.

    torch's parametrizations do so, and the hooks of `torch.nn.utils.weight_norm`, `spectral_norm` and `prune`. A weight
    that is a buffer is frozen, not computed.
    """
    return module._parameters.get("weight") is None and module._buffers.get("weight") is None


def known_weights(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Returns the weights of a module that plans can decide on; () for a module of no kind."""
    kind = kind_of(module)
    return () if kind is None else kind.weights(module)
