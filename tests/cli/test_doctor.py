"""The doctor finds working and failing parts, and ends without a traceback."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import BloomConfig, FalconConfig, Gemma2Config, LlamaConfig, MixtralConfig, PretrainedConfig

from snip_hf.cli import doctor, main
from snip_hf.kernels.backend import BACKENDS
from snip_hf.numerics.formats import FORMATS


def lines(text: str, name: str) -> list[str]:
    """The lines of a section."""
    sections = [part.splitlines() for part in text.split("\n\n")]
    return next([line.strip() for line in section[1:]] for section in sections if section[0].startswith(name))


def test_all_that_is_installed_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("snip-hf ") and text.endswith("\n\nEverything that is installed works.\n")
    assert f"torch {metadata.version('torch')}" in lines(text, "Packages")
    assert "emulated: runs on cpu, an emulation that is slower than BF16" in [
        line.replace("cuda:0, ", "") for line in lines(text, "Devices and backends")
    ]
    assert {line.partition(":")[0] for line in lines(text, "Devices and backends")} >= set(BACKENDS)
    quantized = [name for name, format in FORMATS.items() if format.is_quantized]
    assert [line.partition(":")[0] for line in lines(text, "Formats")] == quantized
    assert [line.partition(":")[0] for line in lines(text, "Solvers")] == ["cbc", "highs"]


def test_a_model_is_examined_from_its_config(tmp_path: Path) -> None:
    MixtralConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=80).save_pretrained(tmp_path)
    problems: list[str] = []
    found = dict(line.partition(": ")[::2] for line in doctor._model(str(tmp_path), {}, None, problems))
    assert problems == []
    assert found["covered"] == (
        "99.7% of the weights in the decoder's products; other weights: model.layers.*.mlp.gate x 2 (router); "
        "embeddings and output head stay as they are"
    )
    assert found["formats"].startswith("mxfp4, fp8-delayed by ")
    assert "from transformers 5.23 on, fsdp_size, dp_replicate_size and ep_size" in found["parallelism, works"]
    refused = found["parallelism, refused with a probe"]
    for advice in ("FSDP 1, Megatron-LM: use FSDP2", "sp_size: use cp_size", "a policy without a probe"):
        assert advice in refused
    # With any policy.
    assert "pp_size" not in refused and found["parallelism, refused"].startswith("pp_size: use fsdp_size, tp_size or")


@pytest.mark.parametrize(
    ("family", "under_others"),
    [
        (LlamaConfig, "probes use sdpa if the model trains under FlashAttention and flex attention"),
        (Gemma2Config, "probes use eager if the model trains under FlashAttention and flex attention"),
        # Its code does not look attention up by name.
        (FalconConfig, "with a probe refused under FlashAttention: use sdpa or eager"),
        (BloomConfig, ""),
    ],
)
def test_the_attention_of_a_probe_under_others_is_told(
    family: type[PretrainedConfig], under_others: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    family(**sizes).save_pretrained(tmp_path)
    found = dict(line.partition(": ")[::2] for line in doctor._model(str(tmp_path), {}, None, []))
    own, _, others = found["attention"].partition("; ")
    assert own in ("sdpa", "eager")  # transformers 5.17 has another one for Gemma 2
    assert others == under_others


def test_a_policy_without_a_probe_has_no_attention_of_a_probe(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64).save_pretrained(tmp_path)
    fields = {"policy": "uniform-fp8-delayed"}
    found = dict(line.partition(": ")[::2] for line in doctor._model(str(tmp_path), fields, None, []))
    assert found["target"] == "none"
    assert found["formats"].startswith("fp8-delayed by ")
    assert found["probes"] == "none, and no solver"
    assert found["attention"] == "sdpa"


def test_an_output_head_takes_part_or_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    fields = {"include_modules": ["lm_head"]}
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    found = dict(line.partition(": ")[::2] for line in doctor._model(str(tmp_path), fields, None, []))
    assert found["covered"].endswith("; other weights: none; embeddings stay as they are")
    LlamaConfig(**sizes, tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be swapped: its weight is that of the input embeddings"):
        list(doctor._model(str(tmp_path), fields, None, []))


@pytest.mark.parametrize(
    ("fields", "quantization", "message"),
    [
        ({"fixed_plan": "missing.json"}, None, r"missing\.json"),
        ({"stages": 2}, None, "the model has 1 blocks"),
        ({"ties": [["q_proj", "k"]]}, None, "no swapped layer's last name is 'k'"),
        ({}, {"quant_method": "gptq", "bits": 4}, "already quantized"),
    ],
)
def test_what_training_would_refuse_is_refused(
    fields: dict[str, Any], quantization: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    if quantization is not None:
        config.quantization_config = quantization
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        list(doctor._model(str(tmp_path), fields, None, []))


@pytest.mark.parametrize(
    ("hidden", "speed"),
    [
        (
            512,
            "not measured below a hidden size of 2048 (yours: 512); BF16 is likely to be faster (one layer of hidden "
            "size 512 on an H200, times BF16's speed: 0.64 with 8,192 tokens)",
        ),
        (
            2560,
            "1.03 to 1.35 times compiled BF16, as measured at 75% in 4 bits (in the default formats on an H200 50% was "
            "up to 3% slower, 0% 2 to 4%) and hidden size 2048 (yours: 2560) on H100s and H200s. Set bf16=True and "
            "torch_compile=True, with at least 6,104 tokens per micro-batch. The host may limit it, especially on an "
            "H100: try torch_compile_mode='reduce-overhead' if all micro-batches have one shape "
            "(docs/troubleshooting.md)",
        ),
        (
            8192,
            "1.42 to 1.53 times compiled BF16, as measured at 75% in 4 bits (in the default formats on an H200 50% was "
            "up to 3% slower, 0% 2 to 4%) and hidden size 4096 (yours: 8192) on H100s and H200s. Set bf16=True and "
            "torch_compile=True, with at least 597 tokens per micro-batch",
        ),
    ],
)
def test_the_speed_is_that_of_the_nearest_model_that_was_measured(hidden: int, speed: str) -> None:
    model = SimpleNamespace(config=LlamaConfig(hidden_size=hidden))
    assert doctor._speed(model, BACKENDS["tensor-scaled"], False) == speed
    assert doctor._speed(model, BACKENDS["blackwell"], False) == "not measured"
    emulated = doctor._speed(model, BACKENDS["emulated"], False)
    assert emulated.startswith("slower than BF16, because the formats are emulated")
    assert emulated.endswith("below a hidden size of 2048 (yours: 512)") is (hidden == 512)


def test_adapters_have_speeds_of_their_own() -> None:
    for hidden, speed in ((2048, "0.96"), (5120, "1.35 to 1.38")):
        model = SimpleNamespace(config=LlamaConfig(hidden_size=hidden))
        found = doctor._speed(model, BACKENDS["tensor-scaled"], True)
        assert found.startswith(f"{speed} times compiled BF16, as measured at 75% in 4 bits and hidden size ")
        assert f"(yours: {hidden}) on an H200. Set bf16=True" in found
        assert doctor._speed(model, BACKENDS["hopper"], True) == "not measured"


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # PEFT's use of transformers
def test_a_model_is_examined_under_other_settings_and_with_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=80
    ).save_pretrained(tmp_path)
    settings = ["--snip", "target_fp4_fraction=0.5", "formats=[nvfp4, mxfp8]", "--lora", "r=2"]
    assert main(["doctor", str(tmp_path), *settings]) == 0
    text = capsys.readouterr().out
    title = f"Model {tmp_path} with SnipConfig(target_fp4_fraction=0.5, formats=['nvfp4', 'mxfp8']) and LoRA"
    found = dict(line.partition(": ")[::2] for line in lines(text, title))
    assert found["target"] == "at least 50.0% of the linears' FLOPs in FP4"
    assert found["formats"].startswith("nvfp4, mxfp8 by ")
    assert found["adapters"].startswith("0.0M parameters; the frozen weights have two GEMMs")
    assert found["covered"].startswith("94.6% of the weights") and "28 matrices of adapters" in found["covered"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--snip", "target=0.5"], 1, "SnipConfig has no field 'target'."),
        (["--snip", "target_fp4_fraction"], 2, "'target_fp4_fraction' is not FIELD=VALUE with a YAML value"),
        (["--lora", "target_modules=["], 2, "'target_modules=[' is not FIELD=VALUE with a YAML value"),
    ],
)
def test_settings_that_cannot_be_read_end_with_a_sentence(
    options: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["doctor", str(tmp_path), *options]) == code
    except SystemExit as stop:
        assert stop.code == code
    assert message in capsys.readouterr().err


def test_settings_without_a_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--lora"]) == 2
    assert "give the model too: snip-hf doctor MODEL." in capsys.readouterr().err


def test_a_model_that_cannot_be_built_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", str(tmp_path)]) == 1
    assert "Cannot build the model" in capsys.readouterr().err


def test_the_folder_of_an_adapter_names_its_base_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    main(["doctor", str(tmp_path)])
    assert "is the folder of an adapter, not of a model. Give its base model, 'some/base'." in capsys.readouterr().err


def test_a_missing_extra_is_no_error_and_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    problems: list[str] = []
    found = [line for line in doctor._extras(problems) if line.startswith("eval: ")]
    assert problems == []
    assert found == [
        "eval: lm-eval not installed, for scores of benchmarks and comparisons of policies, in eval/. "
        'pip install "snip-hf[eval]"'
    ]


def test_packages_that_it_works_with_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SUPPORTED", {"numpy": "numbers", "no-such-package-anywhere": "nothing"})
    assert list(doctor._supported([])) == [
        f"numpy {metadata.version('numpy')}",
        "no-such-package-anywhere: not installed, for nothing",
    ]


def test_a_core_package_that_does_not_load_ends_the_examination(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("snip-hf: pyyaml does not load (ModuleNotFoundError: ")
    assert captured.err.count("\n") == 1
    assert "Extras" not in captured.out


def test_a_section_that_breaks_is_told_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(problems: list[str]):
        yield "first: fine"
        raise RuntimeError("the second one is not")

    monkeypatch.setattr(doctor, "_SECTIONS", {"One": broken, "Extras": doctor._extras})
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert lines(captured.out, "One") == ["first: fine", "does not work: RuntimeError: the second one is not"]
    assert lines(captured.out, "Extras")
    assert captured.err == "snip-hf: RuntimeError: the second one is not\n"


def test_a_kernel_that_fails_its_trial_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS["emulated"]
    monkeypatch.setattr(
        type(backend), "fails", lambda self, format, device: "it is off" if format.name == "fp4" else None
    )
    problems: list[str] = []
    found = list(doctor._formats(problems))
    assert problems == ["emulated: it is off."]
    assert [line for line in found if line in problems] == problems
