"""A model card describes the training and keeps the user's own card."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from configs import fp4_config
from events import counted_event
from tiny_runs import SCHEDULE, train
from torch import nn
from transformers import Trainer

from snip_hf import SnipConfig, keep_model_card
from snip_hf.estimation.coverage import Coverage
from snip_hf.integrations.hub import complete_card, tag_model
from snip_hf.integrations.model_card import completed, model_tags, repository_name, trained_section
from snip_hf.kernels.backend import BACKENDS
from snip_hf.kernels.emulated import EMULATED
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

TAGS = ["snip-hf", "snip-plan", "fp4", "fp8", "mixed-precision-training"]


def plan(
    *formats: str,
    policy: str = "snip",
    target: float | None = 0.5,
    stages: int = 1,
    config: Mapping[str, Any] | None = None,
) -> PrecisionPlan:
    """One layer per format, of equal FLOPs."""
    layers = [f"layers.{index}.mlp" for index in range(len(formats))]
    return PrecisionPlan(
        {layer: dict.fromkeys(GEMMS, name) for layer, name in zip(layers, formats, strict=True)},
        {layer: dict.fromkeys(GEMMS, 2.0) for layer in layers},
        tuple(tuple(layers[stage::stages]) for stage in range(stages)),
        PlanProvenance(step=3, policy=policy, target_fp4_fraction=target, config=config),
    )


def section(of: PrecisionPlan, coverage: Coverage | None = None, device: str | None = None) -> str:
    return trained_section(of, coverage, EMULATED.arithmetic, device)


def push(folder: Path, of: PrecisionPlan, model: nn.Module | None = None) -> nn.Module:
    model = nn.Linear(2, 2) if model is None else model
    tag_model(model, of)
    complete_card(folder, SimpleNamespace(plan=of, coverage=None, backend="emulated", model=model))  # type: ignore[arg-type]
    return model


def metadata(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_the_section_tells_policy_target_share_config_arithmetic_device_and_source() -> None:
    config = SnipConfig(refresh_every=77).to_dict()
    text = section(plan("fp4", "fp4", "fp8", config=config), device="Some GPU [a]")
    rows = dict(re.findall(r"^\| (.+?) \| (.*) \|$", text, re.MULTILINE))
    assert rows["policy"] == "`snip`" and rows["target"] == "at least 50.0% of the linears' FLOPs in FP4"
    assert rows["attained by the plan in force"] == ("66.7% of the linear FLOPs in FP4 (not a reduction of FLOPs)")
    assert rows["formats"] == "FP4 66.7%, FP8 33.3% of the linear FLOPs"
    assert rows["arithmetic"].startswith("emulated: ") and rows["trained on"] == "Some GPU \\[a\\]"
    assert "(at the end: FP4, FP8)" in text and "(https://arxiv.org/abs/2602.01410)" in text
    assert '```json\n{\n  "refresh_every": 77\n}\n```' in text
    assert "ordinary checkpoint" in text and text.endswith("```\n<!-- snip-hf: end -->\n")
    assert not any(word in section(plan("fp4")) for word in ("```json", "trained on", "coverage"))


def test_the_section_of_a_native_run_does_not_speak_of_emulation() -> None:
    text = trained_section(plan("fp4"), None, BACKENDS["hopper"].arithmetic, None)
    assert "FP8 tensor cores" in text and "emulated" not in text


def test_the_section_names_the_smallest_share_among_the_stages() -> None:
    text = section(plan("fp4", "fp4", "fp4", "fp8", stages=2))
    assert "75.0% of the linear FLOPs" in text and "(per stage: 100.0%, 50.0%)" in text


@pytest.mark.parametrize("policy", ["bf16", "uniform-fp8", "uniform-fp4"])
def test_the_section_of_a_policy_that_ignores_the_target_states_none(policy: str) -> None:
    assert "| target | none |" in section(plan("fp8", policy=policy))


def test_the_section_tells_what_the_plan_covers_and_why_the_rest_is_not() -> None:
    assert (
        "| coverage | the plan decides on 40.0% of the model's matmul FLOPs (output head and attention products "
        "aside), which makes 20.0% of all of them in FP4 |\n"
        "| not covered | MoE experts 50.0% (no registered layer kind handles \\[Bank\\]); router 10.0% (router) |\n"
    ) in section(plan("fp4", "fp8"), counted_event().coverage)


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ("<script>alert(1)</script>", "| policy | `<script>alert(1)</script>` |"),
        ("![x](http://a.b/c)", "| policy | `![x](http://a.b/c)` |"),
        ("x" * 4096, f"| policy | `{'x' * 57}...` |"),
    ],
)
def test_a_policy_from_elsewhere_is_code_in_one_cell(policy: str, shown: str) -> None:
    assert shown in section(plan("fp4", policy=policy)).splitlines()


@pytest.mark.parametrize(
    ("formats", "tags"),
    [
        (("fp8", "fp4", "bf16"), TAGS),
        (("fp8", "fp8"), ["snip-hf", "snip-plan", "fp8", "mixed-precision-training"]),
        (("fp4",), ["snip-hf", "snip-plan", "fp4", "mixed-precision-training"]),
        (("bf16",), ["snip-hf", "snip-plan"]),
    ],
)
def test_tags_name_the_formats_of_the_plan_and_no_others(formats: tuple[str, ...], tags: list[str]) -> None:
    assert model_tags(plan(*formats)) == tags


def test_tagging_twice_adds_each_tag_once_and_leaves_the_class_alone() -> None:
    class Tagged(nn.Linear):
        model_tags: Any = None

    Tagged.model_tags = ["of the class"]
    model = Tagged(2, 2)
    tag_model(model, plan("fp8"))
    tag_model(model, plan("fp4", "fp8"))
    assert model.model_tags == ["of the class", "snip-hf", "snip-plan", "fp8", "mixed-precision-training", "fp4"]
    assert Tagged.model_tags == ["of the class"]


def test_a_card_that_the_user_wrote_keeps_its_text_and_metadata(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags:\n- poetry\n---\n\n# Mine\n\nBackslash \\1, über.\n")
    push(tmp_path, plan("fp8"))
    with open(tmp_path / "README.md", "a") as file:
        file.write("\n## Below\n")
    model = push(tmp_path, plan("fp4", "fp8"))
    assert model.model_tags == TAGS
    card = (tmp_path / "README.md").read_text()
    assert metadata(card)["license"] == "mit" and set(metadata(card)["tags"]) == {"poetry", *TAGS}
    assert "# Mine\n\nBackslash \\1, über.\n" in card and card.endswith("\n## Below\n")
    assert card.count("How this model was trained") == 1 and "FP4 50.0%, FP8 50.0%" in card
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.skipif(version("huggingface_hub") < "2", reason="huggingface_hub 1 reads a word as a list of letters")
def test_a_card_whose_tags_are_one_word_keeps_it_beside_ours() -> None:
    assert metadata(completed("---\ntags: poetry\n---\n", "x", ["a"], None))["tags"] == ["poetry", "a"]


def test_the_name_of_the_folder_is_text_in_the_title_of_a_card(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"my_run <b>[x](y)`\xe2\x80\xae\xff")
    folder.mkdir()
    push(folder, plan("fp4"))
    title = "# my_run \\<b\\>\\[x\\](y)\\`\\\\u202e\\\\udcff"
    assert title in (folder / "README.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"---\ntags: [unclosed\n---\n\n# Mine\n", "while parsing a flow sequence"),
        (b"---\ntags: 7\n---\n", "the metadata of README.md cannot be read: 'int' object"),
        (b"---\n- a list\n---\n\n# Mine\n", "metadata block should be a dict"),
        (b"\xff", "invalid start byte"),
    ],
)
def test_a_broken_card_gives_a_warning_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, message: str
) -> None:
    (tmp_path / "README.md").write_bytes(content)
    with caplog.at_level(logging.WARNING, "snip_hf.integrations.hub"):
        push(tmp_path, plan("fp4", "fp8"))
    assert message in caplog.text and (tmp_path / "README.md").read_bytes() == content


def test_a_card_that_the_trainer_creates_without_a_push_has_the_section(tmp_path: Path) -> None:
    class Kept(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            keep_model_card(self)
            self.create_model_card()

    run = train(tmp_path, fp4_config(**SCHEDULE), trainer_class=Kept, max_steps=4)
    assert "How this model was trained" not in (tmp_path / "README.md").read_text()
    run.trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert card.count("How this model was trained") == 1 and set(TAGS) <= set(metadata(card)["tags"])


@pytest.mark.parametrize(("name", "base"), [("org/base", "org/base"), ("", None), ("a b", None), (None, None)])
def test_a_card_names_the_model_that_it_was_made_from(tmp_path: Path, name: Any, base: str | None) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(_name_or_path=name)  # type: ignore[assignment]
    push(tmp_path, plan("fp4"), model)
    assert metadata((tmp_path / "README.md").read_text()).get("base_model") == base


def test_a_folder_is_no_base_model_and_one_that_the_user_named_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert repository_name("runs/mine") is None and repository_name("runs/other") == "runs/other"
    card = completed("---\nbase_model: a/b\n---\n", "x", ["snip-hf"], "c/d")
    assert metadata(card) == {"base_model": "a/b", "tags": ["snip-hf"]}
