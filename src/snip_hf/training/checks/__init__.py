"""What a start refuses, in the order in which it asks: what was got, what was expected and what to do.

1. `launch`, before anything is built: the Trainer's arguments, Accelerate's settings.
2. `agreement`: the process groups of a pipeline, and one configuration on all ranks.
3. `model`, once the layers are swapped: what the probe cannot run through, and trained weights in FP16.
4. `agreement` again, once the first plan is made: the same layers, plans and lengths of training on all ranks.

What belongs to one part alone is refused by that part: a field by `SnipConfig`, a layer by `layers.convert`, an
optimizer by `optimizers.response`, a backend by `kernels.backend`, stages and ties by `policies.setting`, a state of
another run by `checkpoint`, a plan for other layers or sizes by the plan. What goes wrong in mid-run is noticed by
`loop_checks`; it costs a refresh and not the run.
"""

from .agreement import check_alike, check_configs, check_pipeline, check_plans, differences
from .launch import check_guard, check_launch, check_trainer
from .model import check_model, check_parts, check_weights

__all__ = [
    "check_alike",
    "check_configs",
    "check_guard",
    "check_launch",
    "check_model",
    "check_parts",
    "check_pipeline",
    "check_plans",
    "check_trainer",
    "check_weights",
    "differences",
]
