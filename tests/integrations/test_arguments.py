"""SnipArguments: the config beside a Trainer's arguments, in one parser."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from snip_hf import SnipArguments, SnipCallback, SnipConfig

VALUES = ["--output_dir", "run", "--seed", "3", "--target_fp4_fraction", "1:0.9,800:0.5", "--stages", "2"]


def test_a_parser_of_both_gives_the_trainer_s_arguments_and_a_plain_config() -> None:
    parser = HfArgumentParser((TrainingArguments, SnipArguments))
    args, config = parser.parse_args_into_dataclasses([*VALUES, "--snip_seed", "4"], look_for_args_file=False)
    assert (args.output_dir, args.seed) == ("run", 3)
    assert type(config) is SnipConfig
    assert config == SnipConfig(target_fp4_fraction=((1, 0.9), (800, 0.5)), stages=2, seed=4)
    assert SnipCallback(config).config is config


def test_one_yaml_file_holds_both(tmp_path: Path) -> None:
    values = {"output_dir": "run", "seed": 3, "snip_seed": 4, "formats": ["nvfp4", "fp8"], "refresh_every": None}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    args, config = HfArgumentParser((TrainingArguments, SnipArguments)).parse_yaml_file(tmp_path / "run.yaml")
    assert args.seed == 3 and config == SnipConfig(formats=("nvfp4", "fp8"), refresh_every=None, seed=4)


def test_the_default_is_that_of_the_config() -> None:
    parser = HfArgumentParser((TrainingArguments, SnipArguments))
    assert parser.parse_args_into_dataclasses([], look_for_args_file=False)[1] == SnipConfig()


def test_the_seed_alone_has_another_name() -> None:
    names = [field.name for field in dataclasses.fields(SnipArguments) if field.init]
    assert names == [field.name for field in dataclasses.fields(SnipConfig) if field.name != "seed"] + ["snip_seed"]
    help_of = {action.dest: action.help for action in HfArgumentParser(SnipArguments)._actions}
    assert help_of["snip_seed"].startswith("Seed of stochastic rounding")
    assert help_of["stages"].startswith("Pipeline stages")
    with pytest.raises(TypeError, match="seed"):
        SnipArguments(seed=3)


def test_the_config_itself_meets_the_trainer_s_seed() -> None:
    # Passes when the parser lets two dataclasses share an option: then SnipArguments is no longer needed.
    with pytest.raises(argparse.ArgumentError, match="conflicting option string: --seed"):
        HfArgumentParser((TrainingArguments, SnipConfig))


def test_trl_s_parser_takes_it_with_a_file_of_defaults(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    (tmp_path / "run.yaml").write_text("target_fp4_fraction: '1:0.9,80:0.5'\nstages: [[a, b], [c]]\nsnip_seed: 4\n")
    parser = trl.TrlParser((trl.ScriptArguments, SnipArguments))
    arguments = ["--dataset_name", "d", "--config", str(tmp_path / "run.yaml"), "--granularity", "gemm"]
    _, config = parser.parse_args_and_config(arguments)
    expected = {"target_fp4_fraction": ((1, 0.9), (80, 0.5)), "stages": (("a", "b"), ("c",)), "granularity": "gemm"}
    assert config == SnipConfig(**expected, seed=4)


def test_a_yaml_file_may_say_off_and_none(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("output_dir: here\nuse_cpu: true\nguard: off\nrefresh_every: none\n")
    _, config = HfArgumentParser((TrainingArguments, SnipArguments)).parse_yaml_file(str(path))
    assert (config.guard, config.refresh_every) == ("off", None)
