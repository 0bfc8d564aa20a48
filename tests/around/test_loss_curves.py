"""Do the loss curves of several seeds run, and are their differences paired?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import loss_curves
import pytest
from scipy.stats import ttest_rel
from speed_parts import setting


def row(arm: str, seed: int, loss: float, steps: int = 2) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "losses": [9.0, loss][-steps:]}


def test_differences_are_paired_by_seed_with_the_interval_of_a_t_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_curves, "_LAST", 1)
    first, second = [3.0, 3.5, 4.0], [3.1, 3.7, 4.05]
    rows = [row("a", seed, loss) for seed, loss in enumerate(first)]
    rows += [row("b", seed, loss) for seed, loss in enumerate(second)]
    rows += [row("a", 7, 5.0), row("b", 7, 1.0, steps=1), row("c", 0, 1.0)]
    interval = ttest_rel(second, first).confidence_interval()
    half = (interval.high - interval.low) / 2
    assert list(loss_curves.differences(rows, 2)) == [f"b less a: +0.1167 ± {half:.4f} (3 seeds)"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_tiny_model_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "lines.jsonl"
    text.write_text("One word, another word, and so on to the end of it. " * 2000)
    monkeypatch.setattr(loss_curves, "COMPILER", "eager")
    shape = ["--shape", "64", "160", "1", "4", "2", "--steps", "2", "--rows", "2", "--device", "cpu"]
    command = ["loss_curves.py", *shape, "--text", str(text), "--arms", setting.BF16, "emulated", "--seeds", "0", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    loss_curves.main()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["arm"], line["seed"]) for line in lines] == [
        (arm, seed) for seed in (0, 1) for arm in (setting.BF16, "emulated")
    ]
    assert lines[0]["losses"] != lines[1]["losses"] != lines[2]["losses"]
    assert "emulated less BF16: " in capsys.readouterr().out
