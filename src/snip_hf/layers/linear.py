"""The layers that run in place of `nn.Linear` and of transformers' `Conv1D` (the GPT-2 family), and their kinds.

Subclasses of `nn.Linear` are swapped if their forward is known to be the same product (`register_linear_class`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Needed as a class: a swapped layer stays an instance of it, which PEFT checks for.
from transformers.pytorch_utils import Conv1D

from .kinds import COMPUTED_WEIGHT, LayerKind, has_computed_weight, register_layer_kind
from .layer import SnipLayer

# Methods of nn.Module that a swap would replace by those of nn.Linear.
_NOT_KEPT = ("__call__", "_apply", "state_dict", "_save_to_state_dict", "_load_from_state_dict")
# Shapes of the trial: input (2, 3, I) and weight (O, I).
_IN, _OUT = 8, 5


class SnipLinear(SnipLayer, nn.Linear):
    """An `nn.Linear` whose three GEMMs run in the formats that its `snip_state` buffer names: a `SnipLayer`."""


class Linear(LayerKind):
    """`nn.Linear` itself, and registered subclasses. Other subclasses, and computed weights, are refused."""

    name = "linear"
    layer = SnipLinear

    @property
    def accepts(self) -> str:
        return f"nn.Linear itself or {', '.join(getattr(cls, '__name__', str(cls)) for cls in LINEAR_CLASSES)}"

    def knows(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def refuses(self, module: nn.Module) -> str | None:
        if has_computed_weight(module):
            return COMPUTED_WEIGHT
        kind = type(module)
        known = kind is nn.Linear or kind in LINEAR_CLASSES or kind.__name__ in LINEAR_CLASSES
        return None if known else f"class {kind.__name__}"


class SnipConv1D(SnipLayer, Conv1D):
    """A `Conv1D`, which stores its weight as (I, O): a `SnipLayer`."""

    __repr__ = nn.Module.__repr__

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return int(self.nx)

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return int(self.nf)

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.t(),)

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        (matrix,) = matrices
        return matrix.t()

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}, formats={'/'.join(self.formats.values())}"


class Conv1DKind(LayerKind):
    """transformers' `Conv1D`. Subclasses are refused, since their forward may differ."""

    name = "conv1d"
    layer = SnipConv1D
    accepts = "transformers' Conv1D"

    def knows(self, module: nn.Module) -> bool:
        return isinstance(module, Conv1D)

    def refuses(self, module: nn.Module) -> str | None:
        if has_computed_weight(module):
            return COMPUTED_WEIGHT
        return None if type(module) is Conv1D else f"class {type(module).__name__}"


# The subclasses of `nn.Linear` that are swapped. Falcon's, whose forward is `input @ self.weight.T` plus the bias, is
# known by its name, since its code may come with a checkpoint.
LINEAR_CLASSES: list[type[nn.Linear] | str] = ["FalconLinear"]


def register_linear_class(cls: type[nn.Linear]) -> type[nn.Linear]:
    """Lets snip-hf swap a subclass of `nn.Linear` whose forward is the same product. Returns it, as a decorator must.

    Its modules run as `SnipLinear` until the model is restored, without any methods that the class adds. Subclasses
    must be registered themselves.

    Raises:
        TypeError: it is not a subclass of `nn.Linear`.
        ValueError: in a trial in BF16 the class computes something other than input @ weight^T + bias, or needs more
            than these two parameters; or the class changes how `nn.Module` saves, loads, moves or calls it.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Linear)) or cls is nn.Linear or issubclass(cls, SnipLayer):
        raise TypeError(
            f"Got {cls!r}; expected a subclass of nn.Linear. Modules of other classes need a layer kind "
            "(docs/extending.md)."
        )
    own = [name for name in _NOT_KEPT if getattr(cls, name) is not getattr(nn.Linear, name)]
    problem = f"has a {own[0]} of its own" if own else _difference(cls)
    if problem is not None:
        raise ValueError(
            f"{cls.__qualname__} cannot be swapped as an nn.Linear: it {problem}. Expected the same product as "
            "nn.Linear's, and nothing else. Write a layer kind for it (docs/extending.md)."
        )
    LINEAR_CLASSES.append(cls)
    return cls


def _difference(cls: type[nn.Linear]) -> str | None:
    """Runs the class's forward on random input; returns how it differs from `nn.Linear`'s, or None."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(2, 3, _IN, dtype=torch.bfloat16)
        for has_bias in (True, False):
            layer = cls.__new__(cls)
            try:
                # Not the class's own __init__, whose arguments are unknown.
                nn.Linear.__init__(layer, _IN, _OUT, bias=has_bias, dtype=x.dtype)
                expected = nn.functional.linear(x, layer.weight, layer.bias)
                # Allows another order of summation; BF16 has 8 bits.
                torch.testing.assert_close(layer(x), expected, rtol=2**-6, atol=2**-6)
            except Exception as error:  # a foreign class may raise anything
                text = " ".join(str(error).split())
                return f"fails a trial with only a weight and a bias ({type(error).__name__}: {text})"
    return None


register_layer_kind(Conv1DKind())
register_layer_kind(Linear())
