"""Named entries that a run chooses from: formats, backends, policies. Users may add their own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=_Named)
# Of difflib's ratio: "snap" still names "snip", "fp6" no longer "fp8".
_ALIKE = 0.75
# Characters of a name that others may go on from.
_SHORTEST = 4


class UnknownName(ValueError):
    """A name that no entry has: a misspelt one, or that of an entry that is not registered yet."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that names the closest of the known names, after a space; "" if none is close.

    Close is also the first that goes on from the whole of the name, as "target_fp4_fraction" from "target_fp4".
    """
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, 1, _ALIKE)
    if not close and len(name) >= _SHORTEST:
        close = [one for one in names if one.startswith(name.lower())]
    return f" Did you mean {close[0]!r}?" if close else ""


def choices(known: Iterable[str], guess: str = "", listing: str | None = None) -> str:
    """Returns the end of a message that refuses a name: the closest one first, then which ones there are.

    Args:
        known: the names that there are.
        guess: as `did_you_mean` returns it.
        listing: what lists names that are too many for a message, e.g. "docs/config.md"; None: the message lists them.
    """
    names = list(known)
    if listing is not None:
        return f".{guess} {listing} lists all {len(names)}."
    return f".{guess} Expected one of {', '.join(names)}." if guess else f"; expected one of {', '.join(names)}."


class Registry(Mapping[str, Entry]):
    """A mapping from names to entries, in the order of their registration.

    Args:
        kind: what the entries are, for error messages, e.g. "format".
        built_in: the module that registers the entries that come with snip-hf. It is imported on first use, so that the
            names can be checked by modules below it.
        listing: the expression that lists the names, of entries that are too many for a message.
    """

    def __init__(self, kind: str, built_in: str | None = None, listing: str | None = None) -> None:
        self.kind = kind
        self.listing = listing
        self._entries: dict[str, Entry] = {}
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
        return entry

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Takes back, when the context ends, whatever was registered inside: for tests of one's own entries."""
        before = dict(self._loaded())
        try:
            yield
        finally:
            self._entries.clear()
            self._entries.update(before)

    def checked(self, name: object, where: str) -> str:
        """Returns `name` if an entry has it.

        Raises:
            ValueError: there is none; names `where` the name was given, guesses which was meant and says which there
                are. It is an `UnknownName` where an entry might have the name.
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
