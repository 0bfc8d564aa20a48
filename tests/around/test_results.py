"""Tables of the results are those of the committed lines."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.paired import Paired, holm

ROOT = Path(__file__).resolve().parents[2]
# Row of the table -> contender of the lines.
CONTENDERS = {
    "FP8": "fp8",
    "75%, {mxfp4, fp8-tensor}, saliency, refresh every 500": (
        "snip {mxfp4, fp8-tensor}, 75% by gemm, refresh_every 500, loss_estimator saliency"
    ),
    "75%, {fp4, fp8}, saliency, refresh every 500": (
        "snip {fp4, fp8}, 75% by gemm, refresh_every 500, loss_estimator saliency"
    ),
    "75%, {fp4, fp8}, token-fisher, refresh every 250": "snip {fp4, fp8}, 75% by gemm, refresh_every 250",
    "75% by the rule `backward-first`, {fp4, fp8}": "backward-first {fp4, fp8}, 75% by gemm",
    "75% by layer, {fp4, fp8}, saliency, refresh every 250": (
        "snip {fp4, fp8}, 75% by layer, refresh_every 250, loss_estimator saliency"
    ),
    "all FP4": "fp4",
}


def section(page: str, heading: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def losses() -> dict[tuple[str, int], dict[str, float]]:
    """Returns (contender, steps) -> state at the start -> held-out loss under the plan."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    with gzip.open(ROOT / "eval/results/forks-longer.jsonl.gz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            found.setdefault((row["contender"], row["steps"]), {})[row["state"]] = row["loss"]["held_out_plan"]
    return found


@pytest.mark.parametrize("row", CONTENDERS)
def test_gaps_of_full_runs_are_those_of_the_lines(row: str, losses: dict[tuple[str, int], dict[str, float]]) -> None:
    table = section("results-loss.md", "Full training runs")
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)$", table, re.MULTILINE)
    written = [cell.strip(" *") for cell in cells.split("|")[:4]]
    expected = []
    for steps in (700, 1400, 2100, 2700):
        bf16, ours = losses["bf16", steps], losses[CONTENDERS[row], steps]
        gap = Paired.of([100 * (ours[state] / bf16[state] - 1) for state in ours])
        assert gap.count == 8
        expected.append(f"{gap.mean:+.3f} ± {gap.half_width:.3f}")
    assert written == expected


def lines_of(name: str, folder: str = "benchmarks") -> list[dict[str, Any]]:
    with gzip.open(ROOT / folder / f"results/{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def cells(page: str, heading: str) -> dict[str, list[str]]:
    """Returns the first column of a section's table -> the others."""
    rows = [line.replace("*", "").split("|")[1:-1] for line in section(page, heading).splitlines() if line[:1] == "|"]
    return {first.strip(): [cell.strip() for cell in others] for first, *others in rows[2:]}


def cells_of_tables(page: str, heading: str) -> list[dict[str, list[str]]]:
    """Returns the tables of a section: the first column -> the others."""
    tables = [part.partition("\n\n")[0] for part in section(page, heading).split("\n|---|")[1:]]
    rows = [[line.replace("*", "").split("|")[1:-1] for line in table.splitlines()[1:]] for table in tables]
    return [{first.strip(): [cell.strip() for cell in others] for first, *others in table} for table in rows]


def current(model: str) -> list[dict[str, Any]]:
    return [run for run in lines_of("speed_shares") if (run["model"], run["commit"]) == (model, "fe61c8e4")]


def most(run: dict[str, Any]) -> float:
    """Returns the peak with a refresh."""
    return float(max(run["peak_gib"], run.get("refresh_peak_gib", 0)))


def bf16_of(runs: Sequence[dict[str, Any]], key: str = "step_ms") -> float:
    return statistics.median(run[key] for run in runs if run["recipe"] == "BF16")


def test_speeds_through_the_trainer_are_those_of_the_lines() -> None:
    written = cells_of_tables("results-speed.md", "Through the Trainer, H200")[0]
    names = {"0%, all `fp8-delayed`": "snip-hf 0%", "50%, the default": "snip-hf 50%", "67%": "snip-hf 66.6%"}
    names |= {"75%": "snip-hf 75%", "100%, all MXFP4": "snip-hf 100%", "torchao tensorwise FP8": "torchao tensorwise"}
    assert list(written) == ["BF16, first and last", *names]
    for model, at in (("8B, 8 layers", 0), ("TinyLlama-1.1B", 5)):
        runs = current(model)
        own, bf16, peak = {run["recipe"]: run for run in runs}, bf16_of(runs), bf16_of(runs, "peak_gib")
        torchao = own["torchao tensorwise"]["step_ms"]
        steps = ", ".join(f"{run['step_ms']:.1f}" for run in runs if run["recipe"] == "BF16")
        assert written["BF16, first and last"][at : at + 3] == [steps, "1", f"{torchao / bf16:.3f}"]
        for row, recipe in names.items():
            run = own[recipe]
            ratios = [f"{other / run['step_ms']:.3f}".removesuffix(".000") for other in (bf16, torchao)]
            memory = [f"{most(run) / peak:.3f}"] if at == 0 else []
            refresh = f"{run['refresh_ms'] / bf16:.1f}" if "refresh_ms" in run else ""
            expected = [f"{run['step_ms']:.1f}", *ratios, *memory, refresh]
            assert written[row][at : at + len(expected)] == expected, row
    summary = cells_of_tables("results.md", "What do 4 bits buy against FP8?")[1]
    assert set(summary) == set(names)
    assert all(row[1:] == [written[name][at] for at in (1, 3, 6)] for name, row in summary.items())


def test_speeds_on_paper_are_those_of_the_default() -> None:
    written = cells("results-speed.md", "Through the Trainer, H200")["50%, the default"][1]
    (taken,) = re.findall(r"\| speed of the default.*? \| (.*?) \|", section("scale.md", "Measured parts"))
    assert taken == written
    for row in re.findall(r"^\| 70?B \|(.*)$", section("scale.md", "Cost of a refresh, and speed"), re.MULTILINE):
        _, _, _, _, refresh, share, speeds, *_ = (cell.strip() for cell in row.split("|"))
        # In BF16 steps: 500 steps under the plan, and a refresh.
        steps, cost = 500 / float(written), float(refresh)
        assert float(share.rstrip("%")) == pytest.approx(100 * cost / (steps + cost), abs=0.07)
        expected = [500 / (500 * waiting + (1 - waiting) * (steps + cost)) for waiting in (0, 0.2)]
        assert [float(speed) for speed in speeds.split(", ")] == pytest.approx(expected, abs=0.006)


# Row -> file, model, fields of its lines.
EARLIER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "8B shape, `29b1d5fe` (1)": ("speed_shares", "8B, 8 layers", {"commit": "29b1d5fe"}),
    "8B shape, `0e89e583` (2)": ("speed_delayed", "8B, 8 layers", {"call": 1}),
    "8B shape, {mxfp4, fp8-tensor}, `c78620b` (4)": ("speed_trainer", "8B, 8 layers", {"commit": "c78620b"}),
    "8B shape, {mxfp4, fp8-tensor}, `b171d5d` (5)": ("speed_saliency", "8B, 8 layers", {"commit": "b171d5d"}),
    "8B shape, `5ee1b484` (1)": ("speed_shares", "8B, 8 layers", {"commit": "5ee1b484"}),
    "1.1B, CUDA graphs, `29b1d5fe` (1)": ("speed_shares", "TinyLlama-1.1B", {"commit": "29b1d5fe"}),
    "1.1B, CUDA graphs, `d04d6afd` (3)": ("speed_graphs", "TinyLlama-1.1B", {"commit": "d04d6afd"}),
    "1.1B, `0e89e583` (2)": ("speed_delayed", "TinyLlama-1.1B", {"call": 1, "mode": None}),
    "1.1B, `5ee1b484` (1)": ("speed_shares", "TinyLlama-1.1B", {"commit": "5ee1b484"}),
    "1.1B, `32a69b0a` (3)": ("speed_graphs", "TinyLlama-1.1B", {"call": 1, "mode": "default", "rows": None}),
    "1.1B, {mxfp4, fp8-tensor}, `32a69b0a` (3)": (
        "speed_graphs", "TinyLlama-1.1B", {"call": 1, "mode": "default", "rows": None}
    ),
    "1.1B, {mxfp4, fp8-tensor}, `b171d5d` (5)": ("speed_saliency", "TinyLlama-1.1B", {"commit": "b171d5d"}),
    "1.1B, {mxfp4, fp8-tensor}, `c78620b` (4)": ("speed_trainer", "TinyLlama-1.1B", {"commit": "c78620b"}),
}  # fmt: skip


@pytest.mark.parametrize("row", EARLIER)
def test_speeds_of_other_runs_are_those_of_the_lines(row: str) -> None:
    name, model, fields = EARLIER[row]
    runs = [run for run in lines_of(name) if "recipe" in run and run.get("model", model) == model]
    runs = [run for run in runs if all(run.get(key) == value for key, value in fields.items())]
    commit, bf16 = row.split("`")[1], bf16_of(runs)
    ours = [run for run in runs if run["commit"] == commit and run["recipe"] != "BF16"]
    other = {"fp8-delayed"} if "tensor" in row else {"fp8-tensor"}
    table = cells_of_tables("results-speed.md", "Through the Trainer, H200")[1]
    assert set(table) == set(EARLIER)
    recipes = *(f"snip-hf {share}%" for share in (0, 50, 67, 75, 90, 100)), "torchao tensorwise"
    for cell, share in zip(table[row], recipes, strict=True):
        shown = [run for run in ours if run["recipe"] == share]
        if share in ("snip-hf 0%", "snip-hf 75%"):
            shown = [run for run in shown if not other & {*run["formats"]}]
        assert cell == ", ".join(f"{bf16 / run['step_ms']:.3f}" for run in shown), share


LARGE = "8B, 8 layers"


def case_of(run: dict[str, Any]) -> str:
    return f"{run['model']}, {run['case'].removeprefix('8 x 2,048 tokens').removeprefix(', ')}".removesuffix(", ")


def test_speeds_of_combinations_are_those_of_the_lines() -> None:
    lines = [run for run in lines_of("speed_combinations") if "step_ms" in run]
    written = cells("results-speed.md", "Combinations")
    for row, cell in written.items():
        name, _, other = row.partition(", `")
        commit = other.removesuffix("`") or "fe61c8e4"
        name = name.replace("8B shape", LARGE)
        runs = [run for run in lines if run["commit"] == commit and name == case_of(run)]
        bf16, peak, last = bf16_of(runs), bf16_of(runs, "peak_gib"), {run["recipe"]: run for run in runs}
        both = last["torchao tensorwise"], last["snip-hf 75%"]
        speeds, memory = ([f"{bf16 / run['step_ms']:.3f}" for run in both], [f"{most(run) / peak:.3f}" for run in both])
        refresh = f"{both[1]['refresh_ms'] / bf16:.1f}"
        assert cell == [f"{bf16:.1f}", *speeds, f"{peak:.1f}", *memory, refresh], row


def test_the_profile_of_a_step_is_that_of_the_lines() -> None:
    written = cells_of_tables("results-speed.md", "Where the time goes")[0]
    lines = [line for line in lines_of("step_profile") if line.get("trainer") and line.get("commit") == "b0bf68a"]
    lines = [line for line in lines if "75%, ties, +" not in line["recipe"]]
    assert len(written) == len(lines)
    columns = ("FP8 product", "BF16 product"), ("attention",), ("fused by Inductor",)
    columns += ("fold an operand", "find its scales"), ("optimizer",), ("other", "copied", "sort, gather and scatter")
    bf16 = 0.0
    for cell, line in zip(written.values(), lines, strict=True):
        parts, step = line["ms"], line["alone_ms"]
        bf16 = step if line["recipe"] == "BF16" else bf16
        found = [[parts.get(name, 0.0) for name in names] for names in columns]
        found[-1] = [sum(found[-1])]
        texts = [", ".join(f"{one:.1f}" if one else "0" for one in part) for part in found]
        ratio = f"{bf16 / step:.3f}".removesuffix(".000")
        expected = [f"{step:.1f}", ratio, f"{sum(parts.values()):.1f}", *texts]
        assert cell == [text if text != "0, 0" else "" for text in expected]


def in_steps(runs: Sequence[dict[str, Any]], recipe: str = "snip-hf") -> list[str]:
    """Returns the second refresh of each run whose recipe begins like this, in steps of BF16."""
    return [f"{run['refresh_ms'] / bf16_of(runs):.1f}" for run in runs if run["recipe"].startswith(recipe)]


def test_refreshes_are_in_steps_of_bf16() -> None:
    written = cells_of_tables("results-speed.md", "A refresh")[0]
    starts = "0 to 100%", "50 and 75%", '{mxfp4, fp8-tensor}, "token', "two H200s, 50%", "FSDP2 on two H200s"
    whole, some, trainer, two, plain = (
        next(cells for row, cells in written.items() if row.startswith(start)) for start in starts
    )
    for at, model in enumerate((LARGE, "TinyLlama-1.1B")):

        def of(name: str, commit: str, text: str = "", model: str = model) -> list[dict[str, Any]]:
            runs = [run for run in lines_of(name) if (run.get("model"), run["commit"]) == (model, commit)]
            return [run for run in runs if text in run["command"]]

        found = in_steps(current(model))
        assert whole[at] == f"{min(found)} to {max(found)}"
        assert some[at] == ", ".join(in_steps(of("speed_shares", "5ee1b484")))
        assert [trainer[at]] == in_steps(of("speed_trainer", "c78620b"), "snip-hf 75%")
        fsdp2, *ddp = (in_steps(of("speed_two_gpus", "5ee1b484", f"runs/{name}.")) for name in ("fsdp2", "ddp", "ddp2"))
        assert two[at] == "; ".join([*fsdp2, ", ".join(one for output in ddp for one in output)])
    loops = lines_of("multi_gpu_speed")[-6:]
    steps = [
        f"{1e3 * ours['refresh_s'] / bf16['step_ms']:.1f}" for bf16, ours in zip(loops[::2], loops[1::2], strict=True)
    ]
    assert [*plain[1].split("; "), plain[0]] == [steps[0], steps[2], steps[1]]


# Row -> name of the output in the command of its lines.
SAME_HOST = {"one GPU": "bare", "with Liger": "liger", "without": "bare", "FSDP2": "fsdp2", "DDP": "ddp"}
SAME_HOST["DDP, once more"] = "ddp2"


@pytest.mark.parametrize("heading", ["Liger's kernels", "Two GPUs"])
def test_speeds_of_one_host_are_those_of_the_lines(heading: str) -> None:
    lines = [run for name in ("shares", "combinations", "two_gpus") for run in lines_of(f"speed_{name}")]
    speeds: dict[str, float] = {}
    for row, cell in cells_of_tables("results-speed.md", heading)[0].items():
        model, _, name = row.partition(": ")
        output, shape = f"runs/{SAME_HOST[name]}.jsonl", {"8B shape": LARGE}.get(model, model)
        runs = [
            run for run in lines if output in run["command"] and (run["model"], run["commit"]) == (shape, "5ee1b484")
        ]
        bf16, mean = bf16_of(runs), bf16_of(runs, "mean_step_ms")
        last = {run["recipe"]: run for run in runs}
        expected = [f"{bf16:.1f}"]
        for recipe in ("snip-hf 50%", "torchao tensorwise"):
            if run := last.get(recipe):
                of_means = f"{mean / run['mean_step_ms']:.3f}"
                expected += [f"{run['step_ms']:.1f}", f"{bf16 / run['step_ms']:.3f}", of_means]
            else:
                expected += ["", "", ""]
        ours, torchao = last["snip-hf 50%"], last.get("torchao tensorwise")
        peaks = [bf16_of(runs, "peak_gib"), most(ours), *([most(torchao)] if torchao else [])]
        expected.append(", ".join(f"{peak:.1f}" for peak in peaks))
        speeds[name] = bf16 / ours["step_ms"]
        expected += [f"{speeds[name] / speeds['one GPU']:.3f}"] if "one GPU" in speeds else []
        assert cell == expected, row


# Row -> file, mode of its lines.
SHORT = {
    "1 x 128 tokens, `32a69b0a` (1)": ("speed_graphs", "default"),
    "1 x 128 tokens, `dabb1842`, quiet host (2)": ("step_profile", "default"),
    "1 x 128 tokens, CUDA graphs, `dabb1842` (1)": ("speed_graphs", "reduce-overhead"),
    "1 x 128 tokens, CUDA graphs, `dabb1842`, quiet host (2)": ("step_profile", "reduce-overhead"),
    "1 x 128 tokens, CUDA graphs, `fe61c8e4`, beside other work (3)": ("speed_combinations", ""),
    "1 x 128 tokens, `2fa3edda`, beside another timing (2)": ("step_profile", ""),
    "1 x 2,048 tokens, `2fa3edda`, beside another timing (3)": ("speed_combinations", ""),
    "1 x 64 to 256 tokens, `c9913a10`, quiet host (3)": ("speed_combinations", ""),
}


@pytest.mark.parametrize("row", SHORT)
def test_short_steps_are_those_of_the_lines(row: str) -> None:
    name, mode = SHORT[row]
    runs = [run for run in lines_of(name) if run.get("commit") == row.split("`")[1] and "error" not in run]
    runs = [run for run in runs if run.get("rows") == 1 or run.get("case", "").startswith("1 x")]
    runs = [run for run in runs if run["model"] == "TinyLlama-1.1B" and run.get("mode", "") == mode]
    steps: dict[str, list[float]] = {}
    for run in runs:
        step = run.get("alone_ms") or run.get("step_ms") or run["mean_step_ms"]
        steps.setdefault(run["recipe"], []).append(step)
    bf16 = steps["BF16"]
    base = bf16[-1] if "64 to 256" in row else statistics.median(bf16)
    expected = [", ".join(f"{step:.1f}" for step in bf16)]
    for recipe in ("snip-hf 75%", "torchao tensorwise"):
        expected.append(", ".join(f"{step:.1f}, {base / step:.3f}" for step in steps.get(recipe, [])))
    written = [cell.removesuffix(" of the last") for cell in cells("results-speed.md", "CUDA graphs")[row]]
    assert [cell for cell in written if "fails" not in cell] == expected[: 2 if "64 to 256" in row else 3]


def test_speeds_under_trl_are_those_of_the_lines() -> None:
    written, runs = cells("results-speed.md", "TRL"), lines_of("trl_speed")
    names = {
        "SFT, packed, TinyLlama-1.1B": ("SFT, packing", "TinyLlama-1.1B"),
        "SFT, packed, 100M": ("SFT, packing", "100M"),
        "SFT, LoRA of rank 16, TinyLlama-1.1B": ("SFT, LoRA", "TinyLlama-1.1B"),
    }
    for row, key in names.items():
        bf16, torchao, ours = (run for run in runs if (run["task"], run["model"]) == key)
        steps = [f"{one['step_ms']:.1f}, {bf16['step_ms'] / one['step_ms']:.3f}" for one in (torchao, ours)]
        peaks = ", ".join(f"{one['peak_gib']:.1f}" for one in (bf16, torchao, ours))
        assert [cell.removesuffix(" times") for cell in written[row]] == [f"{bf16['step_ms']:.1f}", *steps, peaks], row
    padding_free = "SFT, padding-free"
    for row, task in (("GRPO, 100M", "GRPO"), ("DPO, TinyLlama-1.1B", "DPO"), (f"{padding_free}, 100M", padding_free)):
        last = {run["recipe"]: run for run in runs if run["task"] == task}
        bf16, *others = (last.get(name) for name in ("BF16", "torchao tensorwise", "snip-hf"))
        assert bf16 is not None
        steps = [one and f"{one['step_ms']:,.1f}, {bf16['step_ms'] / one['step_ms']:.3f}" for one in others]
        peaks = [one and f"{one['peak_gib']:.1f}" for one in (bf16, *others)]
        expected = [f"{bf16['step_ms']:.1f}", *(step or "" for step in steps), ", ".join(peak or "-" for peak in peaks)]
        assert written[row] == expected
    graphs = {run["recipe"]: run["step_ms"] for run in runs if run["task"] == "DPO, CUDA graphs"}
    ours, bf16 = graphs["snip-hf"], graphs["BF16"]
    assert written["DPO, TinyLlama-1.1B, CUDA graphs"][:3] == [f"{bf16:.1f}", "", f"{ours:.1f}, {bf16 / ours:.3f}"]


SHARES = {"0%, all `fp8-delayed`": "fp8-delayed", "67%": "snip-67", "75%": "snip-75", "90%": "snip-90"}
SHARES["100%, all MXFP4"] = "mxfp4"


@pytest.fixture(scope="module")
def shares() -> dict[tuple[str, str], list[float]]:
    """Returns (contender, steps) -> held-out losses under the plan of the seeds in order."""
    return by_contender("frontier")


@pytest.fixture(scope="module")
def half() -> dict[tuple[str, str], list[float]]:
    """As `shares`, at the default share, in other seeds."""
    return by_contender("default")


def by_contender(name: str) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for line in sorted(lines_of(name, "eval"), key=lambda line: int(line["seed"])):
        for steps, loss in line["losses"].items():
            found.setdefault((line["contender"], steps), []).append(loss)
    return found


def gap(ours: Sequence[float], others: Sequence[float]) -> Paired:
    """Returns the mean difference in percent."""
    assert len(ours) == len(others) == 8
    return Paired.of([100 * (one / other - 1) for one, other in zip(ours, others, strict=True)])


def shown(p: float | None) -> str:
    assert p is not None
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def test_losses_by_share_are_those_of_the_lines(shares: dict[tuple[str, str], list[float]]) -> None:
    written = cells("results-loss.md", "By share, in the default formats")
    bf16, fp8 = shares["bf16", "2700"], shares["fp8-delayed", "2700"]
    last = {row: gap(shares[name, "2700"], bf16) for row, name in SHARES.items()}
    against = {row: gap(shares[name, "2700"], fp8) for row, name in SHARES.items() if name != "fp8-delayed"}
    of_last, of_against = holm([one.p for one in last.values()]), holm([one.p for one in against.values()])
    assert list(written) == list(SHARES)
    for (row, name), p in zip(SHARES.items(), of_last, strict=True):
        expected = [str(gap(shares[name, step], shares["bf16", step])) for step in ("700", "1400", "2100")]
        assert written[row][:5] == [*expected, str(last[row]), shown(p)]
    for (row, found), p in zip(against.items(), of_against, strict=True):
        assert written[row][5:] == [str(found), f"{found.detectable:.3f}", shown(p)]
        summary = cells("results.md", "What do 4 bits buy against FP8?")
        if row != "90%":
            assert summary[row][0] == str(found)
    for row, found in last.items():
        (place,) = (name for name in cells("results.md", "At which share?") if name.startswith(row.partition(",")[0]))
        assert cells("results.md", "At which share?")[place][2] == str(found)


PROBE = {
    "`backward-first` minus SNIP": ("backward-first", "snip"),
    "SNIP minus BF16": ("snip", "bf16"),
    "`backward-first` minus BF16": ("backward-first", "bf16"),
    "all `fp8-tensor` minus BF16": ("fp8", "bf16"),
}
SUMMARY_OF_PROBE = {
    "75% by SNIP, {mxfp4, fp8-tensor}": "SNIP minus BF16",
    "75% by the rule `backward-first`, {mxfp4, fp8-tensor}": "`backward-first` minus BF16",
    "24 seeds: all FP8 with current scales, `fp8-tensor`": "all `fp8-tensor` minus BF16",
}


def test_a_probe_and_a_rule_compare_as_in_the_lines() -> None:
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines_of("probe", "eval"):
        for steps, loss in line["losses"].items():
            losses.setdefault((line["contender"], steps), {})[line["seed"]] = loss
    assert {tuple(sorted(seeds)) for seeds in losses.values()} == {tuple(range(8, 32))}
    written = cells("results-policies.md", "A probe against a rule")
    last = {}
    for row, (ours, other) in PROBE.items():
        for place, steps in enumerate(("700", "1400", "2100", "2700")):
            pairs = ((loss, losses[other, steps][seed]) for seed, loss in losses[ours, steps].items())
            last[row] = Paired.of([100 * (one / base - 1) for one, base in pairs])
            assert written[row][place] == str(last[row]), row
        assert written[row][4] == f"{last[row].detectable:.3f}"
    against_bf16 = list(last)[1:]
    for row, p in zip(against_bf16, holm([last[row].p for row in against_bf16]), strict=True):
        assert written[row][5] == shown(p)
    summary = cells("results.md", "Does the loss hold?")
    for name, row in SUMMARY_OF_PROBE.items():
        assert summary[name][:2] == [str(last[row]), f"{last[row].detectable:.3f}"]
    rule = last["`backward-first` minus SNIP"]
    row = "30M, 2,700 steps, {mxfp4, fp8-tensor}, 24 seeds"
    assert cells("results.md", "Is a probe better than a rule?")[row][1:] == [str(rule), f"{rule.detectable:.3f}"]


CONTENDER = {
    "SNIP": "snip",
    "by gradients": "snip-gradient",
    "by Fisher": "snip-fisher",
    "`backward-first`": "backward-first",
    "`backward-front`": "backward-front",
    "all `fp8-delayed`": "fp8",
    "BF16": "bf16",
    "50% by SNIP": "snip-50",
    "50% by gradients": "gradient-50",
    "75% by SNIP": "snip-75",
    "75% by gradients": "gradient-75",
    "75% by Fisher": "fisher-75",
}
EXPERIMENTS = {
    "1": ("default", 2, 8),
    "2": ("blocks", 2, 8),
    "3": ("gradient", 4, 8),
    "4": ("gradient-again", 1, 16),
}
"""Number in the table -> the lines, how many of the rows are planned tests, and the seeds."""


def named(rows: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns row "A minus B" -> the contenders A and B."""
    pairs = (row.partition(" minus ") for row in rows)
    return {row: (CONTENDER[ours], CONTENDER[other]) for row, (ours, _, other) in zip(rows, pairs, strict=True)}


def pooled(ours: str, other: str, step: str) -> Paired:
    """Returns the differences at 50% over the seeds of all experiments from scratch that have both contenders."""
    lines = [by_contender(name) for name, *_ in EXPERIMENTS.values()]
    both = [found for found in lines if {(ours, step), (other, step)} <= set(found)]
    pairs = [pair for found in both for pair in zip(found[ours, step], found[other, step], strict=True)]
    return Paired.of([100 * (one / base - 1) for one, base in pairs])


def test_losses_at_the_default_share_are_those_of_the_lines(half: dict[tuple[str, str], list[float]]) -> None:
    planned, together, continued, longer = cells_of_tables("results-policies.md", "At the default share")
    steps = ("700", "1400", "2100", "2700")
    planned = {row.removesuffix(", 16 seeds"): written for row, written in planned.items()}
    for number, (name, count, seeds) in EXPERIMENTS.items():
        rows = named([row[3:] for row in planned if row[0] == number])
        for row, last in differences(name, rows, "2700", count).items():
            assert planned[f"{number}. {row}"] == [*(str(paired(name, *rows[row], step)) for step in steps[:3]), *last]
            assert paired(name, *rows[row], "2700").count == seeds
        assert len(rows) == (5 if number == "1" else count)
    for row, names in named(list(together)).items():
        found = [pooled(*names, step) for step in steps]
        last = found[-1]
        assert together[row] == [str(last.count), *map(str, found), f"{last.detectable:.3f}", shown(last.p)]
    assert [row[0] for row in together.values()] == [*["24"] * 3, *["16"] * 3, "24"]
    other_orders = {row.removesuffix(", eight other orders"): row for row in continued}
    at_half = named([row for row, written in other_orders.items() if row == written])
    costs = named([row for row in other_orders if row not in at_half])
    assert (len(at_half), len(costs)) == (5, 3)
    for name, family, count in (("smollm2-default", at_half, 2), ("smollm2-gradient", costs, 3)):
        for row, last in differences(name, family, "1000", count).items():
            assert paired(name, *family[row], "1000").count == 8
            first, second, whole = (str(paired(name, *family[row], step)) for step in ("250", "500", None))
            assert continued[other_orders[row]] == [first, second, *last, whole], row
    for row, name in {
        "all `fp8-delayed`": "fp8",
        "50% by SNIP": "snip",
        "50% by `backward-first`": "backward-first",
    }.items():
        ends = [{line["contender"]: line for line in lines_of("smollm2-5000", "eval")}[one] for one in (name, "bf16")]
        losses = [(*line["losses"].values(), line["loss_unquantized"]) for line in ends]
        assert longer[row] == [f"{100 * (ours / bf16 - 1):+.3f}" for ours, bf16 in zip(*losses, strict=True)]
    found = gap(half["snip", "2700"], half["bf16", "2700"])
    p = planned["1. SNIP minus BF16"][-1]
    assert cells("results.md", "Does the loss hold?")["50% by SNIP, the default, {mxfp4, fp8-delayed}"] == [
        str(found),
        f"{found.detectable:.3f}",
        f"yes (p = {p})",
    ]
    assert cells("results.md", "At which share?")["50%, other seeds"][2] == str(found)
    against = gap(half["snip", "2700"], half["fp8", "2700"])
    assert cells("results.md", "What do 4 bits buy against FP8?")["50%, the default"][0] == str(against)
    assert f"| `SnipConfig()` | {found} |" in (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    rules = cells("results.md", "Is a probe better than a rule?")
    found = paired("smollm2-default", "backward-first", "snip", "1000")
    row = "SmolLM2-135M, 1,000 steps, {mxfp4, fp8-delayed}, 50%, eight other orders"
    assert rules[row][1:] == [str(found), f"{found.detectable:.3f}"]
    found, row = pooled("backward-first", "snip", "2700"), next(row for row in rules if "24 seeds of" in row)
    assert rules[row][1:] == [str(found), f"{found.detectable:.3f}"]


TRICKS = {
    "all FP8": "fp8",
    "`grad_input` in MXFP4": "only-grad-input",
    "`grad_weight` in MXFP4": "only-grad-weight",
    "`forward` in MXFP4": "only-forward",
    "both backward GEMMs in MXFP4": "backward-67",
    "SNIP": "snip-75",
    'SNIP ("token-fisher")': "snip-75-fisher",
    "SNIP (backward GEMMs rotated)": "snip-75-rht",
    "SNIP (UE5M3 scales)": "snip-75-ue5m3",
    "SNIP (NVFP4 by four over six)": "snip-75-nvfp4-46",
    "first and last block in FP8": "first-last-fp8",
    "first and last block in BF16": "first-last-bf16",
    "all MXFP4": "mxfp4",
    "all MXFP4 (gradients to nearest)": "mxfp4-nearest",
    "all MXFP4 (emulated)": "mxfp4-emulated",
    "all MXFP4 (backward GEMMs rotated)": "mxfp4-rht",
    "all MXFP4 (`grad_weight` rotated)": "mxfp4-rht-wgrad",
    "all MXFP4 (UE5M3 scales)": "mxfp4-ue5m3",
    "all NVFP4": "nvfp4",
    "all NVFP4 (four over six)": "nvfp4-46",
}


def test_tricks_lose_as_in_the_lines() -> None:
    gaps, planned = cells_of_tables("results-loss.md", "Less loss at the same share")
    lines, bf16 = lines_of("less-loss", "eval"), {row: (name, "bf16") for row, name in TRICKS.items()}
    assert list(gaps) == list(TRICKS)
    for row, last in differences("less-loss", bf16, "1000", len(TRICKS)).items():
        shares = [line["share"] for line in lines if line["contender"] == TRICKS[row]]
        assert gaps[row] == [f"{100 * statistics.fmean(shares):.0f}%", *last]
        assert len(shares) == paired("less-loss", *bf16[row], "1000").count == 8
    pairs = {row: (TRICKS[first], TRICKS[second]) for row in planned for first, second in [row.split(" minus ")]}
    config = yaml.safe_load((ROOT / "eval/proof/less-loss.yaml").read_text(encoding="utf-8"))
    assert list(pairs.values()) == [(one["contender"], one["against"]) for one in config["comparisons"]]
    for row, last in differences("less-loss", pairs, "1000", len(pairs)).items():
        assert planned[row] == list(last)


EQUAL_LOSS = {
    "all in `fp8-delayed`": ("fp8-delayed", "snip-hf 0%"),
    "50%, {mxfp4, fp8-delayed}, the default": ("snip", "snip-hf 50%"),
    "67%, {mxfp4, fp8-delayed}": ("snip-67", "snip-hf 66.6%"),
    "75%, {mxfp4, fp8-delayed}": ("snip-75", "snip-hf 75%"),
    "all MXFP4": ("mxfp4", "snip-hf 100%"),
}


_500 = "refresh_every 500, loss_estimator saliency"
# Row -> contender, commit of its speed, recipe.
EQUAL_LOSS_EARLIER = {
    "75%, {mxfp4, fp8-tensor}, saliency, refresh every 500": (
        f"snip {{mxfp4, fp8-tensor}}, 75% by gemm, {_500}", "c78620b", "snip-hf 75%"
    ),
    "75%, {fp4, fp8}, saliency, refresh every 500": (
        f"snip {{fp4, fp8}}, 75% by gemm, {_500}", "e38ca4d-dirty", "snip-hf 75%"
    ),
    "75%, {fp4, fp8}, `backward-first`": ("backward-first {fp4, fp8}, 75% by gemm", "e38ca4d-dirty", "snip-hf 75%"),
    "all FP4": ("fp4", "e38ca4d-dirty", "snip-hf 100%"),
}  # fmt: skip
EQUAL_LOSS_SUMMARY = {row: row.partition(", saliency")[0] for row in EQUAL_LOSS_EARLIER if "first" not in row}


def speed_with_refreshes(runs: Sequence[dict[str, Any]], recipe: str) -> float:
    """Returns how many times as fast as BF16; one refresh every 500 steps if the recipe plans."""
    (run,) = (run for run in runs if run["recipe"] == recipe)
    refresh = 0.0 if recipe in ("snip-hf 0%", "snip-hf 100%") else float(run["refresh_ms"]) / 500
    return bf16_of(runs) / (float(run["step_ms"]) + refresh)


def test_the_table_of_the_readme_is_that_of_the_lines(
    shares: dict[tuple[str, str], list[float]], half: dict[tuple[str, str], list[float]]
) -> None:
    def shown_with_interval(found: Paired, form: str) -> str:
        low, high = (form.format(found.mean + sign * found.half_width) for sign in (-1, 1))
        return f"{found.mean:+.2f}% ({low} to {high})"

    lines = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    speeds = cells_of_tables("results-speed.md", "Through the Trainer, H200")[0]
    for start, name, contender, continued in (
        ("all in FP8", "0%, all `fp8-delayed`", "fp8-delayed", "fp8"),
        ("50% in MXFP4", "50%, the default", "snip", "snip-50"),
        ("75% in MXFP4", "75%", "snip-75", "snip-75"),
        ("all in MXFP4", "100%, all MXFP4", "mxfp4", None),
    ):
        (written,) = (others for first, *others in rows if first.startswith(start))
        assert written[:4] == [speeds[name][at] for at in (1, 2, 3, 6)], start
        of = half if contender == "snip" else shares
        assert written[4] == shown_with_interval(gap(of[contender, "2700"], of["bf16", "2700"]), "{:+.2f}")
        if continued is not None:
            assert written[5] == shown_with_interval(paired("smollm2-shares", continued, "bf16", "1000"), "{:.2f}")


def test_speeds_at_equal_loss_are_those_of_the_lines(
    shares: dict[tuple[str, str], list[float]],
    half: dict[tuple[str, str], list[float]],
    losses: dict[tuple[str, int], dict[str, float]],
) -> None:
    def mean_slope(before: Sequence[float], after: Sequence[float]) -> float:
        """Returns the relative change of the steps by that of BF16's loss, over the last 600 of 2,800 steps."""
        slopes = [math.log(one / other) for one, other in zip(before, after, strict=True)]
        return statistics.fmean(math.log(2800 / 2200) / slope for slope in slopes)

    laws = []
    for whole, a, b, alpha, beta in ((1.69, 406.4, 410.7, 0.34, 0.28), (1.8172, 482.01, 2085.43, 0.3478, 0.3658)):
        by_data = b / (20 * 7e9) ** beta
        laws.append((whole + a / 7e9**alpha + by_data) / (beta * by_data))
    slope = mean_slope(shares["bf16", "2100"], shares["bf16", "2700"])

    def after_more_steps(speed: float, found: Paired, form: str, slope: float = slope) -> list[str]:
        """Returns the speed after the steps that close a gap, by BF16's slope and by the laws, with its interval."""
        ends = found.mean, found.mean + found.half_width, found.mean - found.half_width
        first, *by_laws = (
            form.format(*(speed / math.exp(scale * end / 100) for end in ends)) for scale in (slope, *laws)
        )
        return [f"{speed:.3f}", first, "; ".join(by_laws)]

    def whole_row(speeds: Sequence[float], found: Paired, slope: float = slope) -> list[str]:
        ends = found.mean, found.mean - found.half_width, found.mean + found.half_width
        more = "{:.1f} ({:.1f} to {:.1f})".format(*(100 * math.expm1(slope * end / 100) for end in ends))
        form = "{:.2f} ({:.2f} to {:.2f})"
        return [more, *(cell for speed in speeds for cell in after_more_steps(speed, found, form, slope))]

    machines = [current(model) for model in (LARGE, "TinyLlama-1.1B")]
    heading = "At equal loss"
    summary, written = cells("results.md", "How fast, at equal loss?"), cells("results-speed.md", heading)
    for row, (name, recipe) in EQUAL_LOSS.items():
        of = half if name == "snip" else shares
        found = gap(of[name, "2700"], of["bf16", "2700"])
        expected = whole_row([speed_with_refreshes(runs, recipe) for runs in machines], found)
        assert written[row] == expected, row
        assert summary[row][:4] == [*expected[1:3], *expected[4:6]], row
    bf16 = losses["bf16", 2700]
    own = mean_slope([losses["bf16", 2100][state] for state in bf16], list(bf16.values()))
    for row, (contender, commit, recipe) in EQUAL_LOSS_EARLIER.items():
        found = gap([losses[contender, 2700][state] for state in bf16], list(bf16.values()))
        formats = ["mxfp4", "fp8-tensor"] if "mxfp4" in row else ["fp4", "fp8"]
        speeds = []
        for model in (LARGE, "TinyLlama-1.1B"):
            runs = [run for run in lines_of("speed_trainer") if (run["model"], run["commit"]) == (model, commit)][:5]
            (run,) = (run for run in runs if (run["recipe"], run["formats"]) == (recipe, formats))
            refresh = float(run["refresh_ms"]) / 500 if "saliency" in row else 0.0
            speeds.append(bf16_of(runs) / (float(run["step_ms"]) + refresh))
        expected = whole_row(speeds, found, own)
        assert written[row] == expected, row
        if row in EQUAL_LOSS_SUMMARY:
            assert summary[EQUAL_LOSS_SUMMARY[row]][:4] == [*expected[1:3], *expected[4:6]], row
    gaps = {"50%": pooled("snip", "fp8", "2700")}
    gaps["75%"] = gap(shares["snip-75", "2700"], shares["fp8-delayed", "2700"])
    for share, found in gaps.items():
        for model, runs in zip(("8B shape", "TinyLlama-1.1B"), machines, strict=True):
            ratio = speed_with_refreshes(runs, f"snip-hf {share}") / speed_with_refreshes(runs, "snip-hf 0%")
            expected = after_more_steps(ratio, found, "{:.3f} ({:.3f} to {:.3f})")
            assert written[f"{model}, {share}"] == expected, model


def paired(name: str, ours: str, other: str, step: str | None) -> Paired:
    """Returns the differences in percent of cells from the same start; None: of the models without quantization."""
    found = {(line["contender"], line["start"]): line for line in lines_of(name, "eval")}
    losses = {
        cell: line["loss_unquantized"] if step is None else line["losses"][step]
        for cell, line in found.items()
        if cell[0] in (ours, other)
    }
    starts = [start for contender, start in losses if contender == ours and (other, start) in losses]
    return Paired.of([100 * (losses[ours, start] / losses[other, start] - 1) for start in starts])


ORDERS = {
    "SNIP minus `backward-first`, 75%": ("snip-75-default", "backward-first-default"),
    "SNIP, 75%, minus all `fp8-delayed`": ("snip-75-default", "fp8-default"),
    "SNIP, 75%, minus BF16": ("snip-75-default", "bf16"),
    "`backward-first`, 75%, minus BF16": ("backward-first-default", "bf16"),
    "all `fp8-delayed` minus BF16": ("fp8-default", "bf16"),
}
CHECKPOINT_SHARES = {
    "50% by SNIP minus all `fp8-delayed`": ("snip-50", "fp8"),
    "67% by SNIP minus all `fp8-delayed`": ("snip-67", "fp8"),
    "67% by SNIP minus 50% by SNIP": ("snip-67", "snip-50"),
    "67% by `backward-first` minus 67% by SNIP": ("backward-67", "snip-67"),
    "all `fp8-delayed`, fast sums, minus BF16": ("fp8", "bf16"),
    **{f"{share}% by SNIP minus BF16": (f"snip-{share}", "bf16") for share in (25, 50, 67, 75)},
    "67% by `backward-first` minus BF16": ("backward-67", "bf16"),
}
CONTINUED = {
    "all `fp8-delayed`": ("smollm2-shares", "fp8"),
    "50% by SNIP, the default": ("smollm2-shares", "snip-50"),
    "67% by SNIP": ("smollm2-shares", "snip-67"),
    "67% by the rule `backward-first`": ("smollm2-shares", "backward-67"),
    "75% by SNIP": ("smollm2", "snip-75-default"),
    "75% by the rule `backward-first`": ("smollm2", "backward-first-default"),
}
RULES = ("layer-position", "min-abs-err", "min-rel-err", "layer-type", "random", "snip-paper")
PAPER = {
    f"{share}% by {unit}, SNIP": f"snip-{share}-{unit.lower()}" for share in (25, 50, 75) for unit in ("GEMM", "layer")
}
PAPER |= {f"75% by layer, `{rule}`": rule for rule in RULES} | {"FP8": "fp8", "all FP4": "fp4"}
PAPER |= {"67% by GEMM, SNIP": "snip-67-gemm", "75% by GEMM, `backward-first`": "backward-first"}
PAPER['75% by GEMM, SNIP with "token-fisher"'] = "snip-75-gemm-fisher"
TUNED = {
    "75% by SNIP minus 75% by `backward-first`": ("snip-75", "backward-first"),
    "75% by SNIP minus all `fp8-delayed`": ("snip-75", "fp8"),
    "50% by SNIP minus all `fp8-delayed`": ("snip-50", "fp8"),
    "all `fp8-delayed` minus BF16": ("fp8", "bf16"),
    "50% by SNIP minus BF16": ("snip-50", "bf16"),
    "75% by SNIP minus BF16": ("snip-75", "bf16"),
    "75% by `backward-first` minus BF16": ("backward-first", "bf16"),
    "all MXFP4 minus BF16": ("mxfp4", "bf16"),
}


SCORED = {"all `fp8-delayed`": "fp8", "50% by SNIP": "snip-50", "75% by SNIP": "snip-75"}
SCORED |= {"75% by `backward-first`": "backward-first", "all MXFP4": "mxfp4"}


def differences(
    name: str, rows: dict[str, tuple[str, str]], step: str, planned: int
) -> dict[str, tuple[str, str, str]]:
    """Returns each row's difference, the detectable one and p after Holm; the first rows are the planned family."""
    found = [paired(name, *names, step) for names in rows.values()]
    corrected = [p for part in (found[:planned], found[planned:]) for p in holm([one.p for one in part])]
    return {
        row: (str(one), f"{one.detectable:.3f}", shown(p)) for row, one, p in zip(rows, found, corrected, strict=True)
    }


def test_losses_of_the_checkpoint_are_those_of_the_lines() -> None:
    written = cells("results-policies.md", "On a real checkpoint")
    heads = {"---", "{fp4, fp8}", "eight orders of the data"}
    assert set(written) - heads == {*CHECKPOINT_SHARES, *ORDERS, *PAPER}
    tables = (("smollm2-shares", CHECKPOINT_SHARES, 4, 4), ("smollm2", ORDERS, 2, 8))
    for lines, rows, planned, count in tables:
        for row, last in differences(lines, rows, "1000", planned).items():
            assert paired(lines, *rows[row], "1000").count == count
            first, second, whole = (str(paired(lines, *rows[row], step)) for step in ("250", "500", None))
            assert written[row] == [first, second, *last, whole]
    rules = {
        "SmolLM2-135M, 1,000 steps, {mxfp4, fp8-delayed}, eight orders": (
            "smollm2",
            "backward-first-default",
            "snip-75-default",
        ),
        "the same at 67%, four orders": ("smollm2-shares", "backward-67", "snip-67"),
    }
    for row, names in rules.items():
        found = paired(*names, "1000")
        assert cells("results.md", "Is a probe better than a rule?")[row][1:] == [str(found), f"{found.detectable:.3f}"]
    summary = cells("results.md", "Does the loss hold?")
    for row, (lines, name) in CONTINUED.items():
        found = paired(lines, name, "bf16", "1000")
        assert summary[row] == [str(found.count), str(found), f"{found.detectable:.3f}", "yes"]
    for row, name in PAPER.items():
        found = paired("smollm2", name, "bf16", "1000")
        expected = [str(found.count), str(found), f"{found.detectable:.2f}"]
        assert written[row] == [*expected, str(paired("smollm2", name, "bf16", None))]


def test_losses_of_fp8_on_tensor_cores_and_emulated_are_those_of_the_lines() -> None:
    written = cells("results-loss.md", "MXFP4 and `fp8-tensor`")["`fp8-delayed` on tensor cores minus emulated"]
    first, last = (paired("fp8-emulated", "fp8", "fp8-emulated", step) for step in ("100", "300"))
    assert last.count == 4
    assert written == [str(first), str(last), f"{last.detectable:.3f}"]


def test_losses_of_instruction_tuning_are_those_of_the_lines() -> None:
    written, accuracy = cells_of_tables("results-policies.md", "Instruction tuning")
    assert (list(written), list(accuracy)) == (list(TUNED), list(SCORED))
    for row, last in differences("sft", TUNED, "270", 3).items():
        assert paired("sft", *TUNED[row], "270").count == 8
        first, unquantized = (str(paired("sft-lora", *TUNED[row], step)) for step in ("70", None))
        of_adapters = [first, *differences("sft-lora", TUNED, "270", 3)[row], unquantized]
        assert written[row] == [str(paired("sft", *TUNED[row], "70")), *last, *of_adapters]
        if row in list(TUNED)[:3]:
            assert abs(paired("sft-again", *TUNED[row], "270").mean - paired("sft", *TUNED[row], "270").mean) < 0.2
    expected: dict[str, list[str]] = {row: [] for row in SCORED}
    for lines in ("sft-lora-scores", "sft-scores"):
        scores: dict[tuple[str, str], list[float]] = {}
        for line in lines_of(lines, "eval"):
            name, _, seed = line["model"].rpartition("/")[2].rpartition("-")
            scores.setdefault((name, seed), []).append(100 * line["metrics"]["acc_norm"]["value"])
        seeds = [seed for name, seed in scores if name == "bf16"]
        gains = [
            Paired.of([statistics.mean(scores[name, seed]) - statistics.mean(scores["bf16", seed]) for seed in seeds])
            for name in SCORED.values()
        ]
        for row, one, p in zip(SCORED, gains, holm([one.p for one in gains]), strict=True):
            expected[row] += [str(one), f"{one.detectable:.3f}", shown(p)]
    assert accuracy == expected


def test_estimates_by_share_are_those_of_the_lines(
    shares: dict[tuple[str, str], list[float]], half: dict[tuple[str, str], list[float]]
) -> None:
    written = cells("choosing.md", "Which share for your model")
    names = ("0.5", "0.666", "0.75", "0.9")
    for line in lines_of("share_estimates"):
        costs = [line["objective"][name] - line["objective"]["0"] for name in (*names, "1")]
        assert written[f"{line['model']}, estimated"] == [f"{100 * cost / costs[-1]:.1f}" for cost in costs[:-1]]
    fp8 = shares["fp8-delayed", "2700"]
    means = [gap(shares[name, "2700"], fp8).mean for name in ("snip-67", "snip-75", "snip-90", "mxfp4")]
    means.insert(0, gap(half["snip", "2700"], half["fp8", "2700"]).mean)
    assert written["30M Llama, measured"] == [f"{100 * mean / means[-1]:.1f}" for mean in means[:-1]]
    gaps = [paired("smollm2", name, "bf16", "1000").mean for name in ("snip-50-gemm", "snip-67-gemm", "snip-75-gemm")]
    least, whole = (paired("smollm2", name, "bf16", "1000").mean for name in ("fp8", "fp4"))
    found = [f"{100 * (one - least) / (whole - least):.1f}" for one in gaps]
    assert written["SmolLM2-135M, measured"] == [*found, "not run"]


def test_losses_with_fast_sums_are_those_of_the_lines() -> None:
    written = cells("results-loss.md", "Fast sums")
    fast, forward, bf16 = "fast", "fp8-delayed", "bf16"
    pairs = [(fast, forward), (fast, bf16), (forward, bf16)]
    last = [paired("fast-sums", *names, "2700") for names in pairs]
    corrected = [f"{shown(last[0].p)}, alone", *map(shown, holm([one.p for one in last[1:]]))]
    for found, names, one, p in zip(written.values(), pairs, last, corrected, strict=True):
        losses = [str(paired("fast-sums", *names, step)) for step in ("700", "1400", "2100", "2700")]
        assert found == [*losses, f"{one.detectable:.3f}", p]


def test_the_fidelity_on_the_checkpoint_is_that_of_the_lines() -> None:
    rows = [line.strip("| ").split("|") for line in section("fidelity.md", "14. A real checkpoint").splitlines()]
    written = [[cell.strip(" `") for cell in row] for row in rows if len(row) > 3][2:]
    for cells_of_row, line in zip(written, lines_of("fidelity_smollm2"), strict=True):
        expected = [line["divergence"], line["estimate"], f"{line['spearman']:.3f}", line["interval"]]
        if "median_error" in line:
            expected += [f"{line['median_error']:.3f}", f"{line['error_90']:.3f}", line["ratio"]]
        assert [cell for cell in cells_of_row if cell] == expected


def test_the_block_that_recomputes_a_figure_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(
        r"^```python\n(.*?)^```", section("results.md", "Recompute a figure"), re.DOTALL | re.MULTILINE
    )
    monkeypatch.chdir(ROOT)
    exec(block, {})
    printed = capsys.readouterr().out.strip()
    assert block.rstrip().endswith(f"# {printed}")
    assert f"| `nvfp4` | {printed} |" in section("results-loss.md", "Formats")
