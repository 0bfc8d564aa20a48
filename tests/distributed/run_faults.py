"""Trains under faults on all ranks. Started by the tests in one process, which forks the ranks: imports take longest.

Argument: a folder. Each group of `WAVES` is two ranks of its own; groups of a wave run at once. A rank writes into the
group's folder, as rank<N>.json, what became of it; ended.json holds group -> exit statuses and times of all ranks.

With "nccl" as second argument the process is itself one of two ranks, on a GPU, and only the faults of `ON_GPUS`
strike: a process that has forked cannot use a GPU.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from devices import NCCL, join
from loops import CONFIG, Loop, history, replaced
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor

from snip_hf import SnipConfig
from snip_hf.estimation import divergence, optimizer_step
from snip_hf.estimation.layer_sums import LayerSums
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import RankError
from snip_hf.planning.solver import ilp
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.records import run_folder
from snip_hf.training import refresh, setup
from snip_hf.training.refresh import Refresher

STEPS = 8
# Training waits for a solver no longer than the solver's own limit.
refresh.GRACE, setup.RANK_GRACE = 0.0, 30.0
# Refreshes at steps 2 and 6, applied after steps 4 and 8; or at step 6 only.
PATIENT = replace(CONFIG, solver_time_limit=30.0)
WITHOUT_FIRST = replace(PATIENT, first_refresh=6)
LATE = replace(PATIENT, apply_delay=4)  # as many steps as there are between refreshes
QUICK = replace(CONFIG, solver_time_limit=4.0)
BOUND = 6.0  # seconds that a rank then waits for the others: the sum of the two
LAYER = "model.layers.1.mlp.down_proj"
_PATIENCE = 180.0  # seconds for each wave of groups
_START = SolverProcess.start

Fault = Callable[[Loop], AbstractContextManager[None]]


@dataclass
class _Found:
    losses: dict[int, float]
    plans: dict[int, Any]
    history: list[dict[str, Any]]
    messages: list[str]
    """Warnings of this rank."""
    seconds: float


# --- faults that training survives; each is for one run, and those with a rank strike there alone


@contextmanager
def none(loop: Loop) -> Iterator[None]:
    yield


@contextmanager
def poison(loop: Loop, where: str, value: float = math.nan, rank: int = 1) -> Iterator[None]:
    """Puts a number that is not finite into step 2 of one rank, or into the probe's own passes of that step only."""

    def is_on(*places: str) -> bool:
        return where in places and loop.at == 2 and loop.rank == rank

    def in_a_probe() -> bool:
        return snip_linears(loop.bare)[LAYER].snip_recorder is not None

    def forward(layer: Any, args: Any, output: Tensor) -> Tensor:
        if is_on("activation") or (is_on("probe's activation") and in_a_probe()):
            return output * value
        if output.requires_grad and (is_on("gradient") or (is_on("probe's gradient") and in_a_probe())):
            output.register_hook(lambda gradient: gradient * value)
        return output

    def after_backward() -> None:
        if is_on("shard"):
            gradient = snip_linears(loop.bare)[LAYER].weight.grad
            assert isinstance(gradient, DTensor)
            gradient.to_local().fill_(value)

    compute = loop.bare.loss_function
    loop.bare.loss_function = lambda **kwargs: compute(**kwargs) * (value if is_on("loss") else 1.0)
    loop.bare.get_submodule(LAYER).register_forward_hook(forward)
    loop.after_backward = after_backward  # type: ignore[method-assign]
    yield


@contextmanager
def no_labels(loop: Loop) -> Iterator[None]:
    """The controller of rank 1 gets a batch that has none."""
    capture = loop.capture

    def without(batch: dict[str, Tensor]) -> None:
        spoiled = loop.rank == 1 and loop.at == 2
        capture({name: value for name, value in batch.items() if not (spoiled and name == "labels")})

    loop.capture = without  # type: ignore[method-assign]
    yield


@contextmanager
def not_captured(loop: Loop, step: int = 2) -> Iterator[None]:
    capture = loop.capture

    def missing(batch: dict[str, Tensor]) -> None:
        if (loop.rank, loop.at) != (1, step):
            capture(batch)

    loop.capture = missing  # type: ignore[method-assign]
    yield


@contextmanager
def out_of_memory(loop: Loop, name: str, rank: int = 1, owner: Any = divergence) -> Iterator[None]:
    """A function of the estimate fails on one rank at step 2, as on a device without memory."""
    original = vars(owner)[name]

    def fails(*args: Any, **kwargs: Any) -> Any:
        if loop.rank == rank and loop.at == 2:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return original(*args, **kwargs)

    with replaced(owner, name, fails):
        yield


@contextmanager
def hanging_solver(loop: Loop) -> Iterator[None]:
    """The solver of the first refresh, on rank 0, gives no answer."""

    def start(problem: dict[str, Any]) -> SolverProcess:
        assert loop.rank == 0
        if loop.at != 2:
            return _START(problem)
        return _START(problem, [sys.executable, "-S", "-c", "import time; time.sleep(600)"])

    with replaced(SolverProcess, "start", staticmethod(start)):
        yield


@contextmanager
def slow_solver(loop: Loop) -> Iterator[None]:
    """Rank 0 gets its answer two seconds late."""
    result = SolverProcess.result

    def late(process: SolverProcess, timeout: float = 600.0) -> Any:
        if loop.at <= 5:
            time.sleep(2)
        return result(process, timeout)

    with replaced(SolverProcess, "result", late):
        yield


@contextmanager
def full_disk(loop: Loop) -> Iterator[None]:
    def fails(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ExitStack() as stack:
        for name in ("append_json_line", "write_json_atomic"):
            stack.enter_context(replaced(run_folder, name, fails))
        yield


SURVIVED: dict[str, tuple[str, SnipConfig, Fault]] = {
    "ddp undisturbed": ("ddp", PATIENT, none),
    "ddp without first": ("ddp", WITHOUT_FIRST, none),
    "fsdp2 undisturbed": ("fsdp2", PATIENT, none),
    "fsdp2 without first": ("fsdp2", WITHOUT_FIRST, none),
}
# Those of training itself change it: they are compared with a run that has them and no refresh at that step.
POISONS = {"ddp loss": ("ddp", partial(poison, where="loss")), "fsdp2 shard": ("fsdp2", partial(poison, where="shard"))}
for _name, (_wrapper, _fault) in POISONS.items():
    SURVIVED[_name] = (_wrapper, PATIENT, _fault)
    SURVIVED[f"{_name} without first"] = (_wrapper, WITHOUT_FIRST, _fault)
ON_BOTH = ("probe's loss", "out of memory in the sums")
FAULTS: dict[str, Fault] = {
    "probe's loss": partial(poison, where="probe's activation"),
    "probe's loss on rank 0": partial(poison, where="probe's activation", rank=0),
    "probe's gradient": partial(poison, where="probe's gradient"),
    "no labels": no_labels,
    "not captured": not_captured,
    "out of memory in the sums": partial(out_of_memory, name="errors", owner=LayerSums),
}
SURVIVED |= {
    f"{wrapper} {name}": (wrapper, PATIENT, fault)
    for index, (name, fault) in enumerate(FAULTS.items())
    for wrapper in (("ddp", "fsdp2") if name in ON_BOTH else ("ddp",) if index % 2 else ("fsdp2",))
}
_NO_PUSHFORWARD = partial(out_of_memory, name="pushforward", owner=optimizer_step.RelativeUpdates)
SURVIVED |= {
    "ddp solver hangs": ("ddp", replace(PATIENT, solver_time_limit=5.0), hanging_solver),
    "ddp out of memory in the probe": ("ddp", PATIENT, partial(out_of_memory, name="run_probe")),
    "ddp out of memory after the probe": ("ddp", PATIENT, _NO_PUSHFORWARD),
    "ddp not captured when a plan is due": ("ddp", LATE, partial(not_captured, step=6)),
    "ddp solver slow": ("ddp", PATIENT, slow_solver),
    "ddp full disk": ("ddp", PATIENT, full_disk),
}


ON_GPUS = [
    f"{wrapper} {name}"
    for wrapper in ("ddp", "fsdp2")
    for name in ("without first", "probe's loss", "out of memory in the sums")
]


def survive(folder: Path, names: Sequence[str]) -> None:
    found = {}
    for name in names:
        wrapper, config, fault = SURVIVED[name]
        messages: list[str] = []
        handler = Keeping(messages)
        logging.getLogger("snip_hf").addHandler(handler)
        own = folder / name.replace(" ", "-").replace("'", "") / f"rank{dist.get_rank()}"
        loop = Loop(own, config, wrapper)
        began = time.monotonic()
        with fault(loop):
            loop.run(STEPS)
        loop.close()
        seconds = time.monotonic() - began
        logging.getLogger("snip_hf").removeHandler(handler)
        lines = history(own) if (own / "snip" / "history.jsonl").exists() else []
        found[name] = asdict(_Found(loop.losses, loop.plans, lines, messages, seconds))
    _note(folder, found)
    dist.barrier()


class Keeping(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


# --- faults that end the run: nobody has more than two ranks, so that nobody is left to train


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# Group -> the rank it strikes, how, and where in a refresh that is applied in its own step.
ENDED: dict[str, tuple[int, Callable[..., None], Any, str]] = {
    "rank 1 is killed in the probe": (1, die, divergence, "run_probe"),
    "rank 1 stops in the probe": (1, stop, divergence, "run_probe"),
    "rank 1 stops before the plan": (1, stop, Refresher, "_apply"),
    "rank 0 is killed while others wait for the plan": (0, die, SolverProcess, "result"),
}


def end(folder: Path, name: str) -> None:
    """Notes how the rank that is not struck ends, and when, and the solver's process."""
    rank, strike, owner, attribute = ENDED[name]
    setup.RANK_GRACE = 2.0
    loop = Loop(folder / "run", replace(QUICK, first_refresh=1, apply_delay=0))
    started = _noting_solver(folder)
    if loop.rank == rank:
        setattr(owner, attribute, strike)
    dist.barrier()
    began = time.monotonic()
    try:
        with started:
            loop.run(1)
    except RankError as error:
        _note(folder, {"error": str(error), "began": began, "seconds": time.monotonic() - began})
        raise


@contextmanager
def _noting_solver(folder: Path) -> Iterator[None]:
    """Lets the solver hang, and notes the id of its process."""

    def start(problem: dict[str, Any]) -> SolverProcess:
        process = _START(problem | {"time_limit": 600.0}, _hanging(folder))
        (folder / "solver").write_text(str(process._process.pid))
        return process

    with replaced(SolverProcess, "start", staticmethod(start)):
        yield


def _hanging(folder: Path) -> list[str]:
    """Returns the command of `ilp.py`, but that it never finds a solution."""
    source = Path(ilp.__file__).parent
    program = folder / "hanging.py"
    program.write_text(
        f"import sys, time\nsys.path.insert(0, {str(source)!r})\nimport ilp\n"
        "ilp.solve = lambda problem: time.sleep(600)\nilp.main()\n"
    )
    return [sys.executable, str(program), str(os.getpid()), "600"]


def _note(folder: Path, found: Any) -> None:
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


# --- groups of ranks

# Those of a wave run at once.
WAVES: list[dict[str, Callable[[Path], None]]] = [
    {
        wrapper: partial(survive, names=[name for name in SURVIVED if name.startswith(wrapper)])
        for wrapper in ("ddp", "fsdp2")
    },
    {name: partial(end, name=name) for name in ENDED},
]


@dataclass
class _Group:
    """Two ranks, and per rank its exit status and the time of its end; None for one that was still there at the end."""

    pids: list[int]
    codes: list[int | None]
    times: list[float | None]

    def reap(self) -> bool:
        """Tells whether all that can end by themselves have ended."""
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank], self.times[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        left = [pid for pid, code in zip(self.pids, self.codes, strict=True) if code is None]
        return all(_is_stopped(pid) for pid in left) and len(left) < len(self.pids)

    def kill(self) -> None:
        for pid, code in zip(self.pids, self.codes, strict=True):
            if code is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def _fork(folder: Path, work: Callable[[Path], None]) -> _Group:
    """Starts two ranks. Returns in the parent only."""
    folder.mkdir(parents=True)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    pids = []
    for rank in (0, 1):
        pids.append(os.fork())
        if pids[-1]:
            continue
        log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank == 0:
            store = TCPStore("127.0.0.1", port, 2, is_master=True, master_listen_fd=listening.detach())
        else:
            listening.close()
            store = TCPStore("127.0.0.1", port, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        work(folder)
        sys.exit()  # as any program ends, with what is to be done then
    listening.close()
    return _Group(pids, [None, None], [None, None])


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if NCCL in sys.argv:
        join(sys.argv)
        survive(folder, ON_GPUS)
        return dist.destroy_process_group()
    parent, ended = os.getpid(), {}
    for wave in WAVES:
        groups: dict[str, _Group] = {}
        deadline = time.monotonic() + _PATIENCE
        try:
            groups |= {name: _fork(folder / name, work) for name, work in wave.items()}
            while sum(not group.reap() for group in groups.values()) and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            if os.getpid() == parent:
                for group in groups.values():
                    group.kill()
        ended |= {name: {"codes": group.codes, "times": group.times} for name, group in groups.items()}
    (folder / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
