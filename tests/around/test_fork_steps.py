"""The benchmark of a fork's steps, from its command to its lines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small_forks import write_recipe

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import fork_steps


@pytest.mark.slow
def test_a_line_says_how_long_a_step_takes_of_each_contender_and_number_of_processes(tmp_path: Path) -> None:
    path, output = write_recipe(tmp_path, [{"format": "bf16"}]), tmp_path / "steps.jsonl"
    fork_steps.main([str(path), "--processes", "2", "1", "--steps", "2", "--output", str(output), "--device", "cpu"])
    lines = read_lines(output)
    contenders = ["bf16", "random {fp4, fp8}, 50% by gemm", "mxfp4", "random {mxfp4, mxfp8}, 50% by gemm", "nvfp4"]
    assert [line["contender"] for line in lines] == [name for name in contenders for _ in range(2)]
    assert [line["processes"] for line in lines] == [1, 2] * 5
    assert {line["cuda_graph"] for line in lines} == {False}
    for alone, beside in zip(lines[::2], lines[1::2], strict=True):
        assert alone["losses"] == beside["losses"] and len(alone["losses"]) == 5
        assert all(map(math.isfinite, alone["losses"]))
        assert alone["step_ms"] == alone["step_ms_per_device"] > 0
        assert beside["step_ms_per_device"] == pytest.approx(beside["step_ms"] / 2, abs=1e-3)
