"""The kinds of layers that can be swapped: which modules they are, and what takes their place.

Kinds are entries of the registry `LAYER_KINDS`. Selection, conversion, estimate and training know none of them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from ..registry import Registry
from .layer import SnipLayer

# The reason for a module whose `weight` is none of its parameters.
COMPUTED_WEIGHT = "its weight is computed from other parameters, e.g. by weight_norm"


class LayerKind(ABC):
    """Modules of one kind. One object per kind, without state of its own."""

    name: ClassVar[str]
    layer: ClassVar[type[SnipLayer]]
    """The class that a swapped module has. It derives from `SnipLayer` and from the class that is swapped."""

    @property
    @abstractmethod
    def accepts(self) -> str:
        """What it swaps, for error messages; a kind may have an attribute of that name instead."""

    @abstractmethod
    def knows(self, module: nn.Module) -> bool:
        """Returns True for a module of this kind, also one that it refuses and one that is swapped."""

    def refuses(self, module: nn.Module) -> str | None:
        """Returns why a module that it knows, not swapped yet, cannot be swapped; None if it can."""
        return None

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        """Returns what the names of the module's layers, swapped or not, add to its own; ("",): it is the layer."""
        return ("",)

    def weights(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        """Returns the weights of a module, swapped or not, that plans decide on."""
        # Not `module.weight`: what parametrizes a weight may write to its buffers when it is asked for.
        weight = module._parameters.get("weight")
        return () if weight is None else (weight,)

    def swap(self, module: nn.Module) -> tuple[SnipLayer, ...]:
        """Swaps a module in place and returns the layers that it now is or gets, one for each of its `parts`.

        Changes the module's class. Parameters, ties, hooks and state_dict keys stay what they were. A module of several
        parts may have some of them already.
        """
        original_class = type(module)
        module.__class__ = self.layer
        assert isinstance(module, SnipLayer)
        module.snip_original_class = original_class
        return (module,)


LAYER_KINDS: Registry[LayerKind] = Registry("layer kind", "snip_hf.layers")


def register_layer_kind(kind: LayerKind) -> LayerKind:
    """Adds a kind of layers, which is swapped from now on. Returns it."""
    return LAYER_KINDS.register(kind)


def kind_of(module: nn.Module) -> LayerKind | None:
    """Returns the kind of a module, swapped or not; None if no kind knows it."""
    return next((kind for kind in LAYER_KINDS.values() if kind.knows(module)), None)


def has_computed_weight(module: nn.Module) -> bool:
    """Returns True if other parameters are trained in place of the module's weight, which is computed from them.

    So do torch's parametrizations, and the hooks of `torch.nn.utils.weight_norm`, `spectral_norm` and `prune`. A weight
    that is a buffer is not computed; it is frozen.
    """
    return module._parameters.get("weight") is None and module._buffers.get("weight") is None


def known_weights(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Returns the weights of a module that plans can decide on: none if no kind knows it."""
    kind = kind_of(module)
    return () if kind is None else kind.weights(module)
