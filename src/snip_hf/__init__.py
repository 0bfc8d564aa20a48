"""Adaptive FP4/FP8 training for Hugging Face causal language models (SNIP, arXiv:2602.01410).

trainer = Trainer(model, args, train_dataset=data, callbacks=[SnipCallback(SnipConfig(target_fp4_fraction=0.75))])
trainer.train()
"""

from __future__ import annotations

from .config import SnipConfig
from .estimation.divergence import estimate_divergence
from .estimation.ground_truth import measure_divergence
from .integrations.trainer import SnipCallback
from .layers.convert import SnipLinearConfig, convert_model, restore_model
from .layers.linear import SnipLinear
from .planning.plan import PrecisionPlan
from .training.controller import SnipController

__version__ = "0.1.0"

__all__ = [
    "PrecisionPlan",
    "SnipCallback",
    "SnipConfig",
    "SnipController",
    "SnipLinear",
    "SnipLinearConfig",
    "convert_model",
    "estimate_divergence",
    "measure_divergence",
    "restore_model",
]
