"""What do the ranks' layers draw, and do they keep who they are under DDP? For the processes that the tests start."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from configs import fp4_config
from small import text, tiny_llama
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from snip_hf import SnipController
from snip_hf.layers.state import snip_linears


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
