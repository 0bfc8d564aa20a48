"""The long run with faults notices what grows, what differs, and what a fault should not have cost."""

from __future__ import annotations

import argparse
import gc
import os
import random
import tempfile
from array import array
from pathlib import Path
from typing import Any

import leaks_under_faults
import process_resources
import pytest
import torch
from injected_faults import FAULTS, draws
from processes import wait_until
from scipy.stats import theilslopes

from snip_hf.parallel import ranks as distributed
from snip_hf.records.run_folder import RunFolder
from snip_hf.training.refresh import Refresher

DEFAULTS = {"refresh_every": 4, "apply_delay": 2, "processes": 1, "solver": "greedy", "blocks": 1, "device": "cpu"}
# So short a run shows nothing of memory: what is allocated for the first time weighs more than what is not given back.
UNCLEAR = ("memory (malloc), KiB", "memory (RSS), KiB", "Python objects")


def options(steps: int, seed: int = 0) -> argparse.Namespace:
    return argparse.Namespace(**DEFAULTS, steps=steps, seed=seed)


@pytest.mark.slow
def test_every_fault_costs_what_it_may_and_nothing_else() -> None:
    """15 refreshes, one per fault."""
    row = leaks_under_faults.work(options(steps=62))
    assert row["faults"].keys() == FAULTS.keys()
    for name, fault in row["faults"].items():
        kept = FAULTS[name].reason is not None
        assert fault == {"struck": 1, "applied": int(not kept), "kept": int(kept), "as_expected": 1}, name
    equal = {"equal_steps": 62, "first_different": None, "equal_weights": True}
    assert row["comparisons"] == {"replayed": equal, "without faults": equal}
    assert row["plans"] > 3 and row["skipped_steps"] == 1
    assert {name: found["flat"] for name, found in row["resources"].items() if name not in UNCLEAR} == {
        **dict.fromkeys(["file descriptors", "threads", "processes started"], True),
        **dict.fromkeys(["files in snip/", "files in the temporary folder"], True),
        **dict.fromkeys(["divergence tables", "history, KiB"]),
    }
    # None but what other tests in this process started before.
    assert len(set(row["resources"]["processes started"]["values"])) == 1
    report = leaks_under_faults.report(row | {"commit": None, "machine": None})
    assert report.count("\n| ") == len(row["resources"]) + 15 + 2 + 3


@pytest.mark.slow
def test_what_refreshes_leave_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One descriptor, one file here and one there per refresh."""
    left: list[Any] = []
    write = RunFolder.write_divergences

    def leaking(folder: RunFolder, step: int, table: Any) -> None:
        write(folder, step, table)
        left.append(os.dup(0))
        tempfile.mkdtemp()
        (folder._folder / f"left-{step}").touch()

    monkeypatch.setattr(RunFolder, "write_divergences", leaking)
    try:
        found = leaks_under_faults.work(options(steps=31))["resources"]
    finally:
        for descriptor in left:
            os.close(descriptor)
    leaks = {name for name, resource in found.items() if resource["flat"] is False} - set(UNCLEAR)
    assert leaks == {"file descriptors", "files in snip/", "files in the temporary folder"}


def test_a_refresh_that_leaves_a_trace_is_noticed_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One random number taken in the first refresh shows in the attention dropout of the next step."""
    begin = Refresher.begin

    def drawing(refresher: Refresher, step: int, *args: Any) -> None:
        if step == 4:
            torch.rand(1)
        begin(refresher, step, *args)

    monkeypatch.setattr(Refresher, "begin", drawing)
    row = leaks_under_faults.work(options(steps=10))
    assert row["comparisons"]["replayed"]["first_different"] == 5
    assert not row["comparisons"]["replayed"]["equal_weights"]
    assert not row["passed"]


@pytest.mark.parametrize(
    ("added_at", "is_flat"),
    [((), True), ((40, 700), True), ((1200,), False), ((150, 1900), False), (range(0, 2000, 90), False)],
)
def test_a_count_is_flat_if_nothing_is_added_from_the_middle_on(added_at: Any, is_flat: bool) -> None:
    steps = list(range(10, 2000, 20))
    values = [7 + sum(at < step for at in added_at) for step in steps]
    assert process_resources.judged(steps, values, 0.0)["flat"] == is_flat
    assert process_resources.judged(steps, values, None)["flat"] is None


def test_a_figure_that_varies_is_judged_by_its_line() -> None:
    steps, rng = list(range(10, 2000, 20)), random.Random(0)
    noise = [rng.choice([0, 0, 0, 0, 50_000]) for _ in steps]
    for slope in (900, 1100):
        values = [500_000 + slope * step // 1000 + extra for step, extra in zip(steps, noise, strict=True)]
        found = process_resources.judged(steps, values, 1024.0)
        expected = theilslopes(values[25:], steps[25:])
        assert found["per_1000_steps"] == pytest.approx(1000 * expected.slope)
        assert found["flat"] == (slope == 900)
    # What is added in 30 steps is taken as it is, not as what it would be in 1,000.
    assert process_resources.judged([0, 10, 20, 30], [0, 0, 100, 200], 1024.0)["flat"]


def test_runs_are_equal_only_to_the_bit_and_nan_is_nan() -> None:
    def run(*losses: float) -> leaks_under_faults.Run:
        return leaks_under_faults.Run(array("d", losses), array("d", [1.0] * len(losses)), "digest")

    one = run(1.0, float("nan"), 0.1)
    assert leaks_under_faults.compared(one, run(1.0, float("nan"), 0.1))["first_different"] is None
    other = run(1.0, float("nan"), 0.1 + 2**-56)
    assert leaks_under_faults.compared(one, other) == {"equal_steps": 2, "first_different": 3, "equal_weights": True}


def test_a_fault_that_costs_another_refresh_than_its_own_or_none_is_not_as_expected() -> None:
    faults = {20: "none", 40: "solver killed", 60: "solver killed", 80: "clock jumps"}
    applied = {20: False, 40: True, 60: False, 80: True}
    reasons = {20: "whatever", 60: "SolverError: The solver process crashed (signal SIGKILL): nothing"}
    table = leaks_under_faults.fault_table(leaks_under_faults.Run(faults=faults, applied=applied, reasons=reasons))
    assert {name: (row["struck"], row["as_expected"]) for name, row in table.items()} == {
        "none": (1, 0),
        "solver killed": (2, 1),
        "clock jumps": (1, 1),
    }
    run = leaks_under_faults.Run(faults={60: "solver killed"}, applied={60: False}, reasons={60: "NaN"})
    table = leaks_under_faults.fault_table(run)
    assert table["solver killed"]["as_expected"] == 0


def test_all_faults_are_drawn_before_one_comes_again() -> None:
    names = draws(random.Random(0))
    first, second = ([next(names) for _ in FAULTS] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(FAULTS)
    assert first != second


def test_memory_that_is_not_given_back_shows_in_what_malloc_has_given_out() -> None:
    gc.collect()  # what earlier tests left would else be given back in between
    before = process_resources.in_malloc()
    if before is None:
        pytest.skip("no glibc 2.33")
    block = torch.ones(2**20, dtype=torch.uint8)
    assert process_resources.in_malloc() - before == pytest.approx(1024, abs=64)
    del block
    assert process_resources.in_malloc() == pytest.approx(before, abs=64)


# --- what it found


class _Group:
    """Stands for a process group."""


def test_controllers_of_the_same_processes_share_one_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would hold sockets and threads; one that was ended cannot be made again under its name."""
    made: list[float] = []

    def new_group(members: list[int], timeout: Any, **options: Any) -> _Group:
        made.append(timeout.total_seconds())
        return _Group()

    for name, answer in {"get_rank": 0, "get_world_size": 2, "get_process_group_ranks": [0, 1]}.items():
        monkeypatch.setattr(distributed.dist, name, lambda group, answer=answer: answer)
    monkeypatch.setattr(distributed.dist, "new_group", new_group)
    known = len(distributed._control_groups)
    world, stage = _Group(), _Group()
    first = distributed.Ranks(world, 60.0)
    control = first._control
    assert distributed.Ranks(world, 60.0)._control is control
    assert made == [60.0]
    assert distributed.Ranks(world, 90.0)._control is not control
    assert distributed.Ranks(stage, 60.0)._control is not control
    assert made == [60.0, 90.0, 60.0]
    del world, stage, first  # they are kept no longer than the processes' own groups
    gc.collect()
    wait_until(lambda: len(distributed._control_groups) == known)  # the thread of a timer that was ended ends later


def test_a_solver_that_nobody_waits_for_any_more_leaves_no_open_file() -> None:
    from snip_hf.planning.solver.process import SolverProcess

    # Other tests in this process may have started what serves them all.
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before, others = len(os.listdir("/proc/self/fd")), children.read_text()
    process = SolverProcess.start({}, ["sleep", "600"])
    files = process._files
    del process
    gc.collect()
    assert all(file.closed for file in files)
    assert len(os.listdir("/proc/self/fd")) == before
    assert children.read_text() == others
