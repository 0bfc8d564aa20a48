"""Single layers of a model against their estimates (benchmarks/truth_at_size.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import truth_at_size
from committed import ROOT


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["truth_at_size.py", *arguments])
    monkeypatch.setattr(truth_at_size.torch, "set_num_threads", lambda count: None)  # for this process it would stay
    truth_at_size.main()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_with_the_layers_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(truth_at_size.MODELS, "tiny", (64, 96, 1, 2, 1, 2e-3))
    text = tmp_path / "text.txt"
    text.write_text("The text of a test. " * 4000, encoding="utf-8")
    output, state = tmp_path / "lines.jsonl", tmp_path / "state.pt"
    arguments = ["measure", "--device", "cpu", "--text", str(text), "--steps", "2", "--rows", "1", "--draws", "1"]
    arguments += ["--state", str(state), "--output", str(output)]
    run([*arguments, "--layers", "3"], monkeypatch)
    run([*arguments, "--layers", "7"], monkeypatch)
    lines = lines_of(output)
    assert len({line["layer"] for line in lines}) == len(lines) == 7
    assert np.array([line["truth"] for line in lines]).shape == (7, 2, 1)
    assert all(0.3 < line["estimate"][0] / line["truth"][0][0] < 30 for line in lines)
    run(["report", str(output)], monkeypatch)
    assert "7 layers in FP4" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match=r"has lines of another measurement: \{'seed': 0\}; this one has \{'seed': 1\}"
    ):
        run([*arguments, "--seed", "1"], monkeypatch)


def test_a_perfect_estimate_has_rank_1_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth_at_size, "RESAMPLES", 20)
    first = {
        "model": "tiny",
        "steps": 1,
        "loss": 5.0,
        "batches": 2,
        "rows": 1,
        "draws": 2,
        "machine": "m",
        "commit": "c",
    }
    lines = [{**first, "truth": [[3.0 * i, 4.0 * i]] * 2, "estimate": [np.sqrt(12.5) * i] * 2} for i in range(1, 41)]
    report = truth_at_size.report(lines)
    assert "40 layers in FP4" in report
    assert "| rank correlation (Spearman) | 1.000 (1.000 to 1.000) | 1.000 (1.000 to 1.000) |" in report
    assert "| median error | 0.000 (0.000 to 0.000) | 0.000 (0.000 to 0.000) |" in report
    assert "| rank correlation of the truth of two micro-batches | 1.000 (1.000 to 1.000) | |" in report
    worse = [{**line, "estimate": [1.1 * line["estimate"][0], line["estimate"][1]]} for line in lines]
    assert "| median of estimate / truth | 1.051 (1.051 to 1.051) | 1.100 (1.100 to 1.100) |" in truth_at_size.report(
        worse
    )


def test_an_empty_file_is_no_error() -> None:
    assert truth_at_size.report([]) == "No lines yet."


@pytest.mark.slow
def test_the_table_of_single_layers_at_1_1b_is_that_of_its_lines() -> None:
    lines = lines_of(ROOT / "benchmarks" / "results" / "truth_at_size_1.1B.jsonl")
    _, table = truth_at_size.report(lines).split("\n\n")
    assert table in (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
