"""SnipConfig as transformers' HfArgumentParser takes it: from arguments, YAML, JSON and dicts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser

from snip_hf import SnipConfig
from snip_hf.config import DEFAULT_FP4_FRACTION

SHARES = "0.5, or 1:0.9,800:0.5 as STEP:SHARE, or none"
STAGES = "a number, or a,b;c,d for two lists, or none"


def parse(*arguments: str) -> SnipConfig:
    (config,) = HfArgumentParser(SnipConfig).parse_args_into_dataclasses(list(arguments), look_for_args_file=False)
    return config


def test_without_arguments_the_config_is_the_default() -> None:
    assert parse() == SnipConfig() and type(parse()) is SnipConfig


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("target_fp4_fraction", "0.5", 0.5),
        ("target_fp4_fraction", "1:0.9,800:0.5", ((1, 0.9), (800, 0.5))),
        ("target_fp4_fraction", " 1 : 0.9 , 800 : 0.5 ", ((1, 0.9), (800, 0.5))),
        ("target_fp4_fraction", "none", DEFAULT_FP4_FRACTION),  # as SnipConfig(target_fp4_fraction=None)
        ("stages", "2", 2),
        ("stages", "none", None),
        ("stages", "layers.0.a,layers.0.b;layers.1.a", (("layers.0.a", "layers.0.b"), ("layers.1.a",))),
        ("stages", "a.0", (("a.0",),)),
        ("ties", "auto", "auto"),
        ("ties", "q_proj,k_proj;gate_proj,up_proj", (("q_proj", "k_proj"), ("gate_proj", "up_proj"))),
        ("ties", "", ()),
        ("formats", "nvfp4,fp8", ("nvfp4", "fp8")),
        ("skip_modules", "*.q_proj, *.k_proj", ("*.q_proj", "*.k_proj")),
        ("skip_modules", "", ()),
        ("include_modules", "score", ("score",)),
        ("refresh_every", "none", None),
        ("refresh_every", "1000", 1000),
        ("probe_tokens", "None", None),
        ("start_format", "bf16", "bf16"),
        ("granularity", "layer", "layer"),
        ("solver_time_limit", "1e1", 10.0),
        ("seed", "7", 7),
    ],
)  # fmt: skip
def test_a_field_is_read_from_text(field: str, text: str, value: Any) -> None:
    config = parse(f"--{field}", text)
    assert getattr(config, field) == value
    assert config == SnipConfig(**{field: value})


def test_options_with_hyphens_are_the_same() -> None:
    assert parse("--target-fp4-fraction", "1:0.9,80:0.5") == SnipConfig(target_fp4_fraction=((1, 0.9), (80, 0.5)))


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("target_fp4_fraction", "half", f"'half' is not valid; expected {SHARES}."),
        ("target_fp4_fraction", "1:0.9:3", f"'1:0.9:3' is not valid; expected {SHARES}."),
        ("refresh_every", "often", "'often' is not valid; expected an integer, or none."),
        ("granularity", "block", "invalid choice: 'block'"),
    ],
)  # fmt: skip
def test_text_that_is_none_of_a_field_s_forms_ends_with_what_is_expected(
    field: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(f"--{field}", text)
    assert exit.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"argument --{field}" in error and message in error


def test_a_value_that_the_config_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(ValueError, match="has step 3 after step 800"):
        parse("--target_fp4_fraction", "1:0.9,800:0.5,3:0.1")


def test_a_yaml_file_a_json_file_and_a_dict_give_the_config_of_their_values(tmp_path: Path) -> None:
    values = {
        "target_fp4_fraction": [[1, 0.9], [800, 0.5]],
        "stages": [["a.0", "a.1"], ["a.2"]],
        "ties": "auto",
        "skip_modules": ["*.q_proj"],
        "refresh_every": None,
        "seed": 5,
    }
    expected = SnipConfig.from_dict(values)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "config.json").write_text(json.dumps(values))
    parser = HfArgumentParser(SnipConfig)
    assert parser.parse_dict(values) == (expected,)
    assert parser.parse_yaml_file(tmp_path / "config.yaml") == (expected,)
    assert parser.parse_json_file(tmp_path / "config.json") == (expected,)
    assert parser.parse_dict({"guard": False}) == (SnipConfig(),)  # YAML's off without quotes
    with pytest.raises(ValueError, match=r"Some keys are not used by the HfArgumentParser: \['target'\]"):
        parser.parse_dict(values | {"target": 1})


def test_results_of_to_dict_are_read_again() -> None:
    config = SnipConfig.preset("paper", target_fp4_fraction=((1, 0.9), (800, 0.5)), stages=2)
    assert HfArgumentParser(SnipConfig).parse_dict(config.to_dict()) == (config,)


def test_every_field_has_an_option_with_the_help_of_the_field() -> None:
    help_of = {action.dest: action.help for action in HfArgumentParser(SnipConfig)._actions}
    for field in dataclasses.fields(SnipConfig):
        assert help_of[field.name] == field.metadata["help"]
    assert help_of["stages"].endswith(f"Given as {STAGES}.")
    text = " ".join(HfArgumentParser(SnipConfig).format_help().split())
    assert "--first_refresh FIRST_REFRESH" in text
    assert "Step of the first probe. None means 100," in text and "or none. (default: None)" in text


def test_a_config_is_checked_as_before_after_a_parser_has_read_its_fields() -> None:
    # Parsers write other types into the fields.
    HfArgumentParser(SnipConfig)
    assert SnipConfig(target_fp4_fraction=None, refresh_every=None).refresh_every is None
    with pytest.raises(TypeError, match=r"refresh_every='often' has type str; expected int \| None"):
        SnipConfig(refresh_every="often")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"target_fp4_fraction='0\.5' has type str"):
        SnipConfig(target_fp4_fraction="0.5")  # type: ignore[arg-type]
