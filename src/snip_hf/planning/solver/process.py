"""How is the integer program solved beside training, and what if that goes wrong?

The parent's side of ``ilp.py``: start it as a process of its own, go on, ask whether it has finished, read and re-check
its answer. Whatever happens there arrives here as a `SolverError` that says which; nothing waits without a bound.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import IO, Any

from ...json_io import MAX_JSON_BYTES, parse_json
from . import ilp
from .ilp import BAD_INPUT, MISSING_SOLVER, NO_SOLUTION, ProblemError, Program, evaluate, missed, parse

# Seconds beyond the problem's time_limit until the process is killed: interpreter, imports, building the model, and a
# solver that looks at its clock only now and then.
START_UP_ALLOWANCE = 30.0
# What is read and told of the process's error output: its last lines are the ones that say why.
_MAX_ERROR_BYTES, _MAX_ERROR_TEXT = 64 * 2**10, 1000


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
    """Re-check a solution against its problem: shape, every group once, known options, ties, constraints, objective.

    Raises:
        SolverError: "garbage" (not a solution at all), "infeasible" (with the attainable values) or "rejected".
        snip_hf.ilp.ProblemError: if the problem itself is malformed.
    """
    program = parse(problem)
    expected = {field.name for field in fields(SolverResult)}
    if not isinstance(solution, dict) or set(solution) != expected or not isinstance(solution["choices"], dict):
        raise SolverError("garbage", f"The solver's output is no solution: {str(solution)[:80]!r}.")
    for field in ("bound", "gap"):
        if not _is_number(solution[field]) and solution[field] is not None:
            raise _garbage(solution, field, "a number or null")
    if not _is_number(solution["seconds"]):
        raise _garbage(solution, "seconds", "a number")
    for field in ("solver", "solver_version"):
        if not isinstance(solution[field], str) or not solution[field].isprintable():
            raise _garbage(solution, field, "printable text")
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
    return SolverError("rejected", f"The solver's map failed the re-check: {what}.")


def _garbage(solution: dict[str, Any], field: str, expected: str) -> SolverError:
    return SolverError("garbage", f"The solver's {field} is {_short(solution[field])}, expected {expected}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _close(reported: Any, recomputed: float, size: float) -> bool:
    return _is_number(reported) and abs(reported - recomputed) <= 1e-9 * size


def _short(value: Any) -> str:
    return repr(value)[:80]


def _infeasible_message(program: Program, attainable: Any) -> str:
    parts = [
        f"{row.name!r}: minimum {row.minimum:.6g}, attainable {attainable.get(row.name):.6g}"
        for row in program.constraints
        if isinstance(attainable, dict) and _is_number(attainable.get(row.name))
    ]
    return f"No map meets all constraints ({'; '.join(parts)}, each by itself). Lower the target or tie less."


def _give_up(process: subprocess.Popen[bytes], files: list[IO[bytes]]) -> None:
    """End the process and all it started, unless it has ended, reap it, and close its files."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for file in files:
        file.close()


class SolverProcess:
    """One integer program being solved in a process of its own; get one from `start`.

    Input and outputs are unnamed temporary files: nothing blocks on a full pipe and nothing is left behind. A process
    whose owner forgets it is killed when the owner is collected or Python ends; if Python itself is killed, the process
    notices and ends.
    """

    def __init__(
        self, problem: dict[str, Any], process: subprocess.Popen[bytes], files: list[IO[bytes]], limit: float
    ) -> None:
        self._problem = problem
        self._process = process
        self._files = files
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._outcome: SolverResult | SolverError | None = None
        self._finalizer = weakref.finalize(self, _give_up, process, files)

    @classmethod
    def start(
        cls, problem: dict[str, Any], command: Sequence[str] | None = None, allowance: float = START_UP_ALLOWANCE
    ) -> SolverProcess:
        """Start solving and return at once.

        Args:
            problem: as laid out in `snip_hf.ilp`. It is checked by the process: a bad one shows in `result`.
            command: the program to run instead of ``python -I ilp.py``, with the same input and output.
            allowance: seconds beyond the problem's `time_limit` after which the process is killed.

        Raises:
            SolverError: if the process cannot be started.
        """
        limit = problem.get("time_limit", 60.0)
        seconds = (float(limit) if isinstance(limit, (int, float)) and math.isfinite(limit) else 0.0) + allowance
        own = [sys.executable, "-I", ilp.__file__, "--parent", str(os.getpid())]
        words = own if command is None else list(command)
        try:
            with contextlib.ExitStack() as on_failure:
                stdin, stdout, stderr = (on_failure.enter_context(tempfile.TemporaryFile()) for _ in range(3))
                stdin.write(json.dumps(problem).encode())
                stdin.seek(0)
                process = subprocess.Popen(words, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
                on_failure.pop_all()
        except OSError as error:  # also a full disk
            raise SolverError("crashed", f"The solver process could not be started: {error}") from error
        stdin.close()
        return cls(problem, process, [stdout, stderr], seconds)

    def poll(self) -> bool:
        """Whether `result` would return (or raise) without waiting."""
        if self._outcome is None and self._process.poll() is None and time.monotonic() > self._deadline:
            self._end(SolverError("timeout", f"The solver ran past its limit of {self._limit:g} s and was killed."))
        return self._outcome is not None or self._process.poll() is not None

    def result(self, timeout: float | None = None) -> SolverResult:
        """The re-checked solution. Waits `timeout` seconds or until the process's own limit at most, then kills it.

        Asking again gives the same answer.

        Raises:
            SolverError: whatever went wrong; `reason` says which.
        """
        if self._outcome is None:
            left = max(self._deadline - time.monotonic(), 0.0)
            waited = left if timeout is None else min(left, timeout)
            try:
                self._process.wait(waited)
            except subprocess.TimeoutExpired:
                limit = f"its limit of {self._limit:g} s" if waited == left else f"the {waited:g} s it was waited for"
                self._end(SolverError("timeout", f"The solver ran past {limit} and was killed."))
            else:
                self._end(self._read())
        if isinstance(self._outcome, SolverError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def kill(self) -> None:
        """End the process if it still runs and give up its files. May be called at any time, any number of times."""
        if self._outcome is None:
            self._end(SolverError("killed", "The solver process was killed before its result was read."))

    close = kill

    def __enter__(self) -> SolverProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _end(self, outcome: SolverResult | SolverError) -> None:
        self._finalizer()
        self._outcome = outcome

    def _read(self) -> SolverResult | SolverError:
        """The outcome of a process that has ended."""
        stdout, stderr = self._files
        stdout.seek(0)
        output = stdout.read(MAX_JSON_BYTES)
        stderr.seek(max(stderr.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES, 0))
        errors = stderr.read(_MAX_ERROR_BYTES).decode(errors="replace")
        code = self._process.returncode
        reasons = {BAD_INPUT: "bad problem", MISSING_SOLVER: "missing", NO_SOLUTION: "no solution"}
        try:
            reply = parse_json(output)
        except ValueError:
            reply = None
        if code in reasons and isinstance(reply, dict) and "error" in reply:
            return SolverError(reasons[code], f"The solver gave up ({reasons[code]}): {reply['error']}")
        if code != 0:
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            last = "; ".join(errors.strip().splitlines()[-3:])[-_MAX_ERROR_TEXT:] or "nothing on stderr"
            return SolverError("crashed", f"The solver process crashed ({end}): {last}")
        if reply is None:
            begin = output[:80].decode(errors="replace")
            return SolverError("garbage", f"The solver's output is no JSON object (it begins with {begin!r}).")
        try:
            return check_solution(self._problem, reply)
        except SolverError as error:
            return error
        except ProblemError as error:
            return SolverError("bad problem", f"The solver answered a malformed problem: {error}")
