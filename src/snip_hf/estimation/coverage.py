"""The coverage of a plan: the share of a model's matrix products that it can decide on, and the reasons for the rest.

The FLOPs of one forward pass under gradients are counted by the weight that each product multiplies with. Gradients
tell how many GEMMs a product takes in training: one forward, and one more for each operand that needs a gradient. A
multiplication and an addition count as two. torch's own `FlopCounterMode` counts by module instead of by weight, knows
neither grouped products nor attention on CPUs, and refuses flex attention outside compiled graphs; the totals agree
(`tests/estimation/test_coverage.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..config import SnipConfig
from ..layers.adapters import ADAPTER, adapter_modules, is_adapted
from ..layers.kinds import kind_of, known_weights
from ..layers.labels import without_numbers
from ..layers.layer import Dispatch, ForwardRecorder, SnipLayer
from ..layers.selection import (
    check_patterns,
    class_name,
    head_of,
    layer_reasons,
    refuse_quantized,
    skip_reasons,
    weight_matrices,
)
from ..layers.state import plain_name, snip_linears
from ..parallel.sharding import compute_device, unwrap, whole
from ..text import printable
from .passes import call, stand_in, traceless

# Coverage below this share is worth a warning.
LITTLE = 0.9
_HEAD = "output head"
# Mamba does so with `dt_proj`, its fused kernels on a GPU with `out_proj`, and Liger's loss with the output head: no
# format reaches such a product.
NO_CALL = "the model multiplies with its weight without a call of the layer"
_ACTIVATIONS = "products of activations with each other (attention, scans)"
_OTHER = "other products without a weight (masks, tables)"


Formula = Callable[[Sequence[Any], Tensor], int]
"""(All arguments of an operator, its result) -> the FLOPs of that product."""

# Nodes of autograd's graph: what they return are activations, or rows of a matrix.
_PRODUCTS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "Embedding", "NativeLayerNorm", "ScaledDotProduct")
_LOOKUPS = ("Index", "Gather")


@dataclass(frozen=True)
class Uncovered:
    """Matrix products that stay in high precision, of one kind of weight in all blocks."""

    name: str
    """Name of the module, or of the parameter if it is not called "weight"; `*` stands for a number."""
    kind: str
    """"MoE experts", "router" or the class of the module."""
    share: float
    """Share of the FLOPs of all products that count, 0..1."""
    reason: str


@dataclass(frozen=True)
class Coverage:
    """The matrix products of one micro-batch, and those that a plan can decide on."""

    flops: float
    """FLOPs of all matrix products with a weight in a forward and a backward pass, by the tokens that it saw. Each
    product counts as forward, as grad_input if its input needs a gradient, and as grad_weight if the weight is trained.
    The output head, if no plan decides on it, and products without a weight are in `aside`."""
    covered: float
    """The FLOPs that a plan decides on."""
    uncovered: list[Uncovered]
    """The others, the largest share first."""
    aside: dict[str, float] = field(default_factory=dict)
    """Kind of products that are no part of `flops`, so that they do not lower the share -> their FLOPs."""

    @property
    def share(self) -> float:
        """The part of the FLOPs that a plan can decide on, 0..1; 0 if there are none, since it decides on nothing."""
        return self.covered / self.flops if self.flops else 0.0

    @property
    def counted(self) -> str:
        """Describes what `flops` counts."""
        head = "" if self.aside.get(_HEAD) == 0 else "output head and "
        return f"the model's matmul FLOPs ({head}attention products aside)"

    def by_kind(self) -> dict[tuple[str, str], float]:
        """Returns (kind, reason) -> share of what is not covered, the largest first.

        Layers for which a plan names formats without effect are listed by name.
        """
        shares: dict[tuple[str, str], float] = {}
        for one in self.uncovered:
            kind = one.name if one.reason == NO_CALL else one.kind
            shares[kind, one.reason] = shares.get((kind, one.reason), 0.0) + one.share
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON data."""
        return asdict(self)

    def describe(self) -> str:
        """Returns the share, and kind, share and reason of the rest, for the log and reports."""
        rest = [
            f"{printable(kind)}: {share:.1%}, not covered ({printable(reason)})"
            for (kind, reason), share in self.by_kind().items()
        ]
        return "; ".join([f"{self.share:.1%} of {self.counted}", *rest])


class PassCounts:
    """Counts of one forward pass, or of those of several ranks together.

    Keys of FLOPs: ("covered",), ("left", name, kind, reason), ("aside", kind). Keys of tokens: ("tokens", layer), which
    a swapped layer saw in all its matrices together, and ("returned", layer), for which its grad_input runs.
    """

    def __init__(self, entries: Iterable[Sequence[Any]] = ()) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        for *key, count in entries:
            self.counts[tuple(key)] += count

    def entries(self) -> list[list[Any]]:
        """Returns the counts as JSON data; the entries of several passes make one pass together."""
        return [[*key, count] for key, count in self.counts.items()]

    @property
    def tokens(self) -> dict[str, int]:
        return self._under("tokens")

    @property
    def returned(self) -> dict[str, int]:
        return self._under("returned")

    @property
    def coverage(self) -> Coverage:
        left = {key[1:]: count for key, count in self.counts.items() if key[0] == "left" and count}
        covered = float(self.counts["covered",])
        total = covered + sum(left.values())
        rest = [Uncovered(name, kind, count / total, reason) for (name, kind, reason), count in left.items()]
        aside = {what: float(count) for what, count in self._under("aside").items()}
        return Coverage(float(total), covered, sorted(rest, key=lambda one: -one.share), aside)

    def _under(self, what: str) -> dict[str, int]:
        return {key[1]: count for key, count in self.counts.items() if key[0] == what}


def coverage(model: nn.Module, batch: Mapping[str, Any], config: SnipConfig | None = None) -> Coverage:
    """Returns which share of a model's matmul FLOPs on this batch a plan can decide on.

    Runs one forward pass, which leaves no trace. Experts count by the tokens that their router gave them.

    Args:
        model: a model, converted or not; wrappers are looked through. It is not changed.
        batch: keyword arguments of its forward, on its device; labels are only needed if an encoder-decoder makes its
            decoder's inputs of them.
        config: decides which layers are swapped; None: those that are, or the defaults if the model is not
            converted.

    Raises:
        ValueError: the model is already quantized by another method, or a name in `skip_modules` or `include_modules`
            matches nothing, as in `convert_model`.
    """
    bare = unwrap(model)
    refuse_quantized(bare)
    if config is not None and not snip_linears(bare):
        check_patterns(bare, config, skip_reasons(bare, config))
    return count_pass(bare, batch, config).coverage


def count_pass(
    model: nn.Module, batch: Mapping[str, Any], config: SnipConfig | None = None, autocast: torch.dtype | None = None
) -> PassCounts:
    """Counts the FLOPs of a model without wrappers, as `coverage` does, and the tokens of each swapped layer.

    Runs forward only, under gradients, and keeps nothing for a backward pass. Collective if weights are sharded.

    Args:
        model, batch, config: as `coverage` takes them.
        autocast: dtype of training's autocast; None: the autocast that is on, or none.
    """
    matrices = weight_matrices(model, config)
    kwargs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
    layers = snip_linears(model)
    found = PassCounts([[what, name, 0] for what in ("tokens", "returned") for name in layers])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    calls = calls_of(model)
    with traceless(model), _training_gradients(model), training_autocast(model, autocast):
        counter = FlopsByWeight(dict(model.named_parameters()))
        _count_layers(layers, found, counter)
        _track_calls(calls, counter)
        with counter:
            call(model, kwargs)
    counts = found.counts
    counts["aside", _HEAD], counts["aside", _ACTIVATIONS] = 0, counter.of_activations
    if counter.of_others:
        counts["aside", _OTHER] = counter.of_others
    for one in matrices:
        name = names[id(one.parameter)]
        count, in_calls = counter.of_weights[name], counter.in_calls[name]
        if one.is_aside:
            counts["aside", _HEAD] += count
            continue
        covered = in_calls if one.reason is None else 0
        counts["covered",] += covered
        counts["left", one.name, one.kind, one.reason or NO_CALL] += count - covered
    reasons, head, adapters = layer_reasons(model, config), head_of(model), adapter_modules(model)
    for caller, count in counter.of_modules.items():
        name, kind = plain_name(caller.name), class_name(caller.module)
        reason = (
            ADAPTER if id(caller.module) in adapters else reasons.get(name, f"no registered layer kind handles {kind}")
        )
        if reason is None:
            counts["covered",] += count
        elif caller.module is head:
            counts["aside", _HEAD] += count
        else:
            counts["left", without_numbers(name), kind, reason] += count
    return found


@contextmanager
def training_autocast(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Runs a pass under training's autocast in this dtype, or in the autocast that is on.

    If none is on, a model of several dtypes, which needs autocast, runs under autocast in BF16: the dtype changes no
    FLOPs.
    """
    parameters = [one for one in model.parameters() if one.is_floating_point()]
    device = compute_device(parameters[0]).type if parameters else "cpu"
    if dtype is None and not torch.is_autocast_enabled(device) and len({one.dtype for one in parameters}) > 1:
        dtype = torch.bfloat16
    if dtype is None or device == "meta":
        yield
        return
    with torch.autocast(device, dtype=dtype):
        yield


@contextmanager
def _training_gradients(model: nn.Module) -> Iterator[None]:
    """Replaces a model's parameters by stand-ins that require gradients as in training."""
    asks = {name: one.requires_grad for name, one in model.named_parameters() if one.is_floating_point()}
    stand_in(model, {}, in_fp32=False)
    for name, parameter in model.named_parameters():
        if name in asks:
            parameter.requires_grad_(asks[name])
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_forgotten, _forgotten):
        yield


def _forgotten(_: Tensor) -> Any:
    """Packs and unpacks saved tensors of a backward pass that never runs."""


def _track_calls(calls: Iterable[Call], counter: FlopsByWeight) -> None:
    """Tells the counter which modules run; use inside `traceless`."""
    for one in calls:
        one.module.register_forward_pre_hook(lambda *_, one=one: counter.running.append(one))
        one.module.register_forward_hook(lambda *_: counter.running.pop() and None, always_call=True)


def _count_layers(layers: Mapping[str, SnipLayer], found: PassCounts, counter: FlopsByWeight) -> None:
    """Makes every swapped layer run in high precision and counts its tokens and FLOPs; use inside `traceless`."""
    names = {id(parameter): name for name, parameter in counter.parameters.items()}

    def recorder(name: str, weight: str) -> ForwardRecorder:
        def forward(layer: SnipLayer, input: Tensor, dispatch: Dispatch | None) -> Tensor:
            x = input.reshape(-1, input.shape[-1])
            rows = x.shape[0] if dispatch is None else int(dispatch.ends[-1])
            found.counts["tokens", name] += rows
            found.counts["returned", name] += rows if needs_gradient(input) else 0
            gemms = 1 + needs_gradient(input) + layer.weight.requires_grad
            counter.add(weight, 2 * rows * layer.in_features * layer.out_features, gemms)
            with counter.paused():
                return _output(layer, x, dispatch).view(*input.shape[:-1], layer.out_features)

        return forward

    for name, layer in layers.items():
        layer.snip_recorder = recorder(name, names[id(layer.weight)])


def _output(layer: SnipLayer, x: Tensor, dispatch: Dispatch | None) -> Tensor:
    """Returns a layer's output in high precision, in the dtype of training."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    x, matrices = x.to(dtype), [one.to(dtype) for one in layer.matrices(whole(layer.weight))]
    bias = None if layer.bias is None else layer.bias.to(dtype)
    if dispatch is None:
        return nn.functional.linear(x, matrices[0], bias)
    *parts, behind = x.tensor_split(dispatch.ends.cpu())
    products = [part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)]
    y = torch.cat([*products, behind.new_zeros(len(behind), layer.out_features)])
    return y if bias is None else y + nn.functional.pad(bias, (0, 0, 0, 1))[dispatch.matrix()]


# ------------------------------------------------------------------------------------------------------------- FLOPs


class Call(NamedTuple):
    """A running module, and the weight that its products belong to if their operands do not show one."""

    name: str
    module: nn.Module
    layer: frozenset[str]
    """Names of the parameters whose products plans decide on if the module is called."""
    weight: str | None
    """Name of the parameter, if the module is a linear, or holds frozen matrices and no layers."""
    is_fixed: bool
    """True if its weights are matrices that are not parameters, or an adapter's."""


class FlopsByWeight(TorchDispatchMode):
    """Counts the products of passes within the context.

    A product belongs to the parameter that an operand is, is a view of, or is computed from without products: casts,
    scaled weights, chosen experts. Otherwise it belongs to the innermost module that runs, if that only multiplies
    with its own weights (`Call`). The others are products of activations, as in attention and scans.

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
        """FLOPs of attention, and of batched products of activations with each other."""
        self.of_others = 0
        """FLOPs of unbatched products in which no weight was found."""
        self.running: list[Call] = []
        self.parameters = dict(parameters)
        self._names = {id(_root(tensor)): name for name, tensor in parameters.items()}
        self._leaves = {id(tensor): name for name, tensor in parameters.items()}
        self._is_paused = False

    def add(self, name: str, flops: int, gemms: int) -> None:
        """Adds a product with a parameter."""
        self.of_weights[name] += flops * gemms
        if any(name in call.layer for call in self.running):
            self.in_calls[name] += flops * gemms

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops counting while a layer runs that counts for itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not self._is_paused:  # a layer that runs gathers its own weight
            args = tree_map_only(Tensor, lambda one: whole(one) if id(one) in self._leaves else one, args)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known = _FORMULAS.get(func.name().partition(".")[0])  # without the name of an overload
        if known is not None and not self._is_paused:
            formula, operands = known
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
                self.add(name, flops, 1 + sum(needs))
                return
        call = self.running[-1] if self.running else None
        if call is not None and call.weight is not None:
            self.add(call.weight, flops, 1 + sum(needs))
        elif call is not None and call.is_fixed:
            self.of_modules[call] += flops * (1 + sum(needs))
        elif operands[0].dim() == 3:
            self.of_activations += flops * (1 + sum(needs))
        else:
            self.of_others += flops * (1 + sum(needs))

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
        # Autocast's copy of a trained matrix shows which parameter it is; a copy of a frozen one does not.
        is_owner = is_linear or (is_leaf and not all(one.requires_grad for one in matrices))
        weight = names[id(max(matrices, key=Tensor.numel))] if matrices and is_owner else None
        is_fixed = weight is None and (id(module) in adapters or (is_leaf and _has_matrix(module)))
        return Call(name, module, layer, weight, is_fixed)

    return [call(name, module) for name, module in model.named_modules()]


def _has_matrix(module: nn.Module) -> bool:
    """Returns True if a module holds a matrix as a buffer or a plain attribute instead of a parameter."""
    held = (*module._buffers.values(), *(value for value in vars(module).values() if type(value) is Tensor))
    return any(one is not None and one.is_floating_point() and sum(n > 1 for n in one.shape) > 1 for one in held)


def needs_gradient(tensor: Tensor) -> bool:
    """Returns True if a gradient flows back to a tensor, or if that is unknown.

    It is unknown in a part of the pass that runs without gradients because its backward pass recomputes it (reentrant
    gradient checkpointing).
    """
    return tensor.requires_grad or not torch.is_grad_enabled()


def _product(first: int) -> Formula:
    """Each of these products contracts the last dimension of its first operand."""
    return lambda args, out: 2 * out.numel() * int(args[first].shape[-1])


def _grouped_product(args: Sequence[Any], out: Tensor) -> int:
    first, tensors = args[0], (one for one in args[2:] if isinstance(one, Tensor))
    # The ends of the groups are the only integers. Without them each matrix has rows of its own, (E, T, I).
    ends = next((one for one in tensors if not one.is_floating_point()), None)
    if ends is None:
        return 2 * out.numel() * int(first.shape[-1])
    # Rows behind the last end belong to no group.
    return int(2 * min(first.shape[0], int(ends[-1])) * out.shape[-1] * first.shape[-1])


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    image, weight = args[:2]
    if weight.shape[1] == 1 and weight.shape[0] > 1 and image.shape[1] > 1:
        return 0  # one channel per group is multiplied element by element
    is_transposed = len(args) > 6 and args[6] is True
    return int(2 * (image if is_transposed else out).numel() * math.prod(weight.shape[1:]))


def _attention(args: Sequence[Any], out: Any) -> int:
    query, key, value = args[:3]
    return int(2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


# Operator -> formula of its FLOPs, and the places of its operands among its arguments.
_FORMULAS: dict[str, tuple[Formula, Sequence[int]]] = {
    **{f"aten::{name}": (_product(0), (0, 1)) for name in ("mm", "bmm", "mv", "linear", "_scaled_mm", "_scaled_mm_v2")},
    **{f"aten::{name}": (_product(1), (1, 2)) for name in ("addmm", "baddbmm", "addmv", "_addmm_activation")},
    "aten::_grouped_mm": (_grouped_product, (0, 1)),
    "aten::_scaled_grouped_mm": (_grouped_product, (0, 1)),
    "transformers::grouped_mm_fallback": (_grouped_product, (0, 1)),
    **{f"aten::{name}convolution": (_convolution, (0, 1)) for name in ("", "_", "cudnn_", "mkldnn_")},
    "aten::convolution_overrideable": (_convolution, (0, 1)),
    "aten::_scaled_dot_product_flash_attention": (_attention, (0, 1, 2)),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (_attention, (0, 1, 2)),
    "aten::_scaled_dot_product_efficient_attention": (_attention, (0, 1, 2)),
    "aten::_scaled_dot_product_cudnn_attention": (_attention, (0, 1, 2)),
    "flex_attention": (_attention, (0, 1, 2)),
}
