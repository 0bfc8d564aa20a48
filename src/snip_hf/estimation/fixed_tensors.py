"""The tensors of a model that are no parameters and may yet be weights: matrices in buffers and in plain attributes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ..layers.adapters import adapter_modules


class FixedTensor(NamedTuple):
    """A floating-point tensor with at least two dimensions larger than 1 that no optimizer trains."""

    tensor: Tensor
    is_buffer: bool
    """Whether it is a buffer, or a plain attribute of a module."""
    of_adapter: bool
    """Whether a module of an adapter holds it: such a tensor is no table of positions."""


def fixed_tensors(model: nn.Module) -> dict[str, FixedTensor]:
    """Returns name -> tensor for what may be a weight and is no parameter, once.

    Vectors are none, such as the frequencies of rotary embeddings, nor are integers and masks of truth values. Of a
    tensor that several modules share, such as VeRA's projections, the shortest name is told. Attributes that are lists
    or mappings of tensors are not looked into.
    """
    adapters = adapter_modules(model)
    names: dict[int, str] = {}
    found: dict[int, FixedTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        plain = {name: value for name, value in vars(module).items() if type(value) is Tensor}
        for own_name, tensor in (*module._buffers.items(), *plain.items()):
            if tensor is None or tensor.requires_grad or not _is_matrix(tensor):
                continue
            name, key = f"{path}.{own_name}" if path else own_name, id(tensor)
            before = found.get(key)
            of_adapter = id(module) in adapters or (before is not None and before.of_adapter)
            found[key] = FixedTensor(tensor, own_name in module._buffers, of_adapter)
            names[key] = min(names.get(key, name), name, key=lambda one: (one.count("."), one))
    return {names[key]: one for key, one in found.items()}


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and sum(size > 1 for size in tensor.shape) > 1
