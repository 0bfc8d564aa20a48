"""The faults that are let loose on the refreshes of a long run, and what each of them may cost.

They are injected for real: processes are killed, hang or print something else, descriptors run out, activations are
NaN. What cannot be had for real without being root is stood in for: a full disk, and a wall clock that jumps.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import psutil
from torch import Tensor

from snip_hf.layers.linear import SnipLinear
from snip_hf.planning.solver import ilp
from snip_hf.planning.solver.process import SolverProcess

START = SolverProcess.start
# The real solver, half a second late: long after its plan is due.
_LATE = f"import runpy, time; time.sleep(0.5); runpy.run_path({ilp.__file__!r}, run_name='__main__')"


@dataclass(frozen=True)
class Place:
    """Where and how a fault strikes."""

    layer: SnipLinear
    """The one that has NaN among its activations."""
    is_struck: bool
    """Whether this rank's micro-batch is the one with the NaN."""
    rng: random.Random


@dataclass(frozen=True)
class Fault:
    lasts: Callable[[Place], AbstractContextManager[Any]]
    """The context that the steps of the refresh run in."""
    reason: str | None = None
    """Part of the reason for which the plan is kept; None: the new plan is applied in spite of the fault."""
    is_in_data: bool = False
    """Whether it belongs to the data, so that a run without faults sees it too."""
    is_of_step: bool = False
    """Whether it is over after the step of the probe, and not only when the plan is due."""


def _solver(start: Callable[[dict[str, Any]], SolverProcess], reason: str | None) -> Fault:
    return Fault(lambda place: mock.patch.object(SolverProcess, "start", start), reason)


def _killed(problem: dict[str, Any]) -> SolverProcess:
    before = set(psutil.Process().children())
    process = START(problem)
    for child in set(psutil.Process().children()) - before:
        child.kill()
    return process


def _hanging(problem: dict[str, Any]) -> SolverProcess:
    """With a process of its own, which must not survive it either."""
    return START(problem | {"time_limit": 0.1}, ["sh", "-c", "sleep 600 & wait"], allowance=0.2)


def _without_descriptors(problem: dict[str, Any]) -> SolverProcess:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # 0, 1 and 2 are open
    try:
        return START(problem)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _nan(place: Place, in_training: bool) -> AbstractContextManager[Any]:
    """One activation is NaN: in the whole step, or in the probe's passes alone."""

    def spoiled(layer: Any, args: Any, output: Tensor) -> Tensor:
        if not in_training and layer.snip_recorder is None:
            return output
        return output.index_fill(-1, output.new_zeros(1).long(), float("nan"))

    return _hooked(place.layer, spoiled) if place.is_struck else nullcontext()


@contextmanager
def _hooked(layer: SnipLinear, hook: Any) -> Iterator[None]:
    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _FullDisk:
    """Stands in for the module `os` where the package writes files: one call on files of one name finds no space."""

    def __init__(self, call: str, name: str) -> None:
        self._call, self._name = call, name

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._failing(real) if name == self._call else real

    def opened(self, *args: Any, **kwargs: Any) -> Any:
        return (self._failing(open) if self._call == "open" else open)(*args, **kwargs)

    def _failing(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if real is os.write:  # as a disk does: part of it still fits
                real(args[0], args[1][: len(args[1]) // 2])
            elif self._name not in str(args[0]):
                return real(*args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return call


@contextmanager
def _full_disk(call: str, name: str) -> Iterator[None]:
    full = _FullDisk(call, name)
    with (
        mock.patch("snip_hf.json_io.os", full),
        mock.patch("snip_hf.json_io.open", full.opened, create=True),
    ):
        yield


@contextmanager
def _jumping_clock(place: Place) -> Iterator[None]:
    """The wall clock is up to a month off, in either direction, anew whenever it is asked."""
    month = 30 * 86400.0
    now, now_ns = time.time, time.time_ns
    rng = random.Random(place.rng.random())
    with (
        mock.patch.object(time, "time", lambda: now() + rng.uniform(-month, month)),
        mock.patch.object(time, "time_ns", lambda: now_ns() + int(1e9 * rng.uniform(-month, month))),
    ):
        yield


RESUMED, ABANDONED = "trainer resumed", "trainer gone and resumed"
FAULTS = {
    "none": Fault(lambda place: nullcontext()),
    "solver killed": _solver(_killed, "crashed (signal SIGKILL)"),
    "solver hangs": _solver(_hanging, "ran past its limit of 0.3 s"),
    "solver prints garbage": _solver(lambda problem: START(problem, ["echo", "Welcome"]), "no JSON object"),
    "solver cannot start": _solver(lambda problem: START(problem, ["/nowhere/solver"]), "could not be started"),
    "no descriptor is left": _solver(_without_descriptors, "could not be started: [Errno 24]"),
    "solver is late": _solver(lambda problem: START(problem, [sys.executable, "-c", _LATE]), None),
    "NaN in the micro-batch": Fault(lambda place: _nan(place, True), "finite", is_in_data=True, is_of_step=True),
    "NaN in the probe": Fault(lambda place: _nan(place, False), "finite", is_of_step=True),
    "no space for the history": Fault(lambda place: _full_disk("write", "")),
    "no space for the plan": Fault(lambda place: _full_disk("replace", ".plan.json.")),
    "no space for the table": Fault(lambda place: _full_disk("open", "divergence-")),
    "clock jumps": Fault(_jumping_clock),
    # The next two are the loop's to do: it writes the controller's state, and makes a new controller from it.
    RESUMED: Fault(lambda place: nullcontext()),
    ABANDONED: Fault(lambda place: nullcontext()),
}


def draws(rng: random.Random) -> Iterator[str]:
    """Yields the names of all faults in random order, and again in another one, without end."""
    while True:
        yield from rng.sample(sorted(FAULTS), len(FAULTS))
