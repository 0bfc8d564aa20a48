"""A comparison shows the differences between runs and plans, and their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written_runs import random_assignments, write_run

from snip_hf.cli import main
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
from snip_hf.records.events import LOSS, Alarm

GEMMS = ("forward", "grad_input", "grad_weight")
LAYERS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


def save(path: Path, low: dict[str, tuple[str, ...]], layers: tuple[str, ...] = LAYERS) -> str:
    """Writes a plan of four equal layers in two stages, whose GEMMs named in `low` are in FP4."""
    assignment = {layer: {gemm: "fp4" if gemm in low.get(layer, ()) else "fp8" for gemm in GEMMS} for layer in layers}
    flops = {layer: dict.fromkeys(GEMMS, 2.0) for layer in layers}
    config = {"policy": "snip", "formats": ["fp4", "fp8"], "seed": len(low)}
    plan = PrecisionPlan(
        assignment, flops, (layers[:2], layers[2:]), PlanProvenance(step=7, policy="snip", config=config)
    )
    plan.save(path)
    return str(path)


def write_losses(folder: Path, losses: dict[int, dict[str, float]]) -> str:
    """Writes the Trainer's log of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    log = [{"step": step, **row} for step, row in losses.items()]
    state = {"global_step": max(losses), "log_history": log}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return str(folder)


def write_refreshed(folder: Path) -> None:
    """Writes a run that goes from FP8 to FP4 after step 20."""
    layers = random_assignments(1)[0]
    write_run(folder, [{layer: dict.fromkeys(GEMMS, name) for layer in layers} for name in ("fp8", "fp4")], every=10)


def compare(capsys: pytest.CaptureFixture[str], *paths: str) -> list[list[str]]:
    """The words of each line that is printed."""
    assert main(["compare", *paths]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def sentence(lines: list[list[str]], start: str) -> str:
    """The sentence that begins so; it may go over lines."""
    text = " ".join(word for line in lines for word in line)
    return text[text.index(start) :]


def test_plans_are_compared_by_shares_settings_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save(tmp_path / "one.json", {"layers.0.up": GEMMS})
    other = save(tmp_path / "other.json", {"layers.0.up": ("forward",), "layers.1.down": ("forward", "grad_input")})
    lines = compare(capsys, one, other)
    assert ["A", "snip", "7", "0.2500", "-", "0.0000", "-", "-", "-"] in lines
    assert ["B", "snip", "7", "0.2500", "-", "0.1667", "-", "-", "-"] in lines
    assert ["seed", "1", "2"] in lines and not any(line[:1] == ["policy"] and len(line) == 3 for line in lines)
    assert sentence(lines, "From A to B").startswith(
        "From A to B, 4 of 12 GEMMs in 2 of 4 layers change, 0.3333 of the FLOPs: 2 fp4 -> fp8, 2 fp8 -> fp4."
    )
    assert ["0", "up", "grad_input,", "grad_weight", "fp4", "fp8"] in lines
    assert ["1", "down", "forward,", "grad_input", "fp8", "fp4"] in lines
    assert not any("losses" in line for line in lines)


def test_a_run_under_a_fixed_plan_is_not_called_by_its_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "other"):
        write_refreshed(tmp_path / name)
    history = tmp_path / "one" / "snip" / "history.jsonl"
    start, *rest = history.read_text().splitlines(keepends=True)
    record = json.loads(start)
    record["config"]["fixed_plan"] = "plan.json"
    history.write_text("".join([json.dumps(record) + "\n", *rest]))
    lines = compare(capsys, str(tmp_path / "one"), str(tmp_path / "other"))
    assert any(line[:3] == ["A", "fixed", "plan"] for line in lines)
    assert any(line[:2] == ["B", "snip"] for line in lines)


def test_layers_of_long_names_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = "base_model.model.model.language_model.shared_transformer_decoder.layers.0.feed_forward"
    layers = tuple(f"{stem}.{kind}" for kind in ("gate", "up", "out", "down"))
    one = save(tmp_path / "one.json", dict.fromkeys(layers, GEMMS), layers)
    other = save(tmp_path / "other.json", {}, layers)
    lines = compare(capsys, one, other)
    for kind in ("gate", "up", "out", "down"):
        assert ["0", kind, "forward,", "grad_input,", "grad_weight", "fp4", "fp8"] in lines


def test_settings_that_are_lists_are_told_apart_by_what_they_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [save(tmp_path / f"{name}.json", {}) for name in ("one", "other")]
    for name, formats in zip(names, (["fp4", "fp8"], ["fp4", "bf16"]), strict=True):
        plan = json.loads(Path(name).read_text())
        plan["provenance"]["config"] |= {"formats": formats, "skip_modules": ["a" * 70]}
        Path(name).write_text(json.dumps(plan))
    lines = compare(capsys, *names)
    assert ["formats", "['fp4',", "'fp8']", "['fp4',", "'bf16']"] in lines
    assert not any(line[:1] == ["skip_modules"] for line in lines)


def test_equal_plans_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (save(tmp_path / name, {"layers.0.up": GEMMS}) for name in ("one.json", "other.json"))
    lines = compare(capsys, one, other)
    assert sentence(lines, "The plans").startswith("The plans of A and B agree in all 12 GEMMs.")
    assert not any("Settings" in line for line in lines)


def test_plans_of_other_layers_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save(tmp_path / "one.json", {})
    other = save(tmp_path / "other.json", {}, (*LAYERS, "layers.2.up"))
    assert sentence(compare(capsys, one, other), "The formats").startswith(
        "The formats of A and B cannot be compared: Layer 'layers.2.up' is in only one of the two plans; compare plans"
    )


def test_a_run_is_compared_with_another_and_with_a_baseline_without_the_callback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"run": (5.0, 4.0), "other": (5.0, 4.1), "base": (4.8, 3.9)}
    for name, (early, late) in losses.items():
        if name != "base":
            write_refreshed(tmp_path / name)
        rows = {10: {"loss": early, "eval_loss": early}, 20: {"loss": late}, 30: {"eval_loss": late}}
        write_losses(tmp_path / name, rows)
    lines = compare(capsys, *(str(tmp_path / name) for name in losses))
    # 20 steps without FP4, and 10 of which the history says 0.5.
    assert [line[:5] for line in lines if line[:2] == ["A", "snip"]] == [["A", "snip", "30", "1.0000", "0.1667"]]
    assert ["C", "-", "30", *["-"] * 6] in lines
    assert sentence(lines, "The plans").startswith("The plans of A and B agree in all 18 GEMMs.")
    assert ["10", "5.0000", "5.0000", "4.8000"] in lines
    assert ["30", "4.0000", "4.1000", "3.9000"] in lines
    expected = "At step {}, {} loss against A: B +0.1000 (+2.50%), C -0.1000 (-2.50%)."
    for step, kind in ((30, "validation"), (20, "training")):
        assert sentence(lines, f"At step {step}").startswith(expected.format(step, kind))


def test_a_run_with_alarms_is_not_shown_as_a_healthy_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("healthy", "sick"):
        write_refreshed(tmp_path / name)
        write_losses(tmp_path / name, {10: {"loss": 5.0}, 20: {"loss": 4.0 if name == "healthy" else 0.0}})
    alarm = Alarm(step=15, figure=LOSS, value=None, limit=None, action="noted", reason="nan", failures=1)
    with (tmp_path / "sick" / "snip" / "history.jsonl").open("a") as file:
        file.write(json.dumps(alarm.to_record()) + "\n")
    lines = compare(capsys, str(tmp_path / "healthy"), str(tmp_path / "sick"))
    text = sentence(lines, "A:")
    assert "B: alarms of the guard: 1, the last at step 15 (`snip-hf report`)" in text and "A: alarms" not in text


def test_losses_at_no_common_step_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_losses(tmp_path / "one", {10: {"loss": 4.0}})
    other = write_losses(tmp_path / "other", {11: {"loss": 4.0}, 12: {"loss": float("nan")}})
    lines = compare(capsys, one, other)
    expected = "A, B have no training losses at a common step."
    assert sentence(lines, "A, B have") == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one.json"], "Got 1 to compare, expected 2 to 26 runs or plans."),
        (["one.json"] * 27, "Got 27 to compare, expected 2 to 26 runs or plans."),
        (["one.json", "none.json"], "none.json does not exist; expected a run's folder or a plan"),
        (["one.json", "."], "snip/history.jsonl does not exist; expected the output folder of a run"),
    ],
)
def test_runs_that_cannot_be_compared_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "one.json", {})
    assert main(["compare", *names]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"snip-hf: {message}") and captured.err.count("\n") == 1
