"""`snip-hf report` writes the requested files to the named places, for one run and for several."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import Page
from written_runs import random_assignments, write_losses, write_run

from snip_hf.cli import main
from snip_hf.cli.report import short_names


def runs_of(folder: Path, *names: str) -> list[str]:
    for name in names:
        write_run(folder / name, random_assignments(2))
    return [str(folder / name) for name in names]


def test_a_page_of_several_runs_lies_in_the_folder_of_the_first_and_their_figures_in_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = runs_of(tmp_path, "a/run", "b/run")
    write_losses(tmp_path / "plain" / "trainer_state.json", 30)
    assert main(["report", first, second, "--html", "--csv", "--bf16", str(tmp_path / "plain")]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("plan.png", "plan.csv", "refreshes.csv")
    expected = [f"{run}/snip/{name}" for run in (first, second) for name in names] + [f"{first}/snip/report.html"]
    assert lines[-len(expected) :] == expected
    assert "Run a/run" in lines and "Run b/run" in lines
    found = Page((tmp_path / "a" / "run" / "snip" / "report.html").read_text())
    assert found.rows[0] == ["", "a/run", "b/run", "plain (BF16)"]


def test_a_run_above_the_working_directory_is_written_below_the_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_of(tmp_path, "above", "above/here/run")
    monkeypatch.chdir(tmp_path / "above" / "here")
    assert main(["report", "..", "run", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.parent.name for path in tmp_path.rglob("plan.png")) == ["above", "run"]
    assert len(list((tmp_path / "out").rglob("plan.png"))) == 2


def test_the_files_of_several_runs_go_to_a_folder_each_below_the_one_that_is_named(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, "a/run", "b/run")
    assert main(["report", *runs, "--html", "--out", str(tmp_path / "out")]) == 0
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    assert files == ["a-run/plan.png", "b-run/plan.png", "report.html"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--bf16", "elsewhere"], "--bf16 adds a run to the page, so it needs --html."),
        (
            ["--html", "--bf16", "."],
            "--bf16 . has no losses: There is no trainer_state.json with losses (saved with a checkpoint or by "
            "trainer.save_state()).",
        ),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused_before_anything_is_written(
    arguments: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs_of(tmp_path, "run")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run", *arguments]) == 2
    assert capsys.readouterr().err == f"snip-hf: {error}\n"
    assert not (tmp_path / "run" / "snip" / "plan.png").exists()


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/first"], ["first"]),
        (["runs/first/", "runs/second"], ["first", "second"]),
        (["a/run", "b/run", "c/other"], ["a/run", "b/run", "other"]),
        (["run", "a/run"], ["run", "a/run"]),
        ([".", "someone/model"], [".", "model"]),
        (["/"], ["/"]),
    ],
)
def test_runs_have_short_names_that_tell_them_apart(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short
