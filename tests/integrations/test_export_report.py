"""Does `snip-hf export` write what it says, refuse what it must, and say what it changed?"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from llama_plans import BLOCK, llama, make_plan
from transformers import AutoModelForCausalLM

from snip_hf.cli import main
from snip_hf.integrations.export_names import NAMES
from snip_hf.integrations.export_targets import TARGETS


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "model")
    make_plan("nvfp4", b0_q_proj="mxfp8").save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_export_refuses_with_exit_code_1_and_a_list_and_writes_nothing(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = plan_path.with_name("precision.yaml")
    assert main(["export", str(plan_path), "--to", "megatron", "-o", str(output)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0].startswith("  decoder.layers.0.self_attention.linear_qkv: its parts differ")
    assert captured.err.splitlines()[1] == (
        "snip-hf: The target 'megatron' cannot express the plan: it lacks the above for 1 modules. "
        "--nearest rounds what it can."
    )
    assert not output.exists()


def test_export_writes_the_nearest_plan_and_says_what_it_changed(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = plan_path.with_name("precision.yaml")
    command = ["export", str(plan_path), "--to", "megatron", "--nearest", "-o", str(output)]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"Written: {output}",
        "FP4 share 0.9500 in the plan, 1.0000 in the file. 1 of 14 layers were changed; 0.0500 of the FLOPs have "
        "an operand of fewer bits than in the plan:",
        f"  {BLOCK}.0.self_attn.q_proj: forward mxfp8 -> nvfp4, grad_input mxfp8 -> nvfp4, grad_weight mxfp8 -> nvfp4",
    ]
    text = output.read_text()
    assert main(command) == 2
    assert "exists already; give another --output, or --overwrite." in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert output.read_text() == text


def test_export_prints_the_file_alone_to_stdout(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(plan_path.with_name("model"))
    assert main(["export", str(plan_path), "--to", "fouroversix", "--nearest", "--model", model]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["modules_to_not_convert"] == ["lm_head", f"{BLOCK}.0.self_attn.q_proj"]
    assert "The plan fits" in captured.err
    assert main(["export", str(plan_path), "--to", "fouroversix", "--nearest"]) == 0
    assert "are not known without --model" in capsys.readouterr().err


def test_sizes_that_torchao_cannot_convert_are_refused_with_every_layer_or_left_in_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = llama(intermediate_size=192, num_hidden_layers=1)
    config.save_pretrained(tmp_path / "model")
    plan = make_plan("nvfp4", config, b0_down_proj="mxfp8")  # 192 is a multiple of 32, not of 128
    plan.save(tmp_path / "plan.json")
    output = tmp_path / "precision.py"
    command = ["export", str(tmp_path / "plan.json"), "--to", "torchao", "-o", str(output)]
    with_model = [*command, "--model", str(tmp_path / "model")]
    why = "its in- and out-features are 128 and 192, expected multiples of 128 for nvfp4"
    unfit = [f"  {BLOCK}.0.mlp.{part}_proj: {why}" for part in ("gate", "up")]
    assert main(with_model) == 1
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == unfit
    assert "lacks the above for 2 modules. --nearest rounds what it can." in last
    assert not output.exists()
    assert main([*with_model, "--nearest"]) == 0
    out = capsys.readouterr().out.splitlines()
    share = 2 * 192 / (3 * 192 + 4 * 128)
    said = f"2 layers stay in bf16, {share:.4f} of the FLOPs, because torchao cannot convert them:"
    assert out[out.index(said) :][1:3] == unfit
    model = AutoModelForCausalLM.from_config(config)
    functions = runpy.run_path(str(output))
    modules = dict(model.named_modules())
    for how, names in functions["LAYERS"].items():
        multiple, _ = functions["LIMITS"][how]
        sizes = [size for name in names for size in modules[name].weight.shape]
        assert all(size % multiple == 0 for size in sizes)
    assert sum(len(names) for names in functions["LAYERS"].values()) == 5
    assert main([*command, "--overwrite"]) == 0
    assert "Sizes of the layers are not known without --model: `convert` in the file" in capsys.readouterr().out
    assert "Sizes are checked there: it raises ValueError" in output.read_text()


def test_export_refuses_another_model(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(num_hidden_layers=1).save_pretrained(plan_path.with_name("other"))
    output = plan_path.with_name("script.py")
    other = ["--model", str(plan_path.with_name("other"))]
    assert main(["export", str(plan_path), "--to", "torchao", "-o", str(output), *other]) == 1
    assert "7 layers are in the plan but not in" in capsys.readouterr().out
    assert not output.exists()


def test_an_unknown_target_is_refused(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(plan_path), "--to", "vllm"])
    message = capsys.readouterr().err
    assert list(NAMES) == [*TARGETS, "checkpoint"]
    assert all(name in message for name in NAMES)


def test_a_format_that_is_not_known_here_is_refused(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_path.write_text(plan_path.read_text().replace("nvfp4", "nvfp3"))
    assert main(["export", str(plan_path), "--to", "megatron"]) == 2
    assert "Unknown format 'nvfp3'" in capsys.readouterr().err
