"""Routers and indexers: which linears choose experts or weigh them, and which choose tokens.

They stay in high precision. A small error in a router's output sends a token to another expert, and one in an
indexer's hides a token from sparse attention. No estimate of this library sees such a jump. Nor has a choice a
gradient, without which an indexer has no price.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

# Fields of configs that count experts: num_experts, num_local_experts, n_routed_experts, moe_num_experts, ...
_COUNTS = re.compile(r"(\w+_)?(num|n)(_local|_routed)?_experts")
# Words that a router's name or that of the module around it may have, beside "router".
_GATES = {"gate", "gating", "classifier", "wg"}


class Routers:
    """Says which linears of a model are routers, by their names and by how many outputs they have.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for name, module in model.named_modules() if "router" in type(module).__name__.lower()}
        self._counts = {count for count in (*_of_modules(model), *_of_configs(getattr(model, "config", None))) if count}

    def has(self, name: str, module: nn.Module) -> bool:
        """Returns True for a linear that is called, or is inside of what is called, a router or a gate of experts.

        So is one inside of a module whose class is called a router (Zaya's, by the name of `gate`).

        What is only called a gate must have as many outputs as the model has experts somewhere: gates of other kinds
        exist.
        """
        parts = name.split(".")
        if any(".".join(parts[:end]) in self._names for end in range(1, len(parts))):
            return True
        words = [set(part.split("_")) for part in parts]
        if any("router" in part or ("gate" in part and part & {"expert", "experts"}) for part in words):
            return True
        is_gate = any(part & _GATES and "proj" not in part for part in words[-2:])
        return is_gate and getattr(module, "out_features", None) in self._counts

    def is_of_class(self, module: nn.Module, outputs: int) -> bool:
        """Returns True for a module of no known kind whose class is called a router or a gate and chooses experts.

        Args:
            module: has a weight.
            outputs: of the weight; as many as the model has experts somewhere.
        """
        name = type(module).__name__.lower()
        return ("router" in name or "gate" in name) and outputs in self._counts


def is_in_indexer(name: str) -> bool:
    """Returns True for a linear of an indexer of sparse attention (DeepSeek-V3.2's, and those built after it)."""
    return "indexer" in name.split(".")


def _of_modules(model: nn.Module) -> Iterator[int]:
    """Yields how many experts each list of experts, or module of experts, has."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            yield len(module) if isinstance(module, nn.ModuleList) else _whole(getattr(module, "num_experts", 0))


def _of_configs(config: object) -> Iterator[int]:
    """Yields the counts of experts in a config and in those inside it."""
    for field, value in getattr(config, "__dict__", {}).items():
        if _COUNTS.fullmatch(field):
            yield from map(_whole, value if isinstance(value, list | tuple) else [value])
        elif field.endswith("_config"):
            yield from _of_configs(value)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
