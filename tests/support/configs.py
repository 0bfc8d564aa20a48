"""Configurations that tests share."""

from __future__ import annotations

from typing import Any

from snip_hf import SnipConfig


def fp4_config(**changes: Any) -> SnipConfig:
    """Returns a config with the paper's formats, the first refresh at step 100 and without ties."""
    return SnipConfig(**{"formats": ("fp4", "fp8"), "ties": (), "first_refresh": 100, **changes})
