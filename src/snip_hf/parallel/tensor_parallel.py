"""Tensor and expert parallelism of transformers: the forward functions that it sets on modules, and its processes.

`from_pretrained(..., distributed_config=DistributedConfig(tp_size=N))` splits weights over a dimension of the device
mesh. On each module with a split weight it sets a forward of the instance's own, `tp_forward`, which exchanges inputs
and outputs with the other ranks around the forward that the module's class had at that time. With `ep_size` each rank
holds some of the experts whole, and the module's `ep_forward` exchanges tokens. (transformers 5.17 has no `ep_forward`:
there the router's `tp_forward` hides the other ranks' experts.) Nothing here imports transformers: these functions hold
their styles and meshes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..python_state import binding_kept

_FORWARDS = ("tp_forward", "ep_forward")
_PACKAGE = "transformers"
# Names of the dimensions of its mesh; transformers 5.17 gave it none.
_DIMENSIONS = (None, ("tp",))
# The styles that can hand this rank's parts of the input and of the weight to the forward as plain tensors.
_LINEAR_STYLES = ("ColwiseParallel", "PackedColwiseParallel", "RowwiseParallel")
# The styles of modules with experts. The second one is that of tensor parallelism too.
_EXPERT_STYLES = ("EpDispatchExpertsParallel", "MoeExpertsParallel")
# The attribute of a module with its number of experts on this rank.
_COUNT = "num_experts"
# The attribute of a module that asks them to. transformers sets it on the linears of its own quantized models.
_TAKES_PARTS = "_hf_quantized_needs_local_tp"


class Split(NamedTuple):
    """The split of a linear's weight, or of a module's experts, over ranks."""

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
        """Index of this rank's part of the output features or experts; 0 if it computes a term of all features."""
        return 0 if self.is_by_inputs else self.mesh.get_local_rank()


def is_parallel(module: nn.Module) -> bool:
    """Returns True if transformers set a forward on the module that exchanges data with other ranks."""
    forward = vars(module).get("forward")
    return getattr(forward, "__name__", "") in _FORWARDS and forward.__module__.startswith(f"{_PACKAGE}.")  # type: ignore[union-attr]


def split_of(module: nn.Module) -> Split | None:
    """Returns how a linear's weight, or a module's experts, are split.

    Returns None if they are not, or not in a way in which the module can be swapped: experts of which each rank holds a
    part, not some as a whole.
    """
    held = _held_by_forward(module)
    style = type(held.get("self")).__name__
    is_known = style in _LINEAR_STYLES or (style in _EXPERT_STYLES and _number_of_all_experts(module) is not None)
    return Split(held["self"], held["ep_mesh" if "ep_mesh" in held else "mesh"]) if is_known else None


def _number_of_all_experts(module: nn.Module) -> int | None:
    """Returns the number of a module's experts on all ranks together if this one holds only some of them, else None."""
    here = vars(module).get(_COUNT)
    counts = (parameter.shape[0] for parameter in module.parameters(recurse=False) if isinstance(parameter, DTensor))
    everywhere = next(counts, here)
    return None if here in (None, everywhere) else everywhere


def _held_by_forward(module: nn.Module) -> Mapping[str, Any]:
    """Returns the variables that the module's `tp_forward` or `ep_forward` holds; none if it has no such forward."""
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
        _with_gathered_inputs(split).install_forward(module, split.mesh)
    else:
        vars(module).pop(_TAKES_PARTS, None)
        split.style.install_forward(module, split.mesh)


def _with_gathered_inputs(split: Split) -> Any:
    """Returns the style of a split; if each rank has only some tokens of the inputs, a copy that gathers them.

    transformers does not gather the inputs of a module that asks for plain tensors.
    """
    style, layout = split.style, getattr(split.style, "input_layouts", None)
    if split.is_by_inputs or layout in (None, Replicate()):
        return style

    def transform(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
        x, *others = args
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [layout], run_check=False)
        return style.transform_inputs_pre_forward(module, (x, *others), kwargs, mesh)

    gathering = copy.copy(style)
    gathering.transform_inputs_pre_forward = transform
    return gathering


@contextmanager
def without_tensor_parallelism(model: nn.Module) -> Iterator[None]:
    """Lets every module run as its class does, with all experts, inside the context.

    The caller provides whole tensors.
    """
    modules = [module for module in model.modules() if is_parallel(module)]
    with binding_kept(map(vars, modules)):
        for module in modules:
            number = _number_of_all_experts(module)
            if number is not None:
                vars(module)[_COUNT] = number
            del vars(module)["forward"]
        yield


def tensor_mesh(models: Iterable[nn.Module]) -> DeviceMesh | None:
    """Returns the mesh of the ranks that get the same data, in one dimension; None if there are none.

    Experts are split among these ranks, or among ranks with other data.
    """
    held = (_held_by_forward(module) for model in models for module in model.modules())
    meshes = (getattr(one.get("implementation"), "tp_mesh", one.get("mesh")) for one in held)
    known = (mesh for mesh in meshes if mesh is not None and mesh.mesh_dim_names in _DIMENSIONS)
    return next((mesh for mesh in known if mesh.size() > 1), None)
