"""What a pass through a model may change in Python and how it is put back, and whether SNIP's own passes run.

Put back are the attribute bindings of modules and the generators that they hold. The contents of other objects, such as
a user's lists, are left alone: code that must not count a probe asks `is_probing`.
"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

# How many contexts of `probing` are open, in all threads: autograd calls backward hooks from threads of its own.
_open = 0
_lock = threading.Lock()


def is_probing() -> bool:
    """Returns True while SNIP runs a model, its loss or a copy of its optimizer for itself, and not for training.

    Hooks and modules run in a probe as they do when activation checkpointing recomputes a layer. Code that counts,
    logs or fills lists can skip that here. The answer is the same in all threads, so it is also right in backward
    hooks, which autograd calls from threads of its own.

        def count(module, args, output):
            if not snip_hf.is_probing():
                calls.append(output.shape)
    """
    return _open > 0


@contextmanager
def probing() -> Iterator[None]:
    """Has `is_probing` return True, in all threads."""
    global _open
    with _lock:
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1


class Shared:
    """A patch of what all threads have in common: the first to need it puts it in place, the last one takes it away.

    Args:
        patch: gives the context that patches.
    """

    def __init__(self, patch: Callable[..., AbstractContextManager[None]]) -> None:
        self._patch = patch
        self._lock = threading.Lock()
        self._users = 0
        self._in_place = ExitStack()

    @contextmanager
    def __call__(self, *args: Any) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._in_place.enter_context(self._patch(*args))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._in_place.close()


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Keeps Python from looking for garbage in cycles: a look at all objects of a process takes a third of a second.

    What no cycle holds is freed as ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Kept:
    """Notes which objects attributes and entries are bound to; `restore` binds them again. What objects hold stays."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        # Such as most of the hooks of a module: many, and quick to put back.
        self._empty: list[dict[Any, Any]] = []

    def restore(self) -> None:
        """Puts everything back; what did not change is not written."""
        for undo in self._undo:
            undo()
        for entries in self._empty:
            if dict.__len__(entries):
                _kind_of(entries).clear(entries)

    def keep_modules(self, model: nn.Module) -> None:
        """Keeps the attributes, parameters, buffers, submodules and hooks of all modules of a model."""
        # torch's own tables of parameters, buffers, submodules and hooks.
        tables = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
        for module in model.modules():
            self.keep_attributes(module)
            for name in tables:
                self.keep_entries(vars(module)[name])

    def keep_attributes(self, thing: object) -> None:
        """Keeps the attributes of an object, and the state of the generators among them."""
        self.keep_entries(vars(thing))
        for value in vars(thing).values():
            if isinstance(value, torch.Generator):
                self._undo.append(partial(value.set_state, value.get_state()))

    def keep_entries(self, entries: dict[Any, Any]) -> None:
        """Keeps what the keys of a dict are bound to."""
        if not dict.__len__(entries):
            self._empty.append(entries)
            return
        kind = _kind_of(entries)
        self._undo.append(partial(_put_back_entries, kind, entries, dict(kind.items(entries))))


def _kind_of(entries: dict[Any, Any]) -> Any:
    """Returns the class whose methods tell what a dict holds, whatever those of a class of the user's do."""
    return OrderedDict if isinstance(entries, OrderedDict) else dict


def _put_back_entries(kind: Any, entries: dict[Any, Any], then: dict[Any, Any]) -> None:
    is_same = dict.__len__(entries) == len(then) and (
        all(map(is_, kind.keys(entries), then)) and all(map(is_, kind.values(entries), then.values()))
    )
    if not is_same:
        kind.clear(entries)
        for key, value in then.items():
            kind.__setitem__(entries, key, value)
