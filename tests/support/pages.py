"""A page of the report taken apart, as a browser would read it."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The elements of a page, its texts, and the JSON data in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside == "style":
            self.styles.append(data)
        elif inside in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.texts.append(data)

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    @property
    def policy(self) -> str:
        """Its Content-Security-Policy."""
        return next(
            attributes["content"] or ""
            for tag, attributes in self.elements
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        )


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def decoded_plan(run: dict[str, Any], column: int) -> dict[str, dict[str, str]]:
    """Layer -> GEMM -> format of the plan in a column of a page's data."""
    plan = run["plan"]
    letters = iter(plan["codes"][column])
    rows = {layer: {gemm: next(letters) for gemm in plan["gemms"]} for layer in run["layers"]}
    return {
        layer: {gemm: plan["formats"][ord(letter) - ord("A")] for gemm, letter in row.items() if letter != "."}
        for layer, row in rows.items()
    }


def decoded_divergences(data: dict[str, Any], panel: dict[str, Any]) -> list[list[float | None]]:
    """The values of a panel, one list per probe."""
    letters = data["letters"]
    highest = len(letters) ** 2 - 1

    def value(pair: str) -> float | None:
        if pair == "..":
            return None
        part = (letters.index(pair[0]) * len(letters) + letters.index(pair[1])) / highest
        return float(panel["low"] * (panel["high"] / panel["low"]) ** part)

    return [[value(code[at : at + 2]) for at in range(0, len(code), 2)] for code in panel["codes"]]
