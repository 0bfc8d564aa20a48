"""Groups of the experts of a projection, each of which is a layer with formats of its own.

Legend: as in `experts.py`. Groups are of experts that follow each other, as many in each. The parameter stays one, so
that a group's matrices are some of those of a tensor that is laid out as the parameter; the others are no business of
the group's.

Groups stand beside their projection in its container, and are called by it and by which experts they have:
`model.layers.0.mlp.experts.gate_up_proj[0:4]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backend import Backend
from ..kernels.emulated import EMULATED
from .experts import SnipExperts
from .experts_interface import LAYERS
from .layer import STATE, SnipLayer
from .state import without_group


class SnipExpertGroup(SnipExperts):
    """Some of the experts of a projection.

    Args:
        projection: which is divided.
        experts: which of its experts.
    """

    def __init__(self, projection: SnipExperts, experts: slice) -> None:
        super().__init__(projection.owner, projection.parameter, projection.layout)
        self._projection = (projection,)
        self.experts = experts
        self._part_of_all = (experts.stop - experts.start) / self.num_matrices
        self.num_matrices = experts.stop - experts.start

    @property
    def key(self) -> str:
        """Its name in the container."""
        return f"{self.holder[1]}[{self.experts.start}:{self.experts.stop}]"

    @property
    def rows_per_token(self) -> float:
        rows: float = super().rows_per_token
        return float(rows * self._part_of_all)

    @property
    def bias(self) -> Any:  # type: ignore[override]
        bias = super().bias
        return None if bias is None else bias[self.experts]

    @property
    def stacked(self) -> Tensor:
        return super().stacked[self.experts]

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return super().matrices(tensor)[self.experts]

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        """Returns the tensor whose `matrices` these are, with zeros in the place of other experts'."""
        own = torch.stack(tuple(matrices))
        count = self._projection[0].num_matrices
        every = own.new_zeros(count, *own.shape[1:])
        every[self.experts] = own
        return self.layout.laid_out(every)

    def weight_name(self, name: str) -> str:
        return without_group(name)

    def refused_by(self, backend: Backend) -> str | None:
        if not backend.runs_groups:
            return super().refused_by(backend)
        return None if backend is EMULATED else "groups of experts (expert_groups) run emulated"

    def restore(self) -> None:
        """Takes the group from its projection, and with the last one the projection from its module."""
        (projection,) = self._projection
        projection.groups = tuple(group for group in projection.groups if group is not self)
        layers = self.holder[0]._modules[LAYERS]
        assert isinstance(layers, nn.ModuleDict)
        del layers[self.key]
        if not projection.groups:
            projection.restore()
        self._end()


def divide(projection: SnipExperts, part: str, groups: int) -> tuple[SnipLayer, ...]:
    """Divides a projection into so many layers, or lets it be one again for 1. Returns the new ones, without a state.

    Args:
        projection: divided or not.
        part: its name, for the error.
        groups: how many.

    Raises:
        ValueError: they do not divide the number of experts.
    """
    size, rest = divmod(projection.num_matrices, groups)
    if rest:
        count = projection.num_matrices
        fitting = [number for number in range(1, count + 1) if count % number == 0]
        raise ValueError(
            f"expert_groups={groups} does not divide the {count} experts of {part!r} in a "
            f"{type(projection.owner).__name__}; expected one of {', '.join(map(str, fitting))}."
        )
    layers = projection.holder[0]._modules[LAYERS]
    assert isinstance(layers, nn.ModuleDict)
    for group in projection.groups:
        assert isinstance(group, SnipExpertGroup)
        del layers[group.key]
        group._end()
    projection.groups = ()
    if groups == 1:
        return (projection,)
    projection._buffers.pop(STATE, None)
    projection._non_persistent_buffers_set.discard(STATE)
    projection.use_backend(EMULATED)
    projection.snip_is_plain = True  # its groups have formats, and it has none
    found = [SnipExpertGroup(projection, slice(size * index, size * (index + 1))) for index in range(groups)]
    for group in found:
        group.train(projection.training)
        layers[group.key] = group
    projection.groups = tuple(found)
    return projection.groups
