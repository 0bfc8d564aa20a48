"""Do the tables of the paper's estimates say what the lines of the benchmark hold? (benchmarks/paper_fidelity.py)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paper_fidelity
import pytest
from shared.json_lines import read_lines

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "paper_fidelity.jsonl"


def line(seed: int = 0, factor: float = 1.0) -> dict[str, Any]:
    """A case of four layers in which "snip" is right and "snip-paper" is in the opposite order, times a factor."""
    true = [1.0, 2.0, 3.0, 4.0]
    right, wrong = ({"loss": one, "weight": one} for one in (true, [factor * x for x in true[::-1]]))
    return {
        "family": "llama",
        "seed": seed,
        "estimates": {
            name: [dict.fromkeys(paper_fidelity.FORMATS, table)] * 2
            for name, table in (("snip", right), ("snip-paper", wrong))
        },
        "weight_truth": {key: [true, true] for key in paper_fidelity.FORMATS},
        "held_out_rise": {key: [[x, x] for x in true] for key in paper_fidelity.FORMATS},
        "own_rise": {key: [true, [-x for x in true]] for key in paper_fidelity.FORMATS},
        "plans": {"snip": 0.01, "snip-paper": 0.03, "random-0": 0.02, "random-1": 0.04, "uniform-fp8": 0.0}
        | {"uniform-fp4": 0.05},
        "plan_overlap": 0.5,
        "commit": "abc",
        "machine": "none",
        "command": "python",
    }


def test_figures_are_of_the_micro_batches_together() -> None:
    right, wrong = (paper_fidelity.figures(line(factor=2.0), name, "fp4") for name in paper_fidelity.ESTIMATORS)
    assert right == pytest.approx(dict.fromkeys(right, 1.0) | {"dW median error": 0.0})
    assert [wrong[name] for name in wrong if "Spearman" in name] == pytest.approx([-1.0, -1.0, -1.0])
    ratios = np.array([8.0, 3.0, 4 / 3, 0.5])
    assert wrong["dW median ratio"] == pytest.approx(np.median(ratios))
    assert wrong["dW median error"] == pytest.approx(np.median(np.abs(ratios - 1)))
    assert wrong["dL ratio of means, held out"] == pytest.approx(2.0)


def test_tables_have_means_over_seeds_with_intervals_and_paired_differences() -> None:
    text = paper_fidelity.text_of([line(seed) for seed in range(3)])
    assert "| dW Spearman | snip | 1.00 ± 0.00 | 1.00 ± 0.00 |" in text
    assert "|  | difference | 2.00 ± 0.00 | 2.00 ± 0.00 |" in text
    assert "| snip-paper less snip | 2.000 ± 0.000 |" in text and "| snip-paper less random | 0.000 ± 0.000 |" in text
    assert "Cases: llama 3;" in text


def test_an_interval_is_student_s_t_over_cases() -> None:
    # 4.303 = t of 2 degrees of freedom.
    assert paper_fidelity.interval([1.0, 2.0, 3.0], 3) == f"2.000 ± {4.3027 / 3**0.5:.3f}"
    assert paper_fidelity.interval([1.0]) == "1.00"


def test_the_page_has_the_tables_of_the_committed_lines() -> None:
    page = (RESULTS.parents[2] / "docs" / "fidelity.md").read_text(encoding="utf-8")
    for row in paper_fidelity.text_of(read_lines(RESULTS)).splitlines():
        assert row in page, row
