"""Is the grouped truth that of one micro-batch at a time, and does a run reach its report? (benchmarks/)"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import format_fidelity
import format_fidelity_report
import pytest
import torch
from estimate_fidelity import unquantized
from scipy.stats import spearmanr
from shared import small_models, texts
from shared.grouped_truth import GroupedTruth

from snip_hf.config import SnipConfig
from snip_hf.estimation.ground_truth import measure_assignment
from snip_hf.estimation.pending import LAYER
from snip_hf.numerics.gemms import GEMMS


def some_text(vocabulary: int = texts.BYTES) -> texts.Text:
    ids = torch.randint(vocabulary, (8, 64), generator=torch.Generator().manual_seed(0))
    return texts.Text(ids, ids)


@pytest.mark.parametrize("family", ["phi", "gemma3"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_grouped_truth_is_that_of_each_micro_batch_by_itself(family: str, optimizer: str) -> None:
    text = some_text()
    shape: dict[str, Any] = {"rows": 2, "hidden": 32, "blocks": 1, "vocabulary": texts.BYTES}
    state = small_models.new_state(family, optimizer, "cpu", **shape)
    state.train(text, 2)
    config = SnipConfig(start_format="bf16", probe_tokens=None)
    batches = [text.batch(index, 2) for index in (1, 2, 3)]
    before = {name: weight.clone() for name, weight in state.model.named_parameters()}
    with unquantized(state.model, config) as layers:
        # Formats without random numbers: one of small blocks, and one whose scale is that of the whole tensor.
        cells = [
            (layer, row, fmt)
            for fmt, row in (
                ("mxfp8", LAYER),
                ("fp8-tensor", LAYER),
                ("fp8-tensor", "forward"),
                ("int8", "grad_weight"),
            )
            for layer in (layers[1], layers[-1])
        ]
        grouped = GroupedTruth(state.model, batches, state.optimizer).squares(cells).sqrt()
        assignments = [{layer: dict.fromkeys(GEMMS if row == LAYER else (row,), fmt)} for layer, row, fmt in cells]
        alone = [measure_assignment(state.model, batch, state.optimizer, assignments, config, 1) for batch in batches]
    expected = torch.tensor([[weight for _, weight in of_batch] for of_batch in alone], dtype=torch.float64).T
    assert (expected > 0).all()
    torch.testing.assert_close(grouped, expected, rtol=1e-4, atol=0)
    after = dict(state.model.named_parameters())
    assert all(torch.equal(after[name], weight) and after[name].requires_grad for name, weight in before.items())


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_every_family_is_of_its_own_shape(family: str) -> None:
    state = small_models.new_state(family, "adamw", "cpu", rows=1, hidden=32, blocks=1, vocabulary=texts.BYTES)
    names = {name.rpartition(".")[0] for name, _ in state.model.named_parameters()}
    state.train(some_text(), 1)
    has_norms_of_queries = family in ("qwen3", "olmo2", "gemma3")
    assert any(name.endswith("q_norm") for name in names) is has_norms_of_queries
    biases = {name.split(".")[-2] for name, _ in state.model.named_parameters() if name.endswith("_proj.bias")}
    assert biases == ({"q_proj", "k_proj", "v_proj"} if family in ("glm4", "phi") else set())
    assert state.model.config.vocab_size == texts.BYTES


def test_bytes_are_the_ids_of_a_text_on_bytes(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("né", encoding="utf-8")
    assert texts.byte_ids(file).tolist() == [110, 195, 169]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for this process it would stay
    monkeypatch.setattr(sys, "argv", ["format_fidelity.py", *arguments])
    format_fidelity.main()


@pytest.mark.slow
def test_a_case_is_measured_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The text. " * 800, encoding="utf-8")
    output = tmp_path / "runs" / "formats.jsonl"
    arguments = ["--cases", "llama:adamw:2:bytes", "--formats", "fp8", "mxfp4", "--gemms", "layer", "grad_input"]
    arguments += ["--blocks", "1", "--rows", "1", "--batches", "2", "--device", "cpu", "--text", str(text)]
    run([*arguments, "--output", str(output)], monkeypatch)
    *formats, case = (json.loads(line) for line in output.read_text(encoding="utf-8").splitlines())
    assert [line["format"] for line in formats] == ["mxfp4", "fp8"]
    assert case["kind"] == "case" and (case["tokens"], case["batches"], len(case["layers"])) == (256, 2, 7)
    for line in formats:
        for row in (LAYER, "grad_input"):
            truth, estimate = (torch.tensor(line[row][name]) for name in ("truth", "estimate"))
            assert truth.shape == estimate.shape == (2, 7)
            # grad_input of the first block's queries, keys and values moves nothing.
            assert (truth > 0).sum() == (14 if row == LAYER else 8)
    written_at_once = output.read_text(encoding="utf-8")
    run([*arguments, "--output", str(output)], monkeypatch)
    assert "0 of 1 cases to do" in capsys.readouterr().out
    assert output.read_text(encoding="utf-8") == written_at_once
    more = [argument if argument != "mxfp4" else "int8" for argument in arguments]
    run([*more, "--output", str(output)], monkeypatch)
    added = output.read_text(encoding="utf-8").removeprefix(written_at_once).splitlines()
    assert [json.loads(line).get("format") for line in added] == ["int8", None]

    report = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["format_fidelity_report.py", str(output), "--output", str(report)])
    format_fidelity_report.main()
    written = report.read_text(encoding="utf-8")
    assert "\n| llama:adamw:2:bytes | 3 | " in written and "\n| mxfp4 | grad_input | 1 | " in written


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (
            ["--cases", "llama:adamw"],
            "'llama:adamw' is not known; expected small, all, bytes or family:optimizer:steps",
        ),
        (["--formats", "fp5"], "'fp5' is not known; expected some of fp8, fp4, "),
        (["--batches", "1"], "--batches is 1; expected at least 2, for two halves of the truth"),
    ):
        with pytest.raises(SystemExit):
            run(arguments, monkeypatch)
        assert said in capsys.readouterr().err


def test_figures_compare_means_over_micro_batches_and_halves_of_the_truth() -> None:
    truth = [[3.0, 1.0, 2.0, 4.0, 0.0], [1.0, 3.0, 2.0, 5.0, 0.0]]
    mean = torch.tensor(truth).square().mean(0).sqrt()
    estimate = [[9.0, 1.0, 1.0, 1.0, 0.0], (mean * torch.tensor([1.2, 0.92, 1.0, 1.0, 1.0])).tolist()]
    record = {"case": "a", "format": "fp4", LAYER: {"truth": truth, "estimate": estimate}}
    cell = format_fidelity_report.Cell.of(record, LAYER, ["b.q", "b.k", "b.v", "b.o", "c.q"])
    assert cell is not None
    assert cell.ratios == pytest.approx({"b.q": 1.2, "b.k": 0.92, "b.v": 1.0, "b.o": 1.0})
    assert (cell.median_error, cell.error_90) == pytest.approx((0.04, 0.164))
    assert cell.spearman == pytest.approx(spearmanr(mean[:4], estimate[1][:4]).statistic)
    assert cell.one_batch == pytest.approx(spearmanr(mean[:4], estimate[0][:4]).statistic)
    halves = spearmanr(truth[0][:4], truth[1][:4]).statistic
    assert cell.halves == pytest.approx(halves) and cell.corrected == pytest.approx(2 * halves / (1 + halves))
    assert cell.misses == []
    worse = replace(cell, median_error=0.06, spearman=0.5, halves=0.6)
    assert worse.misses == ["median error 0.060", "Spearman 0.500, halves 0.600"]
    nothing = {"case": "a", "format": "fp4", LAYER: {"truth": [[0.0], [0.0]], "estimate": [[0.0], [0.0]]}}
    assert format_fidelity_report.Cell.of(nothing, LAYER, ["b.q"]) is None


def test_ranks_from_one_micro_batch_are_counted_by_optimizer() -> None:
    cases = {"llama:adamw:300": 0.92, "llama:adamw:300:bytes": 0.90, "gemma3:adamw:300": 0.97, "phi:muon:300": 0.8}
    cells = [
        format_fidelity_report.Cell(case, "fp4", LAYER, 0.01, 0.02, 0.96, one, 0.96, 0.98, 0.3, {})
        for case, one in cases.items()
    ]
    assert format_fidelity_report.targets(cells).split("\n") == [
        "4 cells: 0 miss the median error of 0.05, 0 the ranks of the halves.",
        "From one micro-batch under adamw, 1 of 3 miss the ranks of the halves.",
        "From one micro-batch under muon, 1 of 1 miss the ranks of the halves.",
        "",
    ]
