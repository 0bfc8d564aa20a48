"""Commands and figures of docs/results.md, and what docs/snip.md and docs/results-longer.md add to their tables."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import weight_gradients
from committed import DEFAULT, RESULTS, ROOT, difference_among, lines_of, prose_of, text_of

from eval.bakeoff.__main__ import main
from eval.bakeoff.fork_lines import read_forks
from eval.bakeoff.fork_statistics import Difference
from snip_hf import SnipConfig

BY_GEMM = "snip {fp4, fp8}, 75% by gemm, refresh_every 250"
PAGE = "docs/results.md"
SMALL, LARGE = (f"benchmarks/results/weight_gradients_{size}.jsonl" for size in ("small", "30M"))
# Page -> its forks.
ON_TENSOR_CORES = {
    name: f"forks-{name}" for name in ("criteria", "longer", "refreshes", "shifts", "objectives", "loss-forms", "mxfp4")
} | {"continued": "forks-continue-124m"}


def whole_training(contender: str) -> Difference:
    """The difference to BF16 after the longest forks, in percent."""
    lines = read_forks([RESULTS / "forks-longer.jsonl"])
    return difference_among((line for line in lines if line["steps"] == 2700), contender, "bf16")


@pytest.mark.slow
def test_the_printed_commands_make_the_tables_of_the_page_from_the_committed_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    commands = re.findall(r"^python -m eval\.bakeoff (report .*?[^\\])$", page, re.DOTALL | re.MULTILINE)
    assert len(commands) == 2
    monkeypatch.chdir(ROOT)
    copy = Path(shutil.copy(ROOT / PAGE, tmp_path))
    # The tables are emptied first, so that a command that writes nothing is found.
    copy.write_text(re.sub(r"(<!-- (bakeoff\S*) -->).*?(<!-- /\2 -->)", r"\1\n\3", page, flags=re.DOTALL), "utf-8")
    for command in commands:
        arguments = shlex.split(command.replace("\\\n", " "))
        output = Path(arguments[arguments.index("--output") + 1])
        assert arguments[arguments.index("--docs") + 1 :] == [PAGE]
        arguments[arguments.index("--output") + 1] = str(tmp_path / output)
        assert main([*arguments[:-1], str(copy)]) == 0
        made = {path.name: path for path in (tmp_path / output).iterdir() if path.is_file()}
        assert made.keys() == {path.name for path in output.iterdir() if path.is_file()}
        assert made["tables.md"].read_text(encoding="utf-8") == (output / "tables.md").read_text(encoding="utf-8")
    assert copy.read_text(encoding="utf-8") == page


def test_the_table_of_weight_gradients_has_both_sizes_and_the_prose_its_figures() -> None:
    text, large = prose_of(PAGE), lines_of(LARGE)
    assert weight_gradients.report([*lines_of(SMALL), *large]) in (ROOT / PAGE).read_text(encoding="utf-8")
    found = Difference.of([100 * (line["fp32"] / line["bf16"] - 1) for line in large])
    low, high = found.mean - found.half_width, found.mean + found.half_width
    assert found.p is not None and found.forks == 5
    assert f"FP32 sums end {str(found).removeprefix('-')}% lower, not significantly (p = {found.p:.2f})" in text
    assert f"would find a difference of {found.detectable():.3f}% with power 0.8" in text
    assert f"The interval, {low:.3f} to {high:+.3f}%" in text
    assert f"raise the loss by at most {high:.3f}%" in text and f"lower the loss by up to {-low:.3f}%" in text
    assert f"the scatter over seeds, {found.deviation:.3f}%" in text
    assert low < -0.02 < 0.02 < high and "within 0.02%, is neither confirmed nor excluded" in text
    assert f"changed the loss by {found}% at 30M (not significant)" in text
    assert {(line["parameters"] // 10**6, line["hidden"], line["blocks"]) for line in large} == {(27, 512, 8)}
    assert "of 27M, as wide and deep as the 30M model" in text
    snip, fp4, default, fp8 = (whole_training(name) for name in (BY_GEMM, "fp4", DEFAULT, "fp8"))
    gaps = f"{snip}%, nor that of all FP4, {fp4}%, nor that of the present default, {default}%."
    assert gaps.replace("+", "") in text
    assert f"gap, {fp8}%, lies within".replace("+", "") in text
    assert min(gap.mean - gap.half_width for gap in (snip, fp4, default)) > high and fp8.mean < -low


def test_the_forks_that_differ_from_their_baseline_in_weight_gradients_are_those_that_are_named() -> None:
    text = prose_of(PAGE)
    for page, name in ON_TENSOR_CORES.items():
        lines = lines_of(f"eval/results/{name}.jsonl")
        of_pair = [line for line in lines if line["contender"] in ("fp4", "fp8") or "{fp4, fp8}" in line["contender"]]
        assert {line["backend"] for line in of_pair} == {"hopper"} and f"](results-{page}.md)" in text
    of_presets = lines_of("eval/results/forks-mxfp4.jsonl")
    assert {line["backend"] for line in of_presets} == {None, "hopper", "tensor-scaled"}  # None: BF16's
    recipe = (ROOT / "recipes" / "forks-formats.yaml").read_text(encoding="utf-8")
    assert "backend: emulated" in recipe
    assert all("recipes/forks-formats.yaml" in line["command"] for line in lines_of("eval/results/forks.jsonl"))


def test_what_a_whole_training_at_75_percent_costs_stands_in_the_introduction() -> None:
    snip, fp4 = whole_training(DEFAULT), whole_training("fp4")
    assert snip.forks == 8 and snip.p is not None and snip.p < 0.05
    text = text_of("docs/snip.md")
    assert f"ends {snip}% above BF16 (significant, eight seeds;".replace("+", "") in text
    assert f"All FP4 ends {fp4}% above it".replace("+", "") in text


def test_longer_forks_say_how_often_the_default_refreshes_and_that_others_refresh_more_often() -> None:
    default, text = SnipConfig(), text_of("docs/results-longer.md")
    name = f"by {default.granularity}, refresh_every {default.refresh_every}, loss_estimator {default.loss_estimator}"
    assert f"snip {{{', '.join(default.formats)}}}, 75% {name}" == DEFAULT
    quoted = f'`loss_estimator="{default.loss_estimator}"`, a refresh every {default.refresh_every} steps.'
    assert quoted in text
    every = int(BY_GEMM.rsplit(maxsplit=1)[-1])
    assert every < default.refresh_every
    assert '`loss_estimator="token-fisher"`' in text and f"and refreshed every {every} steps." in text
