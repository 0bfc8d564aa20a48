"""Modules of the user's own, which register what files name."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence


def add_import_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first, which registers formats or policies of your own; may be repeated",
    )


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that register what files name, as `python -m` finds them: the working directory goes first."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module raises
            raise ValueError(
                f"--import {name}: {type(error).__name__}: {error}. Expected the name of a module that can be imported "
                "from here, such as my_formats for ./my_formats.py."
            ) from error
