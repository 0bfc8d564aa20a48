"""A solver that cannot be used is reported before training, and "auto" falls back to HiGHS."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import mip
import pytest
import scipy
from configs import fp4_config
from registries import restored
from solver_problems import make_problem
from tiny_runs import SCHEDULE, train

from snip_hf.config import POLICIES
from snip_hf.planning.solver import process as solver
from snip_hf.planning.solver.process import SolverError, SolverProcess
from snip_hf.policies.registry import Policy, register_policy

SHORT = {"max_steps": 4}
LOG = logging.getLogger("snip_hf")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    solver.try_out.cache_clear()
    yield
    solver.try_out.cache_clear()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], list[str]]:
    """Lets solvers fail their trials for these reasons; returns a list that fills with those that are tried."""

    def install(reasons: dict[str, str]) -> list[str]:
        tried: list[str] = []

        def try_out(name: str) -> str:
            tried.append(name)
            if name in reasons:
                raise SolverError(reasons[name], f"{name} {reasons[name]}")
            return "1.0"

        monkeypatch.setattr(solver, "try_out", try_out)
        return tried

    return install


def notes(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if "solver" in record.getMessage()]


def test_a_working_directory_that_is_gone_does_not_stop_the_solver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert SolverProcess.start(make_problem(solver="cbc")).result().solver == "cbc"


def test_the_reason_why_a_package_does_not_load_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mip.py").write_text("raise ValueError('built for another numpy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SolverError) as caught:
        SolverProcess.start(make_problem(solver="cbc")).result()
    assert caught.value.reason == "missing"
    assert "(ValueError: built for another numpy). Install it (pip install" in str(caught.value)
    assert SolverProcess.start(make_problem()).result().solver == "highs"


@pytest.mark.parametrize("name", ["cbc", "highs"])
def test_a_solver_that_is_not_there_is_refused_before_training(
    name: str, failing: Callable[[dict[str, str]], list[str]], tmp_path: Path
) -> None:
    failing({name: "missing"})
    with pytest.raises(ValueError, match=f"{name} missing"):
        train(tmp_path, fp4_config(**SCHEDULE | {"solver": name}), **SHORT)
    assert not (tmp_path / "snip").exists()


def test_the_solver_that_a_policy_asks_for_is_the_one_that_is_tried_out(
    failing: Callable[[dict[str, str]], list[str]],
) -> None:
    tried = failing({})
    with restored(POLICIES):
        register_policy(Policy(name="exact", cost=lambda config, table: lambda row: row.flops, solver="highs"))
        assert solver.check_solver(fp4_config(policy="exact", solver="greedy"), LOG) == "highs"
    assert solver.check_solver(fp4_config(policy="greedy", solver="cbc"), LOG) == "greedy"
    assert tried == ["highs"]


def test_a_trial_that_fails_otherwise_is_told_and_training_goes_on(
    failing: Callable[[dict[str, str]], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    failing({"highs": "crashed"})
    assert solver.check_solver(fp4_config(solver="highs"), LOG) == "highs"
    assert notes(caplog) == [
        (logging.WARNING, "snip-hf: trying out the solver 'highs' failed, so refreshes may fail too: highs crashed")
    ]


@pytest.mark.parametrize(
    ("reasons", "asked", "level"),
    [
        ({}, "auto", logging.INFO),
        ({"cbc": "crashed"}, "highs", logging.WARNING),
        ({"cbc": "missing"}, "highs", logging.INFO),
    ],
)
def test_auto_goes_on_with_highs_and_warns_if_cbc_is_there_and_fails(
    reasons: dict[str, str],
    asked: str,
    level: int,
    failing: Callable[[dict[str, str]], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    failing(reasons)
    assert solver.check_solver(fp4_config(solver="auto"), LOG) == asked
    assert [at for at, _ in notes(caplog)] == [level]


def test_a_solver_that_works_is_tried_out_once_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    for _ in range(2):
        for name in ("auto", "cbc", "highs", "greedy"):
            solver.check_solver(fp4_config(solver=name), LOG)
    assert solver.try_out.cache_info().misses == 2
    cbc, highs = f"'cbc' (mip {mip.__version__})", f"'highs' (scipy {scipy.__version__})"
    taken = [f"solver='auto' uses {cbc}", f"solver='cbc' uses {cbc}", f"solver='highs' uses {highs}"]
    assert notes(caplog) == [(logging.INFO, f"snip-hf: {text}") for text in taken * 2]
