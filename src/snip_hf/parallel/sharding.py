"""Wrapped models and sharded tensors: unwrapping, gathering, local parts, hooks of FSDP2 and DeepSpeed, prefetching."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

# The newer name, from torch 2.13 on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the model inside wrappers of DDP, DeepSpeed and torch.compile; raises ValueError for nn.DataParallel."""
    while True:
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                "nn.DataParallel copies the model in every step, and the plan with it; start one process per GPU with "
                "`accelerate launch`, or make only one GPU visible (CUDA_VISIBLE_DEVICES=0)."
            )
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (isinstance(model, nn.parallel.DistributedDataParallel) or deepspeed_engine(model)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def deepspeed_engine(*candidates: Any) -> Any:
    """Returns the first DeepSpeed engine among the candidates, or held by an Accelerator among them; None: none."""
    for candidate in candidates:
        wrapper = getattr(candidate, "deepspeed_engine_wrapped", None)
        engine = candidate if wrapper is None else wrapper.engine
        if has_class(engine, "DeepSpeedEngine"):
            return engine
    return None


def has_class(value: Any, name: str) -> bool:
    """Returns True for an instance of this class of DeepSpeed, without importing DeepSpeed."""
    return any(kind.__name__ == name and kind.__module__.startswith("deepspeed.") for kind in type(value).__mro__)


def is_fully_sharded(model: nn.Module) -> bool:
    """Returns True if FSDP2 shards the model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def gather_ahead(model: nn.Module) -> int:
    """Makes FSDP2 prefetch the weights of each block while the block before it runs (ours).

    By itself it gathers a block's weights when that block is called, which the host may reach too late. Prefetching
    takes the memory of one more block's weights. Lists in which the user set up prefetching stay as they are. Blocks
    that `fully_shard` got together are gathered together, and count as one.

    Args:
        model: its `ModuleList`s of blocks of one class are set up.

    Returns: the number of blocks that are prefetched.
    """
    prefetched = 0
    for blocks in model.modules():
        if not isinstance(blocks, nn.ModuleList):
            continue
        # Accelerate's regional compilation wraps each block.
        members: list[Any] = [getattr(block, "_orig_mod", block) for block in blocks]
        if len(set(map(type, members))) != 1 or not isinstance(members[0], FSDPModule):
            continue
        # Blocks that are gathered together share one state, which keeps only the last setting.
        firsts = {id(block._get_fsdp_state()): block for block in reversed(members)}
        groups = list(reversed(firsts.values()))
        states = [vars(block._get_fsdp_state()) for block in groups]
        if any(
            state.get(f"_states_to_{direction}_prefetch") for state in states for direction in ("forward", "backward")
        ):
            continue
        for block, following in pairwise(groups):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
        prefetched += len(groups) - 1
    return prefetched


def compute_device(weight: Tensor) -> torch.device:
    """Returns the device on which passes use a weight; FSDP2 may keep its shards in host memory."""
    if not isinstance(weight, DTensor) or weight.device.type == weight.device_mesh.device_type:
        return weight.device
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device())


def on_compute_device(tensor: Tensor) -> Tensor:
    """Returns a tensor, sharded as before, on its `compute_device`: only there can the ranks of its mesh gather it."""
    device = compute_device(tensor)
    return tensor if tensor.device.type == device.type else with_own_part(own_part(tensor).to(device), tensor)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def number_of_parts(tensor: Tensor) -> int:
    """Returns the number of different parts of a tensor that the ranks hold; 1 if each holds the whole."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor, on its `compute_device`. Collective if it is sharded."""
    tensor = on_compute_device(tensor)
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if tensor.placements != (Shard(0),) or tensor.shape[0] % mesh.size():
        return tensor.full_tensor()
    # FSDP2's layout of most weights; this is many times faster on the host than the general way.
    local = tensor.to_local().contiguous()
    result = local.new_empty(tensor.shape)
    all_gather(result, local, group=mesh.get_group())
    return result


def own_part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a tensor that may be sharded, where it is held."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor, the same on all ranks, sharded as `like` is. Nothing is sent."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def with_own_part(part: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor, sharded as `like` is, with this part on this process."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def squares(tensors: Iterable[Tensor]) -> list[float]:
    """Returns the sum of squares of each tensor, in FP32. Collective if any is sharded; reads the device once."""
    return pending_squares(tensors).tolist()


def pending_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Returns `squares` as a tensor, without waiting for the device."""
    found, layouts = [], []
    for tensor in tensors:
        found.append(sum_of_squares(own_part(on_compute_device(tensor))))
        layouts.append((tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None)
    if not found:
        return torch.zeros(0)
    sums = torch.stack([one.to(found[0].device) for one in found])
    for layout in dict.fromkeys(layouts):
        if layout is not None:
            of_layout = [index for index, other in enumerate(layouts) if other == layout]
            # FSDP2 with tensor parallelism has shards for which `is_shard()` is False.
            placements = [Replicate() if placement.is_replicate() else Partial() for placement in layout[1]]
            parts = DTensor.from_local(sums[of_layout], layout[0], placements, run_check=False)
            sums[of_layout] = parts.full_tensor()
    return sums


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Returns the sum of squares of a whole tensor, in FP32."""
    if tensor.is_cuda:  # in one pass
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
        return norm.square()
    # A norm's sum on a CPU is off by 2e-3 at 20 million numbers.
    return tensor.to(torch.float32).square().sum()


def remove_sharding_hooks(model: nn.Module) -> None:
    """Removes the hooks by which FSDP2 and DeepSpeed gather parameters; the caller provides whole ones."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            for key in [key for key, hook in hooks.items() if _gathers(hook)]:
                del hooks[key]


def _gathers(hook: Any) -> bool:
    # DeepSpeed's, for ZeRO-3, also prefetch and trace the order of modules.
    if str(getattr(hook, "__module__", "")).startswith("deepspeed."):
        return True
    while hook is not None:
        if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False
