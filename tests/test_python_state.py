"""Is what modules and patches hold put back?"""

from __future__ import annotations

import gc
from collections import OrderedDict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from snip_hf.python_state import Shared, Wrapped, binding_kept, collecting_no_garbage


def test_bindings_are_put_back_in_their_order_and_contents_are_left_alone() -> None:
    inner: list[int] = []
    plain, ordered = {"a": 1, "list": inner}, OrderedDict(first=1, second=2)
    with pytest.raises(ValueError, match="within"), binding_kept([plain, ordered]):
        plain["a"], plain["new"] = 2, 3
        inner.append(4)
        ordered.move_to_end("first")
        raise ValueError("within")
    assert plain == {"a": 1, "list": [4]} and plain["list"] is inner
    assert list(ordered) == ["first", "second"]


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


def test_a_method_that_was_replaced_since_it_was_wrapped_stays_so() -> None:
    holder: Any = SimpleNamespace(log=lambda: 1)
    wrapped = Wrapped(holder, "log", lambda inner: inner() + 1)
    assert holder.log() == 2
    later = holder.log = lambda: 3
    wrapped.remove()
    assert holder.log is later
