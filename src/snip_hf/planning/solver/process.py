"""The process that solves an integer program beside training, and everything that can go wrong with it.

The parent's side of ``ilp.py``: start it as a process of its own, go on, ask whether it has finished, read and re-check
its answer (`solution`). Whatever happens there arrives as a `SolverError` that says which; no wait is without a bound.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from typing import IO, Any

from ...config import LONGEST_WAIT, POLICIES, SnipConfig
from ...json_io import MAX_JSON_BYTES, parse_json
from ...text import printable
from . import ilp
from .ilp import BAD_INPUT, LARGEST_FILE, MISSING_SOLVER, NO_SOLUTION, ProblemError
from .solution import MAX_ERROR_TEXT, SolverError, SolverResult, check_solution, is_finite_number

# Seconds beyond the problem's time_limit until the process is killed: interpreter, imports, building the model, and a
# solver that looks at its clock only now and then.
START_UP_ALLOWANCE = 30.0
# What is read of the process's error output: its last lines are the ones that say why.
_MAX_ERROR_BYTES = 64 * 2**10
# The solver that "auto" goes on with once a process of its first choice, or of the next one, has failed.
NEXT_SOLVER = {"auto": "highs", "highs": "greedy"}
# Seconds that a killed process is waited for: one that hangs in the kernel does not end.
_REAPING = 5.0
# Exit code of a Python that could not write out what it had printed.
_UNWRITTEN = 120
# What a solver is tried out on: it has to reach half of the weight.
_OPTIONS = [{"name": "without", "cost": 0.0, "weight": 0.0}, {"name": "with", "cost": 1.0, "weight": 0.5}]
_TRIAL: dict[str, Any] = {
    "groups": [{"name": name, "options": _OPTIONS} for name in ("a", "b")],
    "constraints": [{"name": "half", "groups": None, "minimum": 0.5}],
    "time_limit": 10.0,
}


def _not_started(error: Exception) -> SolverError:
    return SolverError("crashed", f"The solver process could not be started: {printable(error, MAX_ERROR_TEXT)}")


def _timeout(limit: str) -> SolverError:
    return SolverError("timeout", f"The solver ran past {limit} and was killed.")


def _end_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-code, -code)}"


def _last_words(errors: str, code: int) -> str:
    """Returns the last lines that a crashed process printed, or what it means that there are none."""
    last = printable("; ".join(errors.strip().splitlines()[-3:])[-MAX_ERROR_TEXT:], MAX_ERROR_TEXT)
    if last or code != _UNWRITTEN:
        return last or "nothing on stderr"
    return (
        f"its output could not be written. Is the disk of {printable(tempfile.gettempdir())} full (TMPDIR names another"
        f" folder), or did it print more than {LARGEST_FILE // 2**20} MiB?"
    )


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, if it still runs, and all in its process group, and reaps it."""
    # While a process of the group is left, no new one gets its number: a new one there means that none is left.
    if process.poll() is None or not _is_there(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids to signal zombies
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAPING)


def give_up(process: subprocess.Popen[bytes], files: Sequence[IO[bytes]], owner: int) -> None:
    """Ends a process with its group, if this process is its owner, and closes files."""
    if os.getpid() == owner:  # and not a copy of it that a fork made
        _end_group(process)
    for file in files:
        file.close()


def run_beside(words: Sequence[str], given: dict[str, Any]) -> tuple[subprocess.Popen[bytes], list[IO[bytes]]]:
    """Starts a program in a session of its own.

    Args:
        words: the program and its arguments.
        given: its input, as JSON data.

    Returns: the process, and the files that get its output and its error output.

    Raises:
        OSError: it cannot be started, or the disk of temporary files is full.
    """
    with contextlib.ExitStack() as on_failure:
        stdout, stderr = (on_failure.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        stdin = on_failure.enter_context(tempfile.TemporaryFile())
        stdin.write(json.dumps(given).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            words,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd="/",  # CBC aborts if the working directory is gone
            start_new_session=True,
        )
        on_failure.pop_all()
    stdin.close()
    return process, [stdout, stderr]


class Watch(threading.Thread):
    """Ends a process's group when the process ends, and both at its limit, also if nobody asks for the result.

    Args:
        process: as `run_beside` started it.
        limit: seconds.
    """

    def __init__(self, process: subprocess.Popen[bytes], limit: float) -> None:
        super().__init__(name="snip-hf watch", daemon=True)
        self.ran_late = False
        self.deadline = time.monotonic() + limit
        self._process = process
        self._limit = limit

    def run(self) -> None:
        try:
            self._process.wait(self._limit)
        except subprocess.TimeoutExpired:
            self.ran_late = True
        _end_group(self._process)


def import_paths() -> list[str]:
    """Returns the folders and archives that this process imports from; the solver process ignores PYTHONPATH.

    The working directory and the script's folder are left out: a file `mip.py` there is not meant for the solver.
    """

    def resolved(path: str) -> str:
        try:
            return os.path.realpath(path)
        except (OSError, ValueError):  # relative to a working directory that is gone, or no path at all
            return ""

    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    left_out = {"", resolved("."), os.path.dirname(resolved(script))}
    entries = [resolved(entry) for entry in sys.path if isinstance(entry, str) and entry]
    return [entry for entry in dict.fromkeys(entries) if entry not in left_out]


class SolverProcess:
    """One integer program being solved in a process of its own; get one from `start`.

    Input and outputs are unnamed temporary files: nothing blocks on a full pipe and nothing is left behind. What the
    process started and left behind in its process group is killed when it ends. It is killed itself, with its group,
    when its owner is collected, when Python ends, and at its limit, also if nobody asks for it any more. If Python
    itself is killed, the process notices and ends.
    """

    def __init__(
        self, problem: dict[str, Any], process: subprocess.Popen[bytes], files: list[IO[bytes]], limit: float
    ) -> None:
        self._problem = problem
        self._process = process
        self._files = files
        self._limit = limit
        self._outcome: SolverResult | SolverError | None = None
        self._watch = Watch(process, limit)
        self._watch.start()
        self._finalizer = weakref.finalize(self, give_up, process, files, os.getpid())

    @classmethod
    def start(
        cls, problem: dict[str, Any], command: Sequence[str] | None = None, allowance: float = START_UP_ALLOWANCE
    ) -> SolverProcess:
        """Starts solving and returns at once.

        Args:
            problem: as laid out in `solver.ilp`. It is checked by the process: a bad one shows in `result`.
            command: the program to run instead of ``python -I ilp.py``, with the same input and output.
            allowance: seconds beyond the problem's `time_limit` after which the process is killed.

        Raises:
            SolverError: if the process cannot be started.
        """
        limit = problem.get("time_limit", 60.0)
        seconds = (min(float(limit), LONGEST_WAIT) if is_finite_number(limit) and limit > 0 else 0.0) + allowance
        words = own_command() if command is None else list(command)
        try:
            process, files = run_beside(words, problem)
        except OSError as error:  # also a full disk
            raise _not_started(error) from error
        try:
            return cls(problem, process, files, seconds)
        except RuntimeError as error:  # no thread can be started
            give_up(process, files, os.getpid())
            raise _not_started(error) from error

    def poll(self) -> bool:
        """Returns True if `result` would return (or raise) without waiting."""
        if self._outcome is None and self._watch.is_alive() and time.monotonic() > self._watch.deadline:
            self._end(_timeout(f"its limit of {self._limit:g} s"))
        return self._outcome is not None or not self._watch.is_alive()

    def result(self, timeout: float | None = None) -> SolverResult:
        """Returns the re-checked solution. Waits for `timeout` seconds or until the process's own limit, then kills it.

        Asking again gives the same answer.

        Raises:
            SolverError: whatever went wrong; `reason` says which.
        """
        if self._outcome is None:
            self._watch.join(timeout)
            if self._watch.is_alive():
                self._end(_timeout(f"the {timeout:g} s it was waited for"))
            elif self._watch.ran_late:
                self._end(_timeout(f"its limit of {self._limit:g} s"))
            else:
                self._end(self._read())
        if isinstance(self._outcome, SolverError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def kill(self) -> None:
        """Ends the process if it still runs and gives up its files. May be called at any time, any number of times."""
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
        """Returns the outcome of a process that has ended."""
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
            said = printable(reply["error"], MAX_ERROR_TEXT)
            return SolverError(reasons[code], f"The solver gave up ({reasons[code]}): {said}")
        if code != 0:
            return SolverError("crashed", f"The solver process crashed ({_end_of(code)}): {_last_words(errors, code)}")
        if reply is None:
            begin = output[:80].decode(errors="replace")
            return SolverError("garbage", f"The solver's output is no JSON object (it begins with {begin!r}).")
        try:
            return check_solution(self._problem, reply)
        except SolverError as error:
            return error
        except ProblemError as error:
            return SolverError(
                "bad problem", f"The solver answered a malformed problem: {printable(error, MAX_ERROR_TEXT)}"
            )


def own_command() -> list[str]:
    """Returns ``python -I ilp.py``, which ends with this process and finds the packages that this process finds."""
    paths = [word for path in import_paths() for word in ("--path", path)]
    return [sys.executable, "-I", os.path.abspath(ilp.__file__), "--parent", str(os.getpid()), *paths]


def solver_of(config: SnipConfig) -> str:
    """Returns the solver that the policy names, or else the config."""
    return str(POLICIES[config.policy].solver or config.solver)


def check_solver(config: SnipConfig, log: logging.Logger) -> str:
    """Tries out, before training, whether the solver process can use the solver that the config asks for.

    Returns the solver to ask. With "auto" that is another one where the trial of the first choice failed; the log says
    which one and why, and warns if the first one crashed or only the greedy one can be used.

    Raises:
        ValueError: the solver is not installed where the process can use it; the message says what to do.
    """
    wanted = solver_of(config)
    if wanted == "greedy":
        return wanted
    failures: list[SolverError] = []
    for name in ("cbc", "highs") if wanted == "auto" else (wanted,):
        try:
            version = try_out(name, tuple(sys.path))
        except SolverError as error:
            if wanted != "auto" and error.reason == "missing":
                raise ValueError(str(error)) from error
            if wanted != "auto":
                log.warning("snip-hf: trying out the solver %r failed, and refreshes may fail so too: %s", name, error)
                return wanted
            failures.append(error)
        else:
            reason = f": {failures[0]}" if failures else ""
            has_crashed = any(error.reason != "missing" for error in failures)
            log.log(
                logging.WARNING if has_crashed else logging.INFO,
                "snip-hf: solver=%r takes %r (%s)%s",
                wanted,
                name,
                version,
                reason,
            )
            return name if has_crashed else wanted
    log.warning("snip-hf: solver='auto' takes 'greedy', since no other can be used: %s", " ".join(map(str, failures)))
    return "greedy"


@functools.cache
def try_out(solver: str, paths: tuple[str, ...]) -> str:
    """Solves a small problem and returns the solver's version; raises what `SolverProcess` does.

    A success is remembered as long as `paths` stays.
    """
    with SolverProcess.start(_TRIAL | {"solver": solver}) as process:
        return process.result().solver_version
