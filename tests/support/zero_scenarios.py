"""Trainings of the tests of `deepspeed_zero`, in one process and in two; shared with zero_worker.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import models
import torch
from torch import Tensor
from transformers import PreTrainedModel

STEPS, ROWS, RANKS = 3, 2, 2


@dataclass(frozen=True)
class Scenario:
    stage: int
    micro_batches: int = 1
    clip: float = 0.5
    bf16: bool = False
    accumulation: str | None = None
    offload: str = "none"

    def config(self) -> dict[str, Any]:
        """The content of a DeepSpeed configuration file."""
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.clip,
            "zero_optimization": {
                "stage": self.stage,
                "offload_optimizer": {"device": self.offload},
                # Stage 3 leaves smaller parameters, here those of the norms, whole between the passes.
                "stage3_param_persistence_threshold": 100,
            },
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.bf16},
            "data_types": {"grad_accum_dtype": self.accumulation},
        }


SCENARIOS = {
    "ZeRO-1": Scenario(1),
    "ZeRO-1, accumulation": Scenario(1, micro_batches=2),
    "ZeRO-2": Scenario(2),
    "ZeRO-2, accumulation": Scenario(2, micro_batches=2),
    "ZeRO-2, no clipping": Scenario(2, clip=0.0),
    "ZeRO-2, offload": Scenario(2, micro_batches=2, offload="cpu"),
    "ZeRO-1, BF16 with FP32 gradients": Scenario(1, micro_batches=2, bf16=True, accumulation="fp32"),
    "ZeRO-2, BF16": Scenario(2, micro_batches=2, bf16=True),
    "ZeRO-3": Scenario(3),
    "ZeRO-3, offload": Scenario(3, micro_batches=2, offload="cpu"),
    "ZeRO-3, BF16": Scenario(3, micro_batches=2, bf16=True),
}
"""In BF16 with FP32 gradients, stage 1 is another class of DeepSpeed's."""


def model_and_optimizer() -> tuple[PreTrainedModel, torch.optim.AdamW]:
    """Two groups, whose learning rate and decay differ; a large eps, so that rounding does not turn updates around."""
    model = models.build("llama")
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    others = [weight for weight in model.parameters() if weight.dim() > 1]
    groups = [
        {"params": others, "relative": 1.0, "weight_decay": 0.1},
        {"params": norms, "relative": 0.5, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.9), eps=1e-3)


def learning_rate(step: int) -> float:
    return 1e-2 / (1 + step)


def batch(step: int, micro_batch: int, rank: int) -> dict[str, Tensor]:
    return models.batch(rows=ROWS, seed=100 * step + 10 * micro_batch + rank)


def rows() -> list[int]:
    """Rows from which Accelerate reads the size of a micro-batch."""
    return list(range(RANKS * ROWS))
