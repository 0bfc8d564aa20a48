"""What the commands' parsers share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """A parser whose help keeps the lines of its examples, and whose errors are one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def examples(commands: Mapping[str, str], *sentences: str) -> str:
    """Returns the end of a help text: commands with what they do, then sentences."""
    width = max(map(len, commands))
    lines = [f"  {command:{width}}  {what}" for command, what in commands.items()]
    return "\n".join(["examples:", *lines, *(f"\n{sentence}" for sentence in sentences)])


def add_micro_batches(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--micro-batches", type=int, metavar="N", help="per step through a pipeline's stages (default: 4 per stage)"
    )
