"""The names of a config's fields in earlier versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names of fields in files of earlier versions -> their names now.
RENAMED = {
    "cost": "budget",
    "cost_file": "timing_file",
    "cost_tokens": "timing_tokens",
    "loss_form": "loss_estimator",
    "loss_weight": "loss_divergence_factor",
    "weight_weight": "weight_divergence_factor",
    "plan": "fixed_plan",
}


def current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config's data with the names that the fields have now.

    Raises:
        ValueError: a field is there under its old name and its new one.
    """
    for old, new in RENAMED.items():
        if old in config and new in config:
            raise ValueError(f"{old!r} is the old name of {new!r}, and both are given; expected {new!r} alone.")
    return {RENAMED.get(name, name): value for name, value in config.items()}
