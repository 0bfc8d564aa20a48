"""Do the CSV files hold the numbers of the run, and escaped names?"""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

from written_runs import random_assignments, write_divergence, write_losses, write_run

from snip_hf.numerics.gemms import GEMMS
from snip_hf.records.load import load_run
from snip_hf.reporting.csv_files import write_csv


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_stretches_of_a_plan_are_its_formats_at_every_step(tmp_path: Path) -> None:
    assignments = random_assignments(4)
    write_run(tmp_path, assignments)
    (path,) = [file for file in write_csv(load_run(tmp_path), tmp_path) if file.name == "plan.csv"]
    rows = table(path)
    for begin, assignment in zip((0, 110, 210, 310), assignments, strict=True):
        found = {
            (row["layer"], row["gemm"]): row["format"]
            for row in rows
            if int(row["from_step"]) <= begin and (not row["to_step"] or begin < int(row["to_step"]))
        }
        assert found == {(layer, gemm): name for layer, formats in assignment.items() for gemm, name in formats.items()}
    # No stretch goes on in the format of the one before.
    for above, below in pairwise(rows):
        assert (above["layer"], above["gemm"], above["format"]) != (below["layer"], below["gemm"], below["format"])


def test_refreshes_divergences_and_losses_have_a_file_each_if_there_are_any(tmp_path: Path) -> None:
    assignments = random_assignments(3)
    write_run(tmp_path / "short", assignments[:1])
    assert [path.name for path in write_csv(load_run(tmp_path / "short"), tmp_path / "out")] == ["plan.csv"]
    write_run(tmp_path, assignments, kept=(2,))
    write_divergence(tmp_path, 100, {(layer, gemm): (0.1, 0.3) for layer in assignments[0] for gemm in GEMMS})
    write_losses(tmp_path / "trainer_state.json", 50)
    names = ["plan.csv", "refreshes.csv", "divergence.csv", "losses.csv"]
    assert write_csv(load_run(tmp_path), tmp_path / "out") == [tmp_path / "out" / name for name in names]
    first, second = table(tmp_path / "out" / "refreshes.csv")
    assert (first["step"], first["applied_step"], first["objective"]) == ("100", "110", "12.345678")
    assert (first["seconds_probe"], first["memory_mib_measured"]) == ("1.25", "")
    assert (second["status"], second["applied_step"]) == ("kept", "")
    assert second["reason"] == "The solver [cbc] was killed after 60 s."
    rows = table(tmp_path / "out" / "divergence.csv")
    assert len(rows) == 2 * len(GEMMS) * len(assignments[0])
    assert (rows[0]["step"], rows[0]["format"], rows[0]["weight_divergence"]) == ("100", "fp4", "0.3")
    assert table(tmp_path / "out" / "losses.csv")[-1] == {"step": "50", "loss": "9.5", "eval_loss": "19.5"}


def test_names_from_elsewhere_are_escaped(tmp_path: Path) -> None:
    name = "layers.0.\x1b[31m\ud800\n"
    write_run(tmp_path, [{name: dict.fromkeys(GEMMS, "fp8")}])
    write_csv(load_run(tmp_path), tmp_path / "out")
    assert table(tmp_path / "out" / "plan.csv")[0]["layer"] == "layers.0.\\x1b[31m\\ud800\\n"
