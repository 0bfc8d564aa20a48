"""The pipeline that the tests train, in this process and in those that they start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STAGES, CHUNKS, ROWS, LENGTH, STEPS = 4, 4, 4, 128, 3
LAST = "model.layers.7.mlp.down_proj"
CONFIG: dict[str, Any] = {
    "stages": STAGES,
    "target_fp4_fraction": 0.5,
    "first_refresh": 1,
    "refresh_every": 4,
    "apply_delay": 1,
    "probe_tokens": None,
    "probe_batch_tokens": None,
}


def batch_of(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)).cumsum(1) % 251
    return {"input_ids": tokens, "labels": tokens}
