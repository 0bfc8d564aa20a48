"""Blocks whose forward runs once more in the backward pass, so that a pass holds their inputs alone.

The random generators of the device begin the second run where they began the first one, so that the numbers are the
same to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..layers.state import plain_name
from .batch import Batch


def recomputes_already(model: nn.Module) -> bool:
    """Returns True if the model itself recomputes activations (gradient checkpointing)."""
    by_hugging_face = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    return by_hugging_face or any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())


@contextmanager
def recomputing(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Lets blocks of the model, by their names in plans, recompute their activations for the time of the context."""
    modules = {plain_name(name): module for name, module in model.named_modules()} if blocks else {}
    before = [(vars(modules[name]), vars(modules[name]).get("forward")) for name in blocks]
    try:
        for name in blocks:
            vars(modules[name])["forward"] = _recomputed(modules[name].forward)
        yield
    finally:
        for attributes, forward in before:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def without_cache(model: nn.Module, batch: Batch) -> Batch:
    """Returns the batch for a model that keeps no keys and values: a block that runs twice would add its own twice.

    An objective sees to that itself.
    """
    takes = batch.objective is None and "use_cache" in inspect.signature(model.forward).parameters
    return replace(batch, kwargs={**batch.kwargs, "use_cache": False}) if takes else batch


def _recomputed(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        # The devices of these are those whose generators are put back.
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return checkpoint(lambda *_: original(*args, **kwargs), *tensors, use_reentrant=False)

    return forward
