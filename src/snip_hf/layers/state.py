"""The names of swapped layers, and their states: formats, and keys of random numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..kernels.launching import kept_on_device, on_device
from ..numerics.gemms import GEMMS
from ..numerics.random_streams import stream_key
from .layer import GRAD_OUTPUT, KEY, STATE, SnipLayer

# The GEMM that a frozen weight does not have.
GRAD_WEIGHT = "grad_weight"
# PEFT's additions to names: its model around another one, and its layer around another one. Layers around parameters
# (`target_parameters`) keep their names, which tell them apart.
_PEFT = re.compile(
    r"^base_model\.(?:model\.(?!(?:decoder\.|language_model\.)?layers\.\d))?"
    r"|\.base_layer(?=[.:]|$)(?!(?:\.base_layer)*\.lora_[AB]\.)"
)
# Additions of other wrappers, and of the containers of a module's layers.
_WRAPPERS = re.compile(
    r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.|snip_layers\.|^snip_part_\d+\."
)


def snip_linears(model: nn.Module) -> dict[str, SnipLayer]:
    """Returns name -> layer for every swapped layer, in the model's order; a layer under two names counts once.

    Names are those of the bare model (`plain_name`), so that plans are the same under every launcher.
    """
    return {plain_name(name): layer for name, layer in model.named_modules() if isinstance(layer, SnipLayer)}


def plain_name(name: str) -> str:
    """Returns the name of a module or parameter in the bare model, without wrappers.

    Removes the parts that torch.compile, activation checkpointing, `pipeline.ModelParts` and PEFT add, and the
    containers of layers (`experts.LAYERS`).
    """
    return _PEFT.sub("", unwrapped_name(name))


def unwrapped_name(name: str) -> str:
    """Returns `plain_name` with the parts that PEFT adds."""
    return _WRAPPERS.sub("", name)


def gemms_of(layer: SnipLayer) -> tuple[str, ...]:
    """Returns the GEMMs that a layer runs: a frozen weight has no gradient."""
    return tuple(gemm for gemm in GEMMS if gemm != GRAD_WEIGHT or layer.weight.requires_grad)


def block_of(layer: str) -> str:
    """Returns the name of a layer's block, which ends with the first number ("model.layers.3"), else the layer's."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", layer)
    return match.group() if match else layer


def block_number(layer: str) -> int | None:
    """Returns the number that ends the name of a layer's block; None if it is in no block."""
    last = block_of(layer).rpartition(".")[2]
    return int(last) if last.isdigit() else None


def blocks_of(layers: Sequence[str]) -> dict[str, str]:
    """Returns layer -> its block. One outside all blocks, such as the head, belongs to the block of those before it.

    Layers before all blocks belong to the first one; without any block each layer is its own.
    """
    inside = [layer for layer in layers if block_number(layer) is not None]
    if not inside:
        return {layer: layer for layer in layers}
    found, block = {}, block_of(inside[0])
    for layer in layers:
        found[layer] = block = block if block_number(layer) is None else block_of(layer)
    return found


class PackedStates:
    """The states of layers as rows of one tensor per device, which are written without a loop over the layers.

    Args:
        layers: name -> layer; their states become such rows.
    """

    def __init__(self, layers: Mapping[str, SnipLayer]) -> None:
        devices: dict[torch.device, list[SnipLayer]] = {}
        for layer in layers.values():
            devices.setdefault(layer.snip_state.device, []).append(layer)
        self._packed: list[tuple[Tensor, np.ndarray[Any, Any]]] = []
        """The tensor of each device, a row per layer, and the keys of its layers."""
        for members in devices.values():
            packed = torch.stack([layer.snip_state for layer in members])
            for layer, row in zip(members, packed.unbind(), strict=True):
                layer.snip_state = row
            self._packed.append((packed, np.array([layer.snip_key for layer in members], dtype=np.uint64)))
        self._buffers = [layer._buffers for layer in layers.values()]
        self._states = [layer.snip_state for layer in layers.values()]

    @property
    def are_in_place(self) -> bool:
        """False if a layer has got another state since."""
        return all(map(is_, [buffers.get(STATE) for buffers in self._buffers], self._states))

    def set_step(self, seed: int, step: int, micro_batch: int) -> None:
        """Does the work of the function `set_step`."""
        for packed, names in self._packed:
            keys = stream_key(seed, step, micro_batch, names, GRAD_OUTPUT)
            packed[:, KEY] = on_device(torch.from_numpy(keys.view(np.int64)), packed.device)

    def set_rank(self, rank: int, ranks: int) -> None:
        """Sets this process's rank among the `ranks` processes that share a batch.

        Ranks then draw different random numbers. If all have the same number of tokens, a multiple of 4, they draw
        together what one process with all tokens would draw (`random_streams.rank_stream`).
        """
        for packed, _ in self._packed:
            packed[:, KEY + 1 :] = kept_on_device((rank, ranks), packed.device)


def set_step(layers: Mapping[str, SnipLayer], seed: int, step: int, micro_batch: int) -> None:
    """Keys the layers' random numbers: one stream per (seed, step, micro-batch, layer name)."""
    names = np.array([layer.snip_key for layer in layers.values()], dtype=np.uint64)
    keys = torch.from_numpy(stream_key(seed, step, micro_batch, names, GRAD_OUTPUT).view(np.int64))
    # One copy per device; each of its own would wait for a GPU.
    copies = {device: on_device(keys, device) for device in {layer.snip_state.device for layer in layers.values()}}
    for index, layer in enumerate(layers.values()):
        layer.snip_state[KEY] = copies[layer.snip_state.device][index]
