"""Is Python state put back, whatever holds it, and are objects left the same objects?"""

from __future__ import annotations

import gc
import random
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from snip_hf.python_state import Kept, Shared, collecting_no_garbage

NUMBER = 1


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Words(list[str]):
    pass


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list": ([1, 2], lambda it: it.append(3)),
    "list with other elements": ([1, 2], lambda it: it.reverse()),
    "subclass of list": (Words(["a"]), lambda it: it.clear()),
    "dict": ({"a": 1, "b": 2}, lambda it: it.update(c=3)),
    "dict in another order": ({"a": 1, "b": 2}, lambda it: it.update(a=it.pop("a"))),
    "empty dict": ({}, lambda it: it.update(a=1)),
    "empty ordered dict": (OrderedDict(), lambda it: it.update(a=1)),
    "ordered dict": (OrderedDict(a=1, b=2), lambda it: it.move_to_end("a")),
    "default dict": (defaultdict(list, a=[1]), lambda it: it["b"]),
    "counter": (Counter("aab"), lambda it: it.update("b")),
    "set": ({1, 2}, lambda it: it.discard(1)),
    "deque": (deque([1, 2], 2), lambda it: it.append(3)),
    "nested": ({"a": ([{1}],)}, lambda it: it["a"][0][0].add(2)),
    "object": (Holder([1]), lambda it: it.value.append(2)),
    "attribute": (Holder(1), lambda it: setattr(it, "other", 2)),
    "namespace": (SimpleNamespace(a=1), lambda it: setattr(it, "a", 2)),
    "method": (Holder([1]).value.copy, lambda it: None),
    "partial": (partial(print, [1], sep=[2]), lambda it: (it.args[0].append(1), it.keywords["sep"].append(1))),
}


def seen(value: Any) -> str:
    return repr(vars(value)) if isinstance(value, Holder) else repr(value)


@pytest.mark.parametrize(("value", "change"), CONTAINERS.values(), ids=list(CONTAINERS))
def test_contents_are_put_back(value: Any, change: Any) -> None:
    model, kept, before = nn.Linear(1, 1), Kept(), seen(value)
    model.attribute = value
    kept.keep_modules(model)
    change(value)
    model.attribute = model.another = None
    kept.restore()
    assert model.attribute is value
    assert not hasattr(model, "another")
    assert seen(value) == before


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda it: torch.rand((), generator=it).item()),
        (np.random.default_rng(1), lambda it: it.random()),
        (np.random.RandomState(1), lambda it: it.rand()),
        (random.Random(1), lambda it: it.random()),
    ],
)
def test_generators_are_put_back(generator: Any, draw: Any) -> None:
    kept = Kept()
    kept.keep([Holder((generator,))])
    first = draw(generator)
    kept.restore()
    assert draw(generator) == first


def test_a_generator_without_a_state_and_cycles_are_no_problem() -> None:
    holder = Holder([random.SystemRandom()])
    holder.value.append(holder)
    kept = Kept()
    kept.keep(holder)
    holder.value.clear()
    kept.restore()
    assert holder.value[1] is holder


def test_variables_that_a_function_names_are_put_back() -> None:
    count, notes = 0, []

    def inner() -> None:
        global NUMBER
        NUMBER += 1

    def function(many: list[int] = [], *, few: list[int] = []) -> None:  # noqa: B006
        nonlocal count
        count += 1
        notes.append(1)
        many.append(1)
        few.append(1)
        inner()

    kept = Kept()
    kept.keep(function)
    function()
    assert (count, NUMBER) == (1, 2)
    kept.restore()
    assert (count, NUMBER, notes, function.__defaults__, function.__kwdefaults__) == (0, 1, [], ([],), {"few": []})


def test_a_patch_is_in_place_from_the_first_to_the_last_who_needs_it_and_gone_after_a_failure() -> None:
    events: list[str] = []

    @contextmanager
    def patch(name: str) -> Any:
        events.append(f"on for {name}")
        yield
        events.append("off")

    shared = Shared(patch)
    with shared("first"), shared("second"):
        assert events == ["on for first"]
    assert events == ["on for first", "off"]
    with pytest.raises(ValueError), shared("third"):
        raise ValueError
    assert events[2:] == ["on for third", "off"]

    @contextmanager
    def fails() -> Any:
        raise ValueError
        yield

    for _ in range(2):
        with pytest.raises(ValueError), Shared(fails)():
            pass


def test_garbage_is_collected_again_where_it_was_before() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="within"), collecting_no_garbage():
        with collecting_no_garbage():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("within")
    assert gc.isenabled()
