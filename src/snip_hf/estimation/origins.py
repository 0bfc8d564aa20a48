"""What each tensor of a forward pass was computed from: parameters, other tensors of the model, or its inputs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..parallel.sharding import is_sharded
from .fixed_tensors import FixedTensor

# These look rows up in a table: of a matrix of embeddings they give activations, of stacked matrices some of these.
_LOOKUPS = ("aten::index", "aten::index_select", "aten::embedding", "aten::gather", "aten::take_along_dim")
# These count positions.
_COUNTS = ("aten::arange", "aten::linspace")


class Origin(NamedTuple):
    """What a tensor was computed from; of an activation nothing else is told."""

    parameters: frozenset[str] = frozenset()
    """Those that it is a view, a copy or another function of."""
    fixed: frozenset[str] = frozenset()
    """Tensors that are no parameters, likewise."""
    is_activation: bool = False
    """Whether it depends on the inputs."""
    is_position: bool = False
    """Whether it depends on a range of numbers, as tables of positions do that a pass computes."""
    is_composed: bool = False
    """Whether a product of several of them is part of it."""

    @property
    def names(self) -> frozenset[str]:
        return self.parameters | self.fixed


NOTHING = Origin()
ACTIVATION = Origin(is_activation=True)


class Origins:
    """Follows tensors through a pass by their storages.

    Args:
        parameters: name -> parameter, as the pass uses it. Of one tensor with several names only the first is told.
        fixed: name -> tensor that is no parameter.
        inputs: of the pass; what depends on them is an activation.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], fixed: Mapping[str, FixedTensor], inputs: Iterable[Any]
    ) -> None:
        self.sizes: dict[str, int] = {}
        """Name -> elements."""
        self.written: set[str] = set()
        """What was written to, with an activation or positions."""
        self._fixed = fixed
        # Weak references to storages keep their addresses from being used again.
        self._origins: dict[int, tuple[StorageWeakRef, Origin]] = {}
        # Storage -> where in it a tensor begins, and its name: flattened parameters share a storage.
        self._homes: dict[int, tuple[StorageWeakRef, list[tuple[int, str]]]] = {}
        for name, tensor in (*parameters.items(), *((name, one.tensor) for name, one in fixed.items())):
            if _has_storage(tensor):
                self.add(name, tensor)
        tensors = tensors_in(list(inputs))
        # Of token ids, masks and embeddings (batch, positions, ...), and not the width of features (batch, features).
        least = {True: 3, False: 2}
        self._lengths = {one.shape[1] for one in tensors if one.dim() >= least[one.is_floating_point()]}
        for tensor in tensors:
            self.note(tensor, ACTIVATION)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor for the one of this name from now on, such as the whole of a sharded one."""
        self.sizes[name] = tensor.numel()
        place = StorageWeakRef(tensor.untyped_storage())
        homes = self._homes.setdefault(place.cdata, (place, []))[1]
        if all(begin != tensor.storage_offset() for begin, _ in homes):
            homes.append((int(tensor.storage_offset()), name))
            homes.sort()

    def of(self, tensor: Tensor) -> Origin:
        """Returns what a tensor comes from."""
        place = StorageWeakRef(tensor.untyped_storage()).cdata
        if place not in self._homes:
            return self._origins[place][1] if place in self._origins else NOTHING
        name = self._name_of(tensor, place)
        if name not in self._fixed:
            return Origin(parameters=frozenset([name]))
        return ACTIVATION if self._is_rows(tensor, name) else Origin(fixed=frozenset([name]))

    def note(self, tensor: Tensor, origin: Origin, is_written: bool = False) -> None:
        """Says what the result of an operator was computed from, and whether it is an argument that was written to."""
        place = StorageWeakRef(tensor.untyped_storage())
        if place.cdata not in self._homes:
            self._origins[place.cdata] = place, origin
        elif is_written and (origin.is_activation or origin.is_position):
            self.written.add(self._name_of(tensor, place.cdata))

    def _name_of(self, tensor: Tensor, place: int) -> str:
        homes = self._homes[place][1]
        found = bisect.bisect_right([begin for begin, _ in homes], tensor.storage_offset())
        return homes[max(0, found - 1)][1]

    def joined(self, name: str, args: tuple[Any, ...], parts: Sequence[tuple[Tensor, Origin]], result: Any) -> Origin:
        """Returns what the result of an operator that is no product comes from.

        Args:
            name: of the operator.
            args: its arguments.
            parts: the tensors among them, with their origins before the call, which may write to one of them.
            result: what it returned.
        """
        if name in _COUNTS:
            return Origin(is_position=True)
        if name in _LOOKUPS and parts and parts[0][0] is args[0]:
            table = parts[0][1]
            if table.parameters and args[0].dim() > 2:
                return table
            if table.fixed and not table.parameters and self._is_table(table):
                return ACTIVATION
        origins = [origin for _, origin in parts]
        if any(origin.is_composed for origin in origins):
            # What an adapter adds to a weight: the sum is that weight still.
            sizes = {tensor.numel() for tensor in tensors_in(result)}
            whole = [one for tensor, one in parts if one.parameters and not one.is_composed and tensor.numel() in sizes]
            origins = origins if any(origin.is_activation for origin in origins) else whole or origins
        return union(origins)

    def _is_rows(self, tensor: Tensor, name: str) -> bool:
        """Returns True for a part of a table of positions."""
        is_part = tensor.numel() < self.sizes[name] and not self._lengths.isdisjoint(tensor.shape)
        return is_part and not self._fixed[name].of_adapter

    def _is_table(self, origin: Origin) -> bool:
        return not any(self._fixed[name].of_adapter for name in origin.fixed)


def union(origins: Iterable[Origin]) -> Origin:
    """Returns what a function of several tensors comes from."""
    every = list(origins)
    if any(origin.is_activation for origin in every):
        return ACTIVATION
    is_position = any(origin.is_position for origin in every)
    return Origin(
        parameters=frozenset().union(*(origin.parameters for origin in every)),
        # What is computed from positions is a table of these.
        fixed=frozenset() if is_position else frozenset().union(*(origin.fixed for origin in every)),
        is_position=is_position,
        is_composed=any(origin.is_composed for origin in every),
    )


def is_mask(tensor: Tensor) -> bool:
    """Returns True if a tensor has no value but 0 and one other: a mask, a choice of rows, a mean over all of them.

    Of a tensor without memory that is not known, and not said.
    """
    if tensor.is_meta:
        return False
    low, high = torch.aminmax(tensor.detach().to(torch.float32))
    other = low if high == 0 else high
    return bool(((tensor == 0) | (tensor == other)).all())


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in arguments or results whose storage can be told."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and _has_storage(leaf)]


def _has_storage(tensor: Tensor) -> bool:
    return not (tensor.is_sparse or tensor.is_mkldnn or is_sharded(tensor))
