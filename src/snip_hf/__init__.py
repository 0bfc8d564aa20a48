"""Adaptive FP4/FP8 training for Hugging Face causal language models (SNIP, arXiv:2602.01410).

trainer = Trainer(model, args, train_dataset=data, callbacks=[SnipCallback(SnipConfig(target_fp4_fraction=0.75))])
trainer.train()
"""

from .callback import SnipCallback
from .config import SnipConfig
from .controller import SnipController
from .divergence import estimate_divergence
from .linear import SnipLinear, SnipLinearConfig, convert_model, restore_model
from .plan import PrecisionPlan
from .truth import measure_divergence

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
