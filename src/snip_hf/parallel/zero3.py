"""Parameters that DeepSpeed's ZeRO stage 3 partitions, and their view as the sharded tensors that FSDP2 has.

Outside the passes of its module such a parameter is an empty tensor. DeepSpeed keeps this rank's part of the flattened
tensor, N equal parts of which the last may be padded, as the attribute `ds_tensor` of the parameter. Nothing here
imports DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..python_state import binding_kept
from .sharding import all_gather, own_part

# The attribute of a view with the parameter that it stands for.
_SOURCE = "snip_partitioned"


def is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter; of a partitioned one, that of all its parts together."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def has_partitions(model: nn.Module) -> bool:
    """Returns True if ZeRO-3 partitions the model's parameters."""
    return any(map(is_partitioned, model.parameters()))


def are_on_disk(model: nn.Module) -> bool:
    """Returns True if ZeRO-3 keeps parameters on an NVMe device."""
    parts = (parameter.ds_tensor for parameter in model.parameters() if is_partitioned(parameter))  # type: ignore[attr-defined]
    # DeepSpeed's enum consists of strings.
    return any(getattr(part, "final_location", None) == "nvme" for part in parts)


def first_row(parameter: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """Returns a parameter's first row, or first number of a vector, and its shape; None if this rank lacks the row."""
    shape = whole_shape(parameter)
    if is_partitioned(parameter):
        held = parameter.ds_tensor.detach()  # type: ignore[attr-defined]
    else:
        split = [one.dim for one in getattr(parameter, "placements", ()) if not one.is_replicate()]
        held = own_part(parameter.detach()) if set(split) <= {0} else None
    count = shape[-1] if len(shape) > 1 else 1
    is_there = held is not None and held.numel() >= min(count, math.prod(shape))
    return (held.reshape(-1)[:count] if is_there and held is not None else None), shape


@contextmanager
def partitions_as_shards(model: nn.Module) -> Iterator[None]:
    """Gives the modules sharded tensors (DTensor) in place of partitioned parameters, and these back afterwards.

    Collective if rows do not divide among the ranks; otherwise nothing is sent. Does nothing for a model without
    partitions, or with partitions on disk.
    """
    partitions = [] if are_on_disk(model) else [one for one in model.parameters() if is_partitioned(one)]
    views = {id(one): _view(one) for one in partitions}
    held = [module._parameters for module in model.modules()] if views else []
    with binding_kept(held):
        for entries in held:
            for name, parameter in list(entries.items()):
                entries[name] = views.get(id(parameter), parameter)
        yield


def partitioned(view: Tensor) -> Tensor:
    """Returns the parameter that a sharded view stands for; any other tensor itself."""
    return getattr(view, _SOURCE, view)


def sharded_part(part: Tensor, view: Tensor) -> Tensor:
    """Returns this rank's part of a flattened tensor of the parameter's size as a tensor, sharded as its view is.

    Collective if rows do not divide among the ranks.
    """
    assert isinstance(view, DTensor)
    return _sharded(part, view.shape, view.device_mesh)


def _view(parameter: nn.Parameter) -> nn.Parameter:
    group = parameter.ds_process_group  # type: ignore[attr-defined]
    mesh = DeviceMesh.from_group(group, parameter.device.type)
    part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    shape: torch.Size = parameter.ds_shape  # type: ignore[attr-defined]
    view = nn.Parameter(_sharded(part.detach().to(parameter.device), shape, mesh), parameter.requires_grad)
    setattr(view, _SOURCE, parameter)
    return view


def _sharded(part: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
    if shape and shape[0] % mesh.size() == 0:
        own = part.view(shape[0] // mesh.size(), *shape[1:])
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    flat = part.new_empty(mesh.size() * part.numel())
    all_gather(flat, part.contiguous(), group=mesh.get_group())
    # The parts end within rows: cut it at rows, as FSDP2 does.
    placement = Shard(0) if shape else Replicate()
    return distribute_tensor(flat[: shape.numel()].view(shape), mesh, [placement], src_data_rank=None)
