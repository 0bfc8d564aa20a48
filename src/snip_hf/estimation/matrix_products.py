"""The matrix products of a forward pass: how many FLOPs each of them takes, and which parameter is its operand.

torch's own `FlopCounterMode` sees modules and not parameters, and knows no grouped products.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..layers.adapters import is_adapted
from .fixed_tensors import FixedTensor, fixed_tensors
from .origins import ACTIVATION, Origin, Origins, is_mask, tensors_in, union

# Operator -> where its operands stand among its arguments. Each one contracts the first one's last dimension.
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
    "aten::_trilinear": (0, 2, 1),
}
# These take an activation and where its groups of rows end.
_GROUPED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback")
_CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution", "aten::cudnn_convolution")
_ATTENTION = "scaled_dot_product"


class Call(NamedTuple):
    """A module that runs."""

    name: str
    module: nn.Module
    weights: tuple[str, ...] = ()
    """Names of the parameters that plans decide on by its calls."""


class ProductCounter(TorchDispatchMode):
    """Counts the FLOPs of all matrix products that run inside the context, a multiplication and an addition as two.

    A product belongs to the parameter that one of its operands is, or is computed from: a view, a cast, chosen experts,
    a sum with another parameter or with a product of two. A weight that a module composes of its own parameters by
    products, as LoHa does, belongs to these, by their sizes. A convolution of one channel per group multiplies element
    by element and is no matrix product.

    A product without a parameter belongs to the module that runs it, if an operand is a fixed tensor, or is computed
    from such tensors alone, and is a weight. It is none

    - if the pass writes to the tensor what depends on the inputs or on positions, or puts that in its place: this is a
      running state;
    - if the operand has no value but 0 and one other: this is a mask, a choice of rows, or a mean;
    - if its rows are looked up, or if it is a part as long as the batch's sequences: this is a table of positions. In
      modules of adapters parts are weights: VeRA's layers share one tensor, of which each uses a part.

    Each product counts as forward, again for the gradient of the other operand, unless the pass runs with gradients and
    that operand needs none, and once more for the gradient of the weight if that is trained. The weight of a bilinear
    layer has two other operands.

    Args:
        parameters: name -> parameter, as the pass uses it. Of one tensor with several names only the first is told.
        inputs: of the pass; what depends on them is an activation.
        fixed: name -> tensor that is no parameter and may be a weight.
    """

    supports_higher_order_operators = True

    def __init__(
        self, parameters: Mapping[str, Tensor], inputs: Iterable[Any], fixed: Mapping[str, FixedTensor] | None = None
    ) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        """Name of a parameter -> FLOPs of the products that it is an operand of."""
        self.in_calls: Counter[str] = Counter()
        """Those among them that ran between `enter` and `leave` of a call with this parameter among its weights."""
        self.with_fixed: Counter[tuple[Call, frozenset[str]]] = Counter()
        """(module, names of fixed tensors) -> FLOPs of the products that it runs with them as weights."""
        self.without_parameter = 0
        """FLOPs of the forward products of activations with each other, as in attention."""
        self._fixed = dict(fixed or {})
        self._origins = Origins(parameters, self._fixed, inputs)
        self._trained = {name for name, parameter in parameters.items() if needs_gradient(parameter)}
        self._names = {id(one.tensor): name for name, one in self._fixed.items()}
        self._names |= {id(parameter): name for name, parameter in parameters.items()}
        self._forward: Counter[tuple[Call, frozenset[str]]] = Counter()
        self._masks: dict[frozenset[str], bool] = {}
        self._running: list[Call] = []
        self._held: dict[int, frozenset[str]] = {}

    def note_whole(self, parameter: Tensor, whole: Tensor) -> None:
        """Takes the whole of a sharded parameter for that parameter from now on."""
        self._origins.add(self._names[id(parameter)], whole)

    def enter(self, call: Call) -> None:
        """Notes that a module begins its forward pass."""
        self._running.append(call)

    def leave(self) -> None:
        """Notes that the module that began last has ended."""
        self._running.pop()

    def leave_out_states(self, model: nn.Module) -> None:
        """Takes the products with running states for those of activations, at the end of the pass.

        Args:
            model: what has run; a fixed tensor may have another one in its place now.
        """
        states, after = set(self._origins.written), fixed_tensors(model)
        for name, one in self._fixed.items():
            now = after[name].tensor if name in after else None
            # What was moved or cast is the same weight.
            if now is not one.tensor and (now is None or self._origins.of(now).fixed != {name}):
                states.add(name)
        for key in [key for key in self.with_fixed if not states.isdisjoint(key[1])]:
            self.without_parameter += self._forward[key]
            del self.with_fixed[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before the call, which may write to one of them.
        parts = [(tensor, self._origins.of(tensor)) for tensor in tensors_in((args, kwargs))]
        result, made = func(*args, **kwargs), ACTIVATION
        name = getattr(getattr(func, "_schema", None), "name", str(func))
        if name in _OPERANDS:
            operands = [args[position] for position in _OPERANDS[name]]
            made = self._made(operands, parts, result)
            self._count(operands, _product_flops(name, operands[0], result, args, kwargs))
        elif name in _CONVOLUTIONS:
            made = self._made(args[:2], parts, result)
            self._count(args[:2], _convolution_flops(args, kwargs, result))
        elif _ATTENTION in name:
            query, key, value = args[:3]
            self.without_parameter += 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        else:
            made = self._origins.joined(name, args, parts, result)
        writes = getattr(getattr(func, "_schema", None), "is_mutable", False)
        for tensor in tensors_in(args[0] if writes and result is None else result):
            self._origins.note(tensor, made, writes)
        return result

    def _made(self, operands: Sequence[Tensor], parts: Sequence[tuple[Tensor, Origin]], result: Tensor) -> Origin:
        """Returns what the result of a product comes from, to which another one of the tensors may be added."""
        product = self._composed(operands)
        if product is None:
            return ACTIVATION
        added = [(tensor, one) for tensor, one in parts if all(tensor is not operand for operand in operands)]
        return self._origins.joined("", (), [*added, (result, product)], result)

    def _count(self, operands: Sequence[Tensor], flops: int) -> None:
        """Adds a product to its parameter; of several parameters the last operand is the weight."""
        if flops == 0:  # of an empty tensor
            return
        choices = [
            (self._origins.of(weight), weight, [*operands[:index], *operands[index + 1 :]])
            for index, weight in reversed(list(enumerate(operands)))
        ]
        for origin, weight, others in choices:
            if origin.parameters:
                is_trained = weight.requires_grad or not self._trained.isdisjoint(origin.parameters)
                self._share_out(origin.parameters, flops, 1 + sum(map(needs_gradient, others)) + is_trained)
                return
        for origin, weight, others in choices:
            if self._running and origin.fixed and not self._is_mask(origin, weight):
                key = self._running[-1], origin.fixed
                self._forward[key] += flops
                # Where all parameters are trained, the pass does not tell that a fixed tensor has no gradient.
                returned = sum(needs_gradient(other) and not self._origins.of(other).fixed for other in others)
                self.with_fixed[key] += flops * (1 + returned)
                return
        self.without_parameter += flops

    def _share_out(self, parameters: frozenset[str], flops: int, gemms: int) -> None:
        """Adds so many GEMMs to the parameters that the weight comes from, by their sizes."""
        total = sum(self._origins.sizes[name] for name in parameters)
        for name in parameters:
            part = gemms * (flops * self._origins.sizes[name] // total)
            self.flops[name] += part
            self.in_calls[name] += part if self._is_in_call(name) else 0

    def _is_in_call(self, name: str) -> bool:
        return any(name in call.weights for call in self._running)

    def _composed(self, operands: Sequence[Tensor]) -> Origin | None:
        """Returns what a product of weights comes from, if it is a weight itself; None for all other products.

        It is one if the innermost module that holds weights holds all of these, and if no layer is called: what a layer
        makes of learned queries are activations. Within PEFT's adapters layers are called on weights, too.
        """
        origin = union(map(self._origins.of, operands))
        if origin.is_activation or origin.is_position or not origin.names:
            return None
        held = [(is_adapted(call.module), self._names_in(call.module)) for call in reversed(self._running)]
        innermost = next((names for _, names in held if names), frozenset())
        is_inside = origin.names <= innermost and not any(map(self._is_in_call, origin.names))
        if is_inside or any(of_adapter and origin.names <= names for of_adapter, names in held):
            return origin._replace(is_composed=True)
        return None

    def _names_in(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of all parameters and fixed tensors that a module holds."""
        if id(module) not in self._held:
            fixed = (one.tensor for one in fixed_tensors(module).values())
            ids = map(id, (*module.parameters(), *fixed))
            self._held[id(module)] = frozenset(self._names[one] for one in ids if one in self._names)
        return self._held[id(module)]

    def _is_mask(self, origin: Origin, operand: Tensor) -> bool:
        if origin.fixed not in self._masks:
            self._masks[origin.fixed] = is_mask(operand)
        return self._masks[origin.fixed]


def needs_gradient(tensor: Tensor) -> bool:
    """Returns True if a gradient flows back to a tensor, also where that cannot be told.

    A pass without gradients does not tell, nor does one that is recomputed for its backward pass (reentrant gradient
    checkpointing).
    """
    return tensor.requires_grad or not torch.is_grad_enabled()


def _product_flops(name: str, first: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    if name == "aten::addbmm":  # it sums over the batch
        return 2 * result.numel() * first.shape[0] * first.shape[-1]
    if name == "aten::_trilinear":  # of a weight (O, I, J) and rows of I and of J
        return 2 * result.numel() * first.shape[-1] * int(args[2].shape[-1])
    rows = first.shape[0]
    ends = _ends(args, kwargs) if name in _GROUPED and first.dim() == 2 and result.dim() == 2 else None
    if ends is not None and rows:  # no group has the rows after the last end
        return 2 * min(rows, int(ends[-1])) * (result.numel() // rows) * first.shape[-1]
    return 2 * result.numel() * first.shape[-1]


def _ends(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns where the groups of a grouped product end: its only one-dimensional tensor of whole numbers."""
    found = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() == 1 and not tensor.is_floating_point()]
    return found[0] if found and found[0].numel() else None


def _convolution_flops(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> int:
    image, weight = args[:2]
    is_transposed = args[6] if len(args) > 6 else kwargs.get("transposed", False)
    if weight.shape[1] == 1 and weight.shape[0] > 1 and image.shape[1] > 1:
        return 0
    positions = (image if is_transposed is True else result).numel()
    return int(2 * positions * math.prod(weight.shape[1:]))
