"""The optional dependencies (extras): their purpose, and the command that installs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Extra:
    """Packages that are installed together for one purpose."""

    name: str
    purpose: str
    packages: Mapping[str, str]
    """Imported module -> its package."""

    @property
    def command(self) -> str:
        return f'pip install "snip-hf[{self.name}]"'

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for module, package in self.packages.items() if importlib.util.find_spec(module) is None]


_FIGURES = {"jinja2": "jinja2", "matplotlib": "matplotlib", "rich": "rich"}
_ALL = (
    Extra("cbc", "CBC, the solver that solver='auto' prefers to HiGHS", {"mip": "mip"}),
    Extra("report", "tables, figures and pages: inspect, compare, report", _FIGURES),
    Extra(
        "recipes", "the runs in recipes/", {"datasets": "datasets", "psutil": "psutil", "yaml": "pyyaml", **_FIGURES}
    ),
    Extra("eval", "scores of benchmarks and comparisons of policies, in eval/", {"lm_eval": "lm-eval"}),
)
EXTRAS: Mapping[str, Extra] = {extra.name: extra for extra in _ALL}


class MissingExtra(ImportError):
    """A package of an extra is missing; the message says how to install it."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Replaces failed imports of optional packages by errors that name the extra.

    Args:
        what: the code that needs the package, e.g. "snip_hf.run_report".

    Raises:
        MissingExtra: instead of the `ModuleNotFoundError`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = next((extra for extra in EXTRAS.values() if module in extra.packages), None)
        if extra is None:
            raise
        message = f"{what} needs {extra.packages[module]}, which is not installed. Install it: {extra.command}"
        raise MissingExtra(message, name=error.name) from error
