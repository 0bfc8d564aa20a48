"""Python state around a pass through a model: saved and restored; methods wrapped; patches that threads share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import is_
from typing import Any

import torch


class Shared:
    """A process-wide patch that the first thread to need it applies and the last one removes.

    Args:
        patch: returns the context that patches.
    """

    def __init__(self, patch: Callable[..., AbstractContextManager[None]]) -> None:
        self._patch = patch
        self._lock = threading.Lock()
        self._users = 0
        self._in_place = ExitStack()

    @property
    def is_in_place(self) -> bool:
        return self._users > 0

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


class Wrapped:
    """Wraps a method of one object, until `remove`.

    Args:
        holder: the object.
        name: name of the method.
        around: called with the original method, followed by the arguments of the method.
    """

    def __init__(self, holder: Any, name: str, around: Callable[..., Any]) -> None:
        self._attributes, self._name = vars(holder), name
        self._before = self._attributes.get(name)
        self.inner: Callable[..., Any] = getattr(holder, name)
        self._around: Callable[..., Any] | None = around
        # One bound method, so that `remove` recognizes it.
        self._put = self._attributes[name] = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if self._around is None else self._around(self.inner, *args, **kwargs)

    def remove(self) -> None:
        """Restores the original method; calls it without `around` if something else has wrapped it since."""
        self._around = None
        if self._attributes.get(self._name) is self._put:
            del self._attributes[self._name]
            if self._before is not None:
                self._attributes[self._name] = self._before


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Pauses the garbage collector, whose pass over all objects takes a third of a second.

    Reference counting still frees objects outside of cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def binding_kept(dicts: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """Restores the keys, their order and the referenced objects of dicts, and the state of random generators in them.

    Args:
        dicts: e.g. `vars(module)`, and the parameters, buffers and hooks of a module.
    """
    before = [(one, dict(one)) for one in dicts]
    generators = [value for _, then in before for value in then.values() if type(value) is torch.Generator]
    states = [one.get_state() for one in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        for one, then in before:
            if len(one) != len(then) or not all(map(is_, (*one, *one.values()), (*then, *then.values()))):
                one.clear()
                one.update(then)
