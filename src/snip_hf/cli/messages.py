"""How the command line prints errors and paths."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO

from ..text import printable

# Characters of an error, and of the config that a plan was made under.
MOST_SHOWN = 4000
_MOST_PATH = 4096  # as of Linux
# What a shell reports of a program that SIGPIPE has ended: 128 + 13.
NO_READER = 141


def shown_path(path: str | Path) -> str:
    return printable(path, _MOST_PATH)


def fail(error: Exception, code: int) -> int:
    """Prints the error in one line on stderr and returns the exit code."""
    print(f"snip-hf: {printable(' '.join(str(error).split()), MOST_SHOWN)}", file=sys.stderr)
    return code


def flush() -> None:
    """Writes what was printed so far, which Python would do after the last handler of errors."""
    for stream in _streams():
        stream.flush()


def drop_output(code: int) -> int:
    """Drops what was printed and cannot be written, and returns the exit code."""
    for stream in _streams():
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as null:  # of a stream without a file
                os.dup2(null.fileno(), stream.fileno())
    return code


def _streams() -> list[TextIO]:
    """Returns stdout and stderr, as far as there are any."""
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
