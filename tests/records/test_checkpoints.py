"""Is a checkpoint read with the history of the run around it, up to its step, and alone where there is none?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from configs import fp4_config
from tiny_runs import SCHEDULE, train

from snip_hf.planning.plan import PrecisionPlan
from snip_hf.records.load import load_recorded, load_run
from snip_hf.reporting.run_report import run_contents

# Steps of the checkpoints: after the first refresh, and in the middle of the second one.
CHECKPOINTS = (5, 6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 8 steps: by layer in two stages, and by GEMM with measured times."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {
        "layer": fp4_config(**SCHEDULE, granularity="layer", stages=2, target_fp4_fraction=0.5),
        "gemm": fp4_config(**SCHEDULE, granularity="gemm", budget="measured"),
    }
    for name, config in configs.items():
        run = train(folder / name, config, max_steps=8, save_steps=1, save_strategy="steps")
        shutil.copy(run.folder / "checkpoint-8" / "trainer_state.json", run.folder)
    return folder


def saved_plan(folder: Path) -> PrecisionPlan:
    return PrecisionPlan.from_dict(json.loads((folder / "snip_state.json").read_text())["plan"])


@pytest.mark.parametrize("name", ["layer", "gemm"])
@pytest.mark.parametrize("step", CHECKPOINTS)
def test_a_checkpoint_is_its_run_up_to_its_step(data: Path, name: str, step: int) -> None:
    folder = data / name / f"checkpoint-{step}"
    whole, found = load_run(data / name), load_recorded(folder)
    assert found.folder == folder
    assert found.refreshes == [refresh for refresh in whole.refreshes if refresh.decided_step <= step]
    assert len(found.refreshes) < len(whole.refreshes)
    assert list(found.divergences) == [probe for probe in whole.divergences if probe <= step]
    assert found.plans[-1][1].assignment == saved_plan(folder).assignment
    assert found.plans[-1][1].measured == saved_plan(folder).measured
    assert not any("differs" in note for note in found.notes)


def test_a_checkpoint_between_a_probe_and_its_plan_tells_of_it(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "gemm" / "checkpoint-6", tmp_path / "checkpoint-6")  # alone, so without earlier refreshes
    for folder in (data / "gemm" / "checkpoint-6", tmp_path / "checkpoint-6"):
        contents = " ".join(str(content) for content in run_contents(load_recorded(folder)))
        assert "Step 6 was probed; its plan is due after step 8." in contents
        assert "No refresh was recorded" not in contents


def test_a_checkpoint_alone_has_its_plan_and_its_configuration(data: Path, tmp_path: Path) -> None:
    source = data / "gemm" / "checkpoint-5"
    shutil.copytree(source, tmp_path / "checkpoint-5")
    shutil.copy(data / "gemm" / "trainer_state.json", tmp_path / "checkpoint-5")
    found = load_recorded(tmp_path / "checkpoint-5")
    ((step, plan),) = found.plans
    assert (step, plan.assignment) == (5, saved_plan(source).assignment)
    assert found.config["granularity"] == "gemm"
    assert plan.measured is not None and found.losses.keys() == load_run(data / "gemm").losses.keys()
    assert (found.refreshes, found.divergences) == ([], {})
    assert found.notes == ["There is no history beside the checkpoint, so only its plan is known."]
    assert "the initial plan is in force" not in " ".join(map(str, run_contents(found)))


def test_a_checkpoint_of_another_run_than_its_history_says_so(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "layer", tmp_path / "run")
    state = tmp_path / "run" / "checkpoint-5" / "snip_state.json"
    document = json.loads(state.read_text())
    layer = next(iter(document["plan"]["assignment"]))
    document["plan"]["assignment"][layer]["forward"] = "bf16"
    state.write_text(json.dumps(document))
    notes = load_recorded(tmp_path / "run" / "checkpoint-5").notes
    assert any(
        note.startswith(f"The plan in the checkpoint differs from the history in 1 GEMMs ({layer}:forward is bf16")
        for note in notes
    )


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("[]", "the state is a list of 0, expected an object."),
        ('{"schema_version": 2, "plan": {}}', "schema_version is 2, expected 1."),
        ('{"schema_version": 1, "plan": {}}', "it has no entry 'step'."),
        ('{"schema_version": 1, "step": 1, "plan": 7}', "it has no entry 'config'."),
        ('{"step"', "is not a usable state of a checkpoint: "),
    ],
)
def test_a_broken_state_is_refused_with_file_and_reason(tmp_path: Path, content: str, wrong: str) -> None:
    (tmp_path / "snip_state.json").write_text(content)
    with pytest.raises(ValueError, match=r"snip_state\.json is not a usable state of a checkpoint: ") as caught:
        load_recorded(tmp_path)
    assert wrong in str(caught.value)


def test_a_folder_that_is_neither_a_run_nor_a_checkpoint_is_refused_as_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the output folder of a run with SnipCallback"):
        load_recorded(tmp_path)


def test_the_losses_of_a_pushed_checkpoint_are_found(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "layer" / "snip", tmp_path / "snip")
    (tmp_path / "last-checkpoint").mkdir()
    shutil.copy(data / "layer" / "trainer_state.json", tmp_path / "last-checkpoint")
    assert load_run(tmp_path).losses == load_run(data / "layer").losses != {}
