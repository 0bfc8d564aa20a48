"""What the commands' parsers share."""

from __future__ import annotations

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_micro_batches(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--micro-batches", type=int, metavar="N", help="per step through a pipeline's stages (default: 4 per stage)"
    )
