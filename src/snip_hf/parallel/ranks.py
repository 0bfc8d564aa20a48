"""The ranks that train one model, and their communication, except for the gradient hook and ZeRO's gathers.

Some ranks hold the same layers (or shards of them) and see different data, others hold different layers (stages of a
pipeline). Small data travel as objects over a gloo group of snip-hf's own with a timeout; tensors travel over the group
that training uses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..text import printable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_AT_START = "at the start (every rank needs a SnipCallback, or a SnipController in a loop of your own)"
# Name of the exchange of errors.
_AGREEMENT = "agreement"


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Operators between two ranks.
_NO_COLLECTIVES = ("send", "recv_", "recv_any_source_")


class RankError(RuntimeError):
    """Other processes did not answer in time, or are gone. Training cannot go on: the ranks no longer agree."""


class FailedElsewhere(ValueError):
    """Another rank failed, and all ranks know."""


class Attempt:
    """A context that keeps the first error inside it for `Ranks.agree`. Errors that all ranks know pass through."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, (RankError, FailedElsewhere)):
            return False
        self.error = self.error or error
        return True


class Ranks:
    """Some of the processes of a run, this one among them.

    Every method is collective: all of them call it, in the same order. A single process communicates with nobody.

    Args:
        group: their process group, which tensors travel over; None: only this process.
        timeout: seconds after which waiting for the others ends with a `RankError`.
    """

    log_after = 30.0
    """Seconds of waiting for the others before a log message."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._timeout = timeout
        self.place = _AT_START
        """The point at which the ranks exchange data next, for messages about waiting."""
        self._control: dist.ProcessGroup | None = None
        if group is not None and self.size > 1:
            self._control = self._bounded(lambda: _control_group(group, timeout))

    @classmethod
    def of_all(cls, timeout: float = 600.0) -> Ranks:
        """Returns all processes of the run."""
        is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return cls(dist.group.WORLD if is_one_of_many else None, timeout)

    def alike(self, kind: Any) -> Ranks:
        """Returns those of them that gave the same data, this one among them."""
        kinds = self.gather(kind)
        if self._group is None or kinds.count(kind) == 1:
            return Ranks()
        own = dist.get_process_group_ranks(self._group)
        members = tuple(rank for rank, other in zip(own, kinds, strict=True) if other == kind)
        known = _parts_of_groups.setdefault(self._group, {})
        if members not in known:
            known[members] = dist.new_group(list(members), use_local_synchronization=True)
        return Ranks(known[members], self._timeout)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any, what: str = "figures") -> list[Any]:
        """Returns the data that each of them gave, in the order of the ranks.

        Args:
            value: small data.
            what: its name; different names reveal ranks at different points of the program.

        Raises:
            RankError: one of them did not answer in time, or is at another point.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._bounded(lambda: dist.all_gather_object(found, (what, value), self._control))
        if len({name for name, _ in found}) > 1:
            raise RankError(
                f"The ranks are at different points: {', '.join(name for name, _ in found)}. One of them failed where "
                "the others went on; look into the logs of all of them, and start them again from the last checkpoint."
            )
        return [given for _, given in found]

    def by_first(self, make: Callable[[], Result]) -> Result:
        """Returns, on all ranks, the data that `make` returns on the first one.

        Raises:
            RuntimeError: it failed there; all of them raise this, the first rank the error itself.
            RankError: one of them did not answer in time.
        """
        if self.size == 1:
            return make()
        attempt, value = Attempt(), None
        with attempt:
            value = make() if self.is_first else None
        error = attempt.error
        found, problem = self.gather([value, None if error is None else describe(error)], "decision")[0]
        if error is not None:
            raise error
        if problem is not None:
            raise RuntimeError(f"On rank 0: {problem}")
        return found

    def agree(self, error: Exception | None) -> None:
        """Raises on all of them if one of them has an error.

        Raises:
            ValueError: names the first rank with an error, and the error; that rank raises its error itself.
            RankError: one of them did not answer in time.
        """
        problems = self.gather(None if error is None else describe(error), _AGREEMENT)
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ValueError(f"On rank {rank}: {problem}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Lets all of them raise, as `agree` does, if one of them fails inside."""
        attempt = Attempt()
        with attempt:
            yield
        self.agree(attempt.error)

    def check_others(self) -> None:
        """Raises if another rank has called `agree` with an error; to be called by ranks without one.

        Raises:
            FailedElsewhere: names the first rank with an error, and the error.
            RankError: one of them did not answer in time.
        """
        for rank, problem in enumerate(self.gather(None, _AGREEMENT)):
            if problem is not None:
                raise FailedElsewhere(f"On rank {rank}: {problem}")

    def all_to_all(self, make: Callable[[], Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        """Sends one flat tensor to each rank and returns the tensors that they sent here.

        Args:
            make: returns rank -> (any,), all of one dtype and device. If it fails, all of them raise.
            sizes: rank -> number of elements that come from there.
        """
        if self.size == 1:
            return list(make())
        attempt, lengths = Attempt(), list(sizes)
        with attempt:
            pieces = make()
            sent, lengths = torch.cat(list(pieces)), [len(piece) for piece in pieces]
            received = sent.new_empty(sum(sizes))
        # The exchange itself has the timeout of training's group; missing ranks are noticed here.
        failed = torch.tensor([attempt.error is not None], dtype=torch.int32, device="cpu")
        self._bounded(lambda: dist.all_reduce(failed, dist.ReduceOp.MAX, self._control))
        if failed:
            self.agree(attempt.error)
        self._bounded(lambda: dist.all_to_all_single(received, sent, list(sizes), lengths, group=self._group))
        return list(received.split(list(sizes)))

    def _bounded(self, call: Callable[[], Result]) -> Result:
        timer = threading.Timer(self.log_after, self._log_waiting)
        timer.daemon = True
        timer.start()
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:200]
            raise RankError(
                f"Rank {self.rank} of {self.size} waited for the others, for at most {self._timeout:g} s, and one of "
                f"them did not answer or is gone, {self.place}: {reason}. Look into the logs of the other ranks; start "
                "them again from the last checkpoint."
            ) from error
        finally:
            timer.cancel()

    def _log_waiting(self) -> None:
        logger.warning(
            "snip-hf: rank %d of %d has waited for the others for %g s, %s; it gives up after %g s.",
            self.rank,
            self.size,
            self.log_after,
            self.place,
            self._timeout,
        )


# Process group -> timeout -> the gloo group of the same processes.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]] = WeakKeyDictionary()


# Process group -> ranks of some of its processes -> their group.
_parts_of_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def _control_group(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """Returns the gloo group of the processes of `group`, which lives as long as that does. Collective.

    Each new one holds sockets and threads, and a process may train many times. It cannot be ended with its run: the
    next one of the same processes would get the same name, find the addresses of the ended one in the store, and be
    refused there.
    """
    known = _control_groups.setdefault(group, {})
    if timeout not in known:
        members = dist.get_process_group_ranks(group)
        known[timeout] = dist.new_group(
            members, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True
        )
    return known[timeout]


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Checks, before each collective of all ranks inside the context, that no rank has failed.

    For collectives in code of others: a loss that gathers over the ranks, as TRL's of DPO and KTO do, would wait for a
    rank that failed before it got there until training's process group gives up, which ends the run. A rank that fails
    inside must call `ranks.agree` next; the others hear of it at their next collective.

    Args:
        ranks: all processes that run the code inside.

    Raises:
        FailedElsewhere: on all ranks but the one that failed.
        RankError: another rank did not answer.
    """
    if ranks.size == 1:
        yield
        return
    mode = _CollectiveChecks(ranks)
    with mode:
        yield
    mode.check()


class _CollectiveChecks(TorchDispatchMode):
    # Operators with functions as arguments, such as flex attention, pass like others.
    supports_higher_order_operators = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._failure: FailedElsewhere | None = None

    def check(self) -> None:
        """Raises a failure that the code inside has caught."""
        if self._failure is not None:
            raise self._failure

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operators on local tensors, collectives among them
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _COLLECTIVES:
            group = None if func._opname in _NO_COLLECTIVES else _group_of(args)
            if group is not None and group.size() == self._ranks.size:
                self._check_ranks()
        return func(*args, **(kwargs or {}))

    def _check_ranks(self) -> None:
        self.check()
        try:
            self._ranks.check_others()
        except FailedElsewhere as failure:
            self._failure = failure
            raise


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Returns the process group of a collective: an object, or named by the last string among the arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(names[-1]) if names else None


def describe(error: Exception) -> str:
    """Returns an error on one line, shortened, for the log, the history and other ranks."""
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, grouped by their role in a probe."""

    data: Ranks = field(default_factory=Ranks)
    """Ranks with the same layers, or shards of them, and other data."""
    pipeline: Ranks = field(default_factory=Ranks)
    """Ranks with other layers and the same data."""
    tensor: Ranks = field(default_factory=Ranks)
    """Ranks with other parts of the same weights and the same data."""
    context: DeviceMesh | None = None
    """Those of the data ranks that hold parts of the same sequences as this one; None: each has whole ones."""
    everyone: Ranks = field(default_factory=Ranks)
    """All of them."""
    run: Callable[[Mapping[str, Any]], Tensor | float | None] | None = None
    """Runs a batch forward and backward if this process holds only parts of the model; None: it is whole."""

    def note(self, place: str) -> None:
        """Names the point at which the ranks exchange data next, for messages about waiting."""
        for ranks in (self.data, self.pipeline, self.tensor, self.everyone):
            ranks.place = place
