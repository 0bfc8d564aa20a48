"""The versions that a run is recorded with: of Python, of snip-hf and of the libraries that compute."""

from __future__ import annotations

import platform
from importlib import metadata

_PACKAGES = ("snip-hf", "torch", "torchao", "transformers", "accelerate", "trl", "peft", "mip", "scipy")


def installed_versions() -> dict[str, str]:
    """Returns package -> version of those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
