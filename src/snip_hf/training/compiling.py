"""What the process beside training does that compiles kernels (`kernels_ahead`). It imports no more than that takes.

On its input it gets one line when the run begins, and one when the shapes of the first micro-batch are known. Between
them it imports. Without the second it ends, and says nothing.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from typing import Any

from ..kernels.ahead import compile_for, find_kernels
from ..kernels.backend import BACKENDS
from ..kernels.side_by_side import SideBySide, processes_here
from ..planning.solver.ilp import end_with

LONGEST = 300
"""Seconds that the process waits at most, and that it compiles at most."""
# `main` in a Python that finds what training does, without the working directory and the script's folder. Imports, of
# torch above all, are part of what has a low priority and a bounded life.
PROGRAM = f"import json, os, signal, sys; os.nice(10); signal.alarm({LONGEST}); " + (
    "given = json.loads(sys.stdin.readline()); sys.path[:] = given['paths']; from snip_hf import lean; "
    f"lean.is_lean = True; from {__name__} import main; main(given)"
)


def main(given: dict[str, Any]) -> None:
    """Compiles what the second line names, for the GPU and the caches that the first one names."""
    end_with(given["parent"])
    tempfile.tempdir = given["scratch"]  # what is ended while it compiles leaves files there
    compiled = compile_for(tuple(given["gpu"]), given["folders"])
    line = sys.stdin.readline()
    if not line:
        return
    signal.alarm(LONGEST)
    began, foreseen, forks = time.monotonic(), json.loads(line), processes_here() - 1
    backend = BACKENDS.get(foreseen["backend"])  # None: one that a user registered, or that has no part here
    calls = backend and backend.kernels_of_first_step(foreseen["layers"], foreseen["gates"], foreseen["micro_batch"])
    first = SideBySide(find_kernels(calls or ()), compiled, forks, end_with)
    if not forks:
        first.help()
    # Takes as long as some kernels, which are compiled meanwhile.
    from ..estimation.foreseen import Foreseen, parts

    tasks = find_kernels(parts(Foreseen(**foreseen)))
    first.end()
    SideBySide(tasks, compiled, forks, end_with).end()
    print(f"{len(compiled)} kernels in {time.monotonic() - began:.1f} s", file=sys.stderr)
