"""Paths of text in recipes and grids, which may begin with a variable of the environment: `$SNIP_HF_DATA/corpus`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expanded(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths with their variables replaced.

    Raises:
        ValueError: a variable that is not set.
    """
    found = tuple(map(os.path.expandvars, paths))
    for path in found:
        if unset := _VARIABLE.search(path):
            name = unset[1] or unset[2]
            raise ValueError(f"{path}: {name} is not set; set it to the folder of the text: `export {name}=DIR`.")
    return found
