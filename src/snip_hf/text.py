"""Text from elsewhere (names, paths, messages) as it is safe to show on a terminal, in a log or in a figure."""

from __future__ import annotations

WITHOUT_PROBE = "a policy that needs no probe, such as policy='layer-position'"
"""What messages advise where a probe cannot work."""


def printable(text: object, limit: int = 200) -> str:
    """Returns `str(text)` on one line, with every character that is not printable as its escape, such as \\u202e.

    Escaped are control and format characters, spaces other than " ", and lone surrogates (bytes of a path that are not
    UTF-8); letters of all scripts stay. The result has at most `limit` characters; what was cut ends with "...".
    """
    # Cut before and after: a text of megabytes is not escaped as a whole, and an escape is longer than its character.
    shown = "".join(map(_escaped, str(text)[: limit + 1]))
    return shown if len(shown) <= limit else shown[: max(0, limit - 3)] + "..."


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
