"""Do SNIP's quantities reach the trackers of a loop without a Trainer?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from own_loop import CONFIG, Loop
from tracker_files import Stored, of_tensorboard, of_trackio, of_wandb, use_trackio_in, use_wandb_offline

from snip_hf import log_to
from snip_hf.kernels.emulated import Emulated

# What the plan of step 2 is known by when it is applied after step 4.
OF_A_REFRESH = {
    "fp4_share",
    *(f"snip/{name}" for name in ("applied", "probed_step", "probed_loss", "layers_changed", "gemms_changed")),
    *(f"snip/{name}" for name in ("objective", "gap", "probe_seconds", "solver_seconds", "waited_seconds")),
    *(f"snip/{kind}_divergence_{name}" for kind in ("loss", "weight") for name in ("fp8", "fp4")),
    "snip/memory_mib_predicted",
}
ALL = OF_A_REFRESH | {"fp4_coverage", "snip/gemms_changed_by_tokens"}


def run(name: str, folder: Path) -> None:
    """Five steps of a loop that logs its loss itself, as Accelerate's examples do."""
    accelerator = Accelerator(log_with=name, project_dir=folder / "logs", cpu=True, gradient_accumulation_steps=2)
    accelerator.init_trackers("a-project", config={"lr": 1e-2})
    loop = Loop(CONFIG, folder, accelerator, accumulation=2)
    assert loop.controller is not None
    log_to(loop.controller, accelerator)
    for step in range(1, 6):
        loop.run(step)
        accelerator.log({"loss": loop.losses[-1]}, step=step)
    loop.controller.close()
    accelerator.end_training()


def check_stored(found: Stored) -> None:
    assert found.of_snip == ALL and len(ALL) >= 8
    assert found.numbers["fp4_share"] == [0.0, pytest.approx(0.754)]  # at the start and after step 4
    assert len(found.numbers["loss"]) == 5
    assert found.settings["backend_in_use"] == "emulated"
    assert found.settings["refresh_every"] == json.loads(json.dumps(CONFIG.to_dict()))["refresh_every"]


def test_accelerates_tensorboard_stores_all(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run("tensorboard", tmp_path)
    check_stored(of_tensorboard(tmp_path / "logs" / "a-project"))


@pytest.mark.slow
def test_accelerates_wandb_stores_all_in_its_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wandb_offline(tmp_path, monkeypatch)
    run("wandb", tmp_path)
    check_stored(of_wandb(tmp_path))


@pytest.mark.slow
def test_accelerates_trackio_stores_all_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_trackio_in(tmp_path / "trackio", monkeypatch)
    run("trackio", tmp_path)
    check_stored(of_trackio(tmp_path / "trackio"))


def test_a_function_gets_the_numbers_of_each_event_at_its_step() -> None:
    lines: list[tuple[int, dict[str, Any]]] = []
    loop = Loop()
    assert loop.controller is not None
    log_to(loop.controller, lambda values, step: lines.append((step, values)))
    loop.run(4)
    assert [step for step, _ in lines] == [0, 1, 4]
    start, counted, refresh = (values for _, values in lines)
    assert (start["fp4_share"], counted["fp4_coverage"]) == (0.0, 1.0)
    assert set(refresh) == OF_A_REFRESH


def test_what_the_backend_counts_is_logged_with_each_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulated, "figures", lambda self, layers: {"saturated_share": len(layers) / 100})
    lines: list[dict[str, Any]] = []
    loop = Loop()
    assert loop.controller is not None
    log_to(loop.controller, lambda values, step: lines.append(values))
    loop.run(4)
    assert [line["snip/saturated_share"] for line in lines if "snip/applied" in line] == [0.14]


def test_an_accelerator_without_trackers_gets_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loop = Loop(CONFIG, tmp_path, accelerator)
    assert loop.controller is not None
    before = list(loop.controller._events._trackers)
    log_to(loop.controller, accelerator)
    assert loop.controller._events._trackers == before


def test_what_cannot_log_is_refused() -> None:
    loop = Loop()
    assert loop.controller is not None
    with pytest.raises(TypeError, match=r"Got a str to log to; expected an Accelerator, or a function of \(values, "):
        log_to(loop.controller, "tensorboard")  # type: ignore[arg-type]
