"""`snip-hf completion`: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from .commands import Commands, examples

SHELLS = ("bash", "zsh", "fish", "tcsh")
# What the commands' parsers call folders, and files or either.
_FOLDERS = ("RUN", "RUN_DIR", "DIR", "NAME_OR_DIR")
_FILES = ("plan.json", "problem.json", "FILE", "PATH", "RUN_OR_PLAN")
_EXAMPLES = {
    'eval "$(snip-hf completion bash)"': "in ~/.bashrc",
    "snip-hf completion zsh > ~/.zfunc/_snip-hf": "with fpath+=~/.zfunc before compinit in ~/.zshrc",
    "snip-hf completion fish > ~/.config/fish/completions/snip-hf.fish": "",
}


def add(commands: Commands) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description="Prints a script that completes commands, options and files.",
        epilog=examples(_EXAMPLES),
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell that is to load it")
    completion.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import shtab

    from . import build_parser

    parser = build_parser()
    for action in _actions(parser):
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the options and arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
