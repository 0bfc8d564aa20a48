"""What the commands' parsers share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
PLAN = "a plan, e.g. OUTPUT_DIR/snip/plan.json"
_EXAMPLES = "examples:"


class _Formatter(argparse.HelpFormatter):
    """Fills descriptions, and keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose help keeps the lines of its examples, and whose errors are one line and guess what was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses what it does not know by itself, so that the error names the command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from ..registry import did_you_mean

            guess = did_you_mean(unknown[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{guess}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} See {self.prog} --help.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            # Not before: help and other wrong usage load no registry.
            from ..registry import choices, did_you_mean

            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"unknown {value!r}{choices(known, did_you_mean(str(value), known))}")


def examples(commands: Mapping[str, str], *sentences: str) -> str:
    """Returns the end of a help text: commands with what they do, then sentences."""
    width = max(map(len, commands))
    lines = [f"  {command:{width}}  {what}".rstrip() for command, what in commands.items()]
    return "\n".join([_EXAMPLES, *lines, *(f"\n{sentence}" for sentence in sentences)])


def add_micro_batches(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--micro-batches",
        type=at_least_one,
        metavar="N",
        help="micro-batches per step, for the predicted times of a pipeline (default: 4 per stage)",
    )


def at_least_one(text: str) -> int:
    """For argparse: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
