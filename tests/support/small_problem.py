"""A problem for the solver that is solved by hand."""

from __future__ import annotations

from typing import Any


def make_problem(**fields: Any) -> dict[str, Any]:
    def group(name: str, cost: float) -> dict[str, Any]:
        options = [{"name": "fp8", "cost": 1.0, "weight": 0.0}, {"name": "fp4", "cost": cost, "weight": 0.5}]
        return {"name": name, "options": options}

    constraints = [{"name": "stage 0", "groups": None, "minimum": 0.5}]
    return {"groups": [group("a", 4.0), group("b", 3.0)], "constraints": constraints, **fields}
