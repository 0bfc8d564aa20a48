"""Pipeline parallelism: the stages of a model that this process holds, and how the whole model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, for `SnipController`.

    `run` is called on all processes of the pipeline at once. It runs one batch, as `SnipController.capture` got it,
    forward and backward through all stages, and returns the loss on at least one process and None on the others. With
    several chunks per batch their losses must add up to the batch's mean loss.
    """

    run: Callable[[Mapping[str, Any]], Tensor | float | None]
    group: dist.ProcessGroup | None = None
    """The processes of one pipeline; None: all."""
    data: dist.ProcessGroup | None = None
    """The processes with the same stages and other data; None: only this one."""


class ModelParts(nn.Module):
    """Several modules as one; their parameters keep their names."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(f"snip_part_{index}", part)
        self.config = next((part.config for part in parts if hasattr(part, "config")), None)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Returns the parts of `ModelParts`; [] for a whole model."""
    return list(model.children()) if isinstance(model, ModelParts) else []
