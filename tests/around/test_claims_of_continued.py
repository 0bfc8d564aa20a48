"""Figures that the page on going on from a checkpoint of 124M quotes are those of the committed lines."""

from __future__ import annotations

import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import prose_of
from scipy.stats import norm

from eval.bakeoff.fork_lines import fork_key, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_score_table import Compared, compare_scores, right_answers
from eval.bakeoff.fork_statistics import holm

ROOT = Path(__file__).resolve().parents[2]
LINES = ROOT / "eval" / "results" / "forks-continue-124m.jsonl"
RECIPE = ROOT / "recipes" / "forks-continue-124m.yaml"
PAGE = ROOT / "docs" / "results-continued.md"
text = partial(prose_of, "docs/results-continued.md")
SNIP = "snip {{fp4, fp8}}, {}% by {}, refresh_every 250"
NAMES = {
    "bf16": "BF16",
    "fp8": "FP8",
    SNIP.format(50, "gemm"): "SNIP by GEMM, 50%",
    SNIP.format(75, "gemm"): "SNIP by GEMM, 75%",
    "backward-first {fp4, fp8}, 75% by gemm": "`backward-first` by GEMM, 75%",
    SNIP.format(50, "layer"): "SNIP by layer, 50%",
    SNIP.format(75, "layer"): "SNIP by layer, 75%",
    "layer-position {fp4, fp8}, 75% by layer": "`layer-position` by layer, 75%",
    SNIP.format(50, "layer").replace("snip", "snip-paper"): "`snip-paper` by layer, 50%",
    SNIP.format(75, "layer").replace("snip", "snip-paper"): "`snip-paper` by layer, 75%",
    "fp4": "all FP4",
}
TASKS = {
    "arc_easy": "ARC-Easy",
    "arc_challenge": "ARC-Challenge",
    "hellaswag": "HellaSwag",
    "lambada_openai": "LAMBADA",
    "piqa": "PIQA",
    "winogrande": "WinoGrande",
    "boolq": "BoolQ",
    "openbookqa": "OpenBookQA",
    "mmlu": "MMLU",
}


@cache
def continued() -> list[dict[str, Any]]:
    """The lines."""
    return read_forks([LINES])


def line_of(contender: str, steps: int, seed: int = 0) -> dict[str, Any] | None:
    """The line of a contender; None if there is none."""
    named = (line for line in continued() if (line["contender"], line["steps"]) == (contender, steps))
    return next((line for line in named if line["fork"]["base_seed"] == seed), None)


def gap(contender: str, steps: int, loss: str = "held_out_plan", seed: int = 0) -> str:
    """The difference to BF16 in percent; "-" without a line."""
    own, other = line_of(contender, steps, seed), line_of("bf16", steps, seed)
    if own is None or other is None:
        return "-"
    return f"{100 * (own['loss'][loss] / other['loss'][loss] - 1):+.3f}"


def rows_of_losses() -> list[str]:
    """The rows of the table of losses."""
    kinds = [(1000, "held_out_plan"), (1600, "held_out_plan"), (1000, "train"), (1600, "train")]
    return [
        f"| {name} | " + " | ".join(gap(contender, *kind) for kind in kinds) + " |"
        for contender, name in NAMES.items()
        if contender != "bf16"
    ]


def scores_of_bf16(steps: int) -> dict[str, tuple[float, float, float | None]]:
    """Task -> share of right answers, standard error and chance, in percent."""
    line = line_of("bf16", steps)
    assert line is not None
    rows = {row["task"]: row for row in line["scores"] if row["group"] is None}
    found = {}
    for task in TASKS:
        accuracy, chance = rows[task]["metrics"]["acc"], rows[task]["chance"]
        found[task] = (100 * accuracy["value"], 100 * accuracy["stderr"], None if chance is None else 100 * chance)
    return found


def rows_of_scores() -> list[str]:
    """The rows of the table of BF16's scores."""
    early, late = scores_of_bf16(1000), scores_of_bf16(1600)
    rows = []
    for task, name in TASKS.items():
        chance = early[task][2]
        cells = [f"{own[task][0]:.1f} ± {own[task][1]:.1f}" for own in (early, late)]
        rows.append(f"| {name} | {'-' if chance is None else f'{chance:.0f}'} | {' | '.join(cells)} |")
    return rows


def above_chance(steps: int) -> set[str]:
    """Tasks where BF16 is significantly above chance: one-sided, after Holm's correction over the tasks."""
    scores = {task: own for task, own in scores_of_bf16(steps).items() if own[2] is not None}
    ps = holm([float(norm.sf((share - (chance or 0)) / error)) for share, error, chance in scores.values()])
    return {task for task, p in zip(scores, ps, strict=True) if p is not None and p < 0.05}


@cache
def compared(steps: int) -> list[tuple[Compared, float]]:
    """The comparisons of the report's table with their corrected p-values."""
    families = load_recipe(RECIPE).comparisons_after(steps)
    pairs = dict.fromkeys(pair for family in families.values() for pair in family)
    found = compare_scores([line for line in continued() if line["steps"] == steps], list(pairs))
    ps = holm([one.difference.p for one in found])
    return [(one, 1.0 if p is None else p) for one, p in zip(found, ps, strict=True)]


def rows_of_differences() -> list[str]:
    """The rows of the table of what could be excluded: differences to BF16 after 1,600 steps."""
    rows = []
    for task, name in (TASKS | {"all questions": "all questions"}).items():
        own = [one for one, _ in compared(1600) if one.task == task and one.pair.endswith("against bf16")]
        assert len(own) == 10
        means = [one.difference.mean for one in own]
        widths = [one.difference.half_width for one in own]
        detectable = [one.difference.detectable(0.05 / len(compared(1600))) or 0.0 for one in own]
        cells = [f"{own[0].difference.forks:,}", f"{min(means):+.2f} to {max(means):+.2f}"]
        cells += [f"{min(widths):.2f} to {max(widths):.2f}", f"{min(detectable):.2f} to {max(detectable):.2f}"]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def excluded_on(task: str) -> int:
    """Of how many contenders the interval to BF16 after 1,600 steps excludes half a point, in either direction."""
    own = [one.difference for one, _ in compared(1600) if one.task == task and one.pair.endswith("against bf16")]
    return sum(abs(difference.mean) + difference.half_width < 0.5 for difference in own)


def significant(steps: int) -> dict[tuple[str, str], Compared]:
    """(Pair, task) -> the comparisons that are significant."""
    return {(one.pair, one.task): one for one, p in compared(steps) if p < 0.05}


def rows_of_boolq() -> list[str]:
    """The rows of BoolQ after 1,600 steps: score, difference to BF16, share of "yes", right of both kinds."""
    rows = []
    for contender, name in NAMES.items():
        right, yes, of_yes, of_no = boolq(contender, 1600)
        pair = (f"{contender} against bf16", "boolq")
        one = next((one for one, _ in compared(1600) if (one.pair, one.task) == pair), None)
        difference = "-" if one is None else f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f}"
        difference = f"**{difference}**" if pair in significant(1600) else difference
        rows.append(f"| {name} | {right:.1f} | {difference} | {yes:.1f} | {of_yes:.1f} | {of_no:.1f} |")
    return rows


def boolq(contender: str, steps: int) -> tuple[float, float, float, float]:
    """Right answers, answers "yes", right ones where "yes" is right, and where "no" is, all in percent.

    BF16 of seed 2 answered "no" throughout, so its right answers say which questions have the answer "no".
    """
    line, of_no = line_of(contender, steps), line_of("bf16", 1000, seed=2)
    assert line is not None and of_no is not None
    right, is_no = right_answers(line)["boolq"], right_answers(of_no)["boolq"] == 1
    shares = right.mean(), np.where(is_no, 1 - right, right).mean(), right[~is_no].mean(), right[is_no].mean()
    return tuple(100 * float(share) for share in shares)  # type: ignore[return-value]


def test_which_lines_there_are() -> None:
    assert {name for name in NAMES if line_of(name, 1600) is None} == set()
    assert [NAMES[name] for name in NAMES if line_of(name, 1000) is None] == ["`snip-paper` by layer, 50%"]
    others = {(line["contender"], line["fork"]["base_seed"], line["steps"]) for line in continued()}
    rule = "layer-position {fp4, fp8}, 75% by layer"
    seeds = {("bf16", 1, 1000), ("bf16", 2, 1000), ("fp8", 2, 1000), (rule, 2, 1000)}
    assert {key for key in others if key[1]} == seeds and len(continued()) == len(others) == 25
    assert {(line["commit"], line["machine"]) for line in continued()} == {("6237e0a", "NVIDIA H200")}
    assert "commit `6237e0a`" in text()
    assert len({fork_key(line) for line in continued() if line["fork"]["base_seed"] == 0}) == 1


def test_the_second_call_repeats_the_first_ones_losses() -> None:
    repeated = 0
    for name in NAMES:
        early, late = line_of(name, 1000), line_of(name, 1600)
        if early is not None and late is not None:
            curve = early["training_curve"]
            assert len(curve) == 40 and late["training_curve"][:40] == curve
            assert late["plans"][: len(early["plans"])] == early["plans"]
            repeated += 1
    assert repeated == 10 and "all ten contenders that ran in both" in text()


def test_losses_against_bf16() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_losses())
    late = {name: float(gap(name, 1600)) for name in NAMES if name != "bf16"}
    assert sorted(late, key=lambda name: late[name])[0] == "fp8" and late["fp8"] < 0
    assert max(late, key=lambda name: late[name]) == SNIP.format(75, "layer").replace("snip", "snip-paper")
    by_gemm, by_layer, rule = (
        SNIP.format(75, "gemm"),
        SNIP.format(75, "layer"),
        "layer-position {fp4, fp8}, 75% by layer",
    )
    gaps = {name: gap(name, 1600) for name in (by_gemm, by_layer, "fp4", "fp8")}
    assert f"SNIP by GEMM at 75% ends at {gaps[by_gemm]}% in this one training, all FP4 at {gaps['fp4']}%" in text()
    assert f"FP8 at {gaps['fp8']}%" in text()
    assert f"{gaps[by_layer]}% at 75%, against {gaps[by_gemm]}%" in text()
    half, most = (gap(SNIP.format(share, "layer").replace("snip", "snip-paper"), 1600) for share in (50, 75))
    assert f"{half}% with 50% in FP4 and at {most}% with 75%, where all FP4 is at {gaps['fp4']}%" in text()
    assert f"{gap('fp8', 1000)}% with seed 0 and {gap('fp8', 1000, seed=2)}% with seed 2" in text()
    assert f"{gap(rule, 1000)} and {gap(rule, 1000, seed=2)}%" in text()
    apart = abs(float(gap("fp8", 1000)) - float(gap("fp8", 1000, seed=2)))
    assert f"{apart:.2f} points apart" in text()
    assert "0.15 to 0.31%" in " ".join((ROOT / "docs" / "results-longer.md").read_text(encoding="utf-8").split())
    assert "0.15 to 0.31%" in text()
    gemm_rule, by = "backward-first {fp4, fp8}, 75% by gemm", {name: float(gap(name, 1600)) for name in NAMES}
    assert f"differ by {by[by_gemm] - by[gemm_rule]:+.3f} points after 1,600 steps" in text()
    assert f"differ by {by[by_layer] - by[rule]:+.3f}. Neither" in text()
    longer = " ".join((ROOT / "docs" / "results-longer.md").read_text(encoding="utf-8").split())
    assert "power 0.8: 37 per contender" in longer and "56 for SNIP by GEMM" in longer
    assert "37 to 56 forks per contender" in text()


def test_the_readme_says_what_low_precision_costs_at_124m() -> None:
    costs = [gap(name, 1600).removeprefix("+") for name in (SNIP.format(75, "gemm"), "fp4")]
    assert f"SNIP by GEMM at 75% ends {costs[0]}% above BF16 and all FP4 {costs[1]}%" in prose_of("README.md")


def test_bf16_is_above_chance_on_arc_easy_alone_but_for_a_biased_boolq() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_scores())
    assert above_chance(1000) == {"arc_easy"} and above_chance(1600) == {"arc_easy", "boolq"}
    for steps in (1000, 1600):
        scores = scores_of_bf16(steps)
        below = {task for task, (share, error, chance) in scores.items() if chance and share + 3 * error < chance}
        assert below == {"arc_challenge", "openbookqa", "mmlu"}
        assert scores["lambada_openai"][0] < 0.05
    assert {row["num_fewshot"] for line in continued() for row in line["scores"] if row["group"] is None} == {0}
    assert "0.04 and 0.02%" in text()
    assert [round(scores_of_bf16(steps)["lambada_openai"][0], 2) for steps in (1000, 1600)] == [0.04, 0.02]


def test_significant_differences_are_of_boolq_and_of_all_questions_alone() -> None:
    for steps in (1000, 1600):
        assert {task for _, task in significant(steps)} == {"boolq", "all questions"}
    assert len(compared(1000)) == 110 and len(compared(1600)) == 120
    assert "of the 110 tests after 1,000 steps" in text() and "of the 120 after 1,600" in text()
    to_bf16 = {steps: {key for key in significant(steps) if key[0].endswith("against bf16")} for steps in (1000, 1600)}
    early, late = ({NAMES[pair.removesuffix(" against bf16")] for pair, _ in to_bf16[steps]} for steps in (1000, 1600))
    assert early == {
        "SNIP by GEMM, 50%",
        "SNIP by GEMM, 75%",
        "SNIP by layer, 75%",
        "`snip-paper` by layer, 75%",
        "all FP4",
    }
    assert late == {
        "SNIP by GEMM, 50%",
        "SNIP by layer, 75%",
        "`layer-position` by layer, 75%",
        "`snip-paper` by layer, 75%",
    }

    def directions(steps: int) -> dict[str, bool]:
        """Contender -> whether it is higher than BF16 in BoolQ."""
        own = {pair: one for (pair, task), one in significant(steps).items() if task == "boolq"}
        return {
            NAMES[pair.removesuffix(" against bf16")]: one.difference.mean > 0
            for pair, one in own.items()
            if pair.endswith("against bf16")
        }

    assert {name for name, is_higher in directions(1000).items() if is_higher} == {"SNIP by layer, 75%"}
    assert {name for name, is_higher in directions(1600).items() if not is_higher} == {"`snip-paper` by layer, 75%"}
    assert (
        "SNIP by GEMM at 50 and 75% and all FP4 (lower), SNIP by layer at 75% (higher), `snip-paper` at 75% (lower); "
        "of the 120 after 1,600: SNIP by GEMM at 50%, SNIP by layer at 75% and `layer-position` (higher), "
        "`snip-paper` at 75% (lower)"
    ) in text()
    for steps, name in ((1000, "fp4"), (1600, "layer-position {fp4, fp8}, 75% by layer")):
        one = significant(steps)[f"{name} against bf16", "all questions"]
        assert f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f}" in text()
    for name in (SNIP.format(50, "gemm"), "fp4"):
        for steps in (1000, 1600):
            found = (one for one, _ in compared(steps) if (one.pair, one.task) == (f"{name} against bf16", "boolq"))
            assert f"{next(found).difference.mean:+.2f}" in text()


def test_what_the_benchmarks_could_exclude() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_differences())
    own = [one for one, _ in compared(1600) if one.pair.endswith("against bf16") and one.task in TASKS]
    widths = {(one.pair, one.task): one.difference.half_width for one in own if one.task != "lambada_openai"}
    least, most = (min(widths, key=lambda key: widths[key]), max(widths, key=lambda key: widths[key]))
    assert (least[1], most[1]) == ("hellaswag", "winogrande")
    assert f"± {widths[least]:.2f} points (HellaSwag)" in text() and f"± {widths[most]:.2f} (WinoGrande)" in text()
    assert excluded_on("winogrande") == 0
    assert f"interval of {excluded_on('hellaswag')} of ten contenders on HellaSwag" in text()
    rest = [one.difference.mean for one in own if one.task != "boolq"]
    assert f"{min(rest):+.2f} to {max(rest):+.2f} points" in text()


def test_boolq_shows_how_often_a_model_says_yes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_boolq())
    no = line_of("bf16", 1000, seed=2)
    assert no is not None and (right_answers(no)["boolq"].sum(), len(right_answers(no)["boolq"])) == (1237, 3270)
    scores = [100 * right_answers(line)["boolq"].mean() for seed in range(3) if (line := line_of("bf16", 1000, seed))]
    assert f"{scores[0]:.1f}, {scores[1]:.1f} and {scores[2]:.1f}%" in text()
    assert "62.2% have" in text() and round(100 * (1 - 1237 / 3270), 1) == 62.2
    names = ("fp8", "layer-position {fp4, fp8}, 75% by layer")
    others = [100 * right_answers(line)["boolq"].mean() for name in names if (line := line_of(name, 1000, 2))]
    assert "({:.1f} and {:.1f}%)".format(*others) in text()
    balanced = [sum(boolq(name, 1600)[2:]) / 2 for name in NAMES]
    assert f"{min(balanced):.1f} to {max(balanced):.1f}%" in text()


@pytest.mark.slow
def test_the_tables_of_continued_forks_are_those_of_the_lines(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PAGE, tmp_path))
    report = write_report([LINES], None, Asked.by(load_recipe(RECIPE), RECIPE), [copy])
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert report == (ROOT / "eval" / "results" / "forks-continue-124m.md").read_text(encoding="utf-8")
