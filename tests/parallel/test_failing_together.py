"""Ranks exchange failures before each collective, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from snip_hf.parallel.ranks import FailedElsewhere, Ranks, failing_together


class Counting(Ranks):
    """One of two ranks, which notes how often it met the other."""

    def __init__(self, problem: str | None = None) -> None:
        super().__init__()
        self.size, self.met, self._problem = 2, 0, problem

    def check_others(self) -> None:
        self.met += 1
        if self._problem is not None:
            raise FailedElsewhere(self._problem)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Two ranks, of which there is one; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_ranks_meet_before_each_collective_of_all_of_them_and_before_nothing_else() -> None:
    alone, ranks, x = dist.new_group([0]), Counting(), torch.ones(2)
    with failing_together(ranks):
        for call in (
            lambda: dist.all_gather([torch.empty(2), torch.empty(2)], x),
            lambda: dist.all_reduce(x),
            lambda: dist.broadcast(x, 0),
            lambda: dist.barrier(),
            lambda: wait_tensor(all_reduce(x, "sum", dist.group.WORLD)),
        ):
            before = ranks.met
            call()
            assert ranks.met == before + 1
        found = ranks.met
        dist.all_reduce(x, group=alone)
        dist.send(x, 1)
        (x @ x).sum()
        assert ranks.met == found
    dist.all_reduce(x)
    assert ranks.met == found


def test_a_failure_that_the_code_inside_catches_is_raised_at_the_next_collective_and_at_the_end() -> None:
    ranks, caught = Counting("On rank 1: ValueError: no"), 0
    with pytest.raises(FailedElsewhere, match=r"^On rank 1: ValueError: no$"), failing_together(ranks):
        for _ in range(2):
            try:
                dist.all_reduce(torch.ones(2))
            except ValueError:
                caught += 1
    assert (caught, ranks.met) == (2, 1)  # the rank that failed comes once


def test_errors_of_the_code_inside_pass() -> None:
    error = KeyError("own")
    with pytest.raises(KeyError) as found, failing_together(Counting()):
        raise error
    assert found.value is error


def test_a_rank_that_is_alone_meets_nobody() -> None:
    ranks = Counting()
    ranks.size = 1
    with failing_together(ranks):
        dist.all_reduce(torch.ones(2))
    assert ranks.met == 0
