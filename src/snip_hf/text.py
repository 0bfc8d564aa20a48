"""Escapes foreign text (names, paths, messages) for terminals, logs and figures."""

from __future__ import annotations

WITHOUT_PROBE = "a policy that needs no probe, such as policy='layer-position'"
"""Advice in messages if a probe cannot work."""


def printable(text: object, limit: int = 1000) -> str:
    """Returns `str(text)` on one line, with unprintable characters escaped, e.g. as \\u202e.

    Escapes control and format characters, spaces other than " ", and lone surrogates (bytes of a path that are not
    UTF-8), and keeps letters of all scripts. The result has at most `limit` characters and ends with "..." if cut.
    """
    # Cuts before escaping, because texts may have megabytes, and after it, because escapes are longer.
    given = str(text)[: limit + 1]
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in given)
    return shown if len(shown) <= limit else shown[: max(0, limit - 3)] + "..."
