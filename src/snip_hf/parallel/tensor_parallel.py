"""Tensor parallelism of transformers: the forward functions that it sets on modules, and its processes.

`from_pretrained(..., distributed_config=DistributedConfig(tp_size=N))` splits weights over a dimension of the device
mesh. On each module with a split weight it sets a forward of the instance's own, `tp_forward`, which exchanges inputs
and outputs with the other ranks around the forward that the module's class had at that time. Nothing here imports
transformers: `tp_forward` holds its style and its mesh.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_FORWARD = "tp_forward"
_PACKAGE = "transformers"
# Names of the dimensions of its mesh; transformers 5.17 gave it none.
_DIMENSIONS = (None, ("tp",))
# The styles that can hand this rank's parts of the input and of the weight to the forward as plain tensors.
_LINEAR_STYLES = ("ColwiseParallel", "PackedColwiseParallel", "RowwiseParallel")
# The attribute of a module that asks them to. transformers sets it on the linears of its own quantized models.
_TAKES_PARTS = "_hf_quantized_needs_local_tp"


class Split(NamedTuple):
    """The split of a linear's weight over ranks."""

    style: Any
    """transformers' object, which installs the forward."""
    mesh: DeviceMesh
    """The ranks that hold the parts, in one dimension."""

    @property
    def is_by_inputs(self) -> bool:
        """True if each rank has some of the input features, and computes a term of all output features."""
        return type(self.style).__name__ == "RowwiseParallel"

    @property
    def part(self) -> int:
        """Index of the output features that this rank computes; 0 if it computes a term of all of them."""
        return 0 if self.is_by_inputs else self.mesh.get_local_rank()


def is_parallel(module: nn.Module) -> bool:
    """Returns True if transformers set a forward on the module that exchanges data with other ranks."""
    forward = vars(module).get("forward")
    return getattr(forward, "__name__", "") == _FORWARD and forward.__module__.startswith(f"{_PACKAGE}.")  # type: ignore[union-attr]


def split_of(module: nn.Module) -> Split | None:
    """Returns how a linear's weight is split; None if it is not, or not in a way in which its class can be changed."""
    held = _held_by_forward(module)
    return Split(held["self"], held["mesh"]) if type(held.get("self")).__name__ in _LINEAR_STYLES else None


def _held_by_forward(module: nn.Module) -> Mapping[str, Any]:
    """Returns the variables that the module's `tp_forward` holds; none if it has no such forward."""
    return inspect.getclosurevars(vars(module)["forward"]).nonlocals if is_parallel(module) else {}


def change_class(module: nn.Module, cls: type[nn.Module], takes_parts: bool) -> None:
    """Changes the class of a module, and so its forward, inside the forward that transformers set if there is one.

    Args:
        module: its `split_of` is not None if it `is_parallel`.
        cls: its new class.
        takes_parts: whether the forward of this class wants plain tensors.
    """
    split = split_of(module)
    if split is None:
        module.__class__ = cls
        return
    del vars(module)["forward"]
    module.__class__ = cls
    if takes_parts:
        vars(module)[_TAKES_PARTS] = True
    else:
        vars(module).pop(_TAKES_PARTS, None)
    split.style.install_forward(module, split.mesh)


@contextmanager
def without_tensor_parallelism(model: nn.Module) -> Iterator[None]:
    """Lets every module run as its class does inside the context; the caller provides whole tensors."""
    removed = [(vars(module), vars(module).pop("forward")) for module in model.modules() if is_parallel(module)]
    try:
        yield
    finally:
        for attributes, forward in removed:
            attributes["forward"] = forward


def tensor_mesh(models: Iterable[nn.Module]) -> DeviceMesh | None:
    """Returns the mesh of the ranks among which weights are split, in one dimension; None if none is."""
    meshes = (_held_by_forward(module).get("mesh") for model in models for module in model.modules())
    return next((mesh for mesh in meshes if mesh is not None and mesh.mesh_dim_names in _DIMENSIONS), None)
