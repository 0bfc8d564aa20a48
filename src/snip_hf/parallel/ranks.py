"""The ranks that train one model, and everything they exchange, beside the gradient hook and ZeRO's gathers.

Two kinds of processes: ranks that hold the same layers (or shards of them) and see different data, and ranks that hold
different layers (stages of a pipeline). Small things travel as JSON over a gloo group of snip-hf's own, whose waits are
bounded; tensors travel over the group that training uses.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_AT_START = "at the start (every rank needs a SnipCallback, or a SnipController in a loop of one's own)"
# Where the ranks tell each other what failed.
_AGREEMENT = "agreement"
# Characters of an error's text that the log and the history show: errors of libraries may be pages long.
_LONGEST_REASON = 1000


class RankError(RuntimeError):
    """Other processes did not answer in time, or are gone. Training cannot go on: the ranks no longer agree."""


class FailedElsewhere(ValueError):
    """Another rank failed, and all of them know."""


class Attempt:
    """A context that keeps the first error inside it, until the ranks agree on what to do about it.

    What they know already passes.
    """

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
    """Some of the processes of a run, this one among them, and how they exchange what they found.

    Every method is collective: all of them call it, in the same order. A process that is alone calls nothing.

    Args:
        group: their process group, which tensors travel over; None: this process alone.
        timeout: seconds after which waiting for the others ends with a `RankError`.
    """

    says_after = 30.0
    """Seconds of waiting for the others after which the log says so."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._timeout = timeout
        self.place = _AT_START
        """Where in the program the ranks meet, as what is said of waiting names it."""
        self._control: dist.ProcessGroup | None = None
        if group is not None and self.size > 1:
            self._control = self._bounded(lambda: _control_group(group, timeout))

    @classmethod
    def of_all(cls, timeout: float = 600.0) -> Ranks:
        """Returns all processes of the run."""
        is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return cls(dist.group.WORLD if is_one_of_many else None, timeout)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any, what: str = "figures") -> list[Any]:
        """Returns the JSON data that each of them gave, in the order of the ranks.

        Args:
            value: JSON data.
            what: a name for it, by which ranks at different points of the program are noticed.

        Raises:
            RankError: one of them did not answer in time, or is at another point.
        """
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps([what, value]).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        length = torch.tensor([len(own)], device="cpu")
        self._bounded(lambda: dist.all_gather(sizes, length, self._control))
        longest = max(int(size) for size in sizes)
        texts = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        padded = torch.nn.functional.pad(own, (0, longest - len(own)))
        self._bounded(lambda: dist.all_gather(texts, padded, self._control))
        found = [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]
        if len({name for name, _ in found}) > 1:
            raise RankError(
                f"The ranks are at different points: {', '.join(name for name, _ in found)}. One of them failed where "
                "the others went on; look into the logs of all of them, and start them again from the last checkpoint."
            )
        return [given for _, given in found]

    def by_first(self, make: Callable[[], Result]) -> Result:
        """Returns, on all ranks, the JSON data that `make` returns on the first one.

        Raises:
            RuntimeError: it failed there; all of them raise this, the first rank the error itself.
            RankError: one of them did not answer in time.
        """
        if self.size == 1:
            return make()
        value, failure = None, None
        if self.is_first:
            try:
                value = make()
            except Exception as error:
                failure = error
        found, problem = self.gather([value, None if failure is None else describe(failure)], "decision")[0]
        if failure is not None:
            raise failure
        if problem is not None:
            raise RuntimeError(f"On rank 0: {problem}")
        result: Result = found
        return result

    def agree(self, error: Exception | None) -> None:
        """Raises on all of them if one of them has an error.

        Raises:
            ValueError: names the first rank that has one, and what it is; that rank raises its error itself.
            RankError: one of them did not answer in time.
        """
        problems = self.gather(None if error is None else describe(error), _AGREEMENT)
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ValueError(f"On rank {rank}: {problem}")

    def meet(self) -> None:
        """Raises if another rank has come to `agree` with an error; to be called by those that have none.

        Raises:
            FailedElsewhere: names the first rank that has one, and what it is.
            RankError: one of them did not answer in time.
        """
        for rank, problem in enumerate(self.gather(None, _AGREEMENT)):
            if problem is not None:
                raise FailedElsewhere(f"On rank {rank}: {problem}")

    def all_to_all(self, make: Callable[[], Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        """Sends one flat tensor to each of them and returns what each sent here.

        Args:
            make: returns rank -> (any,), all of one dtype and device. Where it fails, all of them raise.
            sizes: rank -> number of elements that come from there.
        """
        if self.size == 1:
            return list(make())
        attempt, lengths = Attempt(), list(sizes)
        with attempt:
            pieces = make()
            sent, lengths = torch.cat(list(pieces)), [len(piece) for piece in pieces]
            received = sent.new_empty(sum(sizes))
        # The exchange itself waits as long as training's group does; who does not come to it is found out here.
        failed = torch.tensor([attempt.error is not None], dtype=torch.int32, device="cpu")
        self._bounded(lambda: dist.all_reduce(failed, dist.ReduceOp.MAX, self._control))
        if failed:
            self.agree(attempt.error)
        self._bounded(lambda: dist.all_to_all_single(received, sent, list(sizes), lengths, group=self._group))
        return list(received.split(list(sizes)))

    def _bounded(self, call: Callable[[], Result]) -> Result:
        said = threading.Timer(self.says_after, self._say_waiting)
        said.daemon = True
        said.start()
        try:
            return call()
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise RankError(
                f"Rank {self.rank} of {self.size} waited for the others, for at most {self._timeout:g} s, and one of "
                f"them did not answer or is gone, {self.place}: {reason}. Look into the logs of the other ranks; start "
                "them again from the last checkpoint."
            ) from error
        finally:
            said.cancel()

    def _say_waiting(self) -> None:
        logger.warning(
            "snip-hf: rank %d of %d has waited for the others for %g s, %s; it gives up after %g s.",
            self.rank,
            self.size,
            self.says_after,
            self.place,
            self._timeout,
        )


# Process group -> timeout -> the gloo group of the same processes.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]] = WeakKeyDictionary()


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


def describe(error: Exception) -> str:
    """Returns an error as the log, the history and other ranks show it: on one line, what is long cut to its begin."""
    lines = (line.strip() for line in str(error).splitlines())
    text = f"{type(error).__name__}: {' '.join(line for line in lines if line)}"
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


@dataclass(frozen=True)
class Processes:
    """How a probe's work and findings are shared."""

    data: Ranks = field(default_factory=Ranks)
    """Ranks with the same layers, or shards of them, and other data."""
    pipeline: Ranks = field(default_factory=Ranks)
    """Ranks with other layers and the same data."""
    everyone: Ranks = field(default_factory=Ranks)
    """All of them."""
    run: Callable[[Mapping[str, Any]], Tensor | float | None] | None = None
    """Runs a batch forward and backward where the model here is only a part; None: the model is whole."""

    def note(self, place: str) -> None:
        """Says where in the program the ranks meet next."""
        for ranks in (self.data, self.pipeline, self.everyone):
            ranks.place = place
