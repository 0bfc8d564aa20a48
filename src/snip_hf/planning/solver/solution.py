"""The re-check of a solver's answer: nothing that the solver process says of its own map is believed."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from typing import Any

from ...text import printable
from .ilp import Program, evaluate, missed, parse

# Longest text of a process that is told in an error.
MAX_ERROR_TEXT = 1000
# Longest name or version of a solver that is kept in plans.
_MAX_NAME = 200


class SolverError(RuntimeError):
    """The solver process gave no usable map; the message says why.

    `reason`: "crashed", "garbage", "timeout", "killed", "missing", "infeasible", "rejected" (the map failed the
    re-check), "bad problem" or "no solution".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class SolverResult:
    """A map that was re-checked against its problem; objective and constraints are recomputed here."""

    status: str
    """ "optimal" (within the wanted gap) or "feasible"."""
    choices: dict[str, str]
    objective: float
    bound: float | None
    gap: float | None
    constraints: dict[str, float]
    """Name -> attained value."""
    solver: str
    solver_version: str
    seconds: float


def check_solution(problem: dict[str, Any], solution: Any) -> SolverResult:
    """Re-checks a solution against its problem: shape, every group once, known options, ties, constraints, objective.

    Raises:
        SolverError: "garbage" (not a solution at all), "infeasible" (with the attainable values) or "rejected".
        snip_hf.planning.solver.ilp.ProblemError: if the problem itself is malformed.
    """
    program = parse(problem)
    expected = {field.name for field in fields(SolverResult)}
    if not isinstance(solution, dict) or set(solution) != expected or not isinstance(solution["choices"], dict):
        raise SolverError("garbage", f"The solver's output is no solution: {str(solution)[:80]!r}.")
    for field in ("bound", "gap"):
        if not is_finite_number(solution[field]) and solution[field] is not None:
            raise _garbage(solution, field, "a number or null")
    if not is_finite_number(solution["seconds"]):
        raise _garbage(solution, "seconds", "a number")
    for field in ("solver", "solver_version"):
        text = solution[field]
        if not isinstance(text, str) or not text.isprintable() or len(text) > _MAX_NAME:
            raise _garbage(solution, field, f"printable text of at most {_MAX_NAME} characters")
    if solution["status"] == "infeasible":
        raise SolverError("infeasible", _infeasible_message(program, solution["constraints"]))
    if solution["status"] not in ("optimal", "feasible"):
        raise SolverError("garbage", f"The solver's status is {_short(solution['status'])}, which is unknown.")

    choices = solution["choices"]
    for unit in program.units:
        for group in unit.groups:
            if choices.get(group) not in unit.options:
                got = _short(choices.get(group))
                raise _rejected(f"group {group!r} got {got}, expected one of {list(unit.options)}")
            if choices[group] != choices[unit.groups[0]]:
                raise _rejected(f"tied groups {unit.groups[0]!r} and {group!r} got different options")
    names = {group for unit in program.units for group in unit.groups}
    if len(choices) > len(names):
        raise _rejected(f"{_short(next(name for name in choices if name not in names))} is no group of the problem")
    objective, attained = evaluate(problem, choices)
    for row in missed(program, attained):
        raise _rejected(f"constraint {row.name!r} attains {attained[row.name]!r}, below its minimum {row.minimum!r}")
    size = math.fsum(max(map(abs, unit.costs)) for unit in program.units)
    if not _close(solution["objective"], objective, size):
        raise _rejected(f"it reports the objective {_short(solution['objective'])}, its own map costs {objective!r}")
    return SolverResult(**{**solution, "objective": objective, "constraints": attained})


def _rejected(what: str) -> SolverError:
    return SolverError("rejected", f"The solver's map failed the re-check: {printable(what, MAX_ERROR_TEXT)}.")


def _garbage(solution: dict[str, Any], field: str, expected: str) -> SolverError:
    return SolverError("garbage", f"The solver's {field} is {_short(solution[field])}, expected {expected}.")


def is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _close(reported: Any, recomputed: float, size: float) -> bool:
    return is_finite_number(reported) and abs(reported - recomputed) <= 1e-9 * size


def _short(value: Any) -> str:
    return repr(value)[:80]


def _infeasible_message(program: Program, attainable: Any) -> str:
    parts = [
        f"{row.name!r}: minimum {row.minimum:.6g}, attainable {attainable.get(row.name):.6g}"
        for row in program.constraints
        if isinstance(attainable, dict) and is_finite_number(attainable.get(row.name))
    ]
    each = printable("; ".join(parts), MAX_ERROR_TEXT)
    return f"No map meets all constraints ({each}, each by itself). Lower the target or tie less."
