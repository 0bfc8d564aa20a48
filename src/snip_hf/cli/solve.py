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
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{arguments.problem} does not exist; expected an integer program as JSON.") from error
    except ValueError as error:
        raise ValueError(f"{arguments.problem} is not a valid problem: {error}") from error
    if not isinstance(problem, dict):
        raise ValueError(f"{arguments.problem} holds a {type(problem).__name__}, expected a JSON object with groups.")
    if arguments.output is not None:
        _check_output(arguments.output, arguments.problem)
    try:
        result = SolverProcess.start(problem).result()
    except SolverError as error:
        return fail(error, 2 if error.reason == "bad problem" else 1)
    solution = dataclasses.asdict(result)
    if arguments.output is None:
        print(json.dumps(solution, indent=1))
    else:
        write_json_atomic(arguments.output, solution)
        path = printable(arguments.output, 4096)
        print(f"{result.status}, objective {result.objective:.6g}, by {result.solver}: {path}")
    return 0


def _check_output(output: Path, problem: Path) -> None:
    """Refuses, before solving, to overwrite the problem or to write into a folder that does not exist."""
    if output.exists() and output.samefile(problem):
        raise ValueError(f"--output {output} is the problem file itself; expected another file.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}, the folder of --output, does not exist; create it first.")
