"""The names of a config's fields: those of earlier versions, and the closest one to a name that no field has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from .registry import did_you_mean

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
# Names that no field has any more -> what to use.
REMOVED = {
    "guard_noise": "layers are raised by guard='raise' alone",
    "guard_failures": "a callback can go back to a checkpoint (docs/reliability.md, Rolling back)",
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


class FieldNames:
    """Base of a dataclass of keyword arguments, which tells who gives it an unknown or an old name what is right."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    field_types: ClassVar[dict[str, str]] = {}
    """The annotations of the fields as the source has them; parsers of arguments write over those of the class."""

    def __init_subclass__(cls) -> None:
        cls.field_types = cls.field_types | inspect.get_annotations(cls)

    def __new__(cls, *args: object, **values: object) -> Any:
        fields = cls.__dataclass_fields__
        for name in values:
            if name in REMOVED:
                raise TypeError(f"{cls.__name__} has no field {name!r} any more; {REMOVED[name]}.")
            if name in RENAMED:
                raise TypeError(f"{cls.__name__} has no field {name!r}; it is named {RENAMED[name]!r} now.")
            if name not in fields:
                guess = did_you_mean(name, fields)
                raise TypeError(f"{cls.__name__} has no field {name!r}.{guess} docs/config.md lists all of them.")
        return super().__new__(cls)
