"""Do the tables and figures say what the files of a run say, and does a run with missing pieces get a report too?"""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from events import counted_event
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from written_runs import KINDS, random_assignments, write_divergence, write_losses, write_run

from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.estimation.table import LAYER
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
from snip_hf.records.events import Retarget
from snip_hf.records.load import load_run
from snip_hf.registry import UnknownName
from snip_hf.reporting.figures import divergence_figure, plan_figure, write_figures
from snip_hf.reporting.run_report import other_shares, print_run, run_report
from snip_hf.reporting.tables import stage_table


def printed(folder: Path) -> str:
    text = io.StringIO()
    print_run(load_run(folder), Console(file=text, width=100))
    return text.getvalue()


def joined(text: str) -> str:
    return " ".join(text.split())


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_plans_in_force_are_rebuilt_from_the_start_and_the_changes(tmp_path: Path) -> None:
    assignments = random_assignments(6)
    write_run(tmp_path, assignments, kept=(3,))
    run = load_run(tmp_path)
    assert [step for step, _ in run.plans] == [0, 110, 210, 410, 510]
    rebuilt = [plan.to_dict()["assignment"] for _, plan in run.plans]
    assert rebuilt == [assignments[i] for i in (0, 1, 2, 4, 5)]


def test_the_refreshes_are_printed_with_share_objective_gap_and_seconds(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(3, granularity="layer"), kept=(2,))
    changed = load_run(tmp_path).refreshes[0].layers_changed
    text = printed(tmp_path)
    assert ["100", "110", "0.5000", str(changed), "12.35", "3.7e-03", "1.25", "3.00", "0.00"] in rows(text)
    assert ["200", "kept", "0.5000", "0", "-", "-", "1.25", "3.00", "0.00"] in rows(text)
    assert "Step 200: plan kept. The solver [cbc] was killed after 60 s.\n" in text


def test_a_refresh_that_failed_before_its_probe_has_a_line_without_figures(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    failed = {"event": "refresh", "step": 100, "applied_step": None, "decided_step": 100, "status": "kept"}
    failed |= {"reason": "ValueError: the loss is NaN.", "fp4_fraction": 0.0, "changes": {}, "layers_changed": 0}
    with open(tmp_path / "snip" / "history.jsonl", "a") as file:
        file.write(json.dumps(failed) + "\n" + json.dumps(failed | {"step": 200}) + "\n")
    text = printed(tmp_path)
    assert ["100", "kept", "0.0000", "0", "-", "-", "-", "-", "-"] in rows(text)
    assert "Step 200: plan kept. ValueError: the loss is NaN.\n" in text
    assert write_figures(load_run(tmp_path)) == [tmp_path / "snip" / "plan.png"]


def test_a_run_that_continued_a_checkpoint_without_snip_starts_at_its_step(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2), every=1000)
    path = tmp_path / "snip" / "history.jsonl"
    path.write_text(path.read_text().replace('"step": 0', '"step": 500', 1))
    assert [step for step, _ in load_run(tmp_path).plans] == [500, 1010]


def test_the_plan_is_printed_per_block_and_kind_with_one_format_or_one_per_gemm(tmp_path: Path) -> None:
    assignment = {
        "model.layers.0.self_attn.q_proj": {"forward": "fp8", "grad_input": "fp4", "grad_weight": "bf16"},
        "model.layers.0.mlp.down_proj": dict.fromkeys(GEMMS, "fp4"),
        "model.layers.10.self_attn.q_proj": dict.fromkeys(GEMMS, "bf16"),
    }
    write_run(tmp_path, [assignment])
    text = rows(printed(tmp_path))
    assert text[text.index(["block", "q_proj", "down_proj"]) + 2 :][:2] == [["0", "8/4/16", "4"], ["10", "16"]]


def test_the_losses_are_printed_at_the_validations_and_thinned_to_twenty_rows(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2))
    write_losses(tmp_path / "trainer_state.json", 200)
    assert [row for row in rows(printed(tmp_path)) if len(row) == 3 and row[0].isdigit()][:4] == [
        ["50", "9.5000", "19.5000"],
        ["100", "9.0000", "19.0000"],
        ["150", "8.5000", "18.5000"],
        ["200", "8.0000", "18.0000"],
    ]
    write_losses(tmp_path / "trainer_state.json", 5000)
    text = printed(tmp_path)
    table = [row for row in rows(text[text.index("Losses") : text.index("Plan (")]) if row and row[0].isdigit()]
    assert [row[0] for row in (table[0], table[-1])] == ["50", "5000"]
    assert len(table) == 20


def test_the_losses_come_from_the_trainer_state_that_got_furthest(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2))
    for folder, steps in (("checkpoint-90", 90), ("checkpoint-1000", 1000), (".", 500)):
        write_losses(tmp_path / folder / "trainer_state.json", steps)
    assert max(load_run(tmp_path).losses) == 1000


def test_a_loss_that_the_trainer_wrote_as_nan_does_not_stop_the_report(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2))
    state = '{"global_step": 2, "log_history": [{"step": 1, "loss": 3.5}, {"step": 2, "loss": NaN}]}'
    (tmp_path / "trainer_state.json").write_text(state)
    assert ["2", "nan", "-"] in rows(printed(tmp_path))
    assert (tmp_path / "snip" / "losses.png") in write_figures(load_run(tmp_path))


def test_divergences_in_a_format_that_is_not_registered_are_left_out_with_what_to_do(tmp_path: Path) -> None:
    assignments = random_assignments(2)
    write_run(tmp_path, assignments)
    write_divergence(tmp_path, 100, {(layer, "layer"): (0.3, 0.0) for layer in assignments[0]})
    path = tmp_path / "snip" / "divergence-100.json"
    path.write_text(path.read_text().replace('"fp8"', '"my-e3m1"'))
    text = joined(printed(tmp_path))
    assert "divergence-100.json cannot be used and is left out: Unknown format 'my-e3m1' for rows[1].format" in text
    assert "or by `--import MODULE` on the command line." in text
    assert "None of the 1 divergence files can be used, so there is no figure of the divergences." in text


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"policy": "uniform-fp8"}, "no target, attained "),
        ({"policy": "first-last-bf16", "target_fp4_fraction": 0.9}, "no target, attained "),
        ({"fixed_plan": "plan.json"}, "no target, attained "),
        ({"target_fp4_fraction": 0.9}, "target at least 90.0% of the linears' FLOPs in FP4, attained "),
        (
            {"policy": "of a later version", "target_fp4_fraction": 0.9},
            "target at least 90.0% of the linears' FLOPs in FP4, attained ",
        ),
        ({"target_linear_speedup": 2.0}, "target linears at 2.0 times BF16's speed, attained "),
    ],
)
def test_a_target_is_named_where_the_policy_meets_one(tmp_path: Path, changes: dict[str, Any], target: str) -> None:
    write_run(tmp_path, random_assignments(1))
    path = tmp_path / "snip" / "history.jsonl"
    start, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(start)
    record["config"] |= changes
    path.write_text("".join([json.dumps(record) + "\n", *rest]))
    text = " ".join(printed(tmp_path).split())
    assert target in text
    assert ("The policy does not probe, so there are no refreshes." in text) is (
        target[:2] == "no" and "policy" in changes
    )


def test_a_run_that_ended_before_its_first_refresh_has_a_plain_report(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    text = " ".join(printed(tmp_path).split())
    assert "No refresh was recorded (policy snip, first refresh due at step 100): the initial plan is in force." in text
    assert "Note: There are no divergence files, so there is no figure of the divergences." in text
    assert (
        "Note: There is no trainer_state.json with losses (saved with a checkpoint or by trainer.save_state())." in text
    )
    assert write_figures(load_run(tmp_path)) == [tmp_path / "snip" / "plan.png"]


def test_a_run_under_a_fixed_plan_has_no_refreshes(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    path = tmp_path / "snip" / "history.jsonl"
    start, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(start)
    record["config"] |= {"fixed_plan": "plan.json"}
    path.write_text("".join([json.dumps(record) + "\n", *rest]))
    text = " ".join(printed(tmp_path).split())
    assert "The plan is fixed, so there are no refreshes." in text and "first refresh due" not in text
    assert text.startswith("Fixed plan plan.json, no target")  # the plan may have any granularity


def test_a_history_whose_last_line_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(4))
    path = tmp_path / "snip" / "history.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [step for step, _ in load_run(tmp_path).plans] == [0, 110, 210]
    assert "Note: The last line of history.jsonl is not complete and is left out." in printed(tmp_path)


def test_a_history_in_an_unknown_format_is_refused_with_advice_also_in_its_last_line(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(3))
    path = tmp_path / "snip" / "history.jsonl"
    lines = path.read_text().splitlines()
    for number in (1, len(lines)):
        before = ': "fp8"' if number == 1 else '"fp8"]'
        broken = [line.replace(before, before.replace("fp8", "own4"), 1) for line in lines]
        path.write_text("\n".join([*lines[: number - 1], broken[number - 1], *lines[number:]]))
        with pytest.raises(UnknownName) as caught:
            load_run(tmp_path)
        assert str(caught.value).startswith(f"Line {number} of {path} cannot be read: Unknown format 'own4' for ")
        assert str(caught.value).endswith("or by `--import MODULE` on the command line.")


@pytest.mark.parametrize(
    ("line", "old", "new", "message"),
    [
        (
            1,
            '"flops"',
            '"flop"',
            "it has an unknown entry 'flop'; expected schema_version, step, config, plan, flops, ",
        ),
        (2, '"event": "refresh"', '"event": "party"', "event is 'party', expected one of start, refresh, "),
        (1, '"schema_version": 1', '"schema_version": 2', "schema_version is 2, expected 1."),
        (1, '"event": "start"', '"event": "refresh"', "it has an unknown entry 'schema_version'; expected step, "),
        (2, '"changes"', '"change"', "it has an unknown entry 'change'; expected step, "),
        (2, "{", "", "it is not valid JSON, perhaps truncated (line 1: Extra data)."),
    ],
)
def test_a_broken_history_is_refused_with_file_line_and_reason(
    tmp_path: Path, line: int, old: str, new: str, message: str
) -> None:
    write_run(tmp_path, random_assignments(3))
    path = tmp_path / "snip" / "history.jsonl"
    lines = path.read_text().splitlines()
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError) as caught:
        load_run(tmp_path)
    assert str(caught.value).startswith(f"Line {line} of {path} is not a line of a snip-hf history: {message}")


def test_a_folder_without_a_history_and_an_empty_history_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "snip" / "history.jsonl"
    with pytest.raises(FileNotFoundError) as missing:
        load_run(tmp_path)
    assert str(missing.value) == f"{path} does not exist; expected the output folder of a run with SnipCallback."
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ValueError) as cut:
        load_run(tmp_path)
    assert str(cut.value).startswith(f"Line 1 of {path} is not a line of a snip-hf history: it is not valid JSON")
    path.write_text("")
    with pytest.raises(ValueError) as empty:
        load_run(tmp_path)
    assert str(empty.value) == f"{path} is empty; expected a line with the start of the run."


def test_files_that_cannot_be_used_are_named_in_notes(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2))
    (tmp_path / "snip" / "plan.json").write_text("{")
    (tmp_path / "snip" / "divergence-7.json").write_text('{"step": 7}')
    (tmp_path / "trainer_state.json").write_text("[]")
    notes = load_run(tmp_path).notes
    assert notes[0].startswith(f"plan.json cannot be used: {tmp_path}/snip/plan.json cannot be used as a")
    assert notes[1] == "divergence-7.json cannot be used and is left out: it has no entry 'schema_version'."
    assert notes[3].startswith("trainer_state.json cannot be used and is left out: ")


def test_a_plan_file_that_differs_from_the_history_is_noted(tmp_path: Path) -> None:
    assignments = random_assignments(2, granularity="layer")
    write_run(tmp_path, assignments)
    path = tmp_path / "snip" / "plan.json"
    document = json.loads(path.read_text())
    layer = next(iter(document["assignment"]))
    ours = document["assignment"][layer]["grad_input"]
    document["assignment"][layer]["grad_input"] = "bf16"
    path.write_text(json.dumps(document))
    assert load_run(tmp_path).notes[0] == (
        f"plan.json differs from the history in 1 GEMMs ({layer}:grad_input is bf16, but {ours} in the history); "
        "the tables and figures follow the history."
    )


@pytest.mark.parametrize("granularity", ["layer", "gemm"])
def test_the_share_of_fp4_coloured_pixels_is_the_share_of_layers_and_steps_in_fp4(
    tmp_path: Path, granularity: str
) -> None:
    assignments = random_assignments(5, blocks=6, granularity=granularity)
    write_run(tmp_path, assignments)
    write_losses(tmp_path / "trainer_state.json", 600)
    path = write_figures(load_run(tmp_path))[0]
    image = np.round(imread(path)[..., :3] * 255).astype(int)

    def pixels(name: str) -> int:
        rgb = [int(FORMATS[name].colour[i : i + 2], 16) for i in (1, 3, 5)]
        return int((image == rgb).all(axis=-1).sum())

    steps = np.diff([0, 110, 210, 310, 410, 600])
    cells = np.array([[f == "fp4" for row in plan.values() for f in row.values()] for plan in assignments])
    assert pixels("fp4") / (pixels("fp4") + pixels("fp8")) == pytest.approx(
        np.average(cells, axis=0, weights=steps).mean(), abs=0.01
    )
    assert len(plan_figure(load_run(tmp_path)).axes) == (1 if granularity == "layer" else 3)


def meshes(figure: Figure) -> list[QuadMesh]:
    """The divergences of each panel, not the bars of colours beside them."""
    found = [(axes, [one for one in axes.collections if isinstance(one, QuadMesh)]) for axes in figure.axes]
    return [some[0] for axes, some in found if some and axes.get_xlabel() == "optimizer step"]


def bars(figure: Figure) -> list[str]:
    return [axes.get_xlabel() for axes in figure.axes if "divergence, " in axes.get_xlabel()]


def test_the_divergence_figure_shows_the_recorded_values_on_a_log_scale(tmp_path: Path) -> None:
    assignments = random_assignments(2)
    write_run(tmp_path, assignments)
    layers = list(assignments[0])
    rng = random.Random(0)
    values = {step: {(layer, "layer"): (rng.random(), rng.random()) for layer in layers} for step in (1000, 200)}
    values[200][layers[1], "layer"] = (0.0, 0.5)  # A zero has no logarithm: it stays white.
    for step, table in values.items():
        write_divergence(tmp_path, step, table)
    write_losses(tmp_path / "trainer_state.json", 1200)
    images = meshes(divergence_figure(load_run(tmp_path)))
    assert len(images) == 2
    for which, image in enumerate(images):
        expected = np.array([[values[step][layer, "layer"][which] for step in (200, 1000)] for layer in layers])
        shown = np.ma.filled(image.get_array(), 0.0)
        assert np.array_equal(np.nan_to_num(shown), expected)
        # A probe holds until the next one, the last one until the run's last step.
        assert image.get_coordinates()[0, :, 0].tolist() == [200, 1000, 1200]
        assert image.norm.vmin == expected[expected > 0].min()
        middle = np.sqrt(image.norm.vmin * image.norm.vmax)
        assert image.norm(middle) == pytest.approx(0.5)


def test_divergences_of_single_gemms_get_a_panel_each(tmp_path: Path) -> None:
    assignments = random_assignments(2)
    write_run(tmp_path, assignments)
    table = {(layer, g): (0.1 if g == "forward" else 0.0, 0.3) for layer in assignments[0] for g in GEMMS}
    write_divergence(tmp_path, 100, table)
    labels = bars(divergence_figure(load_run(tmp_path)))
    assert labels == [
        "loss divergence, forward",
        "weight divergence, forward",
        "weight divergence, grad_input",
        "weight divergence, grad_weight",
    ]
    assert tmp_path / "snip" / "divergence.png" in write_figures(load_run(tmp_path))


def test_whole_layers_are_shown_where_both_they_and_their_gemms_were_measured(tmp_path: Path) -> None:
    assignments = random_assignments(2)
    write_run(tmp_path, assignments)
    write_divergence(tmp_path, 100, {(layer, g): (0.1, 0.3) for layer in assignments[0] for g in (*GEMMS, "layer")})
    labels = bars(divergence_figure(load_run(tmp_path)))
    assert labels == ["loss divergence, all three GEMMs", "weight divergence, all three GEMMs"]


def test_many_layers_are_labelled_by_block_and_few_by_name(tmp_path: Path) -> None:
    write_run(tmp_path / "few", random_assignments(2))
    write_run(tmp_path / "many", random_assignments(2, blocks=600))
    few, many = (plan_figure(load_run(tmp_path / name)).axes[0].get_yticklabels() for name in ("few", "many"))
    assert [label.get_text() for label in few][:3] == ["0 self_attn.q_proj", "0 mlp.down_proj", "1 self_attn.q_proj"]
    assert [label.get_text() for label in many][:2] == ["model.layers.0", "model.layers.15"]
    assert len(many) == 40


def test_every_layer_of_many_blocks_has_a_name_that_can_be_read(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2, blocks=48))  # From 93 rows on each is as high as its name needs.
    figure = plan_figure(load_run(tmp_path))
    figure.draw_without_rendering()
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels[-2:]] == ["47 self_attn.q_proj", "47 mlp.down_proj"]
    assert len(labels) == 96
    boxes = [label.get_window_extent() for label in labels]
    # Pixels of the letters, none of which cover those of the next name.
    assert all(box.height >= 9 for box in boxes)
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))


def test_layers_of_one_last_name_and_block_number_are_told_apart(tmp_path: Path) -> None:
    layers = [f"{stack}.block.{n}.{kind}.q" for stack in ("encoder", "decoder") for n in (0, 1) for kind in ("a", "b")]
    low, high = ({layer: dict.fromkeys(GEMMS, name) for layer in layers} for name in ("fp4", "fp8"))
    write_run(tmp_path, [high, low])
    write_divergence(tmp_path, 100, {(layer, gemm): (0.3, 0.0) for layer in layers for gemm in GEMMS})
    labels = {f"{stack} {n} {kind}.q" for stack in ("encoder", "decoder") for n in (0, 1) for kind in ("a", "b")}
    shown = [" ".join(line[1:4]) for line in rows(printed(tmp_path).partition("Why (")[2]) if len(line) == 8]
    assert sorted(shown) == sorted(f"{label}:{gemm}" for label in labels for gemm in GEMMS)
    names = plan_figure(load_run(tmp_path)).axes[0].get_yticklabels()
    assert {name.get_text() for name in names} == labels


def test_run_report_prints_and_writes_every_figure_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assignments = random_assignments(3)
    write_run(tmp_path, assignments, kept=(1,))
    write_losses(tmp_path / "checkpoint-300" / "trainer_state.json", 300)
    write_divergence(tmp_path, 100, {(layer, "layer"): (0.1, 0.2) for layer in assignments[0]})
    files = run_report(tmp_path, tmp_path / "out")
    assert files == [tmp_path / "out" / name for name in ("plan.png", "divergence.png", "losses.png")]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert "Refreshes" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------- measured cost


def write_measured_run(folder: Path, keep_times: bool = True) -> PrecisionPlan:
    """A run by measured time: q_proj has 1/3 of the FLOPs and 2/3 of the time, and is in FP4 in two of three blocks."""
    layers = [f"model.layers.{block}.{kind}" for block in range(3) for kind in KINDS]
    in_fp4 = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    new = {layer: dict.fromkeys(GEMMS, "fp4" if layer in in_fp4 else "fp8") for layer in layers}
    write_run(folder, [{layer: dict.fromkeys(GEMMS, "fp8") for layer in layers}, new])
    path = folder / "snip" / "history.jsonl"
    start, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(start)
    record["config"] |= {"budget": "measured", "granularity": "layer"}
    record["flops"] = {layer: dict.fromkeys(GEMMS, 1.0 + row % 2) for row, layer in enumerate(layers)}
    path.write_text("".join([json.dumps(record) + "\n", *rest]))
    seconds = {}
    for row, layer in enumerate(layers):
        fp8 = 1e-3 if row % 2 else 2e-3
        times = {"bf16": 2 * fp8, "fp8": fp8, "fp4": fp8}
        seconds[layer] = dict.fromkeys(GEMMS, times)
    cost = MeasuredCost(machine=Machine("a GPU", "2.11.0", "hopper", "bfloat16"), tokens=8192, seconds=seconds)
    provenance = PlanProvenance(step=100, policy="snip")
    plan = PrecisionPlan(new, record["flops"], (tuple(layers),), provenance, cost if keep_times else None)
    plan.save(folder / "snip" / "plan.json")
    return plan


def test_a_run_by_measured_time_shows_both_shares_of_every_gemm_and_of_the_plan(tmp_path: Path) -> None:
    write_measured_run(tmp_path)
    text = printed(tmp_path)
    for gemm in GEMMS:
        assert ["q_proj", gemm, "0.1111", "0.2222", "2.00", "12", "6", "6"] in rows(text)
        assert ["down_proj", gemm, "0.2222", "0.1111", "0.50", "6", "3", "3"] in rows(text)
    sentences = " ".join(text.split())
    assert (
        "target at least 50.0% of the linears' measured time in FP4, attained 22.2% of the linear FLOPs in FP4, "
        "linears at 2.000 times BF16's speed (measured), 44.4% of their time." in sentences
    )
    assert (
        "All GEMMs of the linears take 54 ms in BF16, 27 ms in FP8, 27 ms in FP4 per micro-batch of 8192 tokens "
        "(hopper backend, a GPU); by measured time q_proj forward counts 2.00 times what it counts by FLOPs (22.2% "
        "against 11.1%), down_proj forward 0.50 times (11.1% against 22.2%). The plan runs 0.2222 of the linear FLOPs "
        "and 0.4444 of their time in FP4." in sentences
    )


def test_prices_are_per_share_of_the_measured_time(tmp_path: Path) -> None:
    plan = write_measured_run(tmp_path)
    write_divergence(tmp_path, 100, {(layer, "layer"): (0.3, 0.0) for layer in plan.assignment})
    text = printed(tmp_path)
    assert "per share of the stage's measured time)" in " ".join(text.split())
    prices = {tuple(line[1:3]): float(line[5]) for line in rows(text) if len(line) == 7 and line[0] == "0"}
    # Each layer costs a sixth of the whole less FP8's hundredth of that; q_proj has 2/9 of the time, down_proj 1/9.
    assert prices["0", "q_proj"] == pytest.approx(0.99 / 6 / (2 / 9), abs=1e-3)
    assert prices["2", "down_proj"] == pytest.approx(0.99 / 6 / (1 / 9), abs=1e-3)


def test_a_run_whose_times_are_lost_or_not_there_yet_says_so_and_gives_no_prices(tmp_path: Path) -> None:
    plan = write_measured_run(tmp_path, keep_times=False)
    write_divergence(tmp_path, 100, {(layer, "layer"): (0.3, 0.0) for layer in plan.assignment})
    text = printed(tmp_path)
    assert "plan.json has no times of GEMMs" in text
    assert "price" not in text
    (tmp_path / "snip" / "plan.json").unlink()
    text = printed(tmp_path)
    assert "plan.json has no times of GEMMs" in text
    assert "Note: plan.json cannot be used" in text


def test_a_run_by_flops_says_nothing_of_time(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2))
    assert "time" not in printed(tmp_path)


def test_stages_show_their_shares_of_time_where_there_are_times(tmp_path: Path) -> None:
    plan = write_measured_run(tmp_path)
    stages = tuple(tuple(x for x in plan.assignment if f".{block}." in x) for block in range(3))
    text = io.StringIO()
    Console(file=text, width=100).print(stage_table(dataclasses.replace(plan, stages=stages)))
    # FP4 takes as long as FP8 here, 9 ms for each block.
    assert rows(text.getvalue())[-5:-1] == [
        ["0", "2", "0.3333", "0.6667", "1.0000", "9"],
        ["1", "2", "0.3333", "0.6667", "1.0000", "9"],
        ["2", "2", "0.0000", "0.0000", "1.0000", "9"],
        ["all", "6", "0.2222", "0.4444", "1.0000", "27"],
    ]


# ------------------------------------------------------------------------------------------------------------ stages


def write_staged_run(folder: Path, **config: Any) -> None:
    """Stage 0 holds blocks 0 and 2, stage 1 block 1; q_proj, a third of each block's FLOPs, is in FP4: 30% is met.

    The layers of block 1 have the larger divergences, and a block's down_proj has more than its q_proj.
    """
    layers = [f"model.layers.{block}.{kind}" for block in range(3) for kind in KINDS]
    stages = [[x for x in layers if ".1." not in x], [x for x in layers if ".1." in x]]
    in_fp4 = [f"model.layers.{block}.self_attn.q_proj" for block in range(3)]
    new = {layer: dict.fromkeys(GEMMS, "fp4" if layer in in_fp4 else "fp8") for layer in layers}
    write_run(folder, [{layer: dict.fromkeys(GEMMS, "fp8") for layer in layers}, new])
    path = folder / "snip" / "history.jsonl"
    start, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(start) | {"stages": stages}
    record["config"] |= {"granularity": "layer", "target_fp4_fraction": 0.3, **config}
    path.write_text("".join([json.dumps(record) + "\n", *rest]))
    provenance = PlanProvenance(step=100, policy="snip", granularity="layer", config=record["config"])
    PrecisionPlan(new, record["flops"], stages, provenance).save(folder / "snip" / "plan.json")
    losses = dict(zip(layers, (0.1, 0.2, 0.4, 0.5, 0.1, 0.2), strict=True))
    write_divergence(folder, 100, {(layer, "layer"): (loss, 0.0) for layer, loss in losses.items()})


def test_a_run_in_stages_has_their_shares_and_times(tmp_path: Path) -> None:
    write_staged_run(tmp_path)
    text = printed(tmp_path)
    lines = rows(text)
    assert ["0", "4", "0.3333", "0.8333", "0.5556"] in lines
    assert ["1", "2", "0.3333", "0.8333", "0.2778"] in lines
    assert "stage 0 is the slowest, a step takes 4.722 (1: FP8), and 0.2941 of it is bubble." in joined(text)


def test_a_run_of_one_stage_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2))
    text = printed(tmp_path)
    assert "of the plan's linear FLOPs are in FP4" in text
    assert "Pipeline of" not in text


def test_the_coverage_is_told_with_the_share_of_the_whole_model_and_the_reasons(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2))
    assert "The plan decides on" not in printed(tmp_path), "a run of an earlier version"
    with open(tmp_path / "snip" / "history.jsonl", "a") as file:
        file.write(json.dumps(counted_event(600).to_record()) + "\n")
    run = load_run(tmp_path)
    assert [event.step for event in run.counted] == [600] and run.notes == load_run(tmp_path).notes
    assert (
        "The plan decides on 40.0% of the model's matmul FLOPs (output head and attention products aside); MoE "
        "experts: 50.0%, not covered (no registered layer kind handles [Bank]); router: 10.0%, not covered (router). "
        f"FP4 share of all of them: {0.4 * run.plans[-1][1].fp4_fraction:.4f}."
    ) in joined(printed(tmp_path))


def test_plans_count_by_the_tokens_that_were_counted_for_them(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(3))
    path = tmp_path / "snip" / "history.jsonl"
    start, first, second = path.read_text().splitlines()
    layers = json.loads(start)["plan"]
    early, late = ({layer: 1.0 + number * (index % 2) for index, layer in enumerate(layers)} for number in (1, 2))
    changed = next(iter(layers))
    old = layers[changed]["forward"]
    new = {changed + ":forward": (old, "bf16")}
    lines = [
        json.dumps(counted_event(1, tokens=early, changes=new).to_record()),
        first,
        json.dumps(counted_event(200, tokens=late).to_record()),
        second,
    ]
    path.write_text("\n".join([start, *lines]) + "\n")
    plans = [plan for _, plan in load_run(tmp_path).plans]
    assert [dict(plan.tokens) for plan in plans] == [early, early, late]
    assert plans[0].assignment[changed]["forward"] == "bf16"


def test_gemms_that_do_not_run_have_no_price_and_a_dash_in_the_plan(tmp_path: Path) -> None:
    fp8, fp4 = (dict.fromkeys(GEMMS, name) for name in ("fp8", "fp4"))
    layers = [f"model.layers.{block}.{kind}" for block in range(3) for kind in KINDS]
    write_run(tmp_path, [dict.fromkeys(layers, fp8), dict.fromkeys(layers, fp4)])
    write_divergence(tmp_path, 100, {(layer, gemm): (0.1, 0.2) for layer in layers[1:] for gemm in GEMMS})
    path = tmp_path / "snip" / "history.jsonl"
    start, *rest = path.read_text().splitlines()
    tokens = {layers[0]: 0.0, layers[1]: {"forward": 1.0, "grad_input": 0.0}, **dict.fromkeys(layers[2:], 1.0)}
    path.write_text("\n".join([start, json.dumps(counted_event(1, tokens=tokens).to_record()), *rest]) + "\n")
    text = printed(tmp_path)
    assert ["0", "-", "4/-/4"] in rows(text) and ["1", "4", "4"] in rows(text)
    assert "-: does not run" in joined(text)
    priced = {line[2] for line in rows(text) if len(line) == 7 and line[1] == "0" and line[-1] == "fp4"}
    assert priced == {"down_proj:forward", "down_proj:grad_weight"}
    assert "4 rows are left out: layers that saw no token, and GEMMs that do not run." in joined(text)


def test_reasons_of_a_large_model_are_evenly_spaced_by_price(tmp_path: Path) -> None:
    fp8, fp4 = (dict.fromkeys(GEMMS, name) for name in ("fp8", "fp4"))
    layers = [f"model.layers.{block}.mlp.up_proj" for block in range(30)]
    write_run(tmp_path, [dict.fromkeys(layers, fp8), dict.fromkeys(layers, fp4)])
    path = tmp_path / "snip" / "history.jsonl"
    path.write_text(path.read_text().replace(json.dumps([layers]), json.dumps([layers[:20], layers[20:]])))
    costs = {(layer, gemm): float(row + 1) for row, layer in enumerate(layers) for gemm in GEMMS}
    write_divergence(tmp_path, 100, {key: (cost, cost) for key, cost in costs.items()})
    text = printed(tmp_path)
    assert "64 of 90 rows, evenly spaced in the order of stages and prices." in joined(text)
    shown = [(line[0], int(line[1])) for line in rows(text) if len(line) == 7 and line[-1] == "fp4"]
    of_first, of_second = ([block for stage, block in shown if stage == name] for name in "01")
    # FLOPs differ between even and odd layers, and so do prices per FLOP.
    assert (len(of_first), min(of_first), max(of_first)) == (43, 0, 19)
    assert (len(of_second), min(of_second), max(of_second)) == (21, 20, 29)


def test_reasons_are_those_of_the_last_refresh_that_was_applied(tmp_path: Path) -> None:
    assignments = random_assignments(3)
    write_run(tmp_path, assignments, kept=(2,))
    for step in (100, 200):
        write_divergence(tmp_path, step, {(layer, gemm): (0.1, 0.3) for layer in assignments[0] for gemm in GEMMS})
    assert "Why (probe of step 100;" in printed(tmp_path)


def test_other_shares_cost_what_their_best_plans_would(tmp_path: Path) -> None:
    layers = random_assignments(2)
    write_run(tmp_path, layers)
    costs = {(layer, gemm): float(gemm in ("forward", LAYER)) for layer in layers[0] for gemm in (*GEMMS, LAYER)}
    write_divergence(tmp_path, 100, {key: (cost, cost) for key, cost in costs.items()})
    # Backward GEMMs are two thirds of the FLOPs, and cost nothing here.
    (sentence,) = other_shares(load_run(tmp_path))
    assert ": 0.0 at 25.0%, 0.0 at 50.0%, 0.0 at 66.6%, " in sentence
    at_75, at_90 = map(float, re.findall(r"([0-9.]+) at (?:75|90)", sentence))
    assert 20 < at_75 < at_90 < 100 and sentence in joined(printed(tmp_path))
    write_divergence(tmp_path, 100, dict.fromkeys(costs, (0.0, 0.0)))
    assert not other_shares(load_run(tmp_path))


def test_the_last_decision_is_explained_by_the_target_of_its_step(tmp_path: Path) -> None:
    layers = random_assignments(2)
    write_run(tmp_path, layers)
    write_divergence(tmp_path, 100, {(layer, gemm): (1.0, 1.0) for layer in layers[0] for gemm in (*GEMMS, LAYER)})
    with (tmp_path / "snip" / "history.jsonl").open("a") as file:
        for step, (before, now) in {100: (0.5, 0.83), 101: (0.83, 0.31)}.items():
            event = Retarget(step=step, fields={"target_fp4_fraction": (before, now)})
            file.write(json.dumps(event.to_record()) + "\n")
    (sentence,) = other_shares(load_run(tmp_path))
    assert " at 83.0%" in sentence and " at 31.0%" not in sentence


def test_a_mean_target_is_not_given_after_a_resume_with_another_one(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(5))
    history = tmp_path / "snip" / "history.jsonl"
    start, *later = history.read_text().splitlines()
    changing = {**json.loads(start)["config"], "target_fp4_fraction": [[1, 0.2], [100, 0.4]]}
    history.write_text("\n".join([json.dumps({**json.loads(start), "config": changing}), *later, ""]))
    assert "with a target of" in joined(printed(tmp_path))
    event = Retarget(step=51, fields={"target_fp4_fraction": ([[1, 0.2], [100, 0.4]], [[1, 0.8], [200, 0.9]])})
    with history.open("a") as file:
        file.write(json.dumps(event.to_record()) + "\n")
    assert "with a target of" not in joined(printed(tmp_path))
