"""Subclasses of `nn.Linear` whose forward is the same product, so that a `SnipLinear` can run in their place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..registry import Registry
from .layer import SnipLayer

# Methods of nn.Module whose loss would change more than the product: a swapped layer has nn.Linear's own.
_NOT_KEPT = ("__call__", "_apply", "state_dict", "_save_to_state_dict", "_load_from_state_dict")
# Of the trial's input, (2, 3, I), and of its weight, (O, I).
_IN, _OUT = 8, 5


@dataclass(frozen=True)
class LinearClass:
    """A subclass of `nn.Linear` that is swapped."""

    name: str
    """Of the class; with its module where `cls` is given."""
    cls: type[nn.Linear] | None = None
    """The class. None: every subclass of that name, also one whose code comes with a checkpoint."""

    @property
    def shown_name(self) -> str:
        return self.name.rpartition(".")[2]

    def is_of(self, cls: type[nn.Module]) -> bool:
        """Returns True if this class of modules is meant. A subclass is not."""
        return cls.__name__ == self.name if self.cls is None else cls is self.cls


LINEAR_CLASSES: Registry[LinearClass] = Registry("class of linear layers")
# `input @ self.weight.T`, and then the bias.
LINEAR_CLASSES.register(LinearClass("FalconLinear"))


def register_linear_class(cls: type[nn.Linear]) -> type[nn.Linear]:
    """Lets a subclass of `nn.Linear` be swapped whose forward is the same product. Returns it, as a decorator does.

    Its modules run as `SnipLinear` until the model is restored, so methods of its own are not there meanwhile.
    Subclasses of it are other classes.

    Raises:
        TypeError: it is no subclass of `nn.Linear`.
        ValueError: a trial in BF16 gives something else than input @ weight^T + bias, or needs more than the two; or
            the class changes how `nn.Module` saves, loads, moves or calls it.
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
    LINEAR_CLASSES.register(LinearClass(f"{cls.__module__}.{cls.__qualname__}", cls))
    return cls


def _difference(cls: type[nn.Linear]) -> str | None:
    """Returns in what a trial of the class's forward differs from `nn.Linear`'s; None if in nothing."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(2, 3, _IN, dtype=torch.bfloat16)
        for has_bias in (True, False):
            layer = cls.__new__(cls)
            try:
                # Not the class's own __init__, whose arguments are not known.
                nn.Linear.__init__(layer, _IN, _OUT, bias=has_bias, dtype=x.dtype)
                found = layer(x)
            except Exception as error:  # Whatever a foreign class makes of it.
                return f"does not run with a weight and a bias alone ({type(error).__name__}: {error})"
            expected = nn.functional.linear(x, layer.weight, layer.bias)
            if not isinstance(found, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
                return f"gives {_described(found)} for {_described(x)}, expected {_described(expected)}"
            # Another order of the same sums; BF16 has 8 bits.
            if not torch.allclose(found, expected, rtol=2**-6, atol=2**-6):
                return "multiplies in another way"
    return None


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
