"""Ranks of a run as threads of one process, which take turns, without `torch.distributed`."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from snip_hf.parallel.ranks import Ranks

Result = TypeVar("Result")
# Seconds after which a rank that nobody meets any more gives up.
_PATIENCE = 60.0


class _Meeting:
    """The point at which threads wait for each other. One runs at a time and has all global state to itself."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.all_there = threading.Barrier(size)
        self.brought: list[Any] = [None] * size


class ThreadRank(Ranks):
    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__()
        self.rank, self.size, self._meeting = rank, size, meeting

    def gather(self, value: Any, what: str = "figures") -> list[Any]:
        found = [pickle.loads(sent) for sent in self._exchange(pickle.dumps((what, value)))]
        assert {name for name, _ in found} == {what}
        return [given for _, given in found]

    def all_to_all(self, make: Callable[[], Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        pieces = make()
        assert len(pieces) == len(sizes) == self.size
        assert all(piece.dim() == 1 and piece.dtype == pieces[0].dtype for piece in pieces)
        received = [sent[self.rank] for sent in self._exchange([piece.clone() for piece in pieces])]
        assert [len(piece) for piece in received] == list(sizes)
        return received

    def _exchange(self, value: Any) -> list[Any]:
        meeting = self._meeting
        meeting.brought[self.rank] = value
        meeting.turn.release()
        try:
            meeting.all_there.wait(_PATIENCE)
            found = list(meeting.brought)
            meeting.all_there.wait(_PATIENCE)  # all have read
        finally:
            meeting.turn.acquire()
        return found


def on_ranks(size: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """Returns rank -> what `work` returns there; raises what it raised on the first rank that did not merely wait."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = work(ThreadRank(rank, size, meeting))
            except BaseException as error:
                errors.append(error)
                meeting.all_there.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
