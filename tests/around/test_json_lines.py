"""Lines of measurements are read back, and continued, after a run that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from shared.json_lines import drop_unfinished_line, read_lines


def test_half_a_line_at_the_end_is_left_out_and_can_be_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    drop_unfinished_line(path)
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_there_are_no_lines_where_there_is_no_file(tmp_path: Path) -> None:
    drop_unfinished_line(tmp_path / "none.jsonl")
    assert read_lines(tmp_path / "none.jsonl") == []


def test_a_line_that_is_no_json_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": {"b"\n{"a": 3}\n')
    message = r"lines.jsonl: line 2 is not JSON \(Expecting ':' delimiter\): .*\. Take it out of the file"
    with pytest.raises(ValueError, match=message):
        read_lines(path)
