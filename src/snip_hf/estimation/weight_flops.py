"""The FLOPs of a model's matrix products by the weight that they multiply with.

torch's own `FlopCounterMode` tells modules and not weights, knows neither grouped products nor attention on CPUs, and
refuses flex attention outside compiled graphs. Its totals are those of this one (`tests/estimation/test_coverage.py`).

A forward pass under gradients tells how many GEMMs each product takes in training: one forward, and one more for each
operand that needs a gradient. A multiplication and an addition count as two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..layers.adapters import adapter_modules, is_adapted
from ..layers.kinds import kind_of, known_weights

Formula = Callable[[Sequence[Any], Tensor], int]
"""Takes all of an operator's arguments, and its result; returns the FLOPs of that one product."""

# Nodes of autograd's graph: what they return are activations, or rows of a matrix.
_PRODUCTS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "Embedding", "NativeLayerNorm", "ScaledDotProduct")
_LOOKUPS = ("Index", "Gather")


class Call(NamedTuple):
    """A module that runs, and what the products are that it runs itself, where their operands do not tell."""

    name: str
    module: nn.Module
    layer: frozenset[str]
    """Names of the parameters that plans decide on by its calls."""
    weight: str | None
    """Name of the parameter that they are with: the module is a linear, or holds frozen matrices and no layers."""
    is_fixed: bool
    """Whether they are with matrices that the module holds and that are no parameters, or are an adapter's."""


class FlopsByWeight(TorchDispatchMode):
    """Counts the products of the passes that run inside the context.

    A product belongs to the parameter that an operand is, is a view of, or is computed from without products: casts,
    scaled weights, chosen experts. Otherwise it belongs to the innermost module that runs, if that multiplies with
    nothing but its own weights (`Call`). What is left are products of activations, as in attention and scans.

    Args:
        parameters: name -> parameter, as the pass uses it.
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.of_weights: Counter[str] = Counter()
        """Parameter -> FLOPs."""
        self.in_calls: Counter[str] = Counter()
        """Those among them that run within a call of the parameter's layer."""
        self.of_modules: Counter[Call] = Counter()
        """Module whose weights are no parameters -> FLOPs."""
        self.of_activations = 0
        self.running: list[Call] = []
        self.parameters = dict(parameters)
        self._names = {id(_root(tensor)): name for name, tensor in parameters.items()}
        self._leaves = {id(tensor): name for name, tensor in parameters.items()}
        self._formulas = formulas()
        self._is_paused = False

    def note(self, name: str, flops: int, gemms: int) -> None:
        """Adds a product with a parameter."""
        self.of_weights[name] += flops * gemms
        if any(name in call.layer for call in self.running):
            self.in_calls[name] += flops * gemms

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing, for a layer that counts for itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out, packet = func(*args, **kwargs), getattr(func, "overloadpacket", func)
        if packet in self._formulas and not self._is_paused:
            formula, operands = self._formulas[packet]
            if flops := formula((*args, *kwargs.values()), out):
                self._assign([args[index] for index in operands], flops, is_attention=formula is _attention)
        return out

    def _assign(self, operands: Sequence[Tensor], flops: int, is_attention: bool) -> None:
        if is_attention:  # two products, each with the gradients of both operands
            self.of_activations += flops * (3 if any(map(needs_gradient, operands)) else 1)
            return
        needs = [needs_gradient(operand) for operand in operands]
        for index, operand in reversed(list(enumerate(operands))):
            if name := self._parameter_of(operand):
                needs[index] = self.parameters[name].requires_grad
                self.note(name, flops, 1 + sum(needs))
                return
        call = self.running[-1] if self.running else None
        if call is not None and call.weight is not None:
            self.note(call.weight, flops, 1 + sum(needs))
        elif call is not None and call.is_fixed:
            self.of_modules[call] += flops * (1 + sum(needs))
        else:
            self.of_activations += flops * (1 + sum(needs))

    def _parameter_of(self, tensor: Tensor) -> str | None:
        """Returns the parameter that a tensor is, is a view of, or is computed from without products."""
        if id(_root(tensor)) in self._names:
            return self._names[id(_root(tensor))]
        found: set[str] = set()
        seen: set[Any] = set()
        nodes, is_choice = [tensor.grad_fn], False
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if node.name().startswith(_PRODUCTS):
                return None
            is_choice = is_choice or node.name().startswith(_LOOKUPS)
            found |= {self._leaves[key] for key in [id(getattr(node, "variable", None))] if key in self._leaves}
            seen.add(node)
            nodes += [one for one, _ in node.next_functions]
        name = max(found, key=lambda one: self.parameters[one].numel(), default=None)
        if name is None or self.parameters[name].dim() > 2:  # of stacked matrices some may be chosen several times
            return name
        # Rows that are looked up in a matrix, and what a vector scales, are activations.
        is_whole = self.parameters[name].dim() == 2 and tensor.numel() <= self.parameters[name].numel()
        return name if is_whole and not is_choice else None


def _root(tensor: Tensor) -> Tensor:
    """Returns the tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def calls_of(model: nn.Module) -> list[Call]:
    """Returns the modules of a model as the counter takes them; before stand-ins take the parameters' places."""
    names, adapters = {id(tensor): name for name, tensor in model.named_parameters()}, adapter_modules(model)

    def call(name: str, module: nn.Module) -> Call:
        layer = frozenset(names[id(weight)] for weight in known_weights(module))
        matrices = [one for one in module.parameters() if one.dim() > 1]
        is_linear = kind_of(module) is not None and not is_adapted(module)
        is_leaf = not any(True for part in module.children() for _ in part.parameters())
        # Autocast's copy of a trained matrix tells whose it is; that of a frozen one does not.
        is_owner = is_linear or (is_leaf and not all(one.requires_grad for one in matrices))
        weight = names[id(max(matrices, key=Tensor.numel))] if matrices and is_owner else None
        is_fixed = weight is None and (id(module) in adapters or (is_leaf and _has_matrix(module)))
        return Call(name, module, layer, weight, is_fixed)

    return [call(name, module) for name, module in model.named_modules()]


def _has_matrix(module: nn.Module) -> bool:
    """Returns True if a module holds a matrix that is no parameter, as a buffer or a plain attribute."""
    held = (*module._buffers.values(), *(value for value in vars(module).values() if type(value) is Tensor))
    return any(one is not None and one.is_floating_point() and sum(n > 1 for n in one.shape) > 1 for one in held)


def needs_gradient(tensor: Tensor) -> bool:
    """Returns True if a gradient flows back to a tensor, also where that cannot be told.

    A part of the pass without gradients does not tell, such as one that is recomputed for its backward pass (reentrant
    gradient checkpointing).
    """
    return tensor.requires_grad or not torch.is_grad_enabled()


def formulas() -> dict[Any, tuple[Formula, Sequence[int]]]:
    """Returns operator -> formula of its FLOPs, and where its operands stand among its arguments."""
    named: dict[str, tuple[Formula, Sequence[int]]] = {}
    for name in ("mm", "bmm", "mv", "linear", "_scaled_mm", "_scaled_mm_v2"):
        named[f"aten::{name}"] = _product(0), (0, 1)
    for name in ("addmm", "baddbmm", "addmv", "_addmm_activation"):
        named[f"aten::{name}"] = _product(1), (1, 2)
    for name in ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback"):
        named[name] = _grouped_product, (0, 1)
    for name in ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "convolution_overrideable"):
        named[f"aten::{name}"] = _convolution, (0, 1)
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        named[f"aten::_scaled_dot_product_{name}"] = _attention, (0, 1, 2)
    named["aten::addbmm"] = lambda args, out: 2 * out.numel() * args[1].shape[0] * args[1].shape[-1], (1, 2)
    # Of a weight (O, I, J) and rows of I and of J.
    named["aten::_trilinear"] = lambda args, out: 2 * out.numel() * args[0].shape[-1] * args[2].shape[-1], (0, 2, 1)
    named["higher_order::flex_attention"] = _attention, (0, 1, 2)
    packets = {name: _packet(name) for name in named}
    return {packet: named[name] for name, packet in packets.items() if packet is not None}


def _packet(name: str) -> Any:
    """Returns an operator by its name; None: this torch has none, or its library is not loaded."""
    library, own = name.split("::")
    return getattr(getattr(torch.ops, library), own, None)


def _product(first: int) -> Formula:
    """Each of these products contracts the last dimension of its first operand."""
    return lambda args, out: 2 * out.numel() * int(args[first].shape[-1])


def _grouped_product(args: Sequence[Any], out: Tensor) -> int:
    first, ends = args[0], next((one for one in args[2:] if _is_ends(one)), None)
    if ends is None or first.dim() != 2 or out.dim() != 2 or not first.shape[0]:
        return 2 * out.numel() * int(first.shape[-1])
    # No group has the rows behind the last end.
    return int(2 * min(first.shape[0], int(ends[-1])) * out.shape[-1] * first.shape[-1])


def _is_ends(value: Any) -> bool:
    """Returns True for where the groups of a grouped product end: its only vector of whole numbers."""
    return isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point() and value.numel() > 0


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    image, weight = args[:2]
    if weight.shape[1] == 1 and weight.shape[0] > 1 and image.shape[1] > 1:
        return 0  # one channel per group is multiplied element by element
    is_transposed = len(args) > 6 and args[6] is True
    return int(2 * (image if is_transposed else out).numel() * math.prod(weight.shape[1:]))


def _attention(args: Sequence[Any], out: Any) -> int:
    query, key, value = args[:3]
    return int(2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
