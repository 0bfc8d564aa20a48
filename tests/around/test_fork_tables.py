"""Do the tables of forks say what the lines hold?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import forks
from eval.bakeoff.fork_cells import Fork
from eval.bakeoff.fork_lines import differences
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_statistics import Difference
from eval.bakeoff.fork_tables import family_table, short_table, table

ROOT = Path(__file__).resolve().parents[2]


def line(contender: str, data_seed: int, loss: float, diverged: bool = False) -> dict[str, Any]:
    return {
        "contender": contender,
        "fork": asdict(Fork(base_seed=data_seed, point=3, data_seed=0)),
        "state": "of the base",
        "loss": dict.fromkeys(("train", "held_out_plan", "held_out_high_precision"), None if diverged else loss),
        "diverged": diverged,
        "fp4_fraction": 0.0 if contender == "bf16" else 1.0,
        "shares": {contender: 1.0},
        "seconds": {"training": 0.5},
        "steps": 100,
        "machine": "a machine",
        "commit": "abc",
    }


LINES = [line("bf16", seed, loss) for seed, loss in enumerate((4.0, 5.0, 8.0))] + [
    line("fp4", 2, 8.24),  # +3%
    line("fp4", 0, 4.04),  # +1%
    line("fp4", 1, 5.10),  # +2%
]


def test_differences_are_paired_by_fork() -> None:
    found = differences(LINES[3:], LINES[:3], "train")
    assert found == pytest.approx([3.0, 1.0, 2.0])
    assert differences([line("fp4", 7, 5.0), line("fp4", 1, 5.0, diverged=True)], LINES[:3], "train") == []


def test_the_table_holds_what_was_computed_by_hand() -> None:
    text = table(LINES, "bf16")
    assert "| bf16 | 0.0% | - | 3 | 0 | 0 | 0 | - | - | 5 |" in text
    cell = "+2.000 ± 2.484"
    assert f"| fp4 | 100.0% | - | 3 | {cell} | {cell} | {cell} | 1.000 | 0.577 | 5 |" in text
    assert "3 forks of 3 bases; a machine; commit abc." in text


def test_a_fork_that_diverged_is_counted_and_left_out() -> None:
    text = table([*LINES[:5], line("fp4", 1, 0.0, diverged=True)], "bf16")
    assert "| fp4 | 100.0% | - | 2 (1 diverged) | +2.000 ± 12.706 |" in text


def test_a_fork_that_blew_up_is_named_and_stays_in_the_mean() -> None:
    text = table([*LINES[:5], LINES[5] | {"blew_up": True}], "bf16")
    assert "| fp4 | 100.0% | - | 3 (1 blew up) | +2.000 ± 2.484 |" in text


def test_forks_from_other_weights_are_no_pair() -> None:
    text = table([*LINES[:5], LINES[5] | {"state": "of a base that was trained again"}], "bf16")
    assert "| fp4 | 100.0% | - | 2 (1 unpaired) | +2.000 ± 12.706 |" in text
    assert "Unpaired: forks that `bf16` has no line of (of base 1)." in text
    assert "Unpaired" not in table(LINES, "bf16")


def test_a_machine_with_one_thread_is_named_in_the_singular() -> None:
    text = table([one | {"machine": "x86_64, 1 threads"} for one in LINES if one["fork"]["base_seed"] == 0], "bf16")
    assert "1 fork of 1 base; x86_64, 1 thread; commit abc." in text


def test_shares_of_several_formats_are_means_over_forks() -> None:
    plans = ({"nvfp4": 0.8, "mxfp8": 0.2}, {"nvfp4": 0.7, "mxfp8": 0.2, "bf16": 0.1})
    lines = [line("snip", seed, 5.0) | {"shares": shares} for seed, shares in enumerate(plans)]
    assert "| snip | 100.0% | nvfp4 75.0%, mxfp8 20.0%, bf16 5.0% | 2 |" in table([*LINES[:2], *lines], "bf16")


def test_forks_on_another_machine_are_no_pair() -> None:
    text = table([*LINES[:5], LINES[5] | {"machine": "another"}], "bf16")
    assert "| fp4 | 100.0% | - | 2 (1 unpaired) | +2.000 ± 12.706 |" in text


def test_forks_of_several_commits_are_pairs_and_all_of_these_are_named() -> None:
    text = table([*LINES[:5], LINES[5] | {"commit": "def"}], "bf16")
    assert "| fp4 | 100.0% | - | 3 | +2.000 ± 2.484 |" in text
    assert "commit abc, def." in text


FP8 = [line("fp8", seed, loss) for seed, loss in enumerate((4.012, 4.995, 8.008))]  # +0.3%, -0.1%, +0.1%


def test_a_family_is_corrected_together_and_says_what_it_could_have_found() -> None:
    text = family_table([*LINES, *FP8], "two-formats", [("fp4", "bf16"), ("fp8", "bf16")])
    # Of 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2). t = 2 / (1 / sqrt(3)), and 0.1 / (0.2 / sqrt(3)).
    far, wide = (Difference.independent(0.0, deviation, 3).detectable(0.05 / 2) for deviation in (1.0, 0.2))
    first, second = (1 - t / (2 + t * t) ** 0.5 for t in (2 * 3**0.5, 0.5 * 3**0.5))
    many = Difference.independent(0.0, 1.0, 3).forks_for(0.1, 0.05 / 2)
    cell = "+2.000 ± 2.484"
    row = f"| fp4 against bf16 | 3 | {cell} | {cell} | {cell} | 1.000 | - | 0.577 |"
    assert f"{row} {far:.3f} | {many} | {first:.3f} | {2 * first:.3f} |" in text
    row = "| fp8 against bf16 | 3 | +0.100 ± 0.497 | +0.100 ± 0.497 | +0.100 ± 0.497 | 0.200 | - | 0.115 |"
    assert f"{row} {wide:.3f} | 41 | {second:.3f} | {second:.3f} | not significant |" in text
    assert "their power for 0.1% is 0.0" in text
    assert text.startswith("**Two formats.** ")
    assert "p < 0.05 / 2" in text


def test_forks_of_one_base_widen_the_interval_and_points_have_a_table() -> None:
    forks = [(base, point) for base in range(3) for point in (3, 6)]
    lines = []
    for base, point in forks:
        for name, loss in (("bf16", 5.0), ("fp4", 5.0 * (1 + base / 100 + point / 1e5))):
            fork = asdict(Fork(base_seed=base, point=point, data_seed=0))
            lines.append(line(name, 0, loss) | {"fork": fork})
    text = family_table(lines, "formats", [("fp4", "bf16")])
    # Means of the bases 0.0045, 1.0045, 2.0045: standard deviation 1, standard error 1 / sqrt(3), 2 degrees of freedom.
    cell = "+1.004 ± 2.484"
    assert f"| fp4 against bf16 | 6 | {cell} | {cell} | {cell} | 0.894 | 1.000 | 0.577 |" in text
    assert "| comparison | after step 3 (%) | after step 6 (%) |" in text
    assert text.endswith("| fp4 against bf16 | +1.003 ± 2.484 | +1.006 ± 2.484 |")


def test_the_short_table_has_the_contenders_that_the_recipe_names() -> None:
    text = short_table([*LINES, *FP8], ["bf16", "fp4", "fp8"], "bf16", "held_out_plan", "python x")
    far, near = (Difference.independent(0.0, deviation, 3).detectable() for deviation in (1.0, 0.2))
    assert [row for row in text.splitlines() if row.startswith("| fp")] == [
        f"| fp4 | 100% | 3 | +2.000 ± 2.484 | {far:.3f} |",
        f"| fp8 | 100% | 3 | +0.100 ± 0.497 | {near:.3f} |",
    ]
    assert "Held-out loss (plan) after 100 steps against `bf16`" in text
    assert text.endswith("`python x` writes this table.")


def test_the_short_table_names_the_kernels_of_its_own_contenders() -> None:
    backends = {"bf16": None, "fp4": "hopper", "fp8": "emulated"}
    lines = [row | {"backend": backends[row["contender"]]} for row in [*LINES, *FP8]]
    texts = [short_table(lines, names, "bf16", "held_out_plan", "") for names in (["fp4"], ["fp4", "fp8"])]
    assert ["Kernels" in text for text in texts] == [False, True]


def test_a_pair_without_lines_is_named_and_not_counted() -> None:
    text = family_table(LINES, "formats", [("fp4", "bf16"), ("fp8", "bf16")])
    assert "over the one test of" in text
    assert text.endswith("Without lines: fp8 against bf16.")


def test_a_family_without_any_lines_has_no_table() -> None:
    assert family_table(LINES, "formats", [("fp8", "bf16"), ("fp8", "fp4")]) == (
        "**Formats.** Without lines: fp8 against bf16; fp8 against fp4."
    )


def test_a_pair_from_other_weights_is_named_and_has_no_row() -> None:
    again = [row | {"state": "of a base that was trained again"} for row in FP8]
    text = family_table([*LINES, *again], "formats", [("fp4", "bf16"), ("fp8", "bf16")])
    assert "over the one test of" in text and "| fp8" not in text
    assert text.endswith("Without a fork from the same weights that ended well for both: fp8 against bf16.")
    short = short_table([*LINES, *again], ["fp4", "fp8"], "bf16", "held_out_plan", "")
    assert "| fp8" not in short and "3 forks of 3 bases;" in short
    assert short.endswith("Not on forks from the same weights: fp8.")


def test_committed_lines_give_the_corrected_figures_of_the_log() -> None:
    lines = read_lines(ROOT / "eval" / "results" / "forks-decay.jsonl")
    pairs = [(name, "bf16") for name in ("fp8", "mxfp8", "nvfp4", "fp4", "mxfp4", "int4")]
    rows = [row.split(" | ") for row in family_table(lines, "formats", pairs).splitlines() if " against " in row]
    found = {row[0].split()[1]: (row[2], row[11]) for row in rows}
    assert found["int4"] == ("+0.104 ± 0.046", "0.032")
    assert found["mxfp4"] == ("+0.074 ± 0.042", "0.058")
    assert found["fp4"] == ("+0.069 ± 0.045", "0.064")


def test_one_fork_is_not_tested() -> None:
    text = family_table([LINES[0], LINES[4]], "formats", [("fp4", "bf16")])
    assert "| fp4 against bf16 | 1 | +1.000 | +1.000 | +1.000 | - | - | - | - | - | - | - | not tested |" in text
    assert "Nothing is tested yet: a test needs two forks of both contenders." in text
    assert "Holm's" not in text


def test_a_report_renews_the_tables_of_a_document_and_nothing_else(tmp_path: Path) -> None:
    lines, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    signed = [one | {"schema_version": 1, "id": str(i), "setting": "s"} for i, one in enumerate([*LINES, *FP8])]
    lines.write_text("".join(json.dumps(one) + "\n" for one in signed), encoding="utf-8")
    page.write_text("By hand.\n<!-- forks:pairs -->\nold\n<!-- /forks:pairs -->\nBy hand too.\n", encoding="utf-8")
    families = {"pairs": [("fp4", "fp8")]}
    text = write_report([lines], tmp_path / "tables.md", Asked(families=families), docs=[page])
    renewed = page.read_text(encoding="utf-8")
    assert renewed.startswith("By hand.\n<!-- forks:pairs -->\n**Pairs.** ")
    assert renewed.endswith("|\n<!-- /forks:pairs -->\nBy hand too.\n")
    assert "\nold\n" not in renewed
    assert "fp4 against fp8 | 3 |" in renewed and "fp4 against fp8 | 3 |" in text
    page.write_text("<!-- forks:other -->\n<!-- /forks:other -->\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match="markers for unknown tables \\['other'\\]; expected some of \\['all', 'pairs'\\]"
    ):
        write_report([lines], tmp_path / "tables.md", Asked(families=families), docs=[page])


def test_forks_of_several_lengths_have_tables_and_figures_of_their_own(tmp_path: Path) -> None:
    lines, page, figures = tmp_path / "lines.jsonl", tmp_path / "page.md", tmp_path / "figures"
    signed = [
        one | {"schema_version": 1, "id": f"{steps}-{i}", "setting": str(steps), "steps": steps}
        for steps in (1000, 100)
        for i, one in enumerate([*LINES, *FP8])
    ]
    lines.write_text("".join(json.dumps(one) + "\n" for one in signed), encoding="utf-8")
    page.write_text("<!-- forks:pairs-100 -->\n<!-- /forks:pairs-100 -->\n", encoding="utf-8")
    asked = Asked(families={"pairs": [("fp4", "fp8")]})
    text = write_report([lines], None, asked, [page], figures)
    assert text.index("loss after 100 steps") < text.index("loss after 1000 steps")
    assert "fp4 against fp8 | 3 |" in page.read_text(encoding="utf-8")
    assert [path.name for path in sorted(figures.iterdir())] == ["forks-pairs-100.png", "forks-pairs-1000.png"]
    more = [one | {"id": f"more-{one['id']}", "setting": "more"} for one in signed]
    lines.write_text("".join(json.dumps(one) + "\n" for one in [*signed, *more]), encoding="utf-8")
    with pytest.raises(ValueError, match="several of them of the same length and shift"):
        write_report([lines], None, asked, [page])


def test_a_table_against_a_contender_without_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="No line is of the contender 'fp8'; there are bf16, fp4"):
        table(LINES, "fp8")


def test_a_report_without_output_is_printed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.jsonl"
    signed = [one | {"schema_version": 1, "id": str(i), "setting": "s"} for i, one in enumerate(LINES)]
    lines.write_text("".join(json.dumps(one) + "\n" for one in signed), encoding="utf-8")
    assert forks.main(["report", str(lines)]) == 0
    assert capsys.readouterr().out == write_report([lines], None) + "\n"
    assert list(tmp_path.iterdir()) == [lines]
