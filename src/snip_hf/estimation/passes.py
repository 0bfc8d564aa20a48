"""Forward and backward passes in FP32 on stand-ins for the model's tensors, so that they leave no trace in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ..layers.adapters import changed_by_adapters, switched_parameters
from ..layers.kinds import known_weights
from ..layers.run_hooks import RunHook
from ..layers.state import plain_name, snip_linears
from ..numerics.random_state import random_state_kept
from ..parallel.sharding import compute_device, is_sharded, remove_sharding_hooks, whole
from ..parallel.tensor_parallel import without_tensor_parallelism
from ..python_state import Shared, binding_kept
from ..text import WITHOUT_PROBE
from .attention import plain_attention
from .batch import Batch, Objective
from .products import efficient_products

# Attributes of a module that are dicts: its hooks, the kinds of hooks, its tensors and its children.
_DICTS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_parameters", "_buffers", "_modules"),
)

Weights = Mapping[str, Tensor | Callable[[], Tensor]]


def is_probing() -> bool:
    """Returns True while snip-hf runs the model for a probe, in any thread: for hooks that must only count training.

    Hooks run in a probe's passes as they do under activation checkpointing. A hook that must not count there:

        def count(module, args, output):
            if not snip_hf.is_probing():
                self.tokens += output.shape[0]
    """
    return _for_all_threads.is_in_place


def run_pass(
    model: nn.Module,
    batch: Batch,
    weights: Weights | Callable[[], Weights],
    run: Callable[[Mapping[str, Any]], Tensor | float | None] | None = None,
) -> Tensor:
    """Runs one forward and backward pass in FP32 on stand-ins for the parameters and returns the loss.

    Args:
        model: a model without wrappers.
        batch: the micro-batch; the generators start from its state. Half-precision tensors in it (in dicts,
            lists and tuples) are converted to FP32, and no gradient flows back to what they were computed from.
        weights: parameter name (`layers.state.plain_name`) -> the tensor to use instead; gradients go to its `.grad` if
            it requires them. Other parameters are replaced by detached FP32 copies, gathered if they are sharded,
            except weights of swapped layers: each layer gathers its own when it runs. A function in place of a tensor
            makes it each time the weight is read. A function in place of all is called when the model's state has been
            saved, so that the device may still compute the tensors until then.
        run: for a stage of a pipeline: runs the batch forward and backward instead and returns its loss, or None if
            another process knows it (the returned tensor is then NaN).
    """
    with traceless(model, has_been_through_hooks=batch.objective is None):
        batch.random_state.restore()
        stand_in(model, weights() if callable(weights) else weights)
        return _run(model, replace(batch, kwargs=tree_map_only(Tensor, _own_input, dict(batch.kwargs))), run)


def _own_input(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    dtype = torch.float32 if value.element_size() < 4 else value.dtype
    own = value.detach().to(dtype)
    # Not a leaf, so that code of the user's may write to it in place.
    return own.requires_grad_().clone() if value.requires_grad else own


@contextmanager
def traceless(model: nn.Module, has_been_through_hooks: bool = True) -> Iterator[None]:
    """Makes the model run uncompiled, unsharded and without SNIP's own hooks; restores it and the random generators.

    Args:
        model: without wrappers.
        has_been_through_hooks: whether the inputs are those that SNIP's hook captured, which the hooks before it have
            already changed.
    """
    with random_state_kept(), _for_all_threads(), _everything_kept(model), without_tensor_parallelism(model):
        remove_sharding_hooks(model)
        _remove_own_hooks(model, has_been_through_hooks)
        with plain_attention(model):
            yield


class _Seen(Tensor):
    """A weight that all code sees whole and in FP32: T5 casts a layer's input to its dtype, Mamba multiplies by it."""

    held: Tensor
    """The weight in its own dtype, which may be sharded."""
    make: Callable[[], Tensor] | None
    """Makes the tensor that is read instead, each time."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return _KNOWN[func](args[0].held)
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(cls, _in_full, (args, kwargs))
            return func(*args, **(kwargs or {}))


def _in_full(weight: _Seen) -> Tensor:
    return whole(weight.held if weight.make is None else weight.make()).to(torch.float32)


# Attributes that need no copy.
_KNOWN: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.dtype.__get__: lambda held: torch.float32,  # type: ignore[attr-defined]
    Tensor.device.__get__: compute_device,  # type: ignore[attr-defined]
    Tensor.shape.__get__: lambda held: held.shape,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__: lambda held: held.requires_grad,  # type: ignore[attr-defined]
}


def stand_in(model: nn.Module, weights: Weights, in_fp32: bool = True) -> None:
    """Replaces the model's parameters, buffers and tensors that are plain attributes by stand-ins.

    A tensor has one stand-in, whatever modules and names refer to it.

    Args:
        model: the model, in `traceless`.
        weights: as `run_pass` takes them.
        in_fp32: whether stand-ins of other parameters and of buffers are in FP32; weights that belong to swapped layers
            only are then converted each time they are read. Otherwise stand-ins keep their dtype, and parameters that
            are not sharded are not copied.
    """
    frozen = frozen_in_a_pass(model)
    swapped = Counter(id(layer.weight) for layer in snip_linears(model).values())
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    stand_ins: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if plain_name(name) in weights:
            given = weights[plain_name(name)]
            if not isinstance(given, Tensor):
                stand_ins.setdefault(id(parameter), _seen(parameter.detach(), given))
                continue
            # PEFT may set `requires_grad` of this tensor, which still moves in place between passes: detach it.
            used = given if given.requires_grad else given.detach().requires_grad_(id(parameter) not in frozen)
            stand_ins.setdefault(id(parameter), _seen(used))
    for parameter in model.parameters():
        if id(parameter) in stand_ins:
            continue
        copy = parameter.detach() if id(parameter) in swapped else whole(parameter.detach())
        if parameter.is_floating_point():
            # Something before the first layer must require gradients, so that the backward pass reaches all layers.
            widens = in_fp32 and swapped[id(parameter)] != uses[id(parameter)]
            copy = copy.to(torch.float32 if widens else copy.dtype).requires_grad_(id(parameter) not in frozen)
            copy = _seen(copy) if in_fp32 else copy
        stand_ins[id(parameter)] = copy
    for parameter in changed_by_adapters(model):
        # torch's parametrization asks for a parameter and writes it to itself, so this one has its own version counter.
        used = stand_ins[id(parameter)]
        stand_ins[id(parameter)] = nn.Parameter(used.data, used.requires_grad)
    for buffer in model.buffers():
        widens = in_fp32 and buffer.is_floating_point()
        stand_ins[id(buffer)] = buffer.clone().to(torch.float32) if widens else buffer.clone()
    for module in model.modules():
        every: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for entries in every:
            for name, tensor in entries.items():
                if tensor is not None:
                    entries[name] = stand_ins[id(tensor)]
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if type(value) is Tensor and not value.requires_grad:
                if id(value) not in stand_ins:
                    stand_ins[id(value)] = value.clone()
                attributes[name] = stand_ins[id(value)]


def _seen(weight: Tensor, make: Callable[[], Tensor] | None = None) -> Tensor:
    if weight.dtype == torch.float32 and not is_sharded(weight) and make is None:
        return weight
    # A kernel that knows no subclasses must not take a part for the whole.
    seen = (torch.empty(0) if is_sharded(weight) else weight).as_subclass(_Seen)
    seen.held, seen.make = weight, make
    return seen


def frozen_in_a_pass(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that get no gradient in `run_pass`.

    These are the weights of layers of known kinds, biases, and the weights of norms, whose gradients would keep the
    norms' inputs alive. Parameters of adapters require gradients as in training: PEFT sets that whenever a loss
    switches adapters, and checkpoints recompute what they saw before.
    """
    known = {id(weight) for module in model.modules() for weight in known_weights(module)}
    known |= {id(parameter) for parameter in model.parameters() if parameter.dim() <= 1}
    # An embedding that is tied to the output head is an embedding: it may be all that precedes the first layer.
    known -= {id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, nn.Embedding)}
    swapped = {id(layer.weight) for layer in snip_linears(model).values()}
    for parameter in switched_parameters(model):
        if id(parameter) not in swapped:
            (known.discard if parameter.requires_grad else known.add)(id(parameter))
    return known


@contextmanager
def _everything_kept(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of every module afterwards: parameters, buffers, hooks and the state of generators.

    Raises:
        RuntimeError: a parameter of the model itself, and not its stand-in, was written to.
    """
    # torch counts the changes of a tensor.
    versions = [(name, parameter, parameter._version) for name, parameter in model.named_parameters()]
    modules = list(model.modules())
    dicts = [getattr(module, name) for module in modules for name in _DICTS]
    with binding_kept([*map(vars, modules), *dicts]):
        yield
    for name, parameter, version in versions:
        if parameter._version != version:
            raise RuntimeError(
                f"A pass of the probe wrote to the parameter {plain_name(name)!r} in place; expected a forward pass "
                "that leaves parameters alone. Let the forward of its module, or a hook, work on a copy of it, or use "
                f"{WITHOUT_PROBE}."
            )


def _remove_own_hooks(model: nn.Module, has_been_through_hooks: bool) -> None:
    """Removes SNIP's hooks, and the model's pre-hooks before them if the inputs have passed those."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            own = [key for key, hook in hooks.items() if isinstance(hook, RunHook)]
            if own and has_been_through_hooks and hooks is model._forward_pre_hooks:
                own = list(hooks)[: list(hooks).index(own[-1]) + 1]
            for key in own:
                del hooks[key]


@contextmanager
def _patched_torch() -> Iterator[None]:
    """Patches torch for the passes: compiled layers, attention and large linears."""
    # Compiled layers would record nothing, and be compiled again for it.
    with torch.compiler.set_stance("force_eager"), efficient_products():
        yield


@contextmanager
def _autocast_disabled() -> Iterator[None]:
    """Makes every new `torch.autocast` disable autocast: some losses run the model in one of their own (TRL's GRPO)."""
    init = torch.autocast.__init__

    def disabled(
        context: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        init(context, device_type, dtype, False, cache_enabled)

    torch.autocast.__init__ = disabled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]


_for_all_threads = Shared(_patched_torch)
_in_fp32 = Shared(_autocast_disabled)


def _run(model: nn.Module, batch: Batch, run: Callable[[Mapping[str, Any]], Tensor | float | None] | None) -> Tensor:
    """Runs forward and backward and returns the loss; recomputation in backward needs the stand-ins too."""
    if run is not None:
        found = run(dict(batch.kwargs))
        return torch.tensor(math.nan if found is None else float(found), dtype=torch.float32)
    # The caller's autocast may be on.
    device = compute_device(next(model.parameters())).type
    attention, share = nullcontext() if batch.sequences is None else batch.sequences.attention(), batch.share
    with _in_fp32(), torch.enable_grad(), torch.autocast(device, enabled=False), attention:
        loss = _loss(model, batch) * share
        loss.backward()
    # The mean over no labels is NaN, but its gradient is 0.
    return loss.detach() if share else torch.zeros_like(loss)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    with _without_cache(model):
        if batch.objective is not None:
            _unwrap_forward(model)
            return batch.objective.loss(model, batch.kwargs)
        asks = {"use_cache": False} if "use_cache" in batch.kwargs else {}
        outputs = call(model, {**batch.kwargs, **asks})
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Stops a model from caching keys and values: a recomputed block would add its own a second time."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    caching: list[Any] = [one for one in (config, text) if getattr(one, "use_cache", False)]
    try:
        for one in caching:
            one.use_cache = False
        yield
    finally:
        for one in caching:
            one.use_cache = True


def recomputes_already(model: nn.Module) -> bool:
    """Returns True if the model itself recomputes activations (gradient checkpointing)."""
    by_hugging_face = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    return by_hugging_face or any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())


@contextmanager
def recomputing(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Makes blocks of the model (named as in plans) recompute their activations in the backward pass.

    The random generators start the second forward pass as they started the first, so the numbers are the same bits.
    Blocks that get a cache (with the prefix of PEFT's prefix tuning) recompute nothing.
    """
    modules = {plain_name(name): module for name, module in model.named_modules()} if blocks else {}
    with binding_kept([vars(modules[name]) for name in blocks]):
        for name in blocks:
            vars(modules[name])["forward"] = _recomputed(modules[name].forward)
        yield


def _recomputed(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        # To transformers' cache of a prefix (of PEFT) the second forward pass would add its keys once more.
        if any(hasattr(value, "get_seq_length") for value in given):
            return original(*args, **kwargs)
        # Checkpointing restores the generators of the devices of these tensors.
        tensors = [value for value in given if isinstance(value, Tensor)]
        return checkpoint(lambda *_: original(*args, **kwargs), *tensors, use_reentrant=False)

    return forward


def call(model: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """Calls the model with its own hooks but without its wrappers; use inside `traceless`."""
    _unwrap_forward(model)
    # With the model's own hooks, but without `model.compile()`.
    return model._call_impl(**kwargs)


def forward_inputs(model: nn.Module, batch: Mapping[str, Any], objective: Objective | None) -> Mapping[str, Any]:
    """Returns the inputs of the model's forward in the pass that the loss is computed from; leaves no trace.

    Args:
        model: without wrappers.
        batch: inputs of the objective; without one, of the model.
        objective: the loss; None: the one that the model returns.

    Raises:
        ValueError: the loss does not call the model, or gives it inputs without names.
    """
    if objective is None:
        return batch
    with traceless(model, has_been_through_hooks=False):
        _unwrap_forward(model)
        return objective.forward_inputs(model, batch)


def _unwrap_forward(model: nn.Module) -> None:
    """Gives the model back the forward that it had before wrappers; use inside `traceless`."""
    original = getattr(model, "_original_forward", None)  # what Accelerate wraps in autocast
    compiled = getattr(original, "_torchdynamo_orig_callable", None)
    if compiled is not None and getattr(compiled, "__self__", None) is model and compiled.__name__ != "forward":
        # The forward of a compiled wrapper, which calls the model as a whole; the class has the model's own.
        vars(model).pop("forward", None)
    elif original is not None:
        vars(model)["forward"] = original
