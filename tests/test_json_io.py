"""JSON files are read strictly, into dataclasses with exactly their fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from snip_hf.json_io import from_json, parse_json, read_as


@dataclass(frozen=True)
class Inner:
    name: str
    value: float | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    kind: Literal["a", "b"]
    inner: tuple[Inner, ...] = ()
    table: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    pairs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    either: float | Mapping[str, float] = 0.0
    flag: bool = False
    anything: Any = None


GOOD = {
    "count": 3,
    "kind": "b",
    "inner": [{"name": "x"}, {"name": "y", "value": 1}],
    "table": {"l": {"g": 2}},
    "pairs": {"c": ["old", "new"]},
    "either": {"forward": 1},
    "flag": True,
    "anything": [1, {"a": None}],
}


def test_a_document_becomes_its_dataclass() -> None:
    found = from_json(Outer, GOOD)
    assert found.inner == (Inner("x"), Inner("y", 1.0))
    assert (found.table, found.pairs, found.either) == ({"l": {"g": 2.0}}, {"c": ("old", "new")}, {"forward": 1.0})
    assert (found.count, found.kind, found.flag, found.anything) == (3, "b", True, [1, {"a": None}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": True}, "count is True, expected an integer."),
        ({"count": 1.0}, "count is 1.0, expected an integer."),
        ({"kind": "c"}, "kind is 'c', expected one of a, b."),
        ({"kind": []}, "kind is a list of 0, expected one of a, b."),
        ({"inner": {}}, "inner is an object of 0, expected a list."),
        ({"inner": [{"name": 7}]}, "inner[0].name is 7, expected text."),
        ({"inner": [{}]}, "inner[0] has no entry 'name'."),
        ({"inner": [{"name": "x", "value": "1"}]}, "inner[0].value is '1', expected a finite number or null."),
        ({"table": {"l": {"g": "x" * 99}}}, "table['l']['g'] is 'xxx"),
        ({"table": {"l": {"g": float("inf")}}}, "table['l']['g'] is inf, expected a finite number."),
        ({"pairs": {"c": ["old"]}}, "pairs['c'] is a list of 1, expected two values."),
        ({"either": "x"}, "either is 'x', expected a finite number or an object."),
        ({"flag": 1}, "flag is 1, expected true or false."),
        ({"tomorrow": 1}, "it has an unknown entry 'tomorrow'; expected count, kind, inner, "),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_json(Outer, GOOD | changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": NaN}', "it holds NaN, which is not a JSON number."),
        (b'{"a": -Infinity}', "it holds -Infinity, which is not a JSON number."),
        (b'{"a": 1', "it is not valid JSON, perhaps truncated (line 1: "),
        (b"", "it is not valid JSON, perhaps truncated (line 1: "),
        (b"\xff\xfe{}", "it is not UTF-8 text (byte 0)."),
    ],
)
def test_text_that_is_not_json_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_json(data)
    assert str(caught.value).startswith(message)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"name": "x"}')
    assert read_as(Inner, path) == Inner("x")
    os.truncate(path, 200 * 2**20)
    with pytest.raises(ValueError, match="the file is larger than 134217728 bytes"):
        read_as(Inner, path)
