"""The command line prints true statements, exits with the right code, and never shows a traceback."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from configs import fp4_config
from registries import restored
from transformers import AutoModelForCausalLM, LlamaConfig

from snip_hf.cli import build_parser, main
from snip_hf.costs.flops import linear_flops
from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.layers.convert import convert_model
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

# fp4 costs i + 1 for the i-th group and counts a quarter each: two quarters are cheapest as a and b, for 3.
PROBLEM = {
    "groups": [
        {
            "name": name,
            "options": [{"name": "fp8", "cost": 0.0, "weight": 0.0}, {"name": "fp4", "cost": cost, "weight": 0.25}],
        }
        for name, cost in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0))
    ],
    "constraints": [{"name": "stage 0", "groups": None, "minimum": 0.5}],
    "ties": [],
    "solver": "greedy",
    "time_limit": 10.0,
    "relative_gap": 1e-4,
}
CHOICES = {"a": "fp4", "b": "fp4", "c": "fp8", "d": "fp8"}


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**{**sizes, "num_key_value_heads": 1, "vocab_size": 50, **changes})


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """A plan for the model whose config is in `model/`, with down_proj skipped: 12 layers in two stages."""
    llama().save_pretrained(tmp_path / "model")
    config = fp4_config(skip_modules=("*.down_proj",))
    model = AutoModelForCausalLM.from_config(llama())
    layers = convert_model(model, config)
    plan = PrecisionPlan(
        {layer: dict.fromkeys(GEMMS, "fp4" if row < 6 else "fp8") for row, layer in enumerate(layers)},
        linear_flops(model),
        (tuple(layers[:6]), tuple(layers[6:])),
        PlanProvenance(step=40, policy="snip", solver="cbc", gap=0.001, config=config.to_dict(), model_name="[tiny]"),
    )
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def write(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def test_solve_prints_the_solution_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", write(tmp_path / "problem.json", PROBLEM)]) == 0
    solution = json.loads(capsys.readouterr().out)
    assert solution["choices"] == CHOICES
    assert solution["objective"] == 3.0
    assert solution["constraints"] == {"stage 0": 0.5}


def test_solve_writes_the_solution_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "solution.json"
    assert main(["solve", write(tmp_path / "problem.json", PROBLEM), "-o", str(output)]) == 0
    assert json.loads(output.read_text())["choices"] == CHOICES
    assert capsys.readouterr().out == f"optimal, objective 3, by greedy: {output}\n"


def test_solve_refuses_its_problem_as_output_and_a_folder_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = write(tmp_path / "problem.json", PROBLEM)
    assert main(["solve", problem, "-o", problem]) == 2
    error = f"snip-hf: --output {problem} is the problem file itself; expected another file.\n"
    assert capsys.readouterr().err == error
    assert json.loads(Path(problem).read_text()) == PROBLEM
    assert main(["solve", problem, "-o", str(tmp_path / "none" / "solution.json")]) == 2
    error = f"snip-hf: {tmp_path / 'none'}, the folder of --output, does not exist; create it first.\n"
    assert capsys.readouterr().err == error


def test_solve_exits_with_1_and_the_attainable_value_when_no_map_is_good_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {**PROBLEM, "constraints": [{"name": "stage 0", "groups": None, "minimum": 1.5}]}
    assert main(["solve", write(tmp_path / "problem.json", problem), "-o", str(tmp_path / "solution.json")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'stage 0': minimum 1.5, attainable 1" in captured.err
    assert not (tmp_path / "solution.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "PATH is not a valid problem: it is not valid JSON, perhaps truncated (line 1: "),
        ("[]", "The integer program is malformed: the document is a list of 0, expected "),
        (json.dumps({**PROBLEM, "solver": "gurobi"}), "The integer program is malformed: solver is 'gurobi'"),
    ],
)
def test_solve_exits_with_2_and_one_line_on_a_bad_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "problem.json"
    path.write_text(text)
    assert main(["solve", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("snip-hf: " + message.replace("PATH", str(path)))
    assert error.count("\n") == 1


def test_inspect_shows_blocks_stages_and_provenance(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(plan_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["block", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"] in lines
    assert ["0", *["4"] * 6] in lines
    assert ["1", *["8"] * 6] in lines
    # The wrapped text of the config may have as many words in a line.
    shares = [line for line in lines if len(line) == 5 and line[0] in ("0", "1", "all")]
    assert shares == [
        ["0", "6", "1.0000", "0.5000", "0.25"],
        ["1", "6", "0.0000", "1.0000", "0.5"],
        ["all", "12", "0.5000", "0.7500", "0.75"],
    ]
    for shown in ("step: 40", "policy: snip", "solver: cbc", "gap: 0.001", "model_name: [tiny]"):
        assert shown.split() in lines
    assert not any(line[:1] == ["objective:"] for line in lines)
    assert ["config,", "other", "than", "the", "defaults:"] in [line[:5] for line in lines]


def test_inspect_shows_what_a_plan_attains_by_measured_time(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(plan_path)]) == 0
    assert "ms" not in capsys.readouterr().out.split()
    plan = PrecisionPlan.load(plan_path)
    # All layers alike, but for those of the second stage, which take three times as long.
    times = {layer: 3e-3 if layer in plan.stages[1] else 1e-3 for layer in plan.assignment}
    seconds = {
        layer: dict.fromkeys(GEMMS, dict.fromkeys(("bf16", "fp8", "fp4"), time)) for layer, time in times.items()
    }
    cost = MeasuredCost(machine=Machine("a GPU", "2.11.0", "hopper", "bfloat16"), tokens=512, seconds=seconds)
    dataclasses.replace(plan, measured=cost).save(plan_path)
    assert main(["inspect", str(plan_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # FP4 takes as long as FP8: 18 ms for stage 0, 54 ms for stage 1.
    assert ["all", "12", "0.5000", "0.2500", "1.0000", "72"] in lines
    assert any(line[:2] == ["q_proj", "forward"] and line[5:] == ["4", "4", "4"] for line in lines)
    text = " ".join(word for line in lines for word in line)
    assert (
        "The plan runs 0.5000 of the linear FLOPs and 0.2500 of their time in FP4 (per stage: 1.0000, 0.0000)." in text
    )


def test_inspect_shows_the_pipeline_of_as_many_micro_batches_as_are_named(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(plan_path)]) == 0
    assert "Pipeline of 8 micro-batches:" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(plan_path), "--micro-batches", "3"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Pipeline of 3 micro-batches: stage 1 is the slowest, a step takes 1.75 (1: FP8)" in out


@pytest.mark.parametrize("command", ["inspect", "report"])
def test_no_micro_batches_are_refused(plan_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path = write_run(plan_path) if command == "report" else plan_path
    for count in ("0", "-1", "two"):
        with pytest.raises(SystemExit) as left:
            main([command, str(path), "--micro-batches", count])
        assert left.value.code == 2
        error = f"argument --micro-batches: {count!r} is not a whole number of at least 1\n"
        assert capsys.readouterr().err.endswith(error)


def test_inspect_finds_that_a_plan_fits_its_model(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = plan_path.parent / "model"
    plan_path.write_text(plan_path.read_text().replace('"skip_modules":', '"of_another_version": 1, "skip_modules":'))
    assert main(["inspect", str(plan_path), "--model", str(model)]) == 0
    assert f"The plan fits {model}: all 12 layers agree in name and size.\n" in capsys.readouterr().out


def test_inspect_lists_what_does_not_fit_and_exits_with_1(
    plan_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    llama(num_hidden_layers=3, intermediate_size=96).save_pretrained(other)
    assert main(["inspect", str(plan_path), "--model", str(other)]) == 1
    out = capsys.readouterr().out
    kinds = [f"self_attn.{x}_proj" for x in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj"]
    new = "".join(f"  model.layers.2.{kind}\n" for kind in kinds)
    assert f"6 layers are in {other} but not in the plan:\n{new}" in out
    resized = "".join(f"  model.layers.{i}.mlp.{kind}_proj\n" for i in (0, 1) for kind in ("gate", "up"))
    assert f"4 layers are of another size in {other} than in the plan:\n{resized}" in out
    llama(intermediate_size=96).save_pretrained(other)
    assert main(["inspect", str(plan_path), "--model", str(other)]) == 1
    capsys.readouterr()
    llama(num_hidden_layers=1).save_pretrained(other)
    assert main(["inspect", str(plan_path), "--model", str(other)]) == 1
    gone = "".join(f"  model.layers.1.{kind}\n" for kind in kinds)
    assert f"6 layers are in the plan but not in {other}:\n{gone}" in capsys.readouterr().out


def test_inspect_cuts_a_long_list_of_mismatches(
    plan_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    llama(num_hidden_layers=8).save_pretrained(tmp_path / "deep")
    assert main(["inspect", str(plan_path), "--model", str(tmp_path / "deep")]) == 1
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"36 layers are in {tmp_path / 'deep'} but not in the plan:")
    assert [line.startswith("  model.layers.") for line in lines[start + 1 : start + 21]] == [True] * 20
    assert lines[start + 21] == "  ..."


def test_inspect_of_a_broken_plan_or_model_is_one_line_and_2(
    plan_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no such architecture"}')
    assert main(["inspect", str(plan_path), "--model", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"snip-hf: Cannot build the model {str(tmp_path / 'model')!r} from its config: ")
    plan_path.write_text(plan_path.read_text()[:200])
    assert main(["inspect", str(plan_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"snip-hf: {plan_path} cannot be used as a precision plan: it is not valid JSON")
    assert error.count("\n") == 1
    assert main(["inspect", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err == (
        f"snip-hf: {tmp_path / 'none.json'} does not exist and cannot be the name of a repository; expected the folder "
        "of a run, a plan file, or a name such as 'user/model'.\n"
    )


def write_run(plan_path: Path) -> Path:
    """A run beside the plan that has been under it from the start."""
    document = PrecisionPlan.load(plan_path).to_dict()
    start = {
        "event": "start",
        "schema_version": 1,
        "step": 0,
        "config": {**document["provenance"]["config"], "policy": "layer-position"},
        "plan": document["assignment"],
        "flops": document["flops"],
        "stages": document["stages"],
        "model_name": "tiny",
    }
    folder = plan_path.parent / "run"
    (folder / "snip").mkdir(parents=True)
    write(folder / "snip" / "history.jsonl", start)
    return folder


def test_inspect_says_by_which_rates_the_linears_run(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(plan_path.read_text())
    document["provenance"]["config"]["rates"] = "ideal"
    write(plan_path, document)
    assert main(["inspect", str(plan_path)]) == 0
    speedup = PrecisionPlan.load(plan_path).linear_speedup()
    out = " ".join(capsys.readouterr().out.split())
    assert f"The linears run at {speedup:.4f} times BF16's speed (ideal rates), per stage: 4.0000, 2.0000." in out


OWN_FORMAT = """
from snip_hf.numerics.formats import NumberFormat, integers, register_format

register_format(NumberFormat(name="own-int4", grid=integers(7), bits=4, speed=2.0, label="INT4", colour="#009e73"))
"""


def test_a_run_in_a_format_of_ones_own_is_read_once_its_module_is_imported(
    plan_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(plan_path)
    (tmp_path / "own_formats_of_test.py").write_text(OWN_FORMAT)
    for path in (plan_path, run / "snip" / "history.jsonl"):
        path.write_text(path.read_text().replace('"fp4"', '"own-int4"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    commands = (["inspect", str(plan_path)], ["report", str(run)], ["export", str(plan_path), "--to", "torchao"])
    first = "A format of your own is registered first: by `snip_hf.register_format`, or by `--import MODULE` on the"
    with restored(FORMATS):
        for command in commands:
            assert main(command) == 2
            error = capsys.readouterr().err
            assert "Unknown format 'own-int4' for assignment" in error and first in error
            assert "is not a" not in error
        assert [main([*command, "--import", "own_formats_of_test"]) for command in commands] == [0, 0, 1]
        assert "INT4" in capsys.readouterr().out
        assert main([*commands[0], "--import", "none_of_test"]) == 2
    assert capsys.readouterr().err == "snip-hf: No module named 'none_of_test'\n"


def test_report_prints_tables_and_the_figures_it_wrote(
    plan_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_run(plan_path)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "figures")]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"{tmp_path / 'figures' / 'plan.png'}\n")
    assert "The policy does not probe, so there are no refreshes." in out
    assert (tmp_path / "figures" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_a_folder_that_holds_no_run_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"snip-hf: {tmp_path}/snip/history.jsonl does not exist; "
        "expected the output folder of a run with SnipCallback.\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert main(["report", str(tmp_path / "none")]) == 2
    expected = f"snip-hf: {tmp_path}/none does not exist; expected the output folder of a run with SnipCallback.\n"
    assert capsys.readouterr().err == expected


def test_a_report_refuses_its_other_folders_before_it_prints_anything(
    plan_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, none = write_run(plan_path), tmp_path / "none"
    assert main(["report", str(run), "--html", "--bf16", str(none)]) == 2
    error = (
        f"snip-hf: --bf16 {none} has no losses: There is no trainer_state.json with losses (saved with a checkpoint or "
        "by trainer.save_state()).\n"
    )
    assert capsys.readouterr() == ("", error)


def test_the_plan_of_a_run_is_read_from_its_folder_and_other_folders_are_refused(
    plan_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_run(plan_path)
    run = tmp_path / "run"
    shutil.copy(plan_path, run / "snip" / "plan.json")
    for folder in (run, run / "snip"):
        assert main(["inspect", str(folder)]) == 0
        assert capsys.readouterr().out.startswith("Plan (")
    assert main(["inspect", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err == (
        f"snip-hf: {tmp_path / 'model'} has neither snip/plan.json nor plan.json; expected the output folder of a run "
        "with SnipCallback, or its folder snip.\n"
    )


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["--help"], 0), ([], 2), (["solve"], 2)])
def test_usage_exits_with_argparses_codes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code


def test_the_help_has_examples_of_commands_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    shown = re.findall(r"snip-hf (\w+) .*  \w", text.partition("examples:\n")[2])
    assert len(shown) >= 5
    assert all(re.search(rf"^    {command}\b", text, re.MULTILINE) for command in shown)


@pytest.mark.parametrize("command", ["report", "inspect", "compare", "export", "recipe", "solve", "doctor"])
def test_the_help_of_a_command_fits_a_terminal_and_says_what_each_argument_is(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) < 80
    (commands,) = [action for action in build_parser()._actions if isinstance(action.choices, dict)]
    described = commands.choices[command]
    arguments = [action for action in described._actions if not isinstance(action.choices, dict)]
    assert described.description and all(action.help for action in arguments)


QUICK = """
import contextlib, sys
from snip_hf.cli import main

for arguments in (["--help"], ["--version"], ["report"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
heavy = ("snip_hf", "torch", "transformers", "accelerate")
print(sorted(name for name in sys.modules if name.partition(".")[0] in heavy))
"""


def test_help_and_wrong_usage_load_no_library() -> None:
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True, timeout=120, check=True)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    assert loaded == ["snip_hf", "snip_hf.cli", "snip_hf.extras", "snip_hf.import_warnings", "snip_hf.text"]


def test_the_package_runs_as_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "snip_hf", "solve", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"snip-hf: [Errno 2] No such file or directory: {command[-1]!r}"
    assert "Traceback" not in done.stderr
