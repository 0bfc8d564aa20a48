"""The parent's side of the solver process: every way in which it can go wrong, and that nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import alive, members, wait_until
from small_problem import make_problem

from snip_hf.planning.solver import ilp
from snip_hf.planning.solver import process as process_module
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.planning.solver.solution import SolverError, SolverResult, check_solution


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def failure(command: list[str] | None, problem: dict[str, Any] | None = None, **limits: float) -> SolverError:
    with SolverProcess.start(problem or make_problem(), command, **limits) as process:
        with pytest.raises(SolverError) as caught:
            process.result(30.0)
        with pytest.raises(SolverError) as again:
            process.result()
        assert again.value is caught.value
        assert process.poll()
    return caught.value


@pytest.mark.parametrize("solver", ["cbc", "highs", "greedy"])
def test_a_problem_is_solved_beside_and_its_result_can_be_asked_for_again(solver: str) -> None:
    with SolverProcess.start(make_problem(solver=solver)) as process:
        wait_until(process.poll)
        result = process.result(0.0)
        assert process.result() is result
    assert isinstance(result, SolverResult)
    assert (result.status, result.choices, result.objective) == ("optimal", {"a": "fp8", "b": "fp4"}, 4.0)
    assert (result.constraints, result.solver, result.bound) == ({"stage 0": 0.5}, solver, pytest.approx(4.0))


def test_start_does_not_wait_for_a_child_that_never_reads_its_input() -> None:
    problem = make_problem()
    problem["groups"][0]["name"] = "x" * 5_000_000  # far beyond a pipe's buffer
    started = time.monotonic()
    with SolverProcess.start(problem, python("import time; time.sleep(60)")) as process:
        assert not process.poll()
    assert time.monotonic() - started < 10


@pytest.fixture(scope="module")
def printed_by_a_trainer() -> list[str]:
    """Of a process that solved a problem, and ended while another solver ran: what it had used and loaded, and the id
    of that solver. One process, since it takes seconds to import what it needs."""
    program = (
        "import json, sys; from snip_hf.planning.solver.process import SolverProcess;"
        "result = SolverProcess.start(json.load(sys.stdin)).result(60);"
        "print(result.solver, 'mip' in sys.modules, 'scipy.optimize._milp' in sys.modules);"
        "p = SolverProcess.start({}, [sys.executable, '-c', 'import time; time.sleep(60)']); print(p._process.pid)"
    )
    source = str(Path(ilp.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(make_problem(solver="cbc")),
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_process_that_imports_the_parent_side_never_loads_a_solver(printed_by_a_trainer: list[str]) -> None:
    assert printed_by_a_trainer[:2] == ["cbc", "False"]


def test_the_child_runs_with_raised_niceness() -> None:
    wrapper = (
        "import os, sys, threading, time; sys.path.insert(0, sys.argv.pop()); import ilp;"
        "ilp.solve = lambda problem: {'nice': os.nice(0), 'threads': os.environ['OMP_NUM_THREADS']}; ilp.main()"
    )
    command = [sys.executable, "-I", "-c", wrapper, str(Path(ilp.__file__).parent)]
    done = subprocess.run(command, input="{}", capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"nice": min(os.nice(0) + 10, 19), "threads": "1"}


def test_a_crash_is_reported_with_exit_code_and_the_last_lines() -> None:
    program = "import sys; print('\\n'.join(f'line {i}' for i in range(9)), file=sys.stderr); sys.exit(7)"
    error = failure(python(program))
    assert error.reason == "crashed"
    assert str(error) == "The solver process crashed (exit code 7): line 6; line 7; line 8"


def test_a_death_by_signal_is_reported_with_its_name() -> None:
    error = failure(python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert error.reason == "crashed"
    assert str(error) == "The solver process crashed (signal SIGSEGV): nothing on stderr"


def test_a_death_by_a_signal_without_a_name_is_reported_with_its_number() -> None:
    error = failure(python("import os; os.kill(os.getpid(), 40)"))
    assert str(error) == "The solver process crashed (signal 40): nothing on stderr"


def test_output_that_could_not_be_written_is_named_as_such() -> None:
    full = f"exec {sys.executable} -I {ilp.__file__} > /dev/full 2>&1"
    error = failure(["sh", "-c", full], make_problem(solver="greedy"))
    assert error.reason == "crashed"
    assert str(error) == (
        "The solver process crashed (exit code 120): its output could not be written. Is the disk of "
        f"{tempfile.gettempdir()} full (TMPDIR names another folder), or did it print more than 64 MiB?"
    )


HOSTILE = "\x1b]0;owned\x07\u202edlrow\u200b"
SHOWN = "\\x1b]0;owned\\x07\\u202edlrow\\u200b"


def test_what_a_crashed_solver_printed_is_shown_escaped_and_bounded() -> None:
    write = f"import sys; sys.stderr.buffer.write({HOSTILE!r}.encode() + b'\\xff'); sys.exit(7)"
    assert str(failure(python(write))) == f"The solver process crashed (exit code 7): {SHOWN}\ufffd"
    endless = str(failure(python(f"import sys; sys.stderr.write({HOSTILE!r} * 10**6); sys.exit(7)")))
    assert endless.isprintable() and len(endless) < 1100


@pytest.mark.parametrize("code", [ilp.BAD_INPUT, ilp.MISSING_SOLVER, ilp.NO_SOLUTION])
def test_the_reason_that_a_solver_gives_is_shown_escaped_and_bounded(code: int) -> None:
    nested = {"a": [HOSTILE]}
    for text, shown in ((HOSTILE, SHOWN), (nested, repr(nested)), ("x" * 10**5, "x" * 997 + "...")):
        error = failure(python(f"import json, sys; print(json.dumps({{'error': {text!r}}})); sys.exit({code})"))
        assert str(error) == f"The solver gave up ({error.reason}): {shown}"


@pytest.mark.parametrize("field", ["status", "solver", "solver_version", "objective", "bound", "seconds", "choices"])
@pytest.mark.parametrize("value", [HOSTILE, "x" * 10**6, [HOSTILE] * 10**5, {HOSTILE * 10**5: HOSTILE}])
def test_no_field_of_an_answer_is_told_raw_or_without_bound(field: str, value: Any) -> None:
    with pytest.raises(SolverError) as caught:
        check_solution(make_problem(), solution(**{field: value}))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_a_program_that_does_not_exist_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SolverError, match=r"^The solver process could not be started: .*No such file") as caught:
        SolverProcess.start(make_problem(), [str(tmp_path / "nothing")])
    assert caught.value.reason == "crashed"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "The solver's output is no JSON object (it begins with '')."),
        ("Welcome to CBC", "The solver's output is no JSON object (it begins with 'Welcome to CBC')."),
        ('{"status": "optimal", "cho', "The solver's output is no JSON object (it begins with"),
        ("[1, 2]", "The solver's output is no solution: '[1, 2]'."),
        ('{"status": "optimal"}', "The solver's output is no solution:"),
        ("null", "The solver's output is no JSON object (it begins with 'null')."),
    ],
)
def test_garbage_on_the_output_is_reported(output: str, message: str) -> None:
    error = failure(python(f"print({output!r}, end='')"))
    assert error.reason == "garbage"
    assert str(error).startswith(message)


def test_bytes_that_are_no_text_are_garbage() -> None:
    assert failure(python("import sys; sys.stdout.buffer.write(bytes(range(128, 256)))")).reason == "garbage"


def test_a_solver_beyond_its_limit_is_killed_with_everything_it_started() -> None:
    process = SolverProcess.start(make_problem(time_limit=0.3), ["sh", "-c", "sleep 60 & sleep 60"], allowance=0.2)
    with pytest.raises(SolverError, match=r"ran past its limit of 0\.5 s and was killed") as caught:
        process.result()
    assert caught.value.reason == "timeout"
    wait_until(lambda: members(process._process.pid) == [])
    assert not Path(f"/proc/{process._process.pid}").exists()  # reaped


def test_asking_whether_it_is_done_kills_it_beyond_its_limit_too() -> None:
    sleeper = python("import time; time.sleep(60)")
    process = SolverProcess.start(make_problem(time_limit=0.1), sleeper, allowance=0.1)
    wait_until(process.poll)
    with pytest.raises(SolverError, match=r"limit of 0\.2 s") as caught:
        process.result()
    assert caught.value.reason == "timeout"


def test_waiting_is_bounded_by_the_callers_own_limit() -> None:
    started = time.monotonic()
    process = SolverProcess.start(make_problem(), python("import time; time.sleep(60)"))
    with pytest.raises(SolverError, match=r"ran past the 0\.2 s it was waited for and was killed") as caught:
        process.result(0.2)
    assert caught.value.reason == "timeout"
    assert time.monotonic() - started < 10


def test_a_solver_that_is_not_installed_is_named() -> None:
    error = failure([sys.executable, "-I", "-S", ilp.__file__], make_problem(solver="highs"))
    assert error.reason == "missing"
    assert str(error).startswith("The solver gave up (missing): solver: 'highs' needs scipy, which ")


def test_a_malformed_problem_is_reported_with_its_field() -> None:
    problem = make_problem(solver="greedy")
    problem["groups"][1]["options"][0]["cost"] = float("nan")
    error = failure(None, problem)
    assert error.reason == "bad problem"
    assert "groups[1].options[0].cost: got nan" in str(error)
    error = failure(None, make_problem(time_limit="soon"))
    assert error.reason == "bad problem"
    assert "time_limit: got 'soon', expected a number" in str(error)


def test_an_infeasible_problem_is_reported_with_what_is_attainable() -> None:
    problem = make_problem()
    problem["constraints"][0]["minimum"] = 1.25
    error = failure(None, problem)
    assert error.reason == "infeasible"
    assert str(error) == (
        "No map meets all constraints ('stage 0': minimum 1.25, attainable 1, each by itself). "
        "Lower the target or tie less."
    )


def test_names_of_a_problem_are_told_within_bounds() -> None:
    name = "x" * 10**5
    problem = make_problem(constraints=[{"name": name, "groups": None, "minimum": 9.0}], solver="greedy")
    assert len(str(failure(None, problem))) < 1200
    problem["constraints"][0]["minimum"] = 0.5
    with pytest.raises(SolverError, match=r"failed the re-check") as caught:
        check_solution(problem, solution(choices={"a": "fp8", "b": "fp8"}))
    assert len(str(caught.value)) < 1200


def test_killing_is_idempotent_and_ends_the_process() -> None:
    process = SolverProcess.start(make_problem(), python("import time; time.sleep(60)"))
    pid = process._process.pid
    assert alive(pid)
    process.kill()
    process.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(SolverError, match="was killed before its result was read") as caught:
        process.result()
    assert caught.value.reason == "killed"


def test_a_result_survives_closing() -> None:
    process = SolverProcess.start(make_problem(solver="greedy"))
    result = process.result(60.0)
    process.close()
    assert process.result() is result


def test_a_forgotten_process_is_killed_and_reaped() -> None:
    process = SolverProcess.start(make_problem(), python("import time; time.sleep(60)"))
    pid = process._process.pid
    for file in process._files:
        file.close()
    del process
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


STUBBORN = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_what_a_solver_that_has_ended_left_behind_is_killed(end: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = (
        f"{STUBBORN}\nchild = os.fork()\nif child == 0: time.sleep(600)\n"
        f"with open({str(pid)!r}, 'w') as file: file.write(str(child))\n{end}"
    )
    process = SolverProcess.start(make_problem(), python(program))
    wait_until(process.poll)  # nobody reads its answer
    wait_until(lambda: not alive(int(pid.read_text())))
    assert members(process._process.pid) == []


def test_a_solver_that_nobody_asks_for_ends_at_its_limit_with_what_it_started() -> None:
    process = SolverProcess.start(make_problem(time_limit=0.3), ["sh", "-c", "sleep 60 & sleep 60"], allowance=0.2)
    group = process._process.pid
    wait_until(lambda: not alive(group))
    wait_until(lambda: members(group) == [])
    with pytest.raises(SolverError, match=r"ran past its limit of 0\.5 s and was killed") as caught:
        process.result()
    assert caught.value.reason == "timeout"


@pytest.mark.parametrize("limit", [10**400, 1e300, -1, float("nan"), float("inf"), True, "soon", None])
def test_a_limit_that_no_clock_takes_is_the_problems_fault(limit: Any) -> None:
    error = failure(None, make_problem(time_limit=limit, solver="greedy"))
    assert error.reason == "bad problem"
    assert "time_limit" in str(error)


def test_a_problem_may_have_a_limit_of_centuries() -> None:
    with SolverProcess.start(make_problem(time_limit=1e99, solver="highs")) as process:
        assert process.result().status == "optimal"


def test_a_copy_of_the_trainer_that_a_fork_made_ends_no_solver() -> None:
    with SolverProcess.start(make_problem(), python("import time; time.sleep(60)")) as process:
        copy = os.fork()
        if copy == 0:
            # As if the fork came while the thread that waits for the process was just looking at it.
            process._process._waitpid_lock.acquire(blocking=False)
            try:
                process.kill()
            finally:
                os._exit(0)
        os.waitpid(copy, 0)
        assert alive(process._process.pid)
        assert not process.poll()


def test_a_number_that_a_new_process_got_is_left_alone() -> None:
    """Somebody else reaped the solver, and its number went to another process."""
    process = SolverProcess.start(make_problem(), python("pass"))
    wait_until(process.poll)
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        process._process.pid = other.pid
        process.kill()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_thread_that_cannot_be_started_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        started.append(thread._process.pid)
        raise RuntimeError("can't start new thread")

    started: list[int] = []
    monkeypatch.setattr(process_module.Watch, "start", refuse)
    with pytest.raises(SolverError, match="could not be started: can't start new thread"):
        SolverProcess.start(make_problem(), python("import time; time.sleep(60)"))
    assert not Path(f"/proc/{started[0]}").exists()


def test_a_trainer_that_ends_takes_its_solver_along(printed_by_a_trainer: list[str]) -> None:
    assert not alive(int(printed_by_a_trainer[3]))


def test_no_file_and_no_open_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    with SolverProcess.start(make_problem(solver="greedy")) as process:
        assert list(tmp_path.iterdir()) == []  # unnamed even while it runs
        process.result(60.0)
    failure(python("print('garbage')"))
    SolverProcess.start(make_problem(), python("import time; time.sleep(60)")).kill()
    with pytest.raises(SolverError):
        SolverProcess.start(make_problem(), [str(tmp_path / "nothing")])
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before


def solution(**changes: Any) -> dict[str, Any]:
    return ilp.solve(make_problem(solver="greedy")) | changes


def test_check_solution_accepts_the_solvers_own_answer_with_its_numbers_recomputed() -> None:
    result = check_solution(make_problem(), solution(constraints={"stage 0": 99.0}))
    assert (result.objective, result.constraints) == (4.0, {"stage 0": 0.5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": {"b": "fp4"}}, "group 'a' got None, expected one of ['fp8', 'fp4']"),
        ({"choices": {"a": "fp2", "b": "fp4"}}, "group 'a' got 'fp2', expected one of ['fp8', 'fp4']"),
        ({"choices": {"a": ["fp4"], "b": "fp4"}}, "group 'a' got ['fp4'], expected one of ['fp8', 'fp4']"),
        ({"choices": {"a": "fp8", "b": "fp4", "c": "fp4"}}, "'c' is no group of the problem"),
        (
            {"choices": {"a": "fp8", "b": "fp8"}, "objective": 2.0},
            "constraint 'stage 0' attains 0.0, below its minimum 0.5",
        ),
        ({"objective": 3.9}, "it reports the objective 3.9, its own map costs 4.0"),
        ({"objective": None}, "it reports the objective None, its own map costs 4.0"),
    ],
)
def test_a_map_that_fails_the_recheck_is_rejected(changes: dict[str, Any], message: str) -> None:
    reply = solution(**changes)
    error = failure(python(f"print({json.dumps(reply)!r})"))
    assert error.reason == "rejected"
    assert str(error) == f"The solver's map failed the re-check: {message}."


def test_a_map_that_breaks_a_tie_is_rejected() -> None:
    with pytest.raises(SolverError, match=r"tied groups 'a' and 'b' got different options") as caught:
        check_solution(make_problem(ties=[["a", "b"]]), solution())
    assert caught.value.reason == "rejected"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "unbounded"}, "The solver's status is 'unbounded', which is unknown."),
        ({"gap": "small"}, "The solver's gap is 'small', expected a number or null."),
        ({"choices": None}, "The solver's output is no solution:"),
        ({"comment": "hello"}, "The solver's output is no solution:"),
    ],
)
def test_a_solution_with_unknown_or_misshapen_fields_is_garbage(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SolverError) as caught:
        check_solution(make_problem(), solution(**changes))
    assert caught.value.reason == "garbage"
    assert str(caught.value).startswith(message)
