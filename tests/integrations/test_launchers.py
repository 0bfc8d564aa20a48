"""Do the recipes run under `accelerate launch` as they do alone, and compiled? Two processes on the CPU, over gloo."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import pretrain
import psutil
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, TorchDynamoPlugin
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from events import records_of
from parts.recipe import load_recipe
from rank_processes import assert_succeeded, start_ranks
from safetensors.torch import load_file
from tiny_runs import history
from transformers import AutoModelForCausalLM

from snip_hf import PrecisionPlan

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CONFIGS = RECIPES / "accelerate"
COMPILED = ("compile", "ddp", "fsdp2")
WORKER = Path(__file__).resolve().parents[1] / "support" / "compiled_worker.py"
# Compiles faster than Inductor: it runs the graphs as they are.
TRACED, PLAIN = ("--dynamo_backend", "aot_eager"), ("--dynamo_backend", "no")

# Seconds; alone on two cores a launch takes 7 to 10, most of them for imports.
LIMIT = 240
# Refreshes at steps 5 and 11, applied after 8 and 14; both checkpoints are in the middle of one. Nothing is quantized
# before the first plan, so that one process and two differ in the order of their sums alone.
RECIPE: dict[str, Any] = {
    "model": {
        "config": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 2, "num_key_value_heads": 1}
    },
    "tokenizer": {"vocab_size": 300},
    "data": {"source": "files", "validation_fraction": 0.25, "sequence_length": 32},
    "training": {
        "max_steps": 16,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "steps",
        "save_steps": 6,
        "disable_tqdm": True,
    },
    "snip": {"first_refresh": 5, "refresh_every": 6, "apply_delay": 3, "start_format": "bf16"},
    "eval": None,
    "cpu_threads": 1,
}
# 2 processes x 4 x 32 tokens: each has one whole tile of 128 tokens.
TWO, ONE = "training.per_device_train_batch_size=4", "training.per_device_train_batch_size=8"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of prepared text that the tests of this module share."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a tiny model and sixty documents of random words."""
    folder = tmp_path_factory.mktemp("recipe")
    generator = random.Random(0)
    for i in range(60):
        words = generator.choices(["ban", "cort", "duss", "élanx", "fi_", "barn", "conk", "dux"], k=200)
        (folder / f"doc{i:02}.txt").write_text(f"{i} {' '.join(words)}", encoding="utf-8")
    source = RECIPE["data"] | {"files": [f"{folder}/*.txt"]}
    values = RECIPE | {"base": str(RECIPES / "quickstart.yaml"), "data": source}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "tiny.yaml"


@pytest.fixture(scope="module")
def two(recipe: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder of a run of two processes, and what it printed."""
    folder = tmp_path_factory.mktemp("two") / "run"
    settings = [str(recipe), "--override", TWO, f"training.output_dir={folder}"]
    return folder, launch(cache, ["ddp", *PLAIN], "pretrain.py", *settings)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the loop, of half of its steps, with formats that scale by tiles and groups.

    By default FP8 has one scale per tensor, that is per process and micro-batch: another number of processes would
    round small numbers differently.
    """
    text = (RECIPES / "accelerate_loop.py").read_text(encoding="utf-8")
    assert text.count("SnipConfig(") == text.count("STEPS, SAVE_EVERY = 40, 10") == 1
    text = text.replace("STEPS, SAVE_EVERY = 40, 10", "STEPS, SAVE_EVERY = 20, 10")
    copy = tmp_path_factory.mktemp("recipe") / "accelerate_loop.py"
    copy.write_text(text.replace("SnipConfig(", 'SnipConfig(formats=("fp4", "fp8"), '), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def loop_of_two(loop: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The output folder of the loop on two machines with a process each, and what each machine printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The options of recipes/slurm/train.sbatch.
    options = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1",
               "--main_process_port", str(port), "--rdzv_backend", "static"]  # fmt: skip
    folder = tmp_path_factory.mktemp("loop") / "two"
    commands = [
        ["--config_file", str(CONFIGS / "ddp.yaml"), *PLAIN, *options, "--machine_rank", str(rank),
         str(loop), str(folder), "--batch", "2"]
        for rank in (0, 1)
    ]  # fmt: skip
    return folder, launch_all(cache, commands)


def launch(cache: Path, config: Sequence[str], script: str | Path, *arguments: str, on_gpus: bool = False) -> str:
    """Runs a script under `accelerate launch` and returns what it wrote to stdout and stderr.

    Args:
        cache: of prepared text.
        config: name of a configuration, and options that replace parts of it.
        script: name of a recipe's, or a path.
        arguments: of the script.
        on_gpus: whether it sees the GPUs.
    """
    name, *options = config
    command = ["--config_file", str(CONFIGS / f"{name}.yaml"), *options, str(RECIPES / script), *arguments]
    return launch_all(cache, [command], on_gpus)[0]


def launch_all(cache: Path, commands: Sequence[Sequence[str]], on_gpus: bool = False) -> list[str]:
    """Runs several `accelerate launch` at once. None of their processes is left, whatever happens."""
    settings = {"HF_DATASETS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    # A copied recipe finds the package `parts` beside the recipes.
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, (str(RECIPES), os.environ.get("PYTHONPATH"))))
    if not on_gpus:
        settings["CUDA_VISIBLE_DEVICES"] = ""
    with ExitStack() as started:
        launchers = []
        for command in commands:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "accelerate.commands.launch", *command],
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.callback(end, launcher)
            launchers.append(launcher)
        printed = [launcher.communicate(timeout=LIMIT)[0] for launcher in launchers]
    for launcher, text in zip(launchers, printed, strict=True):
        assert launcher.returncode == 0, text[-4000:]
    return printed


def end(launcher: subprocess.Popen[str]) -> None:
    """Kills a launcher and the processes that it started, which are in sessions of their own."""
    if launcher.poll() is None:
        for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
            process.kill()
    launcher.wait()


def alone(recipe: Path, folder: Path, *overrides: str) -> None:
    """Runs the recipe in this process."""
    pretrain.run(load_recipe(recipe, [ONE, "training.use_cpu=true", f"training.output_dir={folder}", *overrides]))


def resumable(run: Path, folder: Path, step: int) -> Path:
    """Copies what a run left when it was killed right after the checkpoint of that step."""
    shutil.copytree(run / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    shutil.copytree(run / "snip", folder / "snip")
    return folder


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm)."""
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in log if "loss" in row}


def refreshes(folder: Path) -> list[dict[str, Any]]:
    """Returns the decisions: the history's refresh lines without measured times and without sums in their last bits."""
    kept = ("step", "applied_step", "decided_step", "status", "changes", "fp4_fraction", "stage_fp4_fractions")
    return [{key: line[key] for key in kept} for line in history(folder) if line["event"] == "refresh"]


# --- configurations


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [
        ("single", DistributedType.NO, 1),
        ("compile", DistributedType.NO, 1),
        ("ddp", DistributedType.MULTI_GPU, 2),
        ("fsdp2", DistributedType.FSDP, 2),
        ("deepspeed_zero2", DistributedType.DEEPSPEED, 2),
        ("deepspeed_zero3", DistributedType.DEEPSPEED, 2),
    ],
)
def test_accelerate_reads_every_configuration_and_knows_all_its_keys(
    name: str, kind: DistributedType, processes: int
) -> None:
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes) == (kind, processes)
    # accelerate does not check keys within a mapping: it would ignore an unknown one.
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for prefix, values in (("fsdp", config.fsdp_config), ("dynamo", config.dynamo_config)):
        for key in values:
            assert (key if key.startswith(prefix) else f"{prefix}_{key}") in known
    assert set(config.deepspeed_config) <= set(known)


def test_every_configuration_is_tested_and_in_the_readme() -> None:
    names = {path.name for path in CONFIGS.iterdir()}
    zero = {"deepspeed_zero2.yaml", "deepspeed_zero3.yaml"}
    assert names == {"single.yaml", "compile.yaml", "ddp.yaml", "fsdp2.yaml"} | zero
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    assert names <= set(re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE))


def as_launched(patch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    """Sets what `accelerate launch` gives the processes of a configuration, and hides GPUs."""
    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), *options, "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    is_alone = args.num_processes == 1
    found = prepare_simple_launcher_cmd_env(args)[1] if is_alone else prepare_multi_gpu_env(args)
    for key, value in (found | {"CUDA_VISIBLE_DEVICES": ""}).items():
        patch.setenv(key, value)


@pytest.mark.parametrize("name", COMPILED)
def test_each_configuration_for_gpus_compiles_the_decoder_layers_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_launched(monkeypatch, name)
    plugin = TorchDynamoPlugin()
    assert plugin.backend.value == "INDUCTOR" and plugin.use_regional_compilation


def test_slurm_and_the_recipe_for_gpus_launch_with_configurations_that_compile() -> None:
    for file in ("slurm/train.sbatch", "hopper.yaml"):
        names = re.findall(r"recipes/accelerate/(\w+)\.yaml", (RECIPES / file).read_text(encoding="utf-8"))
        assert names and set(names) <= set(COMPILED)


# --- the Trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrapper", "on_gpus"),
    [
        ("ddp", "DistributedDataParallel", False),
        ("fsdp2", "FSDPLlamaForCausalLM", False),
        # One process on a CPU compiles the loop below.
        pytest.param("compile", "LlamaForCausalLM", True, marks=pytest.mark.gpu),
        pytest.param("ddp", "DistributedDataParallel", True, marks=pytest.mark.gpu),
        pytest.param("fsdp2", "FSDPLlamaForCausalLM", True, marks=pytest.mark.gpu),
    ],
)
def test_under_each_configuration_for_gpus_the_trainer_runs_compiled_layers_and_applies_a_plan(
    name: str, wrapper: str, on_gpus: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = 1 if name == "compile" else 2
    if on_gpus and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    if on_gpus:
        if processes == 1:  # transformers would use DataParallel on two
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        printed = launch(cache, [name], WORKER, str(tmp_path), on_gpus=True)
    else:
        as_launched(monkeypatch, name, *TRACED)
        ended = start_ranks(WORKER, tmp_path, folder=tmp_path)
        assert_succeeded(ended)
        printed = ended.logs[0]
    found = json.loads(re.search(r"^FOUND (.*)$", printed, re.MULTILINE)[1])
    assert found["layers"] == [True, True] and not found["whole"] and found["graphs"] > 0
    assert found["said"] == "compiled by regions"
    assert (found["wrapper"], found["processes"], found["steps"]) == (wrapper, processes, 5)
    assert [(line["step"], line["status"]) for line in history(tmp_path)[1:]] == [(2, "applied")]


@pytest.mark.slow
def test_two_processes_train_refresh_save_and_report_once(two: tuple[Path, str]) -> None:
    folder, printed = two
    assert [(line["step"], line["applied_step"], line["status"]) for line in refreshes(folder)] == [
        (5, 8, "applied"),
        (11, 14, "applied"),
    ]
    assert printed.count("All of it is in") == printed.count("snip-hf swapped") == 1
    assert printed.count("plan of step 5 applied after step 8") == 1
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 16
    PrecisionPlan.load(folder / "snip" / "plan.json")
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == result["parameters"]


@pytest.mark.slow
def test_one_process_with_twice_the_batch_has_the_losses_and_the_plan_of_two(
    two: tuple[Path, str], recipe: Path, tmp_path: Path
) -> None:
    alone(recipe, tmp_path)
    one, both = losses(tmp_path), losses(two[0])
    for step in range(1, 9):  # up to the first plan: the order of sums alone
        assert one[step] == pytest.approx(both[step], rel=1e-6)
    first = [json.loads((folder / "snip" / "divergence-5.json").read_text()) for folder in (tmp_path, two[0])]
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-6)
    pairs = list(zip(*map(records_of, first), strict=True))
    for key, typical in (("loss_divergence", 1e-5), ("weight_divergence", 1e-3)):
        errors = [abs(mine[key] / other[key] - 1) for mine, other in pairs if other[key]]
        # The estimate quantizes too: single layers may differ by an element that rounds to the other neighbour.
        assert statistics.median(errors) < typical
        assert max(errors) < 0.1
    assert refreshes(tmp_path)[0] == refreshes(two[0])[0]
    for step in range(9, 17):  # a sum that rounds to the other neighbour in FP4 or FP8 is no longer the same
        assert one[step] == pytest.approx(both[step], rel=2e-3)


# --- a loop of one's own


def _steps(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", printed, re.MULTILINE)}


@pytest.mark.filterwarnings("ignore")  # torch's about its own compiler
@pytest.mark.slow
def test_the_loop_trains_on_two_machines_and_goes_on_in_one_process(
    loop_of_two: tuple[Path, list[str]],
    loop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    two, printed = loop_of_two
    whole = _steps(printed[0])
    # Accelerate prints once per machine: the mean over all processes.
    assert _steps(printed[1]) == whole
    assert list(whole) == list(range(1, 21))
    assert whole[20] < whole[1] - 0.5
    lines = refreshes(two)
    assert [(line["step"], line["applied_step"]) for line in lines] == [(5, 7), (15, 17)]
    assert all(line["fp4_fraction"] >= 0.75 for line in lines)
    saved = AutoModelForCausalLM.from_pretrained(two).state_dict()
    trained = load_file(two / "checkpoint-20" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in trained.items())
    resumable(two, tmp_path / "one", 10)
    # A checkpoint that was being written when the run was killed has no snip_state.json, and is left alone.
    (tmp_path / "one" / "checkpoint-20").mkdir()
    as_launched(monkeypatch, "compile", *TRACED)
    monkeypatch.setattr(sys, "argv", [str(loop), str(tmp_path / "one"), "--batch", "4"])
    AcceleratorState._reset_state(reset_partial_state=True)
    runpy.run_path(str(loop), run_name="__main__")
    AcceleratorState._reset_state(reset_partial_state=True)
    rest = _steps(capsys.readouterr().out)
    assert list(rest) == list(range(11, 21))
    assert rest[11] == pytest.approx(whole[11], abs=2e-5)
    assert [line["step"] for line in refreshes(tmp_path / "one")] == [5, 15]
    assert refreshes(tmp_path / "one")[0] == lines[0]
