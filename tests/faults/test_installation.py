"""Does the solver process find what the training process finds, and is what it cannot use said before training?"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mip
import pytest
import scipy
from slow_cases import slow
from small_problem import make_problem
from tiny_runs import SCHEDULE, train

from snip_hf import SnipConfig
from snip_hf.config import POLICIES
from snip_hf.layers.state import snip_linears
from snip_hf.planning.solver import ilp
from snip_hf.planning.solver import process as solver
from snip_hf.planning.solver.process import SolverProcess, import_paths
from snip_hf.planning.solver.solution import SolverError
from snip_hf.policies.registry import Policy, register_policy

SHORT = {"max_steps": 4}
RUN_ILP = f"import runpy; runpy.run_path({ilp.__file__!r}, run_name='__main__')"
WITHOUT_BOTH = [sys.executable, "-I", "-S", ilp.__file__]
WITHOUT_MIP = [sys.executable, "-I", "-c", f"import sys; sys.modules['mip'] = None; {RUN_ILP}"]
CRASHING = [sys.executable, "-S", "-c", "import os; os.abort()"]
PATHS = [path for path in sys.path if os.path.isabs(path)]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without packages: what it imports comes from elsewhere."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    return str(folder / "bin" / "python")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["PYTHONPATH", "sys.path"])
def test_packages_that_only_the_training_process_sees_are_shown_to_the_solver(how: str, bare_python: str) -> None:
    program = (
        f"import sys; sys.path += {PATHS if how == 'sys.path' else []!r}; import json;"
        "from snip_hf.planning.solver.process import SolverProcess;"
        "print(SolverProcess.start(json.load(sys.stdin)).result().solver)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if how == "PYTHONPATH":
        environment["PYTHONPATH"] = os.pathsep.join(PATHS)
    given = json.dumps(make_problem(solver="cbc"))
    done = subprocess.run([bare_python, "-c", program], input=given, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("cbc\n", 0), done.stderr


def test_neither_the_working_directory_nor_the_scripts_folder_is_shown_to_the_solver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "script", "given"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script" / "train.py"), raising=False)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    entries = ["", ".", str(tmp_path / "here"), str(tmp_path / "link"), "../script", str(tmp_path / "script"), "\0"]
    monkeypatch.setattr(sys, "path", [*entries, "../given", str(tmp_path / "given")])
    assert import_paths() == [str(tmp_path / "given")]


def test_a_working_directory_that_is_gone_does_not_stop_the_solver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.syspath_prepend("vendored")
    assert all(map(os.path.isabs, import_paths()))
    assert SolverProcess.start(make_problem(solver="cbc")).result().solver == "cbc"


def test_a_folder_that_is_shown_takes_the_place_of_nothing_that_is_found_without(tmp_path: Path) -> None:
    for module in ("mip", "random", "numpy", "decimal"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} was imported from here')")
    command = [sys.executable, "-I", ilp.__file__, "--path", str(tmp_path)]
    with SolverProcess.start(make_problem(solver="cbc"), command) as process:
        assert process.result().solver == "cbc"


def reason(name: str, command: list[str] | None) -> str:
    """Why a solver is missing."""
    with SolverProcess.start(make_problem(solver=name), command) as process, pytest.raises(SolverError) as caught:
        process.result()
    assert caught.value.reason == "missing"
    return str(caught.value)


def test_a_package_that_is_installed_and_does_not_load_is_told_from_one_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "mip.py").write_text("raise ValueError('\x1b[2J built for another \u202e numpy')")
    (tmp_path / "scipy").mkdir()
    words = [*WITHOUT_BOTH, "--path", str(tmp_path)]
    found = {name: reason(name, words) for name in ("cbc", "highs")}
    begin = "The solver gave up (missing): solver: "
    assert found["cbc"] == (
        f"{begin}'cbc' needs mip, which is installed ({tmp_path}/mip.py) but does not load (ValueError: \\x1b[2J built "
        "for another \\u202e numpy). Mend it, or take 'greedy'."
    )
    assert found["highs"].startswith(f"{begin}'highs' needs scipy, which is installed ({tmp_path}/scipy) but does not")
    assert reason("cbc", WITHOUT_BOTH) == (
        f"{begin}'cbc' needs mip, which is not installed for {sys.executable} (the script's folder and the working "
        "directory do not count). Install it (pip install \"snip-hf[cbc]\"), or take 'greedy'."
    )


def test_the_reason_why_cbc_does_not_load_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIP_CBC_LIBRARY", str(tmp_path / "libCbc.so"))
    why = reason("cbc", None)
    assert "mip/__init__.py) but does not load (ImportError: it has no CBC." in why
    assert f"cannot load library '{tmp_path}/libCbc.so'" in why


# --- the trial before training


@pytest.fixture
def with_command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], None]]:
    """Sets the command that solver processes are started with."""
    solver.try_out.cache_clear()
    yield lambda words: monkeypatch.setattr(solver, "own_command", lambda: words)
    solver.try_out.cache_clear()


def notes(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if "solver" in record.getMessage()]


@pytest.mark.parametrize("name", ["cbc", "highs"])
def test_a_solver_that_is_not_there_is_refused_before_training(
    name: str, with_command: Callable[[list[str]], None], tmp_path: Path
) -> None:
    with_command(WITHOUT_BOTH)
    package = {"cbc": "mip", "highs": "scipy"}[name]
    with pytest.raises(
        ValueError, match=f"solver: '{name}' needs {package}, which is not installed .* Install it [(]pip"
    ):
        train(tmp_path, SnipConfig(**SCHEDULE | {"solver": name}), **SHORT)
    assert not (tmp_path / "snip").exists()


def test_the_solver_that_a_policy_asks_for_is_the_one_that_is_tried_out(
    with_command: Callable[[list[str]], None],
) -> None:
    with_command(WITHOUT_BOTH)
    with POLICIES.restored(), pytest.raises(ValueError, match="solver: 'highs' needs scipy, which is not installed"):
        register_policy(Policy(name="exact", cost=lambda config, table: lambda row: row.flops, solver="highs"))
        solver.check_solver(SnipConfig(policy="exact", solver="greedy"), logging.getLogger("snip_hf"))


@pytest.mark.parametrize(
    ("words", "level", "message", "taken"),
    [
        (
            WITHOUT_BOTH,
            logging.WARNING,
            "'greedy', since no other can be used: ",
            "greedy",
        ),
        slow(WITHOUT_MIP, logging.INFO, f"'highs' (scipy {scipy.__version__}): ", "highs"),
    ],
)
def test_auto_says_before_training_that_it_does_not_take_the_first_choice(
    words: list[str],
    level: int,
    message: str,
    taken: str,
    with_command: Callable[[list[str]], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_command(words)
    caplog.set_level(logging.INFO, "snip_hf")
    run = train(tmp_path, SnipConfig(**SCHEDULE | {"solver": "auto"}), **SHORT)
    [(at, said)] = [note for note in notes(caplog) if " takes " in note[1]]
    assert (
        at == level
        and said.startswith(f"snip-hf: solver='auto' takes {message}")
        and "needs mip, which is not installed" in said
    )
    assert ("needs scipy, which is not installed" in said) == (taken == "greedy")
    assert [line["solver"] for line in run.refreshes] == [taken]


def test_a_trial_that_fails_otherwise_is_told_and_training_goes_on(
    with_command: Callable[[list[str]], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_command(CRASHING)
    run = train(tmp_path, SnipConfig(**SCHEDULE | {"solver": "highs"}), **SHORT)
    assert notes(caplog)[0][1] == (
        "snip-hf: trying out the solver 'highs' failed, and refreshes may fail so too: The solver process crashed "
        "(signal SIGABRT): nothing on stderr"
    )
    assert [line["status"] for line in run.refreshes] == ["kept"]


@pytest.mark.parametrize(
    ("cbc", "highs", "asked", "warnings"),
    [
        (None, None, "auto", 0),
        ("crashed", None, "highs", 1),
        ("missing", None, "auto", 0),
        ("missing", "crashed", "greedy", 1),
        ("crashed", "missing", "greedy", 1),
        ("crashed", "crashed", "greedy", 1),
        ("missing", "missing", "greedy", 1),
    ],
)
def test_auto_asks_the_first_solver_whose_trial_succeeds_and_warns_once(
    cbc: str | None,
    highs: str | None,
    asked: str,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def try_out(name: str, paths: tuple[str, ...]) -> str:
        if reason := {"cbc": cbc, "highs": highs}[name]:
            raise SolverError(reason, f"{name} {reason}")
        return "1.0"

    monkeypatch.setattr(solver, "try_out", try_out)
    assert solver.check_solver(SnipConfig(solver="auto"), logging.getLogger("snip_hf")) == asked
    assert len(notes(caplog)) == warnings


def test_a_solver_that_works_is_tried_out_once_and_named_in_the_log(
    with_command: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    started: list[Any] = []
    start = SolverProcess.start
    monkeypatch.setattr(SolverProcess, "start", lambda *words: started.append(words) or start(*words))
    log = logging.getLogger("snip_hf")
    for _ in range(2):
        for name in ("auto", "cbc", "highs", "greedy"):
            solver.check_solver(SnipConfig(solver=name), log)
    solver.check_solver(SnipConfig(policy="greedy", solver="cbc"), log)
    assert [problem["solver"] for (problem,) in started] == ["cbc", "highs"]
    cbc, highs = f"'cbc' (mip {mip.__version__})", f"'highs' (scipy {scipy.__version__})"
    taken = [f"solver='auto' takes {cbc}", f"solver='cbc' takes {cbc}", f"solver='highs' takes {highs}"]
    assert notes(caplog) == [(logging.INFO, f"snip-hf: {text}") for text in taken * 2]


def test_a_policy_that_solves_nothing_needs_no_solver(
    with_command: Callable[[list[str]], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_command(WITHOUT_BOTH)
    run = train(tmp_path, SnipConfig(policy="layer-type", solver="cbc"), **SHORT)
    assert snip_linears(run.model) and notes(caplog) == []
