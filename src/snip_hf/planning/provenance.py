"""The provenance of a plan: which probe, policy, solver and configuration it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from .checked_values import check_text, finite, json_copy, short


@dataclass(frozen=True, kw_only=True)
class PlanProvenance:
    """Where a plan comes from. `None` means that it does not apply or is not known.

    Raises:
        ValueError: a field has the wrong type, a number is not finite, or `config` is not JSON data.
    """

    step: int
    """Optimizer step that the probe preceded; 0 for a plan made before training."""
    policy: str
    granularity: str | None = None
    target_fp4_fraction: float | None = None
    objective: float | None = None
    bound: float | None = None
    """Proven lower bound of the objective."""
    gap: float | None = None
    """(objective - bound) / objective."""
    solver: str | None = None
    solver_version: str | None = None
    seconds: float | None = None
    """Wall-clock time of the solver."""
    config: Mapping[str, Any] | None = None
    """The `SnipConfig` as a dict."""
    model_name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise ValueError(f"provenance.step is {short(self.step)}, expected an integer of at least 0.")
        check_text(self.policy, "provenance.policy")
        for name in ("granularity", "solver", "solver_version", "model_name"):
            if getattr(self, name) is not None:
                check_text(getattr(self, name), f"provenance.{name}")
        for name in ("target_fp4_fraction", "objective", "bound", "gap", "seconds"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, finite(getattr(self, name), f"provenance.{name}"))
        if self.config is not None:
            object.__setattr__(self, "config", MappingProxyType(json_copy(self.config, "provenance.config")))

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"config": None if self.config is None else json_copy(self.config, "provenance.config")}
