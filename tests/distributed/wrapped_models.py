"""Wrapped and sharded models on a rank: what is counted of them, what their layers draw, and who they are."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from configs import fp4_config
from small import text, tiny_llama
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainings import with_lora

from snip_hf import SnipController, convert_model, coverage
from snip_hf.layers.state import snip_linears

CASES = ("LoRA", "checkpoint_wrapper", "torch.compile", "tied", "frozen")
"""Adapters; wrappers around each block; a weight that two layers share; a model that trains its linears alone."""


def counted(case: str, on_ranks: bool) -> dict[str, Any]:
    """Returns the coverage of a case, as JSON data.

    Args:
        case: one of `CASES`.
        on_ranks: whether blocks are wrapped as the case says and sharded over the ranks, or neither.
    """
    model: Any = tiny_llama(hidden=32, layers=2)
    convert_model(model, fp4_config())
    layers = model.model.layers
    if case == "LoRA":
        model = with_lora(model)
    elif case == "tied":
        layers[0].mlp.up_proj.weight = layers[0].mlp.gate_proj.weight
    elif case == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("_proj" in name)
    if on_ranks:
        for index, block in enumerate(layers):
            layers[index] = _wrapped(case, block)
            fully_shard(layers[index])
        fully_shard(model)
    return coverage(model, text(2, 16)).to_dict()


def counted_on_ranks() -> dict[str, dict[str, Any]]:
    """Returns case -> coverage; adapters are left out where PEFT is not installed."""
    return {case: counted(case, on_ranks=True) for case in CASES if case != "LoRA" or find_spec("peft")}


def _wrapped(case: str, block: nn.Module) -> nn.Module:
    if case == "checkpoint_wrapper":
        return checkpoint_wrapper(block)
    return torch.compile(block, backend="eager") if case == "torch.compile" else block  # type: ignore[return-value]


def unreduced_gradients(fmt: str) -> dict[str, Tensor]:
    """Returns the gradients of the swapped layers on this rank alone, of a batch that all ranks have alike."""
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = SnipController(model, optimizer, fp4_config(policy=f"uniform-{fmt}"))
    batch = text(2, 128)
    controller.capture(batch)
    model(**batch).loss.backward()
    return {name: layer.weight.grad for name, layer in snip_linears(model).items() if layer.weight.grad is not None}


def states_under_ddp(order: str) -> dict[str, Any]:
    """Returns layer -> its state after steps under DDP, which gives the first rank's buffers to all before each.

    Args:
        order: when the controller is built: "before" DDP or "after" it.
    """
    model: nn.Module = tiny_llama(hidden=32)
    model.register_buffer("marker", torch.full((1,), float(dist.get_rank())))
    bare, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
    config = fp4_config(policy="uniform-fp4")
    if order == "before":
        controller = SnipController(model, optimizer, config)
    model = DistributedDataParallel(model, broadcast_buffers=True)
    if order == "after":
        controller = SnipController(model, optimizer, config)
    for step in (1, 2):
        batch = text(2, 128, step + dist.get_rank())
        controller.capture(batch)
        model(**batch).loss.backward()
        states = {name: layer.snip_state.clone() for name, layer in snip_linears(bare).items()}
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
    return {"layers": states, "marker": float(bare.get_buffer("marker"))}
