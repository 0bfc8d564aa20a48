"""Comparisons of policies from equal starts (eval/compare.py) and their statistics (eval/paired.py)."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from registries import restored
from scipy.stats import nct, ttest_1samp, ttest_rel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import arc_chats, compare, compare_scores
from eval.paired import Paired, holm
from eval.scoring.questions import packed
from snip_hf import quantize
from snip_hf.config import DEFAULT_FP4_FRACTION, POLICIES
from snip_hf.numerics.formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
VALUES: dict[str, Any] = {
    "model": {
        "model_type": "llama",
        "config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        },
    },
    "tokenizer": {"vocab_size": 300},
    "data": {
        "source": "files",
        "validation_fraction": 0.3,
        "validation_sequences": 4,
        "sequence_length": 32,
        "sample_by": "line",
    },
    "training": {"steps": 5, "base_steps": 2, "measure_at": [2], "sequences": 2, "learning_rate": 0.01},
    "seeds": [3, 4],
    "snip": {"formats": ["nvfp4", "mxfp8"], "solver": "greedy", "first_refresh": 1, "apply_delay": 0},
    "contenders": {
        "bf16": None,
        "fp8": {"policy": "uniform-mxfp8"},
        "snip": {"target_fp4_fraction": 0.5, "granularity": "gemm"},
    },
    "reference": "bf16",
    "comparisons": [{"contender": "snip", "against": "fp8", "margin": 5.0}, {"contender": "fp8", "against": "bf16"}],
}

# A module with a policy of one's own.
BACKWARDS = """
from snip_hf.policies.registry import register_policy
from snip_hf.policies.rules import rule

register_policy(rule("backwards", lambda setting, layers: setting.groups(layers)[::-1]))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A config on a text of random words, and the output that `run` has written."""
    folder = tmp_path_factory.mktemp("compare")
    draw = random.Random(0)
    words = ["tensor", "format", "plan", "layer", "step", "loss", "probe", "scale"]
    text = "\n".join(" ".join(draw.choices(words, k=30)) for _ in range(60))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    values = {**VALUES, "data": {**VALUES["data"], "files": ["$COMPARE_TEXT/text.txt"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPARE_TEXT", str(folder))
        assert run(folder / "config.yaml", folder / "lines.jsonl") == 0
        yield folder / "config.yaml", folder / "lines.jsonl"


def run(config: Path, output: Path, *options: str) -> int:
    return compare.main(["run", str(config), "--output", str(output), "--device", "cpu", *options])


@pytest.fixture(scope="module")
def trained_model(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    options = ("--seeds", "3", "--only", "bf16", "--cache", f"{files[1]}.cache", "--save", str(folder))
    assert run(files[0], folder / "lines.jsonl", *options) == 0
    return folder / "bf16-3"


def test_contenders_of_a_seed_start_alike_and_train_differently(files: tuple[Path, Path]) -> None:
    lines = compare.read_lines(files[1])
    assert [(line["seed"], line["contender"]) for line in lines] == [
        (seed, name) for seed in (3, 4) for name in ("bf16", "fp8", "snip")
    ]
    assert [len({line["start"] for line in lines if line["seed"] == seed}) for seed in (3, 4)] == [1, 1]
    assert len({line["start"] for line in lines}) == 2
    assert len({line["losses"]["5"] for line in lines}) == len({line["losses"]["2"] for line in lines}) == 6
    bf16, fp8, snip = lines[:3]
    assert (bf16["share"], fp8["share"]) == (0, 0) and 0.3 < snip["share"] <= 1 and snip["failed_refreshes"] == []
    assert bf16["loss_unquantized"] == bf16["losses"]["5"] != snip["losses"]["5"] != snip["loss_unquantized"]
    assert (bf16["backend"], snip["backend"]) == (None, "emulated") and snip["snip"]["seed"] == 3
    assert {"commit", "command", "device", "torch", "date", "seconds"} <= snip.keys()


def test_a_cell_that_runs_again_gives_the_same_losses_and_what_is_done_is_left(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = files
    before = output.read_text(encoding="utf-8")
    assert run(config, output) == 0 and output.read_text(encoding="utf-8") == before
    done = before.splitlines(keepends=True)
    part = tmp_path / "lines.jsonl"
    part.write_text("".join(done[:2]) + done[2][:40], encoding="utf-8")  # killed while it wrote
    assert run(config, part, "--seeds", "3", "--cache", f"{output}.cache") == 0
    again = compare.read_lines(part)
    assert [line["losses"] for line in again] == [json.loads(line)["losses"] for line in done[:3]]
    fresh = tmp_path / "fresh.jsonl"  # its base is trained anew
    assert run(config, fresh, "--seeds", "3", "--only", "snip", "--save", str(tmp_path / "models")) == 0
    assert compare.read_lines(fresh)[0]["losses"] == again[2]["losses"]
    assert (tmp_path / "models" / "snip-3" / "model.safetensors").is_file()
    assert run(config, fresh, "--minutes", "0") == 0 and len(compare.read_lines(fresh)) == 1
    assert "Time is up" in capsys.readouterr().out


@pytest.mark.parametrize(("contender", "cut"), [("bf16", "time is over"), ("snip", "killed")])
def test_a_cell_that_was_cut_off_goes_on_bit_for_bit(
    contender: str, cut: str, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A refresh is under way at the cut, and dropout draws random numbers.
    options = ["--seeds", "3", "--only", contender, "--keep-every", "4"]
    for override in ("training.steps=8", "snip.refresh_every=3", "snip.apply_delay=2"):
        options += ["--override", override]
    options += ["--override", "model.config.attention_dropout=0.2"]
    assert run(files[0], tmp_path / "whole.jsonl", "--save", str(tmp_path / "whole"), *options) == 0
    step, steps, now = compare.Trainee.step, [], [0.0]

    def cut_off(trainee: Any, number: int, *rest: Any) -> Any:
        steps.append(number)
        if number - 2 == 5 and cut == "killed":  # after two steps of the base
            raise KeyboardInterrupt
        now[0] = 90.0 if number - 2 == 4 and cut != "killed" else 0.0
        return step(trainee, number, *rest)

    output = tmp_path / "parts.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(compare.Trainee, "step", cut_off)
        patch.setattr(compare, "time", argparse.Namespace(monotonic=lambda: now[0]))
        with pytest.raises(KeyboardInterrupt) if cut == "killed" else contextlib.nullcontext():
            assert run(files[0], output, "--minutes", "1", *options) == 0
        assert compare.read_lines(output) == [] and len(list(Path(f"{output}.cache").glob("cell-*.pt"))) == 1
        steps.clear()
        patch.setattr(compare.Trainee, "step", lambda *args: steps.append(args[1]) or step(*args))
        assert run(files[0], output, "--save", str(tmp_path / "parts"), *options) == 0
    assert steps == [7, 8, 9, 10] and not list(Path(f"{output}.cache").glob("cell-*.pt"))
    whole, parts = compare.read_lines(tmp_path / "whole.jsonl")[0], compare.read_lines(output)[0]
    where = {"command", "date", "seconds"}
    assert {k: v for k, v in whole.items() if k not in where} == {k: v for k, v in parts.items() if k not in where}
    weights = [tmp_path / name / f"{contender}-3" / "model.safetensors" for name in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_tokens_are_prepared_once_for_runs_elsewhere(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["text", str(files[0]), "--cache", str(tmp_path / "text")]) == 0
    assert "sequences of 32 tokens for training, 4 held out, " in capsys.readouterr().out
    short = ["--override", "data.sequence_length=1"]
    assert compare.main(["text", str(files[0]), "--cache", str(tmp_path / "short"), *short]) == 1
    assert "data: no token of 'train' has a loss; raise data.sequence_length" in capsys.readouterr().err
    monkeypatch.setenv("COMPARE_TEXT", "/nowhere")
    text = compare.load_text(compare.load_config(files[0]), tmp_path / "text")
    assert text.train.dtype == np.uint16 and text.train.shape[1] == 32 and len(text.held_out) == 4


def test_a_cell_that_another_process_trains_is_left_to_it(files: tuple[Path, Path], tmp_path: Path) -> None:
    config, output = files[0], tmp_path / "lines.jsonl"
    key = compare.load_config(config).cell_key("bf16", 3)
    with FileLock(f"{files[1]}.cache/cell-{key}.lock"):
        assert run(config, output, "--seeds", "3", "--only", "bf16", "fp8", "--cache", f"{files[1]}.cache") == 0
    assert [line["contender"] for line in compare.read_lines(output)] == ["fp8"]


def test_a_cell_that_fails_is_named_and_the_others_are_trained(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = compare.train_cell

    def failing(config: Any, contender: str, *rest: Any) -> Any:
        if contender == "fp8":
            raise RuntimeError("no kernel")
        return train(config, contender, *rest)

    monkeypatch.setattr(compare, "train_cell", failing)
    output = tmp_path / "lines.jsonl"
    assert run(files[0], output, "--seeds", "3", "--cache", f"{files[1]}.cache") == 1
    assert [line["contender"] for line in compare.read_lines(output)] == ["bf16", "snip"]
    assert "fp8, seed 3: RuntimeError: no kernel" in capsys.readouterr().err


def test_all_contenders_of_a_seed_are_trained_before_the_next_seed(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int]] = []
    line = {"key": None, "losses": {}, "seconds": 0.0}
    monkeypatch.setattr(compare, "train_cell", lambda config, *cell: trained.append(cell[:2]) or line)
    monkeypatch.setattr(compare, "append", lambda output, line: None)
    text = compare.Text(np.zeros((1, 32)), np.zeros((1, 32)), tokenizer=None)
    monkeypatch.setattr(compare, "load_text", lambda config, cache: text)
    start = compare.start_path(compare.load_config(files[0]), 3, tmp_path)
    with FileLock(f"{start}.lock"):  # Another process trains it.
        assert run(files[0], tmp_path / "lines.jsonl", "--cache", str(tmp_path)) == 0
    assert trained == [(name, seed) for seed in (3, 4) for name in VALUES["contenders"]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_all_blocks_share_one_graph(files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    compiling = nn.Module.compile

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda block: compiling(block, backend=counted))
    overrides = ["training.compile=true", "model.config.num_hidden_layers=5", "seeds=[3]"]
    options = [option for override in overrides for option in ("--override", override)]
    assert run(files[0], tmp_path / "lines.jsonl", "--only", "snip", *options) == 0
    # The start, the converted model, and each of them without gradients.
    assert len(graphs) == 4


@pytest.mark.parametrize("kind", ["checkpoint", "experts"])
def test_checkpoints_and_experts_are_compared_too(
    kind: str, files: tuple[Path, Path], tmp_path: Path, trained_model: Path
) -> None:
    overrides = {
        "checkpoint": [
            "model.model_type=null",
            f"model.name_or_path={trained_model}",
            "tokenizer.vocab_size=null",
        ],
        "experts": [
            "model.model_type=qwen3_moe",
            "model.config.moe_intermediate_size=16",
            "model.config.num_local_experts=2",
            "model.config.num_experts_per_tok=1",
            "model.config._experts_implementation=eager",
        ],
    }[kind]
    options = ["--seeds", "3", "--only", "bf16", "snip"]
    for override in (*overrides, "training.steps=3", "training.measure_at=[]"):
        options += ["--override", override]
    output = tmp_path / "lines.jsonl"
    assert run(files[0], output, *options) == 0
    bf16, snip = compare.read_lines(output)
    assert bf16["start"] == snip["start"] and bf16["losses"] != snip["losses"] and snip["share"] > 0.3


def test_the_report_has_the_paired_differences_of_the_lines(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compare.load_config(files[0])
    lines = compare.read_lines(files[1])
    losses = {name: [line["losses"]["5"] for line in lines if line["contender"] == name] for name in config.contenders}
    one, reference = (100 * np.log(losses[name]) for name in ("snip", "bf16"))
    found = compare.differences(config, lines, "snip", "bf16", 5)
    assert found == pytest.approx(list(one - reference), rel=0.01)
    assert compare.main(["report", str(files[0]), str(files[1])]) == 0
    table = capsys.readouterr().out
    test = Paired.of(found)
    assert f"| snip | {np.mean([line['share'] for line in lines[2::3]]):.1%} | 2 | {test} | {test.p:.3f} | " in table
    pair = Paired.of(compare.differences(config, lines, "snip", "fp8", 5))
    other = Paired.of(compare.differences(config, lines, "fp8", "bf16", 5))
    corrected, _ = holm([pair.p, other.p])
    planned = f"| snip minus fp8 | 2 | {pair} | {pair.p:.3f} | {corrected:.3f} | {pair.detectable:.3f} | ± 5 | "
    assert planned in table
    assert compare.main(["report", str(files[0]), str(files[1]), "--step", "2"]) == 0
    assert "after 2 steps" in capsys.readouterr().out
    assert compare.main(["report", str(files[0]), str(files[1]), "--step", "3"]) == 1
    assert capsys.readouterr().err == "error: --step 3: the loss was measured after 2, 5 steps.\n"
    assert compare.main(["report", str(files[0]), str(files[1]), "--override", "training.sequences=3"]) == 1
    assert "None of the 6 lines is of this config." in capsys.readouterr().err
    (tmp_path / "empty.jsonl").touch()
    for name, problem in (("empty.jsonl", "has no lines"), ("none.jsonl", "does not exist")):
        assert compare.main(["report", str(files[0]), str(tmp_path / name)]) == 1
        assert f"{name} {problem}. Give the --output of `run`" in capsys.readouterr().err


def test_cells_of_other_starts_or_devices_and_diverged_ones_are_not_paired(files: tuple[Path, Path]) -> None:
    config, lines = compare.load_config(files[0]), compare.read_lines(files[1])
    for change in ({"start": "other"}, {"device": "other"}, {"losses": {"5": None}}):
        changed = [{**line, **change} if line["contender"] == "fp8" and line["seed"] == 3 else line for line in lines]
        assert len(compare.differences(config, changed, "fp8", "bf16", 5)) == 1
    assert "| fp8 | 0.0% | 0 | - | - | - | - | 1 |" in compare.report(config, changed[:2])
    assert "| snip | - | 0 | - | - | - | - | 0 |\n" in compare.report(config, lines[:2])


def test_a_seed_with_two_starts_is_paired_within_the_last_start_that_both_have(files: tuple[Path, Path]) -> None:
    config, lines = compare.load_config(files[0]), compare.read_lines(files[1])
    old = [{**line, "start": "other", "losses": {"5": 9.0}} for line in lines if line["seed"] == 3]
    expected = compare.differences(config, lines, "snip", "bf16", 5)
    for both in (old + lines, old + lines[:3] + old[:2] + lines[3:]):
        assert compare.differences(config, both, "snip", "bf16", 5) == expected
    assert compare.differences(config, [*lines[:2], *old], "snip", "bf16", 5) == [0.0]
    assert compare.differences(config, [*lines[:2], *old[2:]], "snip", "bf16", 5) == []


def test_contenders_name_policies_of_imported_modules(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "backwards.py").write_text(BACKWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "own.jsonl"
    own = ["--override", "contenders.own={policy: backwards}", "training.measure_at=[]"]
    own += ["--cache", f"{files[1]}.cache", "--only", "own", "--seeds", "3"]
    with restored(POLICIES):
        assert run(files[0], output, *own) == 1
        assert "--import MODULE" in capsys.readouterr().err
        assert run(files[0], output, "--import", "backwards", *own) == 0
    (line,) = compare.read_lines(output)
    assert (line["contender"], line["snip"]["policy"]) == ("own", "backwards")
    assert line["share"] >= DEFAULT_FP4_FRACTION


def test_everything_that_decides_a_course_is_in_the_key_and_nothing_else(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(*overrides: str) -> str:
        return compare.load_config(files[0], overrides).cell_key("snip", 3)

    changes = ["training.steps=6", "training.learning_rate=0.5", "snip.refresh_every=4", "data.sequence_length=16"]
    changes += ["contenders.snip.target_fp4_fraction=0.75", "model.config.hidden_size=64"]
    assert len({key(), *(key(change) for change in changes)}) == 1 + len(changes)
    monkeypatch.setenv("COMPARE_TEXT", "elsewhere")
    assert key("training.measure_at=[1]") == key("contenders.fp8=null") == key("seeds=[3]") == key()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reference=none", "'none' is not a contender; known are bf16, fp8, snip."),
        ("training.decay=step", "training.decay='step' is not known; expected one of cosine, linear, constant."),
        ("training.measure_at=[5]", "training.measure_at: step 5 is outside 1 to 4."),
        ("training.step=5", "training: the key 'step' is not known"),
        ("contenders.snip.policy=snap", "contenders.snip: "),
        ("training.steps=0", "expected at least 1, 0 and 1."),
        ("snip.first_refresh=5", "contenders.snip: the first plan would be applied after step 5 of 5"),
        ("snip.apply_delay=4", "Raise training.steps, or lower first_refresh or apply_delay."),
    ],
)
def test_a_wrong_config_ends_with_a_sentence(
    override: str, message: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["report", *map(str, files), "--override", override]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "fp4"), "--only: 'fp4' is not a contender; known are bf16, fp8, snip."),
        (("--seeds", "4", "5"), "--seeds: 5 is not a seed of the config, which `report` reads: 3, 4."),
    ],
)
def test_cells_that_no_report_counts_are_refused(
    options: tuple[str, ...], message: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(files[0], tmp_path / "lines.jsonl", *options) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_schedule_warms_up_and_decays() -> None:
    training = compare.TrainingSection(steps=8, base_steps=2, warmup_steps=2)
    rates = [training.rate(step) for step in range(1, 11)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert 0.1 < rates[-1] < 0.2
    linear = compare.TrainingSection(steps=4, decay="linear")
    assert [linear.rate(step) for step in range(1, 5)] == [1, 0.75, 0.5, 0.25]


def test_each_epoch_sees_all_sequences_once_in_another_order() -> None:
    text = compare.Text(np.arange(12).reshape(6, 2), np.zeros((1, 2)), None)  # type: ignore[arg-type]
    first, second, other = (
        torch.cat([text.batch(step, 2, seed) for step in steps])
        for steps, seed in ((range(1, 4), 0), (range(4, 7), 0), (range(1, 4), 1))
    )
    for epoch in first, second, other:
        assert sorted(epoch.flatten().tolist()) == list(range(12))
    assert not torch.equal(first, second) and not torch.equal(first, other)


def test_the_shipped_config_is_one() -> None:
    config = compare.load_config(ROOT / "eval" / "compare.yaml")
    assert config.reference == "bf16" and len(config.contenders) == 5
    options: argparse.Namespace = compare.parse(["run", "eval/compare.yaml", "--output", "runs/a.jsonl"])
    assert options.cache == Path("runs/a.jsonl.cache")


def proof(name: str) -> compare.Config:
    return compare.load_config(ROOT / "eval" / "proof" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("name", "of"),
    [
        *((name, name) for name in ("probe", "default", "smollm2-default", "smollm2-shares", "sft", "sft-lora")),
        ("smollm2", "smollm2-orders"),
    ],
)
def test_the_committed_lines_are_of_todays_configs(name: str, of: str) -> None:
    check_lines(name, proof(of))


def check_lines(name: str, config: compare.Config) -> None:
    with gzip.open(ROOT / "eval" / "results" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            assert line["key"] == config.cell_key(line["contender"], line["seed"])


def test_the_planned_comparisons_are_fresh_and_share_their_reference() -> None:
    probe, frontier, smollm2, orders = map(proof, ("probe", "frontier", "smollm2", "smollm2-orders"))
    assert probe.seeds == list(range(8, 32)) and frontier.seeds == probe.seeds[:8]
    assert [(pair.contender, pair.against, pair.margin) for pair in probe.comparisons] == [
        ("snip", "backward-first", 0.1)
    ]
    assert probe.cell_key("bf16", 8) == frontier.cell_key("bf16", 8)
    assert len(smollm2.contenders) == 20 and smollm2.snip_config("snip-paper", 0).target_fp4_fraction == 0.75
    assert all(orders.cell_key(name, 2) == smollm2.cell_key(name, 2) for name in smollm2.contenders)
    shares = proof("smollm2-shares")
    assert len(shares.contenders) == 7 and shares.cell_key("snip-75", 2) == orders.cell_key("snip-75-default", 2)
    default, on_checkpoint = proof("default"), proof("smollm2-default")
    assert min(default.seeds) > 43 and min(on_checkpoint.seeds) > max(orders.seeds)
    assert default.snip_config("snip", 44).target_fp4_fraction == DEFAULT_FP4_FRACTION
    assert list(default.contenders) == list(on_checkpoint.contenders)
    for name in ("sft", "sft-lora", "moe"):
        assert proof(name).seeds == list(range(8))


# --- chats and tricks


def with_chats(folder: Path, trained_model: Path, chats: list[list[dict[str, str]]]) -> list[str]:
    """Returns the overrides for a checkpoint with a chat template and a file of chats."""
    tokenizer = AutoTokenizer.from_pretrained(trained_model)
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.content }}>{% endfor %}{% if add_generation_prompt %}<{% endif %}"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return [
        "model.model_type=null",
        f"model.name_or_path={trained_model}",
        "tokenizer.vocab_size=null",
        f"tokenizer.name_or_path={folder / 'tokenizer'}",
        "data.text_column=messages",
        f"data.files=[{folder}/train.jsonl]",
    ]


def chat(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "format"}, {"role": "assistant", "content": answer}]


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # PEFT's use of transformers
def test_only_the_answers_of_chats_have_a_loss_and_adapters_are_compared_too(
    files: tuple[Path, Path], tmp_path: Path, trained_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["loss", "tensor plan", "a much longer answer", "plan " * 32]  # the last one is left out
    overrides = with_chats(tmp_path, trained_model, [chat(answer) for answer in answers])
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "validation.jsonl")
    overrides += ["data.validation_fraction=null", f"data.validation_files=[{tmp_path}/validation.jsonl]"]
    overrides += ["training.steps=3", "training.measure_at=[]", "model.lora={r: 2, target_modules: all-linear}"]
    options = ["--only", "bf16", "snip", "--seeds", "3", "--save", str(tmp_path), "--override", *overrides]
    assert run(files[0], tmp_path / "lines.jsonl", *options) == 0
    printed = capsys.readouterr().out
    for name in ("training", "held-out"):
        assert f"1 of 4 {name} chats have more than 32 tokens and are left out." in printed
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    text = compare.load_text(compare.load_config(files[0], overrides), tmp_path / "lines.jsonl.cache")
    assert len(text.train) == 3
    plans = [(tmp_path / f"{name}-3/snip/plan.json").exists() for name in ("bf16", "snip")]
    assert plans == [False, True]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "snip-3")
    losses = []
    for row, answer in zip(text.held_out, answers, strict=False):
        batch = {name: values[None] for name, values in compare.inputs(torch.from_numpy(row.astype(np.int64))).items()}
        whole = tokenizer.encode(f"<format><{answer}>")
        assert batch["input_ids"][0, : len(whole)].tolist() == whole
        labels = batch["labels"][0, 1:]
        assert tokenizer.decode(labels[labels >= 0]) == f"{answer}>"
        logits = model(batch["input_ids"]).logits[0, :-1]
        losses += nn.functional.cross_entropy(logits, labels, reduction="none")[labels >= 0].tolist()
    bf16, snip = compare.read_lines(tmp_path / "lines.jsonl")
    assert snip["loss_unquantized"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert bf16["start"] == snip["start"] and bf16["losses"] != snip["losses"] and snip["share"] > 0.3


def test_a_share_of_chats_is_held_out(files: tuple[Path, Path], tmp_path: Path, trained_model: Path) -> None:
    overrides = with_chats(tmp_path, trained_model, [chat(f"plan {place // 2}") for place in range(24)])
    config = compare.load_config(files[0], [*overrides, "data.validation_sequences=24"])
    text = compare.load_text(config, tmp_path)
    train, held_out = ({tuple(row) for row in rows} for rows in (text.train, text.held_out))
    assert len(text.train) + len(text.held_out) == 24
    assert train and held_out and not train & held_out and len(train | held_out) == 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            [{"from": "human", "value": "format"}, {"from": "gpt", "value": "loss"}],
            "data.text_column: row 2 of the training chats has a message with the keys from, value; expected role and ",
        ),
        (chat("loss")[:1], "row 2 of the training chats ends with a message of the role 'user'; expected an answer of"),
        ("data.sequence_length=4", "None of the 1 training chats has at most 4 tokens."),
        (
            "data.document_separator=<end>",
            "data.document_separator='<end>' cuts text, but data.text_column='messages' has",
        ),
    ],
)
def test_chats_that_cannot_be_trained_on_end_with_a_sentence(
    wrong: Any,
    message: str,
    files: tuple[Path, Path],
    tmp_path: Path,
    trained_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats = [chat("plan"), *([wrong] if isinstance(wrong, list) else [])]
    overrides = with_chats(tmp_path, trained_model, chats)
    overrides += ["data.validation_fraction=0.0001", *([wrong] if isinstance(wrong, str) else [])]
    command = ["text", str(files[0]), "--cache", str(tmp_path), "--override", *overrides]
    assert compare.main(command) == 1
    assert message in capsys.readouterr().err


def test_chats_are_made_of_questions_that_no_later_split_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arc_chats.main([str(tmp_path), str(tmp_path / "chats")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / "arc").mkdir()
    questions = {"train": ["New?", "Is it held  out?", "Asked"], "validation": ["Is it held out?"], "test": ["Asked?"]}
    for split, texts in questions.items():
        rows = [
            {"question": text, "choices": {"text": ["no", "yes"], "label": ["1", "2"]}, "answerKey": "2"}
            for text in texts
        ]
        for level in ("Easy", "Challenge"):
            own = rows if level == "Easy" else []
            path = tmp_path / "arc" / f"ARC-{level}-{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
    assert arc_chats.main([str(tmp_path), str(tmp_path / "chats")]) == 0
    assert "train: 1 chats, 2 questions" in capsys.readouterr().out
    expected = [{"role": "user", "content": "New?"}, {"role": "assistant", "content": "yes"}]
    assert compare.read_lines(tmp_path / "chats" / "train.jsonl") == [{"messages": expected}]


def test_tricks_are_contenders(files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eval.proof.tricks", raising=False)
    with restored(FORMATS):
        compare.import_modules(["eval.proof.tricks"])
        config, blocks = proof("less-loss"), proof("blocks")
        check_lines("less-loss", config)
        check_lines("blocks", blocks)
        own = {name: config.contenders[name] for name in ("only-grad-weight", "mxfp4-nearest", "mxfp4-ue5m3")}
        own["backward-front"] = blocks.contenders["backward-front"]
        options = ["--cache", f"{files[1]}.cache", "--seeds", "3", "--only", *own, "--override"]
        options += [f"contenders={json.dumps(own)}", "training.measure_at=[]", "snip.formats=[mxfp4, fp8-delayed]"]
        assert run(files[0], tmp_path / "lines.jsonl", *options) == 0
        gradient = 1e-7 * torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
        error = quantize(gradient, "mxfp4-ue5m3-tensor", "gradient", seed=0) - gradient
        assert error.norm() < 0.2 * gradient.norm()
    lines = compare.read_lines(tmp_path / "lines.jsonl")
    assert [line["share"] for line in lines] == [pytest.approx(1 / 3, abs=1e-5), 1, 1, pytest.approx(0.5, abs=0.02)]
    assert len({line["losses"]["5"] for line in lines}) == 4


# --- scores


def test_models_are_compared_question_by_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = {"bf16": [1, 1, 1, 0, 0, 1, 1, 1], "snip": [1, 1, 0, 0, 1, 1, 1, 1], "fp4": [0, 0, 0, 0, 0, 0, 0, 1]}
    files = []
    for name, answers in right.items():
        line = {
            "task": "arc_easy",
            "answers": {"acc": packed([False] * 8), "acc_norm": packed(list(map(bool, answers)))},
        }
        files.append(tmp_path / f"{name}.jsonl")
        others = [{"task": "mmlu", "answers": {}}, {"task": f"only {name}", "answers": {"acc": packed([True])}}]
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in (line, *others)), encoding="utf-8")
    assert compare_scores.main(list(map(str, files))) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "bf16, accuracy in percent (questions): arc_easy 75.00 (8); only bf16 100.00 (1)"
    # Only one of the two answers 5 questions correctly, always BF16: 2 / 2^5.
    assert rows[4:] == [
        "| arc_easy | snip | 75.00 | +0.00 ± 37.04 | 1, 1 | 1.000 | 1.000 |",
        "| arc_easy | fp4 | 12.50 | -62.50 ± 35.86 | 0, 5 | 0.062 | 0.125 |",
    ]
    for path in files[:2]:
        subjects = [{"task": "mmlu_stem", "group": "mmlu"}]
        subjects += [{"task": name, "group": "mmlu_stem", "answers": {"acc": packed([True])}} for name in ("a", "b")]
        path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in subjects), encoding="utf-8")
    assert compare_scores.main(list(map(str, files[:2]))) == 0
    assert capsys.readouterr().out.splitlines()[4:] == [
        "| arc_easy | snip | 75.00 | +0.00 ± 37.04 | 1, 1 | 1.000 | 1.000 |",
        "| mmlu | snip | 100.00 | +0.00 ± 0.00 | 0, 0 | 1.000 | 1.000 |",
        "| mean of 2 tasks | snip | 87.50 | +0.00 ± 18.52 | - | 1.000 | - |",
    ]
    files[1].write_text(json.dumps({"task": "arc_easy", "answers": {"acc": packed([True])}}) + "\n", encoding="utf-8")
    assert compare_scores.main([str(files[0]), str(files[1])]) == 1
    assert "arc_easy: snip answered 1 questions, the reference 8." in capsys.readouterr().err
    files[1].write_text("", encoding="utf-8")
    assert compare_scores.main([str(files[0]), str(files[1])]) == 1
    assert "has no answers. Score the model again" in capsys.readouterr().err


# --- statistics


def test_mean_interval_and_p_are_those_of_scipy() -> None:
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(2, 9)) + [[0.5], [0.0]]
    test, scipys = Paired.of(list(one - other)), ttest_rel(one, other)
    low, high = scipys.confidence_interval(0.95)
    assert test.p == pytest.approx(scipys.pvalue) and test.mean == pytest.approx((low + high) / 2)
    assert test.half_width == pytest.approx((high - low) / 2)
    assert str(test) == f"{test.mean:+.3f} ± {test.half_width:.3f}"


def test_equivalence_is_the_larger_of_two_one_sided_tests() -> None:
    values = list(np.random.default_rng(1).normal(0.02, 0.05, size=12))
    above = ttest_1samp(values, -0.1, alternative="greater").pvalue
    below = ttest_1samp(values, 0.1, alternative="less").pvalue
    assert Paired.of(values).equivalence_p(0.1) == pytest.approx(max(above, below))


def test_power_is_that_of_the_noncentral_t() -> None:
    test = Paired(0.0, 0.5, 8)
    bound = 2.364624251592784  # of t with 7 degrees of freedom
    expected = nct.sf(bound, 7, 2.0) + nct.cdf(-bound, 7, 2.0)
    assert test.power(1.0) == pytest.approx(expected, abs=1e-3) and test.power(0.0) == pytest.approx(0.05, abs=1e-3)
    assert test.detectable is not None and test.power(test.detectable) == pytest.approx(0.8, abs=1e-4)


def test_one_pair_has_no_interval_and_equal_runs_have_p_1() -> None:
    one = Paired.of([0.3])
    assert (one.p, one.detectable, one.equivalence_p(1.0), str(one)) == (None, None, None, "+0.300")
    equal = Paired.of([0.0, 0.0, 0.0])
    assert (equal.p, equal.detectable, equal.equivalence_p(0.1)) == (1.0, 0.0, 0.0)
    assert Paired.of([0.2, 0.2]).p == 0.0 and Paired.of([0.2, 0.2]).equivalence_p(0.1) == 1.0
    with pytest.raises(ValueError, match="at least one pair"):
        Paired.of([])


def test_holm_multiplies_the_smallest_p_by_the_number_of_tests_and_keeps_the_order() -> None:
    assert holm([0.04, None, 0.01, 0.03]) == [pytest.approx(0.06), None, pytest.approx(0.03), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []
