"""TODO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.state import plain_name, snip_linears
from ..numerics.random_state import RandomState
from ..parallel.sharding import whole, without_sharding_hooks
from .batch import Batch


def run_pass(
    model: nn.Module,
    batch: Batch,
    weights: Mapping[str, Tensor],
    autocast: torch.dtype | None = None,
    backward: bool = True,
    run: Callable[[Mapping[str, Any]], Tensor | float | None] | None = None,
) -> Tensor:
    """Runs one forward and backward pass in FP32 on stand-ins for the parameters and returns the loss.

    Args:
        model: a model without wrappers.
        batch: the micro-batch; the generators start from its state.
        weights: parameter name (`linear.plain_name`) -> the tensor to use instead; gradients go to its `.grad` if it
            requires them. Parameters that are not named are used as detached FP32 copies. Of sharded parameters these
            are whole, but for the weights of swapped layers: each gathers its own when it runs.
        autocast: dtype of autocast, None for none.
        backward: whether to run the backward pass.
        run: runs the batch forward and backward instead and returns its loss, None if that is known elsewhere (the
            returned tensor is then NaN); for a model that is only a part.
    """
    before = RandomState.now()
    frozen = frozen_in_a_pass(model)
    swapped = {id(layer.weight) for layer in snip_linears(model).values()}
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        copy = weights.get(plain_name(name))
        if copy is None:
            copy = parameter.detach() if id(parameter) in swapped else whole(parameter.detach())
            if parameter.is_floating_point():
                # Something before the first layer must ask for gradients, so that the backward pass reaches all of
                # them.
                copy = copy.to(torch.float32).requires_grad_(id(parameter) not in frozen)
        tensors[name] = copy
    for name, buffer in model.named_buffers():
        tensors[name] = buffer.clone().to(torch.float32) if buffer.is_floating_point() else buffer.clone()
    try:
        batch.random_state.restore()
        stand_in = _Pass(model, autocast, backward, run)
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        # Compiled layers would record nothing, and be compiled again for it.
        with (
            torch.compiler.set_stance("force_eager"),
            _attributes_kept(model),
            _efficient_attention(),
            without_sharding_hooks(model),
        ):
            loss: Tensor = torch.func.functional_call(stand_in, named, (dict(batch.kwargs),))
    finally:
        before.restore()
    return loss


def frozen_in_a_pass(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that get no gradient in `run_pass`: weights of linears."""
    linears = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    # An embedding that is tied to the output head is an embedding: it may be all that precedes the first layer.
    return linears - {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def run_forward(model: nn.Module, batch: Batch) -> float:
    """Returns the loss of one FP32 forward pass under the formats in force; as traceless as `run_pass`."""
    return float(run_pass(model, batch, {}, backward=False))


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what a forward pass notes in its modules, such as the longest text that a dynamic RoPE has seen."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for now, then in ((vars(module), attributes), (module._buffers, buffers)):
                now.clear()
                now.update(then)


@contextmanager
def _efficient_attention() -> Iterator[None]:
    """Gives torch's attention in FP32 on CUDA one key and value per query head, where heads share them.

    Only so does it take the memory-efficient kernel, which runs on tensor cores and holds no (tokens, tokens) matrices.
    The function itself is replaced, since backward passes that recompute run in threads of their own.
    """
    original = nn.functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("enable_gqa") and query.is_cuda and query.dtype == torch.float32:
            key, value = per_query_head(query, key), per_query_head(query, value)
            kwargs["enable_gqa"] = False
        return original(query, key, value, *args, **kwargs)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def per_query_head(query: Tensor, shared: Tensor) -> Tensor:
    """Returns keys or values (..., fewer heads, L, E) as (..., heads of the query, L, E)."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], dim=-3)


class _Pass(nn.Module):
    """Forward and backward in one call: recomputation in backward (checkpointing) needs the stand-ins too."""

    def __init__(
        self,
        model: nn.Module,
        autocast: torch.dtype | None,
        backward: bool,
        run: Callable[[Mapping[str, Any]], Tensor | float | None] | None,
    ) -> None:
        super().__init__()
        self.model, self.autocast, self.backward, self.run = model, autocast, backward, run

    def forward(self, kwargs: dict[str, Any]) -> Tensor:
        if self.run is not None:
            found = self.run(kwargs)
            return torch.tensor(math.nan if found is None else float(found))
        # Accelerate wraps `forward` in autocast and keeps the original here.
        forward = getattr(self.model, "_original_forward", self.model.forward)
        device = next(self.model.parameters()).device
        with (
            torch.set_grad_enabled(self.backward),
            torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None),
        ):
            outputs = forward(**kwargs)
            loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        if self.backward:
            with torch.autocast(device.type, enabled=False):  # the caller's may be on
                loss.backward()
        return loss.detach()
