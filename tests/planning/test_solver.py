"""The solver process, as seen from its caller: failures are reported, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from processes import alive, wait_until
from solver_problems import make_problem

from snip_hf.planning.solver import ilp
from snip_hf.planning.solver import process as process_module
from snip_hf.planning.solver.process import SolverError, SolverProcess, SolverResult


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def failure(command: list[str] | None, problem: dict[str, Any] | None = None) -> SolverError:
    with pytest.raises(SolverError) as caught:
        SolverProcess.start(problem or make_problem(), command).result(30.0)
    return caught.value


@pytest.mark.parametrize("solver", ["cbc", "highs", "greedy"])
def test_a_problem_is_solved_in_another_process(solver: str) -> None:
    process = SolverProcess.start(make_problem(solver=solver))
    wait_until(lambda: process._process.poll() is not None)
    result = process.result(0.0)
    assert isinstance(result, SolverResult)
    assert (result.status, result.choices, result.objective) == ("optimal", {"a": "fp8", "b": "fp4"}, 4.0)
    assert (result.constraints, result.solver, result.bound) == ({"stage 0": 0.5}, solver, pytest.approx(4.0))


def test_start_does_not_wait_for_a_child_that_never_reads_its_input() -> None:
    problem = make_problem()
    problem["groups"][0]["name"] = "x" * 5_000_000  # far beyond a pipe's buffer
    started = time.monotonic()
    process = SolverProcess.start(problem, python("import time; time.sleep(60)"))
    assert process._process.poll() is None
    process.kill()
    assert time.monotonic() - started < 10


@pytest.fixture(scope="module")
def printed_by_a_trainer() -> list[str]:
    """Runs one trainer process that solves a problem and exits while a second solver runs.

    Returns the solver it used, the modules it loaded, and the second solver's id. Imports take seconds, so there is
    only one process.
    """
    program = (
        "import json, sys; from snip_hf.planning.solver.process import SolverProcess;"
        "result = SolverProcess.start(json.load(sys.stdin)).result(60);"
        "print(result.solver, 'mip' in sys.modules, 'scipy.optimize._milp' in sys.modules);"
        "p = SolverProcess.start(json.loads(sys.argv[1]), [sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(p._process.pid)"
    )
    source = str(Path(ilp.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(make_problem())],
        input=json.dumps(make_problem(solver="cbc")),
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_process_that_imports_the_parent_side_never_loads_a_solver(printed_by_a_trainer: list[str]) -> None:
    assert printed_by_a_trainer[:2] == ["cbc", "False"]


def test_a_crash_is_reported_with_exit_code_and_the_last_lines() -> None:
    program = "import sys; print('\\n'.join(f'line {i}' for i in range(9)), file=sys.stderr); sys.exit(7)"
    error = failure(python(program))
    assert error.reason == "crashed"
    assert str(error) == "The solver process crashed (exit code 7): line 6; line 7; line 8"


def test_a_death_by_signal_is_reported_with_its_number() -> None:
    error = failure(python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert error.reason == "crashed"
    assert str(error) == "The solver process crashed (exit code -11): nothing on stderr"


def test_a_program_that_does_not_exist_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SolverError, match=r"^The solver process could not be started: .*No such file") as caught:
        SolverProcess.start(make_problem(), [str(tmp_path / "nothing")])
    assert caught.value.reason == "crashed"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "The solver's output is not a solution (it begins with ''): "),
        ("Welcome to CBC", "The solver's output is not a solution (it begins with 'Welcome to CBC'): "),
        ('{"status": "optimal", "cho', "The solver's output is not a solution (it begins with"),
        ("[1, 2]", "The solver's output is not a solution (it begins with '[1, 2]'): the document is a list of 2"),
        (
            '{"status": "optimal"}',
            'The solver\'s output is not a solution (it begins with \'{"status": "optimal"}\'): it has no entry',
        ),
    ],
)
def test_garbage_on_the_output_is_reported(output: str, message: str) -> None:
    error = failure(python(f"print({output!r}, end='')"))
    assert error.reason == "garbage"
    assert str(error).startswith(message)


def test_a_solver_beyond_its_limit_is_killed_and_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "START_UP_ALLOWANCE", 0.2)
    process = SolverProcess.start(make_problem(time_limit=0.3), ["sleep", "60"])
    with pytest.raises(SolverError, match=r"ran past its limit of 0\.5 s and was killed") as caught:
        process.result()
    assert caught.value.reason == "timeout"
    assert not Path(f"/proc/{process._process.pid}").exists()


def test_waiting_is_bounded_by_the_callers_own_limit() -> None:
    started = time.monotonic()
    process = SolverProcess.start(make_problem(), python("import time; time.sleep(60)"))
    with pytest.raises(SolverError, match=r"ran past the 0\.2 s that it had and was killed") as caught:
        process.result(0.2)
    assert caught.value.reason == "timeout"
    assert time.monotonic() - started < 10


def wrong(path: list[Any], value: Any) -> dict[str, Any]:
    """A problem with the field at `path` replaced, or removed (value `...`)."""
    problem: Any = make_problem(ties=[["a", "b"]], time_limit=1.0, relative_gap=0.0, solver="greedy")
    at = problem
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return problem


OPTION = ["groups", 1, "options", 1]


def row(name: str, groups: list[str] | None = None) -> dict[str, Any]:
    return {"name": name, "groups": groups, "minimum": 0.5}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["groups"], [], "groups is empty, expected at least one group."),
        (["groups", 1], "b", "groups[1] is 'b', expected an object."),
        (["groups", 1, "name"], "a", "groups has a name twice"),
        (["groups", 1, "options"], [], "groups[1].options has no option, or a name twice"),
        ([*OPTION, "name"], "fp8", "groups[1].options has no option, or a name twice"),
        ([*OPTION, "weight"], math.inf, "groups[1].options[1].weight is inf, expected a finite number."),
        (["constraints", 0, "groups"], ["c"], "constraints[0].groups names 'c', which is not a group."),
        (["constraints"], [row("x"), row("y", ["a"])], "constraints[1].groups names 'a' again; expected each group in"),
        (["constraints"], [row("x", ["a"]), row("y", ["b"])], "ties[0]: 'a' and 'b' have different options or"),
        (["ties", 0, 1], "z", "ties[0] names 'z', which is not a group."),
        ([*OPTION, "name"], "bf16", "ties[0]: 'a' and 'b' have different options or constraints"),
        (["solver"], "gurobi", "solver is 'gurobi', expected one of auto, cbc, highs, greedy."),
        (["time_limit"], 0, "time_limit must be above 0"),
        (["relative_gap"], -1, "time_limit must be above 0 and relative_gap at least 0."),
    ],
)
def test_a_malformed_problem_is_refused_with_its_field(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(SolverError) as caught:
        SolverProcess.start(wrong(path, value))
    assert caught.value.reason == "bad problem"
    assert str(caught.value).startswith(f"The integer program is malformed: {message}")


def test_a_solver_that_is_not_installed_is_named() -> None:
    error = failure([sys.executable, "-I", "-S", ilp.__file__], make_problem(solver="highs"))
    assert error.reason == "missing"
    assert str(error).startswith("solver='highs' cannot be used by ")


def test_the_process_ends_at_its_limit_and_with_its_parent_on_its_own() -> None:
    sleeping = (
        "import os, sys, time; sys.path.insert(0, sys.argv.pop()); import ilp;"
        "ilp.solve = lambda problem: time.sleep(60); ilp.main()"
    )
    for parent, seconds in ((os.getpid(), 0.1), (1, 60.0)):
        command = [sys.executable, "-c", sleeping, str(parent), str(seconds), str(Path(ilp.__file__).parent)]
        assert subprocess.run(command, input="{}", text=True, timeout=20).returncode == -9


def test_an_infeasible_problem_is_reported_with_what_is_attainable() -> None:
    problem = make_problem()
    problem["constraints"][0]["minimum"] = 1.25
    error = failure(None, problem)
    assert error.reason == "infeasible"
    assert str(error) == (
        "No plan meets all constraints ('stage 0': minimum 1.25, attainable 1). Lower the target or tie less."
    )


def test_killing_is_idempotent_and_ends_the_process() -> None:
    process = SolverProcess.start(make_problem(), python("import time; time.sleep(60)"))
    pid = process._process.pid
    assert alive(pid)
    process.kill()
    process.kill()
    assert not Path(f"/proc/{pid}").exists()


def test_a_forgotten_process_is_killed_and_reaped() -> None:
    process = SolverProcess.start(make_problem(), python("import time; time.sleep(60)"))
    pid = process._process.pid
    for file in process._files:
        file.close()
    del process
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_a_trainer_that_ends_takes_its_solver_along(printed_by_a_trainer: list[str]) -> None:
    assert not alive(int(printed_by_a_trainer[3]))


def test_no_file_and_no_open_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    process = SolverProcess.start(make_problem(solver="greedy"))
    assert list(tmp_path.iterdir()) == []  # unnamed even while it runs
    process.result(60.0)
    failure(python("print('garbage')"))
    SolverProcess.start(make_problem(), python("import time; time.sleep(60)")).kill()
    with pytest.raises(SolverError):
        SolverProcess.start(make_problem(), [str(tmp_path / "nothing")])
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before
