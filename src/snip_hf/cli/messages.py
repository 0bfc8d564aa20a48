"""How the command line prints errors and paths."""

from __future__ import annotations

import sys
from pathlib import Path

from ..text import printable

# Characters of an error, and of the config that a plan was made under.
MOST_SHOWN = 4000
_MOST_PATH = 4096  # as of Linux


def shown_path(path: str | Path) -> str:
    return printable(path, _MOST_PATH)


def fail(error: Exception, code: int) -> int:
    """Prints the error in one line on stderr and returns the exit code."""
    print(f"snip-hf: {printable(' '.join(str(error).split()), MOST_SHOWN)}", file=sys.stderr)
    return code
