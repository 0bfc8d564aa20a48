"""Registries of named entries, such as formats, backends and policies, to which users can add their own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=_Named)
# Minimum ratio of difflib: "snap" is close to "snip", but "fp6" is not close to "fp8".
_MIN_RATIO = 0.75
# Minimum length of a prefix that counts as close.
_MIN_PREFIX = 4


class UnknownName(ValueError):
    """A name without an entry, because it is misspelt or not registered yet."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the closest known name; "" if none is close.

    A name that begins with the given one is also close: "target_fp4_fraction" for "target_fp4".
    """
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, 1, _MIN_RATIO)
    if not close and len(name) >= _MIN_PREFIX:
        close = [one for one in names if one.startswith(name.lower())]
    return f" Did you mean {close[0]!r}?" if close else ""


def choices(known: Iterable[str], guess: str = "", listing: str | None = None) -> str:
    """Returns the end of an error about an unknown name: the closest name, then the known ones.

    Args:
        known: the known names.
        guess: the result of `did_you_mean`.
        listing: the place that lists the names, e.g. "docs/config.md"; None: the error lists them.
    """
    names = list(known)
    if listing is not None:
        return f".{guess} {listing} lists all {len(names)}."
    return f".{guess} Expected one of {', '.join(names)}." if guess else f"; expected one of {', '.join(names)}."


class Registry(Mapping[str, Entry]):
    """A mapping from names to entries, in the order of their registration.

    Args:
        kind: the kind of entry, for error messages, e.g. "format".
        built_in: the module that registers the built-in entries, imported on first use.
        listing: the expression that lists the names, if they are too many for an error message.
    """

    def __init__(self, kind: str, built_in: str | None = None, listing: str | None = None) -> None:
        self.kind = kind
        self.listing = listing
        self._entries: dict[str, Entry] = {}
        self._listeners: list[Callable[[Entry], object]] = []
        self._built_in = built_in

    def register(self, entry: Entry) -> Entry:
        """Adds an entry and returns it.

        Raises:
            ValueError: another entry has its name.
        """
        known = self._entries.get(entry.name)
        if known is not None and known != entry:
            raise ValueError(f"There is a {self.kind} named {entry.name!r} already; choose another name.")
        self._entries[entry.name] = entry
        if known is None:
            for listener in self._listeners:
                listener(entry)
        return entry

    def for_each(self, listener: Callable[[Entry], object]) -> None:
        """Calls `listener` with every entry: with those of now, and with later ones when they are registered."""
        for entry in list(self.values()):
            listener(entry)
        self._listeners.append(listener)

    def checked(self, name: object, where: str) -> str:
        """Returns `name` if an entry has it.

        Raises:
            UnknownName: no entry has this name. The message has `where` it was given, the closest and the known names.
            ValueError: the name is not a string.
        """
        message = f"Unknown {self.kind} {name!r} for {where}"
        if not isinstance(name, str):
            raise ValueError(message + choices(self, listing=self.listing))
        if name not in self:
            raise UnknownName(message + choices(self, did_you_mean(name, self), self.listing))
        return name

    def __getitem__(self, name: str) -> Entry:
        return self._loaded()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())

    def _loaded(self) -> dict[str, Entry]:
        if self._built_in is not None:
            module, self._built_in = self._built_in, None
            importlib.import_module(module)
        return self._entries
