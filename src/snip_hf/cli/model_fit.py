"""What does not fit between a plan and a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..text import printable
from .empty_model import empty_model
from .messages import shown_path

if TYPE_CHECKING:
    from ..planning.plan import PrecisionPlan

# Longer lists of layers are cut: one mistake, such as another prefix, makes every layer a mismatch.
_MOST_LISTED = 20


def compare_with_model(plan: PrecisionPlan, name: str) -> int:
    """Prints what does not fit between a plan and a model; returns 1 if anything does not."""
    from ..config import SnipConfig
    from ..costs.flops import linear_flops
    from ..layers.convert import convert_model

    model = empty_model(name)
    # The plan's own config, because what was skipped then has to be skipped now.
    config = SnipConfig() if plan.provenance.config is None else SnipConfig.from_dict(plan.provenance.config)
    layers = convert_model(model, config)
    flops = linear_flops(model)
    missing, unexpected = plan.mismatches(layers)
    # The forward GEMM, because a frozen weight has no grad_weight FLOPs.
    resized = [x for x in layers if x in plan.flops and plan.flops[x]["forward"] != flops[x]["forward"]]
    shown = shown_path(name)
    for what, names in (
        (f"in {shown} but not in the plan", missing),
        (f"in the plan but not in {shown}", unexpected),
        (f"of another size in {shown} than in the plan", resized),
    ):
        if names:
            print(f"{len(names)} layers are {what}:")
            listed = "".join(f"  {printable(layer)}\n" for layer in names[:_MOST_LISTED])
            print(listed + "  ...\n" * (len(names) > _MOST_LISTED))
    if missing or unexpected or resized:
        return 1
    print(f"The plan fits {shown}: all {len(layers)} layers agree in name and size.")
    return 0
