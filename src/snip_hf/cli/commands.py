"""What the commands' parsers share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """A parser whose help keeps the lines of its examples, and whose errors are one line and guess what was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removesuffix('.')}. See {self.prog} --help.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            # Not before: help and other wrong usage load no registry.
            from ..registry import choices, did_you_mean

            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"unknown {value!r}{choices(known, did_you_mean(str(value), known))}")


def examples(commands: Mapping[str, str], *sentences: str) -> str:
    """Returns the end of a help text: commands with what they do, then sentences."""
    width = max(map(len, commands))
    lines = [f"  {command:{width}}  {what}" for command, what in commands.items()]
    return "\n".join(["examples:", *lines, *(f"\n{sentence}" for sentence in sentences)])


def add_micro_batches(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--micro-batches", type=int, metavar="N", help="per step through a pipeline's stages (default: 4 per stage)"
    )
