"""Is a run found by the name of a folder or of a Hub repository, and what of a repository is downloaded?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Hub, Repository
from written_runs import random_assignments, write_divergence, write_losses, write_run

from snip_hf.integrations.hub_runs import record_files, run_source

REPORT = """
import sys
from snip_hf.cli import main

sys.exit(main(sys.argv[1:]))
"""


def never(repository: str, revision: str | None) -> Path:
    raise AssertionError(f"{repository} was asked for.")


def test_a_folder_goes_before_a_repository_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/one").mkdir(parents=True)
    for name in ("runs/one", str(tmp_path / "none"), "one", "a/b/c", "./one"):
        source = run_source(name, never)
        assert (source.name, source.folder, source.is_local) == (name, Path(name), True)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("someone/model", ("someone/model", None)), ("someone/model@v1.0", ("someone/model", "v1.0"))],
)
def test_a_repository_is_downloaded_at_its_revision(
    name: str, asked: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, str | None]] = []

    def snapshot(repository: str, revision: str | None) -> Path:
        seen.append((repository, revision))
        return tmp_path / "snapshot"

    source = run_source(name, snapshot)
    assert seen == [asked]
    assert (source.name, source.folder, source.is_local) == (name, tmp_path / "snapshot", False)


def test_what_is_neither_a_folder_nor_a_repository_is_told_as_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def snapshot(repository: str, revision: str | None) -> Path:
        raise RuntimeError("404: there is none")

    with pytest.raises(FileNotFoundError) as caught:
        run_source("runs/misspelt", snapshot)
    assert str(caught.value) == (
        "There is no folder runs/misspelt here, and no run can be read from a Hub repository of this name: "
        "404: there is none"
    )


def test_the_record_of_a_run_is_downloaded_without_weights_and_with_as_many_tables_as_are_shown() -> None:
    others = ["model.safetensors", "config.json", "checkpoint-4/optimizer.pt", "snip/plan.png", "snip/report.html"]
    record = ["README.md", "checkpoint-4/trainer_state.json", "snip/history.jsonl", "snip/plan.json"]
    tables = [f"snip/divergence-{step}.json" for step in range(100, 30_100, 100)]
    found = record_files([*others, *record, *tables])
    assert found[: len(record)] == record
    shown = found[len(record) :]
    last = [f"snip/divergence-{step}.json" for step in range(30_000, 29_200, -100)]
    spaced = [f"snip/divergence-{step}.json" for step in range(30_000, 0, -300)]
    assert shown == [*last, *(table for table in spaced if table not in last)]
    assert set(record_files(tables[:128])) == set(tables[:128])


@pytest.mark.slow
def test_a_pushed_run_is_reported_from_a_server(tmp_path: Path) -> None:
    assignments = random_assignments(3)
    write_run(tmp_path / "run", assignments)
    write_divergence(tmp_path / "run", 100, {(layer, "layer"): (0.1, 0.2) for layer in assignments[0]})
    write_losses(tmp_path / "run" / "last-checkpoint" / "trainer_state.json", 200)
    files = {
        str(path.relative_to(tmp_path / "run")): path.read_bytes()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    with Hub.running() as hub:
        hub.repositories["someone/model"] = Repository(files | {"model.safetensors": b"large"}, [("first", {})])
        hub.repositories["someone/other"] = Repository({"model.safetensors": b"large"}, [("first", {})])
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        env = kept | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf-home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        runs = {}
        for name in ("someone/model", "someone/other"):
            command = [sys.executable, "-c", REPORT, "report", name, "--html"]
            runs[name] = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        asked = list(hub.requests)
        assert hub.unknown == []
    assert runs["someone/model"].returncode == 0, runs["someone/model"].stderr
    page = (tmp_path / "snip-report" / "report.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["runs"][0]["name"] == "model"
    assert data["runs"][0]["divergence"]["steps"] == [100]
    assert data["charts"][0]["series"][0]["name"] == "model, training"
    assert not any("model.safetensors" in request for request in asked)
    assert runs["someone/other"].returncode == 2
    assert runs["someone/other"].stderr == (
        "snip-hf: There is no folder someone/other here, and no run can be read from a Hub repository of this name: "
        "it has no snip/history.jsonl; expected a model that was pushed with SnipCallback.\n"
    )
