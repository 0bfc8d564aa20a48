"""`snip-hf solve`: solves an integer program in a separate process."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from ..json_io import read_json, write_json_atomic
from ..planning.solver.process import SolverError, SolverProcess
from ..text import printable
from . import fail


def solve(arguments: argparse.Namespace) -> int:
    try:
        problem = read_json(arguments.problem)
    except ValueError as error:
        raise ValueError(f"{arguments.problem} is not a valid problem: {error}") from error
    output: Path | None = arguments.output
    if output is not None and output.exists() and output.samefile(arguments.problem):
        raise ValueError(f"--output {output} is the problem file itself; expected another file.")
    if output is not None and not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}, the folder of --output, does not exist; create it first.")
    try:
        result = SolverProcess.start(problem).result()
    except SolverError as error:
        return fail(error, 2 if error.reason == "bad problem" else 1)
    solution = dataclasses.asdict(result)
    if output is None:
        print(json.dumps(solution, indent=1))
    else:
        write_json_atomic(output, solution)
        path = printable(output)
        print(f"{result.status}, objective {result.objective:.6g}, by {result.solver}: {path}")
    return 0
