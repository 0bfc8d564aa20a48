"""Are attribute bindings put back and contents left alone, and is it known in all threads that a probe runs?"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from snip_hf import is_probing
from snip_hf.python_state import Kept, Shared, collecting_no_garbage, probing


def test_what_modules_attributes_are_bound_to_is_put_back_and_what_they_hold_is_not() -> None:
    model, kept = nn.Sequential(nn.Linear(1, 1)), Kept()
    layer: Any = model[0]
    layer.counter, layer.seen = 1, [1]
    seen, weight = layer.seen, layer.weight
    kept.keep_modules(model)
    layer.counter += 1
    layer.seen.append(2)
    layer.seen = layer.another = None
    layer.weight = nn.Parameter(torch.zeros(1, 1))
    layer.register_buffer("mask", torch.zeros(1))
    layer.register_forward_hook(lambda *_: None)
    model.append(nn.Linear(1, 1))
    kept.restore()
    assert (layer.counter, layer.seen, hasattr(layer, "another"), len(model)) == (1, [1, 2], False, 1)
    assert layer.seen is seen
    assert layer.weight is weight
    assert not layer._buffers
    assert not layer._forward_hooks


def test_the_order_of_entries_is_put_back() -> None:
    for entries in ({"a": 1, "b": 2}, OrderedDict(a=1, b=2)):
        kept = Kept()
        kept.keep_entries(entries)
        entries["a"] = entries.pop("a")
        kept.restore()
        assert list(entries.items()) == [("a", 1), ("b", 2)]


def test_generators_that_are_attributes_are_put_back() -> None:
    model, kept = nn.Linear(1, 1), Kept()
    generator: Any = torch.Generator().manual_seed(1)
    model.generator = generator
    kept.keep_modules(model)
    first = torch.rand((), generator=generator)
    kept.restore()
    assert torch.rand((), generator=generator) == first


def test_all_threads_know_of_a_probe_until_the_last_one_ends() -> None:
    found: list[bool] = []
    with probing():
        thread = threading.Thread(target=lambda: found.append(is_probing()))
        thread.start()
        thread.join()
        with pytest.raises(ValueError), probing():
            raise ValueError
        assert is_probing()
    assert found == [True]
    assert not is_probing()


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
