"""Python state that a pass through a model or a step of an optimizer may change, and how it is put back.

Kept are the attributes of modules and of the user's own objects, the content of lists, dicts and sets, private random
generators, and what functions refer to: their closures, defaults and global variables. Tensors are not looked into.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Packages whose objects and functions keep no state of the user's.
_LIBRARIES = frozenset(
    {"torch", "torchao", "transformers", "accelerate", "deepspeed", "peft", "trl", "numpy", "snip_hf", "builtins"}
)
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, Tensor, ModuleType, torch.dtype, torch.device)
# How far objects are followed from a module's attribute or a function's variable.
_DEPTH = 4
# Containers with more elements are data: their content is kept, their elements are not looked into.
_LONGEST = 1000


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
    """Notes state as it is now; `restore` puts it back. Objects stay the same objects, only their content returns."""

    def __init__(self) -> None:
        # Held, so that no id is used twice.
        self._found: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []
        # Such as most of the hooks of a module: many, and quick to put back.
        self._empty: list[dict[Any, Any]] = []

    def holds(self, value: object) -> bool:
        """Returns True if a value is kept and may change: immutable ones are shared by much that is not related."""
        return id(value) in self._found and not isinstance(value, tuple | frozenset | FunctionType)

    def restore(self) -> None:
        """Puts everything back; what did not change is not written."""
        for undo in self._undo:
            undo()
        for entries in self._empty:
            if dict.__len__(entries):
                _kind_of(entries).clear(entries)

    def keep_modules(self, model: nn.Module) -> None:
        """Keeps the attributes, parameters, buffers, submodules and hooks of all modules of a model."""
        modules = list(model.modules())
        self._found |= {id(module): module for module in modules}
        for module in modules:
            self.keep_entries(vars(module), 0)

    def keep_code(self, model: nn.Module) -> None:
        """Keeps what the classes of a model's modules hold, and what their methods refer to."""
        for kind in {type(module): None for module in model.modules()}:
            self.keep_class(kind)

    def keep_class(self, kind: type) -> None:
        """Keeps the attributes of a class of the user's and of its bases."""
        for base in kind.__mro__:
            if not is_library(base.__module__):
                then = {name: value for name, value in vars(base).items() if not name.startswith("__")}
                self._undo.append(partial(_put_back_class, base, then))
                for value in then.values():
                    self.keep(value)

    def keep(self, value: Any, depth: int = 0) -> None:
        """Keeps the content of a value, and of what it holds."""
        if isinstance(value, _ATOMS) or depth > _DEPTH or id(value) in self._found:
            return
        self._found[id(value)] = value
        if isinstance(value, dict):
            self.keep_entries(value, depth)
        elif isinstance(value, list | deque):
            self._undo.append(partial(_put_back_sequence, value, list(value)))
            self._keep_all(value, depth)
        elif isinstance(value, set):
            self._undo.append(partial(_put_back_set, value, set(value)))
            self._keep_all(value, depth)
        elif isinstance(value, tuple | frozenset):
            self._keep_all(value, depth)
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            if not isinstance(value, random.SystemRandom):
                self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, partial):
            self._keep_all((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, MethodType):
            self._keep_all((value.__self__, value.__func__), depth)
        elif isinstance(value, FunctionType):
            self._keep_function(value, depth)
        elif isinstance(getattr(value, "__dict__", None), dict) and (
            isinstance(value, nn.Module | SimpleNamespace) or not is_library(type(value).__module__)
        ):
            self.keep_entries(vars(value), depth)

    def keep_entries(self, entries: dict[Any, Any], depth: int = _DEPTH) -> None:
        """Keeps the content of a dict, and of what it holds if that is not too deep."""
        if not dict.__len__(entries):
            self._empty.append(entries)
            return
        kind = _kind_of(entries)
        self._undo.append(partial(_put_back_entries, kind, entries, dict(kind.items(entries))))
        self._keep_all(list(kind.values(entries)), depth)

    def _keep_all(self, values: Any, depth: int) -> None:
        if len(values) <= _LONGEST:
            for value in values:
                self.keep(value, depth + 1)

    def _keep_function(self, function: FunctionType, depth: int) -> None:
        if is_library(function.__globals__.get("__name__")):
            # A decorator of torch, such as `torch.no_grad()`, around a function of the user's.
            self.keep(getattr(function, "__wrapped__", None), depth)
            return
        for cell in function.__closure__ or ():
            if not is_empty(cell):
                self._undo.append(partial(_put_back_cell, cell, cell.cell_contents))
                self.keep(cell.cell_contents, depth + 1)
        self._keep_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), depth)
        for name, value in referred(function).items():
            if not isinstance(value, type | ModuleType):
                self._undo.append(partial(_put_back_global, function.__globals__, name, value))
                self.keep(value, depth + 1)


def is_library(module: str | None) -> bool:
    """Returns True if a module of this name belongs to Python or to a package that models are built with."""
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


def is_empty(cell: CellType) -> bool:
    """Returns True if a variable of a closure has no value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def referred(function: FunctionType) -> dict[str, Any]:
    """Returns the global variables, by name, that a function's code may refer to."""
    return {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


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


def _put_back_sequence(sequence: Any, then: list[Any]) -> None:
    if len(sequence) != len(then) or any(now is not old for now, old in zip(sequence, then, strict=True)):
        kind = list if isinstance(sequence, list) else deque
        kind.clear(sequence)
        kind.extend(sequence, then)


def _put_back_set(members: set[Any], then: set[Any]) -> None:
    if set(map(id, members)) != set(map(id, then)):
        set.clear(members)
        set.update(members, then)


def _put_back_cell(cell: CellType, then: Any) -> None:
    if is_empty(cell) or cell.cell_contents is not then:
        cell.cell_contents = then


def _put_back_global(variables: dict[str, Any], name: str, then: Any) -> None:
    if variables.get(name) is not then:
        variables[name] = then


def _put_back_class(kind: type, then: dict[str, Any]) -> None:
    now = {name for name in vars(kind) if not name.startswith("__")}
    for name in now - then.keys():
        delattr(kind, name)
    for name, value in then.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)
