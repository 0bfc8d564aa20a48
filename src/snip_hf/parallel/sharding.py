"""Sharded tensors: their whole, the part of them that this process holds, and FSDP2's hooks and order of gathers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

# The newer name, from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_fully_sharded(model: nn.Module) -> bool:
    """Returns True if FSDP2 shards the model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def gather_ahead(model: nn.Module) -> int:
    """Has FSDP2 gather the weights of each of a model's blocks while the block before it runs (ours).

    By itself it gathers a block's weights when that block is called, which the host may reach too late. Takes the
    memory of one more block's weights. Leaves alone lists in which some block was told already what to gather ahead.
    Blocks that `fully_shard` was given together are gathered together, and count as one.

    Args:
        model: whose `ModuleList`s of blocks of one class are looked at.

    Returns: how many blocks' weights are gathered ahead.
    """
    told = 0
    for blocks in model.modules():
        if not isinstance(blocks, nn.ModuleList):
            continue
        # Accelerate's regional compilation wraps each block.
        members: list[Any] = [getattr(block, "_orig_mod", block) for block in blocks]
        if len(set(map(type, members))) != 1 or not isinstance(members[0], FSDPModule):
            continue
        # Blocks that are gathered together have one state: told of each other, they would forget the others.
        firsts = {id(block._get_fsdp_state()): block for block in reversed(members)}
        groups = list(reversed(firsts.values()))
        states = [vars(block._get_fsdp_state()) for block in groups]
        if any(state.get(f"_states_to_{way}_prefetch") for state in states for way in ("forward", "backward")):
            continue
        for block, following in pairwise(groups):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
        told += len(groups) - 1
    return told


def offloads(policy: object) -> bool:
    """Returns True for a policy of FSDP2 that keeps shards in host memory."""
    return isinstance(policy, CPUOffloadPolicy)


def has_first_rows(tensor: Tensor) -> bool:
    """Returns True if the first rank holds the whole first row of a tensor, which may be sharded."""
    if not isinstance(tensor, DTensor):
        return True
    dims = [placement.dim for placement in tensor.placements if placement.is_shard()]  # type: ignore[attr-defined]
    return all(dim == 0 for dim in dims)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor that may be sharded as one that is not. Collective where it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if tensor.placements != (Shard(0),) or tensor.shape[0] % mesh.size():
        return tensor.full_tensor()
    # What FSDP2 does with most weights; many times faster on the host than the general way.
    local = tensor.to_local().contiguous()
    result = local.new_empty(tensor.shape)
    _all_gather(result, local, group=mesh.get_group())
    return result


def own_part(tensor: Tensor) -> Tensor:
    """Returns what this process holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor, the same on all ranks, sharded as `like` is. Nothing is sent."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def with_own_part(part: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor, sharded as `like` is, of which this process holds this part."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def squares(tensors: Iterable[Tensor]) -> list[float]:
    """Returns the sum of squares of each tensor. Collective if any is sharded.

    In FP32, and read from the device once. None of the tensors is held.
    """
    figures: list[float] = pending_squares(tensors).tolist()
    return figures


def pending_squares(tensors: Iterable[Tensor]) -> Tensor:
    """As `squares`, not waiting for the device."""
    found, layouts = [], []
    for tensor in tensors:
        found.append(_sum_of_squares(own_part(tensor)))
        layouts.append((tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None)
    if not found:
        return torch.zeros(0)
    sums = torch.stack([one.to(found[0].device) for one in found])
    for layout in dict.fromkeys(layouts):
        if layout is not None:
            of_layout = [index for index, other in enumerate(layouts) if other == layout]
            placements = [Partial() if placement.is_shard() else Replicate() for placement in layout[1]]
            parts = DTensor.from_local(sums[of_layout], layout[0], placements, run_check=False)
            sums[of_layout] = parts.full_tensor()
    return sums


def _sum_of_squares(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:  # in one pass
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
        return norm.square()
    # A norm's sum on a CPU is off by 2e-3 at 20 million numbers.
    return tensor.to(torch.float32).square().sum()


@contextmanager
def without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Keeps FSDP2 from gathering parameters for the time of the context; who runs the model gives it whole ones."""
    kept = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                kept.append((hooks, dict(hooks)))
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in reversed(kept):
            hooks.clear()
            hooks.update(before)


def _is_of_fsdp(hook: Any) -> bool:
    while hook is not None:
        if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False
