"""JSON files are read strictly, into dataclasses with exactly their fields, and written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from snip_hf import json_io
from snip_hf.json_io import append_json_line, from_json, parse_json, read_json, write_json_atomic


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
    assert read_json(path) == {"name": "x"}
    os.truncate(path, 200 * 2**20)
    with pytest.raises(ValueError, match="the file is larger than 134217728 bytes"):
        read_json(path)


# Writing


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_call_that_fails_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_json_atomic(path, {"number": 1})

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_json_atomic(path, {"number": 2})
    monkeypatch.undo()
    assert read_json(path) == {"number": 1}
    assert list(tmp_path.iterdir()) == [path]
    write_json_atomic(path, {"number": 3})
    assert read_json(path) == {"number": 3}


def test_file_and_folder_are_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order, so that a power loss finds the old file or the whole new one."""
    calls: list[Any] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append("rename"), replace(*args))[1])
    write_json_atomic(tmp_path / "plan.json", {})
    assert calls[0].startswith(f"{tmp_path}/.plan.json.")
    assert calls[1:] == ["rename", str(tmp_path)]
    calls.clear()
    append_json_line(tmp_path / "history.jsonl", {})
    assert calls == [str(tmp_path / "history.jsonl")]


def test_a_folder_that_cannot_be_synced_does_not_make_a_write_that_is_done_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse_folders(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_json_atomic(tmp_path / "plan.json", {"number": 1})
    assert read_json(tmp_path / "plan.json") == {"number": 1}


def test_a_history_line_that_half_fitted_does_not_spoil_the_next(tmp_path: Path) -> None:
    """The disk fills up in the middle of a line and is emptied again before the next."""
    path = tmp_path / "history.jsonl"
    append_json_line(path, {"event": "start"})
    write = os.write
    sizes = [5, 5]

    def some(file: int, data: Any) -> int:
        if not sizes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: sizes.pop()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", some)
        with pytest.raises(OSError, match="No space left"):
            append_json_line(path, {"event": "refresh", "step": 2})
    append_json_line(path, {"event": "refresh", "step": 6})
    assert path.read_text() == '{"event": "start"}\n{"event": "refresh", "step": 6}\n'


def test_large_documents_are_written_without_indentation_and_small_ones_for_people(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": [1, 2]})
    assert path.read_text() == '{\n "a": [\n  1,\n  2\n ]\n}\n'
    write_json_atomic(path, {"a": [1] * 2**20})
    assert path.stat().st_size == len('{"a":[') + 2 * 2**20 - 1 + len("]}\n")


def test_a_writer_refuses_what_a_reader_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    monkeypatch.setattr(json_io, "MAX_JSON_BYTES", 100)
    for write in (write_json_atomic, append_json_line):
        write(path, "x" * 97)  # and two quotation marks and a line break
        with pytest.raises(
            ValueError, match=r"10[0-9] bytes of JSON are not written, because at most 100 can be read back"
        ):
            write(path, "x" * 99)
        assert read_json(path) == "x" * 97
        path.unlink()
