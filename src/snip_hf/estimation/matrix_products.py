"""The matrix products of a forward pass: how many FLOPs each of them takes, and which parameter is its operand.

torch's own `FlopCounterMode` sees modules and not parameters, and knows no grouped products.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..parallel.sharding import is_sharded

# Operator -> where its two operands stand among its arguments. Each one contracts the first one's last dimension.
_OPERANDS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::addbmm": (1, 2),
    "aten::mv": (0, 1),
    "aten::addmv": (1, 2),
    "aten::linear": (0, 1),
    "aten::_scaled_mm": (0, 1),
    "aten::_grouped_mm": (0, 1),
    "aten::_scaled_grouped_mm": (0, 1),
    "transformers::grouped_mm_fallback": (0, 1),
}
# These take an activation and where its groups of rows end.
_GROUPED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback")
_CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution", "aten::cudnn_convolution")
_ATTENTION = "scaled_dot_product"
# These look rows up in a table: of a matrix of embeddings they give activations, of stacked matrices some of these.
_LOOKUPS = ("aten::index", "aten::index_select", "aten::embedding", "aten::gather", "aten::take_along_dim")


class _Origin(NamedTuple):
    """What a tensor was computed from."""

    parameters: frozenset[str] = frozenset()
    """Those that it is a view, a copy or another function of; none if it depends on an activation."""
    is_activation: bool = False


_NOTHING = _Origin()
_ACTIVATION = _Origin(is_activation=True)


class ProductCounter(TorchDispatchMode):
    """Counts the FLOPs of all matrix products that run inside the context, a multiplication and an addition as two.

    A product belongs to the parameter that one of its operands is, or is computed from by anything but a matrix
    product: a view, a cast, chosen experts, a sum with another parameter, or with a product of two. A
    convolution of one channel per group multiplies element by element and is no matrix product.

    Args:
        parameters: name -> parameter, as the pass uses it. Of one tensor with several names only the first is told.
        inputs: of the pass; what depends on them is an activation.
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Mapping[str, Tensor], inputs: Iterable[Any]) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        """Name of a parameter -> FLOPs of the products that it is an operand of."""
        self.in_calls: Counter[str] = Counter()
        """Those among them that ran between `enter` and `leave` of the parameter."""
        self.returned: Counter[str] = Counter()
        """Name of a parameter -> those of its FLOPs that run again for the gradient of the other operand: all, unless
        the pass runs with gradients and that operand needs none."""
        self.returned_in_calls: Counter[str] = Counter()
        """Those among them that ran between `enter` and `leave`."""
        self.without_parameter = 0
        """FLOPs of products of activations with each other, as in attention."""
        self._sizes: dict[str, int] = {}
        self._entered: Counter[str] = Counter()
        # Weak references to storages keep their addresses from being used again.
        self._origins: dict[int, tuple[StorageWeakRef, _Origin]] = {}
        # Storage -> where in it a parameter begins, and its name: flattened parameters share a storage.
        self._homes: dict[int, tuple[StorageWeakRef, list[tuple[int, str]]]] = {}
        for name, parameter in parameters.items():
            if _has_storage(parameter):
                self.note_parameter(name, parameter)
        for tensor in _tensors(inputs):
            self._note(tensor, _ACTIVATION)

    def note_parameter(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor for a parameter from now on, such as the whole of a sharded one."""
        self._sizes[name] = tensor.numel()
        place = StorageWeakRef(tensor.untyped_storage())
        homes = self._homes.setdefault(place.cdata, (place, []))[1]
        if all(begin != tensor.storage_offset() for begin, _ in homes):
            homes.append((int(tensor.storage_offset()), name))
            homes.sort()

    def enter(self, names: Iterable[str]) -> None:
        """Notes that a module which holds these parameters begins its forward pass."""
        self._entered.update(names)

    def leave(self, names: Iterable[str]) -> None:
        self._entered.subtract(names)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before the call, which may write to one of them.
        origins = [self._origin(tensor) for tensor in _tensors((args, kwargs))]
        result, made = func(*args, **kwargs), _ACTIVATION
        name = getattr(getattr(func, "_schema", None), "name", str(func))
        if name in _OPERANDS:
            operands = [args[position] for position in _OPERANDS[name]]
            if all(map(self._is_whole_parameter, operands)):
                # What an adapter adds to a weight: the sum is that weight still.
                made = _NOTHING if 0 in _OPERANDS[name] else self._origin(args[0])
            self._count(operands, _product_flops(name, operands[0], result, args, kwargs))
        elif name in _CONVOLUTIONS:
            self._count(args[:2], _convolution_flops(args, kwargs, result))
        elif _ATTENTION in name:
            query, key, value = args[:3]
            self.without_parameter += 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        else:
            origin = _joined(name, args, origins, self._origin)
            for tensor in _tensors(result):
                self._note(tensor, origin)
            return result
        for tensor in _tensors(result):
            self._note(tensor, made)
        return result

    def _count(self, operands: Sequence[Tensor], flops: int) -> None:
        """Adds a product to its parameter; of two parameters the second operand is the weight."""
        first, second = operands
        for operand, other in ((second, first), (first, second)):
            parameters = self._origin(operand).parameters
            if parameters:
                total = sum(self._sizes[name] for name in parameters)
                returns = needs_gradient(other)
                for name in sorted(parameters):
                    part = flops * self._sizes[name] // total
                    in_call = part if self._entered[name] > 0 else 0
                    self.flops[name] += part
                    self.in_calls[name] += in_call
                    self.returned[name] += part if returns else 0
                    self.returned_in_calls[name] += in_call if returns else 0
                return
        self.without_parameter += flops

    def _is_whole_parameter(self, tensor: Tensor) -> bool:
        """Returns True for a parameter in another form, and not for rows that were looked up in one."""
        names = self._origin(tensor).parameters
        return len(names) == 1 and tensor.numel() == self._sizes[min(names)]

    def _origin(self, tensor: Tensor) -> _Origin:
        place = StorageWeakRef(tensor.untyped_storage()).cdata
        if place in self._homes:
            homes = self._homes[place][1]
            found = bisect.bisect_right([begin for begin, _ in homes], tensor.storage_offset())
            return _Origin(frozenset([homes[max(0, found - 1)][1]]))
        return self._origins[place][1] if place in self._origins else _NOTHING

    def _note(self, tensor: Tensor, origin: _Origin) -> None:
        place = StorageWeakRef(tensor.untyped_storage())
        if place.cdata not in self._homes:
            self._origins[place.cdata] = place, origin


def needs_gradient(tensor: Tensor) -> bool:
    """Returns True if a gradient flows back to a tensor, also where that cannot be told.

    A pass without gradients does not tell, nor does one that is recomputed for its backward pass (reentrant gradient
    checkpointing).
    """
    return tensor.requires_grad or not torch.is_grad_enabled()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and _has_storage(leaf)]


def _has_storage(tensor: Tensor) -> bool:
    return not (tensor.is_sparse or tensor.is_mkldnn or is_sharded(tensor))


def _joined(name: str, args: tuple[Any, ...], origins: list[_Origin], origin_of: Any) -> _Origin:
    """Returns what the result of an operator that is no product comes from."""
    if name in _LOOKUPS and isinstance(args[0], Tensor):
        table = origin_of(args[0])
        if table.parameters and args[0].dim() > 2:
            return _Origin(table.parameters)
    if any(origin.is_activation for origin in origins):
        return _ACTIVATION
    return _Origin(frozenset().union(*(origin.parameters for origin in origins)))


def _product_flops(name: str, first: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    if name == "aten::addbmm":  # it sums over the batch
        return 2 * result.numel() * first.shape[0] * first.shape[-1]
    rows = first.shape[0]
    ends = _ends(args, kwargs) if name in _GROUPED and first.dim() == 2 and result.dim() == 2 else None
    if ends is not None and rows:  # no group has the rows after the last end
        return 2 * min(rows, int(ends[-1])) * (result.numel() // rows) * first.shape[-1]
    return 2 * result.numel() * first.shape[-1]


def _ends(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns where the groups of a grouped product end: its only one-dimensional tensor of whole numbers."""
    found = [tensor for tensor in _tensors((args, kwargs)) if tensor.dim() == 1 and not tensor.is_floating_point()]
    return found[0] if found and found[0].numel() else None


def _convolution_flops(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> int:
    image, weight = args[:2]
    is_transposed = args[6] if len(args) > 6 else kwargs.get("transposed", False)
    if weight.shape[1] == 1 and weight.shape[0] > 1 and image.shape[1] > 1:
        return 0
    positions = (image if is_transposed is True else result).numel()
    return int(2 * positions * math.prod(weight.shape[1:]))
