"""Figures that pages quote of forks with other weights of the divergences, and in the formats of the preset `hopper`,
are those of the committed lines; so is what pages say of forks that ran twice."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from committed import RESULTS, check_report, detectable_of, lines_of, recipe_of, text_of
from scipy.stats import fisher_exact

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import by_contender, difference_of, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from snip_hf.numerics.gemms import GEMMS

OBJECTIVES, MXFP4 = "objectives", "mxfp4"
PAGES = {name: f"docs/results-{name}.md" for name in (OBJECTIVES, MXFP4)}
LONG = 1000


@cache
def lines(name: str) -> list[dict[str, Any]]:
    return read_forks([RESULTS / f"forks-{name}.jsonl"])


@cache
def comparisons(name: str, family: str, steps: int) -> dict[tuple[str, str], fork_tables.Tested]:
    pairs = load_recipe(recipe_of(name)).comparisons_after(steps)[family]
    own = [line for line in lines(name) if line["steps"] == steps]
    return {(test.one, test.other): test for test in fork_tables.tests_of(own, pairs)}


def snip(share: int, formats: str = "fp4, fp8") -> str:
    return f"snip {{{formats}}}, {share}% by gemm"


@pytest.mark.parametrize(
    ("row", "of"),
    [
        ("`weight_divergence_factor=0`: the loss divergence alone", "{snip}, weight_divergence_factor 0.0"),
        ("`weight_divergence_factor=0.3`", "{snip}, weight_divergence_factor 0.3"),
        ("`loss_divergence_factor=0`: the weight divergence alone", "{snip}, loss_divergence_factor 0.0"),
        ("`greedy`", "greedy {{fp4, fp8}}, {share}% by gemm"),
        ("`backward-first`", "backward-first {{fp4, fp8}}, {share}% by gemm"),
    ],
)
def test_the_table_of_weights_has_the_differences_of_the_lines(row: str, of: str) -> None:
    cells = []
    for share in (75, 90, 95):
        one = of.format(snip=snip(share), share=share)
        found = comparisons(OBJECTIVES, f"at-{share}", 100)[one, snip(share)]
        figure = str(found.main) if found.reading == fork_tables.NOT_SIGNIFICANT else f"**{found.main}**"
        cells.append(f"{figure} ({found.main.detectable(found.level):.3f})")
    assert f"| {row} | {' | '.join(cells)} |" in text_of(PAGES[OBJECTIVES])


@pytest.mark.parametrize(
    ("name", "family", "steps", "one", "other", "reading"),
    [
        (OBJECTIVES, "at-90", 100, f"{snip(90)}, loss_estimator norm", snip(90), ""),
        (OBJECTIVES, "at-90", 100, f"{snip(90)}, probes 8", snip(90), ""),
        (OBJECTIVES, "at-90", LONG, f"{snip(90)}, weight_divergence_factor 0.0", snip(90), ""),
        (OBJECTIVES, "at-90", LONG, "greedy {fp4, fp8}, 90% by gemm", snip(90), ""),
        (OBJECTIVES, "at-75", LONG, "greedy {fp4, fp8}, 75% by gemm", snip(75), ""),
        (
            OBJECTIVES,
            "greedy",
            100,
            f"{snip(90)}, weight_divergence_factor 0.0",
            "greedy {fp4, fp8}, 90% by gemm",
            "higher",
        ),
        (
            OBJECTIVES,
            "greedy",
            LONG,
            f"{snip(90)}, weight_divergence_factor 0.0",
            "greedy {fp4, fp8}, 90% by gemm",
            "higher",
        ),
        (OBJECTIVES, "at-75", LONG, f"{snip(75)}, weight_divergence_factor 0.0", snip(75), ""),
        (MXFP4, "to-bf16", 100, "fp8-tensor", "bf16", ""),
        (MXFP4, "to-bf16", 100, snip(75, "mxfp4, fp8-tensor"), "bf16", ""),
        (MXFP4, "to-bf16", 100, "mxfp4", "bf16", "higher"),
        (MXFP4, "to-bf16", 100, snip(75), "bf16", ""),
        (MXFP4, "to-bf16", 100, "fp4", "bf16", "higher"),
        (MXFP4, "to-bf16", LONG, snip(75, "mxfp4, fp8-tensor"), "bf16", "higher"),
        (MXFP4, "to-bf16", LONG, "mxfp4", "bf16", "higher"),
        (MXFP4, "to-snip", 100, "random {mxfp4, fp8-tensor}, 75% by gemm", snip(75, "mxfp4, fp8-tensor"), "higher"),
        (MXFP4, "to-snip", 100, "backward-first {mxfp4, fp8-tensor}, 75% by gemm", snip(75, "mxfp4, fp8-tensor"), ""),
        (MXFP4, "to-snip", 100, snip(75), snip(75, "mxfp4, fp8-tensor"), ""),
        (MXFP4, "to-snip", 100, "mxfp4", snip(75, "mxfp4, fp8-tensor"), "higher"),
        (MXFP4, "to-snip", LONG, "mxfp4", snip(75, "mxfp4, fp8-tensor"), "higher"),
    ],
)
def test_pages_have_the_differences_of_the_lines(
    name: str, family: str, steps: int, one: str, other: str, reading: str
) -> None:
    found = comparisons(name, family, steps)[one, other]
    assert found.reading == (reading or fork_tables.NOT_SIGNIFICANT)
    assert str(found.main).removeprefix("+") in text_of(PAGES[name])
    if not reading:
        assert f"{found.main.detectable(found.level):.3f}" in text_of(PAGES[name])


@pytest.mark.parametrize("page", ["README.md", "docs/hopper.md", "docs/choosing.md"])
def test_other_pages_say_what_the_fastest_formats_cost(page: str) -> None:
    for steps in (100, LONG):
        for contender in (snip(75, "mxfp4, fp8-tensor"), "mxfp4"):
            found = comparisons(MXFP4, "to-bf16", steps)[contender, "bf16"]
            assert str(found.main).removeprefix("+") in text_of(page)


def test_pages_say_how_many_forks_ran() -> None:
    for name, whole, long, asked in ((OBJECTIVES, 396, 126, 144), (MXFP4, 144, 45, 54)):
        counts = {steps: sum(line["steps"] == steps for line in lines(name)) for steps in (100, LONG)}
        runs = [steps for run in load_recipe(recipe_of(name)).runs("text") for steps in run.ids]
        assert counts == {100: whole, LONG: long}
        assert (runs.count(100), runs.count(LONG)) == (whole, asked)
        assert f"All {whole} forks of 100 steps ran, and {long} of the {asked} of 1,000 steps" in text_of(PAGES[name])
    ran_on = Counter(
        (line["commit"], line["machine"].split()[1]) for line in lines(OBJECTIVES) if line["steps"] == LONG
    )
    assert ran_on == {("42eb520", "H200"): 71, ("b76cbd1", "H200"): 24, ("b171d5d", "H200"): 28, ("7fd4429", "H100"): 3}
    assert "71 on four H200 of one host (commit `42eb520`), 24 later on two H200 (commit `b76cbd1`)" in text_of(
        PAGES[OBJECTIVES]
    )
    later = "28 on four H200 (commit `b171d5d`) and 3 on two H100 (commit `7fd4429`)"
    assert later in text_of(PAGES[OBJECTIVES])
    of_mxfp4 = Counter((line["commit"], line["machine"]) for line in lines(MXFP4) if line["steps"] == LONG)
    assert of_mxfp4 == {("42eb520", "NVIDIA H200"): 40, ("b171d5d", "NVIDIA H200"): 5}
    assert "five of them later on such a host, commit `b171d5d`" in text_of(PAGES[MXFP4])


def test_the_page_says_how_many_forks_its_figures_after_1000_steps_have() -> None:
    alone, greedy = "{}, weight_divergence_factor 0.0", "greedy {{fp4, fp8}}, {}% by gemm"
    told = {
        ("at-90", alone.format(snip(90)), snip(90)): (
            16,
            "at 90%, the loss divergence alone is at {} in 16 forks (detectable {})",
        ),
        ("at-90", greedy.format(90), snip(90)): (16, "and `greedy` at {} in 16 ({})"),
        ("at-75", alone.format(snip(75)), snip(75)): (11, "at 75% they are at {} in eleven ({})"),
        ("at-75", greedy.format(75), snip(75)): (15, "in eleven (0.026) and {} in 15 ({})"),
    }
    for (family, one, other), (forks, words) in told.items():
        found = comparisons(OBJECTIVES, family, LONG)[one, other]
        assert (found.main.forks, found.reading) == (forks, fork_tables.NOT_SIGNIFICANT)
        assert words.format(found.main, f"{detectable_of(found):.3f}") in text_of(PAGES[OBJECTIVES])
    assert "None of the four is significant" in text_of(PAGES[OBJECTIVES])
    assert sum(len(comparisons(OBJECTIVES, family, LONG)) for family in ("at-75", "at-90")) == len(told)
    above = comparisons(OBJECTIVES, "greedy", LONG)[alone.format(snip(90)), greedy.format(90)]
    figure = str(above.main).removeprefix("+")
    assert above.main.forks == 16 and above.p_holm is not None
    ends = f"ends above `greedy` at 90% here too, by {figure} in 16 forks (significant, p = {above.p_holm:.3f})"
    assert ends in text_of(PAGES[OBJECTIVES])


@pytest.mark.parametrize("page", ["README.md", PAGES[MXFP4]])
def test_pages_say_of_how_many_bases_the_fastest_formats_ran_for_1000_steps(page: str) -> None:
    for contender, end in (
        (snip(75, "mxfp4, fp8-tensor"), ""),
        ("mxfp4", "; both significant" * (page == "README.md")),
    ):
        found = comparisons(MXFP4, "to-bf16", LONG)[contender, "bf16"]
        own = [line for line in lines(MXFP4) if line["steps"] == LONG and line["contender"] == contender]
        bases = {line["fork"]["base_seed"] for line in own}
        assert found.main.forks == len(own) and len(bases) == 5
        after = text_of(page).split(str(found.main).removeprefix("+"))[1]
        assert f"({len(own)} forks of five bases{end}" in after[:60]


def test_other_weights_change_as_little_of_the_plans_as_the_page_says() -> None:
    plans: dict[str, dict[tuple[Any, ...], list[str]]] = {}
    for line in lines(OBJECTIVES):
        if line["steps"] == 100 and line["plan"]:
            names = list(line["shares"])
            formats = [names[int(digit)] for digit in line["plan"]]
            plans.setdefault(line["contender"], {})[tuple(line["fork"].values())] = formats

    def others(one: str, other: str) -> list[int]:
        """In how many GEMMs the plans of each fork differ."""
        found = [sum(a != b for a, b in zip(own, plans[other][fork], strict=True)) for fork, own in plans[one].items()]
        assert len(found) == 18
        return found

    def of_shares(first: str, second: str = "") -> list[list[int]]:
        return [others(f"{snip(share)}{first}", f"{snip(share)}{second}") for share in (75, 90, 95)]

    text, none, less = text_of(PAGES[OBJECTIVES]), ", weight_divergence_factor 0.0", ", weight_divergence_factor 0.3"
    alone = of_shares(", loss_divergence_factor 0.0")
    same = [[own.count(0) for own in of_shares(*pair)] for pair in ((none,), (none, less))]
    assert "without it {}, {} and {} of 18 plans are the same at 75, 90 and 95%".format(*same[0]) in text
    assert "makes the plans of 0 in {}, {} and {} of 18 forks".format(*same[1]) in text
    assert "changes {:.1f}, {:.1f} and {:.1f} of 168 GEMMs".format(*map(fmean, of_shares(none))) in text
    assert "The weight divergence alone changes {:.0f}, {:.0f} and {:.0f}".format(*map(fmean, alone)) in text
    assert f"{others(f'{snip(90)}, probes 8', snip(90)).count(0)} plans are the same" in text


@pytest.mark.parametrize("steps", [100, LONG])
def test_the_cost_of_all_mxfp4_by_the_step_at_which_a_fork_starts_is_that_of_the_lines(steps: int) -> None:
    own = by_contender(line for line in lines(MXFP4) if line["steps"] == steps)
    found = [
        difference_of([line for line in own["mxfp4"] if line["fork"]["point"] == point], own["bf16"], "held_out_plan")
        for point in (300, 900, 1500)
    ]
    assert "{}, {} and {}".format(*(str(one).removeprefix("+") for one in found)) in text_of(PAGES[MXFP4])


def test_snip_and_greedy_spend_fp8_where_the_page_says() -> None:
    def kept(contender: str, is_counted: Any) -> float:
        own = [line for line in lines(OBJECTIVES) if line["contender"] == contender and line["steps"] == 100]
        assert len(own) == 18
        counts = []
        for line in own:
            names = list(line["shares"])
            in_fp8 = [place for place, digit in enumerate(line["plan"]) if names[int(digit)] == "fp8"]
            assert all(GEMMS[place % 3] == "forward" for place in in_fp8)
            # Seven linears of each block, three GEMMs each.
            counts.append(sum(is_counted(place // 21, place // 3 % 7) for place in in_fp8))
        return fmean(counts)

    text = text_of(PAGES[OBJECTIVES])
    greedy = "greedy {fp4, fp8}, 90% by gemm"
    assert kept(snip(90), lambda block, linear: linear == 1) == 8
    assert f"`greedy` of {kept(greedy, lambda block, linear: linear == 1):.1f} on average" in text
    last = [kept(contender, lambda block, linear: block == 7) for contender in (snip(90), greedy)]
    assert f"SNIP keeps {last[0]:.1f} of its GEMMs and `greedy` {last[1]:.1f}" in text


def test_as_many_forks_ran_twice_and_differ_as_the_pages_say() -> None:
    first = {key_of(line): line for line in read_forks([RESULTS / "forks-criteria.jsonl"])}
    twice = {
        name: [(line, first[key_of(line)]) for line in lines(name) if key_of(line) in first]
        for name in (OBJECTIVES, MXFP4)
    }
    others = {name: [(a, b) for a, b in pairs if a["loss"] != b["loss"]] for name, pairs in twice.items()}
    assert {name: (len(twice[name]), len(others[name])) for name in twice} == {OBJECTIVES: (198, 1), MXFP4: (54, 3)}
    assert "252 forks of a 30M model ran twice" in text_of("docs/limitations.md")
    assert "248 ended with the same losses to six decimals" in text_of("docs/limitations.md")
    differing = [pair for pairs in others.values() for pair in pairs]
    assert all(a["plan"] == b["plan"] for a, b in differing)
    gaps = [abs(a["loss"]["held_out_plan"] / b["loss"]["held_out_plan"] - 1) for a, b in differing]
    assert sorted(gap > 0 for gap in gaps) == [False, True, True, True] and 6e-4 < max(gaps) < 7e-4
    assert "198 forks ran there too, and 197 have the same losses" in text_of(PAGES[OBJECTIVES])
    of_mxfp4 = [line for line, _ in twice[MXFP4] if line["contender"] in ("fp4", snip(75))]
    assert len(of_mxfp4) == 36 and "33 of 36 forks have the losses" in text_of(PAGES[MXFP4])


def test_on_hopper_kernels_more_steps_that_ran_twice_differ_than_in_bf16() -> None:
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("forks-*.jsonl")):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if line.get("cuda_graph") and line["machine"] == "NVIDIA H200":
                key = line["setting"], line["contender"], json.dumps(line["fork"]), line["state"]
                found.setdefault(key, []).append(line)
    counts: dict[str | None, list[int]] = {}
    of_two_commits = []
    later = [0, 0, 0]
    for one in found.values():
        ordered = sorted(one, key=lambda line: line["date"])
        for first, second in pairwise(ordered):
            own = counts.setdefault(first["backend"], [0, 0, 0])
            differs = first["training_curve"] != second["training_curve"]
            assert first["backend"] is None or "fp4" in first["contender"]
            of_two_commits += [first["commit"] != second["commit"]] * differs
            for index, number in enumerate((1, first["steps"], differs)):
                own[index] += number
                later[index] += number * (first["commit"] == "b76cbd1")
    assert counts == {"hopper": [280, 85600, 9], None: [61, 28600, 0]}
    text = text_of("docs/limitations.md")
    by_pairs = fisher_exact([[9, 280 - 9], [0, 61]], alternative="greater").pvalue
    assert f"the difference from BF16 is not significant (p = {by_pairs:.2f})" in text
    assert sum(of_two_commits) == 7 and "seven of the nine are of two commits" in text
    assert "280 pairs with 85,600 steps, of which nine trained on other numbers" in text
    assert "in BF16 61 pairs with 28,600 steps, none" in text and "All 280 have FP4" in text
    assert "of 61 pairs in BF16 that ran twice from the same weights" in text_of("docs/results-longer.md")
    assert later == [16, 16000, 0] and "16 pairs with 16,000 steps all trained on the same numbers" in text
    of_others = 9 / (85600 - 16000)
    assert f"at the rate of the other pairs {16000 * of_others:.1f} would differ" in text
    assert f"Of the 15,000 passes with keys in turns {15000 * of_others / 2:.1f} would" in text


def test_forks_that_ran_on_both_kinds_of_machine_end_as_the_page_says() -> None:
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    own = [line for name in (OBJECTIVES, MXFP4, "refreshes", "contrasts", "criteria-124m") for line in lines(name)]
    for line in [*own, *lines_of("eval/results/two-cards.jsonl")]:
        found.setdefault(key_of(line), {})[line["machine"]] = line["loss"]["held_out_plan"]
    same: dict[tuple[int, bool], list[bool]] = {}
    for (contender, *_, steps, _), losses in found.items():
        if len(losses) == 2:
            same.setdefault((steps, contender == "bf16"), []).append(len(set(losses.values())) == 1)
    short = same[100, False] + same[100, True]
    assert all(short) and len(short) == 99 and same[LONG, True] == [False] * 4
    pairs = sum(map(len, same.values()))
    text = text_of("docs/limitations.md")
    assert f"{pairs} forks ran on an H100 and an H200" in text
    assert "Of 100 steps at 124M all 99 end with the same loss to six decimals" in text
    assert f"{sum(same[LONG, False])} of {len(same[LONG, False])} on `hopper` kernels and none of four in BF16" in text


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["contender"], *line["fork"].values(), line["steps"], line["state"]


def test_one_base_had_other_weights_once_more_and_eighteen_had_the_same() -> None:
    # Recipes whose bases are the same trainings. That of refreshes has the base that had other weights before.
    same = dict.fromkeys(("criteria", "contrasts", OBJECTIVES, MXFP4), "criteria")
    found: dict[tuple[str, int, int], dict[str, set[str]]] = {}
    for name in (*same, "longer", "stability", "continue-124m"):
        for line in lines(name):
            key = same.get(name, name), line["fork"]["base_seed"], line["fork"]["point"]
            of = found.setdefault(key, {})
            of.setdefault(line["commit"], set()).add(line["state"])
    again = {key: of.pop("b171d5d") for key, of in found.items() if "b171d5d" in of}
    assert all(set().union(*found[key].values()) == states and len(states) == 1 for key, states in again.items())
    bases = Counter(name for name, _ in {key[:2] for key in again})
    assert bases == {"criteria": 5, "longer": 8, "stability": 4, "continue-124m": 1}
    text = text_of("docs/limitations.md")
    assert "The other 18 bases that were trained there again, 17 of 30M and one of 124M" in text
    states = found["criteria", 5, 300]
    assert states.keys() >= {"6237e0a", "42eb520", "b76cbd1", "7fd4429"} and len(set.union(*states.values())) == 1
    kinds = {(line["commit"], line["machine"].split()[1]) for name in same for line in _of_seed_5(name)}
    assert kinds == {("6237e0a", "H200"), ("42eb520", "H200"), ("b76cbd1", "H200"), ("7fd4429", "H100")}
    assert "that of seed 5, which is in lines of four commits, three of them on H200s and one on H100s" in text
    (state,) = set.union(*states.values())
    assert f"with the same weights at step 300 (state `{state}`)" in text
    left = [line for line in lines("contrasts") if line["machine"] != "NVIDIA H200"]
    assert left == [line for line in left if line["fork"]["base_seed"] == 5] and f"The {len(left)} forks of the" in text


def _of_seed_5(name: str) -> list[dict[str, Any]]:
    """The lines from step 300 of the base that had other weights."""
    return [line for line in lines(name) if (line["fork"]["base_seed"], line["fork"]["point"]) == (5, 300)]


def test_passes_repeated_as_often_as_the_page_says() -> None:
    found: dict[tuple[str, bool, str], list[int]] = {}
    for line in lines_of("eval/results/fork-repeats.jsonl"):
        counts = found.setdefault((line["contender"], line["cuda_graph"], line["commit"]), [0, 0])
        counts[0] += line["passes"]
        counts[1] += line["differing"]
        if line["differing"]:
            assert line["first"][0]["in"] == ["model.layers.7.self_attn.o_proj.weight"]
    # Passes of commits before `9892ebe` all had the keys of one step.
    assert found == {
        ("bf16", True, "32aa231"): [30000, 0],
        ("fp4", True, "32aa231"): [30000, 0],
        ("fp8", True, "32aa231"): [30000, 1],
        ("fp8", False, "32aa231"): [20000, 0],
        ("fp4", True, "b171d5d"): [15000, 0],
    }
    in_turns = [line for line in lines_of("eval/results/fork-repeats.jsonl") if line["commit"] == "b171d5d"]
    assert sorted((line["process"], line["passes"]) for line in in_turns) == [(process, 1500) for process in range(10)]
    assert {(line["backend"], line["machine"]) for line in in_turns} == {("hopper", "NVIDIA H200")}
    text = text_of("docs/limitations.md")
    assert "steps in turns 15,000 passes in FP4, 1,500 in each of ten processes beside other work, had the same" in text
    assert "in BF16 and in FP4 all 30,000 had the same bits. In FP8 one of 30,000" in text
    assert "20,000 passes in FP8 had the same bits" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [OBJECTIVES, MXFP4])
def test_the_tables_are_those_of_the_lines(tmp_path: Path, name: str) -> None:
    check_report(tmp_path, name, page=PAGES[name])
