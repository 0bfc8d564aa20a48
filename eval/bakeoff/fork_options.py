"""What the measurements of a fork's step are told: a recipe, a device, and where their lines go."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.shared.origin import origin_of

from .fork_device import check_graphs
from .fork_recipe import ForkRecipe, load_recipe


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that all of them take.

    Args:
        module: name of the measurement, as after `python -m`.
        description: for its help.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines; new ones are added")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", metavar="ID", help="the lines' commit, for code that lies without its .git folder")
    return parser


def read(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[ForkRecipe, argparse.Namespace]:
    """Returns the recipe, and the options with the `origin` of lines; exits if the recipe or the device is wrong."""
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe, options.override)
        check_graphs(recipe.cuda_graph, options.device)
    except (ValueError, TypeError, FileNotFoundError) as error:
        parser.error(str(error))
    typed = sys.argv[1:] if arguments is None else arguments
    options.origin = origin_of(options.device) | {"command": shlex.join([*parser.prog.split(), *typed])}
    if options.commit is not None:
        options.origin["commit"] = options.commit
    options.output.parent.mkdir(parents=True, exist_ok=True)
    return recipe, options
