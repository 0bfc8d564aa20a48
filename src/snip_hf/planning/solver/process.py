"""The process that solves an integer program beside training.

Any failure there is raised as a `SolverError` that gives the reason. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from ...config import POLICIES, SnipConfig
from ...json_io import from_json, parse_json, short
from ...text import printable
from . import ilp

# Seconds beyond the problem's time_limit until the process is killed: interpreter, imports, building the model, and a
# solver that looks at its clock only now and then.
START_UP_ALLOWANCE = 30.0
# The solver that "auto" goes on with after any failure of the first one.
FALLBACK = "highs"
# Longest text of a process that is quoted in an error.
_MAX_TEXT = 1000


class SolverError(RuntimeError):
    """The solver process gave no solution; the message gives the details.

    `reason`: "bad problem", "missing" (the solver is not installed), "crashed", "garbage" (the output is not a
    solution), "timeout" or "infeasible".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Option:
    """One choice of a group."""

    name: str
    cost: float
    weight: float


@dataclass(frozen=True)
class Group:
    """Picks exactly one of its options."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Constraint:
    """The chosen weights of its groups (None: all) sum to at least `minimum`."""

    name: str
    groups: tuple[str, ...] | None
    minimum: float


@dataclass(frozen=True)
class Problem:
    """An integer program, as `snip-hf solve` reads it and `planning.program.problem` writes it.

    Raises:
        ValueError: names the field, what was got and what was expected.
    """

    groups: tuple[Group, ...]
    constraints: tuple[Constraint, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups that take the option of the same name."""
    solver: Literal["auto", "cbc", "highs", "greedy"] = "auto"
    time_limit: float = 60.0
    relative_gap: float = 1e-4

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty, expected at least one group.")
        for field, named in (("groups", self.groups), ("constraints", self.constraints)):
            if len({one.name for one in named}) < len(named):
                raise ValueError(f"{field} has a name twice; expected distinct names.")
        if self.time_limit <= 0 or self.relative_gap < 0:
            raise ValueError("time_limit must be above 0 and relative_gap at least 0.")
        options = {group.name: {option.name for option in group.options} for group in self.groups}
        for index, group in enumerate(self.groups):
            if not group.options or len(options[group.name]) < len(group.options):
                raise ValueError(f"groups[{index}].options has no option, or a name twice; expected distinct options.")
        stage_of: dict[str, str] = {}
        for where, row in [(f"constraints[{index}].groups", row) for index, row in enumerate(self.constraints)]:
            for name in options if row.groups is None else row.groups:
                if name not in options:
                    raise ValueError(f"{where} names {short(name)}, which is not a group.")
                if name in stage_of:
                    raise ValueError(f"{where} names {short(name)} again; expected each group in one constraint.")
                stage_of[name] = row.name
        for index, tie in enumerate(self.ties):
            for name in tie:
                if name not in options:
                    raise ValueError(f"ties[{index}] names {short(name)}, which is not a group.")
                if options[name] != options[tie[0]] or stage_of.get(name) != stage_of.get(tie[0]):
                    raise ValueError(
                        f"ties[{index}]: {short(tie[0])} and {short(name)} have different options or constraints; tied "
                        "groups must have the same ones."
                    )


@dataclass(frozen=True)
class SolverResult:
    """A solution, as the solver process prints it."""

    status: Literal["optimal", "feasible"]
    """"optimal": within the wanted gap."""
    choices: dict[str, str]
    objective: float
    bound: float | None
    gap: float | None
    constraints: dict[str, float]
    """Name -> attained value."""
    solver: str
    solver_version: str
    seconds: float


def _end(process: subprocess.Popen[bytes], files: Sequence[IO[bytes]]) -> None:
    """Kills a process that still runs, and closes its files."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel does not end
        process.wait(5.0)
    for file in files:
        file.close()


class SolverProcess:
    """One integer program being solved in a separate process; get one from `start`.

    Input and outputs are unnamed temporary files, so nothing blocks on a full pipe and nothing is left behind. The
    process is killed at its limit, when this object is collected and when Python ends; it notices if Python is killed.
    """

    def __init__(self, problem: dict[str, Any], command: Sequence[str] | None) -> None:
        try:
            checked = from_json(Problem, problem)
        except ValueError as error:
            raise SolverError("bad problem", f"The integer program is malformed: {error}") from error
        self._problem = problem
        self._limit = checked.time_limit + START_UP_ALLOWANCE
        self._deadline = time.monotonic() + self._limit
        own = [sys.executable, os.path.abspath(ilp.__file__), str(os.getpid()), str(self._limit)]
        try:
            with contextlib.ExitStack() as on_failure:
                stdin, *files = (on_failure.enter_context(tempfile.TemporaryFile()) for _ in range(3))
                stdin.write(json.dumps(problem).encode())
                stdin.seek(0)
                self._process = subprocess.Popen(
                    own if command is None else list(command),
                    stdin=stdin,
                    stdout=files[0],
                    stderr=files[1],
                    cwd="/",  # CBC aborts if the working directory is gone
                    start_new_session=True,  # Ctrl+C is for training
                )
                on_failure.pop_all()
        except OSError as error:  # also a full disk
            raise SolverError("crashed", f"The solver process could not be started: {printable(error)}") from error
        stdin.close()
        self._files = files
        self.kill = weakref.finalize(self, _end, self._process, files)
        """Ends the process if it still runs. May be called any number of times."""

    @classmethod
    def start(cls, problem: dict[str, Any], command: Sequence[str] | None = None) -> SolverProcess:
        """Starts solving and returns at once.

        Args:
            problem: JSON data of a `Problem`.
            command: the program to run instead of ``python ilp.py``, with the same input and output.

        Raises:
            SolverError: the problem is malformed, or the process cannot be started.
        """
        return cls(problem, command)

    def result(self, timeout: float = math.inf) -> SolverResult:
        """Returns the solution, once. Waits for `timeout` seconds or until the process's own limit, then kills it.

        Raises:
            SolverError: there is no solution; `reason` tells why.
        """
        left = max(self._deadline - time.monotonic(), 0.0)
        try:
            self._process.wait(min(timeout, left))
            return self._read()
        except subprocess.TimeoutExpired:
            limit = f"its limit of {self._limit:g} s" if left <= timeout else f"the {timeout:g} s that it had"
            raise SolverError("timeout", f"The solver ran past {limit} and was killed.") from None
        finally:
            self.kill()

    def _read(self) -> SolverResult:
        """Returns the solution of a process that has ended."""
        for file in self._files:
            file.seek(0)
        output, errors = (file.read() for file in self._files)
        if code := self._process.returncode:  # negative: the number of a signal
            last = "; ".join(errors.decode(errors="replace").strip().splitlines()[-3:])
            why = printable(last[-_MAX_TEXT:]) or "nothing on stderr"
            raise SolverError("crashed", f"The solver process crashed (exit code {code}): {why}")
        try:
            reply = parse_json(output)
            if isinstance(reply, dict) and "missing" in reply:
                raise SolverError("missing", printable(reply["missing"]))
            if isinstance(reply, dict) and reply.get("status") == "infeasible":
                reach, rows = reply["constraints"], self._problem["constraints"]
                each = (f"{x['name']!r}: minimum {x['minimum']:.6g}, attainable {reach[x['name']]:.6g}" for x in rows)
                text = printable("; ".join(each))
                raise SolverError(
                    "infeasible", f"No plan meets all constraints ({text}). Lower the target or tie less."
                )
            return from_json(SolverResult, reply)
        except ValueError as error:
            begin = output[:80].decode(errors="replace")
            raise SolverError(
                "garbage", f"The solver's output is not a solution (it begins with {begin!r}): {error}"
            ) from error


def solver_of(config: SnipConfig) -> str:
    """Returns the solver that the policy names, or else the config."""
    return str(POLICIES[config.policy].solver or config.solver)


@functools.cache
def try_out(solver: str) -> str:
    """Solves a small problem and returns the solver's version; raises what `SolverProcess` does."""
    options = [{"name": "without", "cost": 0.0, "weight": 0.0}, {"name": "with", "cost": 1.0, "weight": 0.5}]
    problem = {
        "groups": [{"name": name, "options": options} for name in ("a", "b")],
        "constraints": [{"name": "half", "groups": None, "minimum": 0.5}],
        "solver": solver,
        "time_limit": 10.0,
    }
    return SolverProcess.start(problem).result().solver_version


def check_solver(config: SnipConfig, log: logging.Logger) -> str:
    """Tries out, before training, whether the solver process can use the configured solver; returns the one to ask.

    With "auto" that is HiGHS if CBC is not installed, or fails, which costs a warning.

    Raises:
        ValueError: the process cannot use the solver; the message says what to do.
    """
    wanted = solver_of(config)
    if wanted == "greedy":
        return wanted
    first = "cbc" if wanted == "auto" else wanted
    try:
        log.info("snip-hf: solver=%r uses %r (%s)", wanted, first, try_out(first))
        return wanted
    except SolverError as error:
        if wanted != "auto" and error.reason == "missing":
            raise ValueError(str(error)) from error
        if wanted != "auto":
            log.warning("snip-hf: trying out the solver %r failed, so refreshes may fail too: %s", wanted, error)
            return wanted
        level = logging.INFO if error.reason == "missing" else logging.WARNING
        log.log(level, "snip-hf: solver='auto' uses %r, because: %s", FALLBACK, error)
    return FALLBACK
