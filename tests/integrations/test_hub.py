"""The model card in itself, and real Trainer runs that push to a local HTTP server.

`huggingface_hub` reads the endpoint when it is imported, so the runs take place in a process of their own that gets the
server's address in `HF_ENDPOINT`, as a user's process would.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pushing_runs
import pytest
import yaml
from events import counted_event, refresh_event, start_event
from hub_server import TOKEN, USER, Hub, Repository
from tiny_runs import SCHEDULE, train
from torch import nn
from transformers import Trainer

from snip_hf import SnipConfig, keep_model_card
from snip_hf.integrations.card_text import repository_name, with_metadata
from snip_hf.integrations.hub import prepare_push, tag_model
from snip_hf.integrations.model_card import (
    Training,
    draw_figures,
    model_card_section,
    model_tags,
    with_figures_from_the_top,
)
from snip_hf.kernels.emulated import EMULATED
from snip_hf.kernels.hopper.backend import HOPPER
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
from snip_hf.records.events import Event

TAGS = ["snip-hf", "snip-plan", "fp4", "fp8", "mixed-precision-training"]
START = start_event()
APPLIED = refresh_event(2, applied_step=4, reason=None)
KEPT = refresh_event(6)


def plan(*formats: str, policy: str = "snip", target: float | None = 0.5, stages: int = 1) -> PrecisionPlan:
    """One layer per format, of equal FLOPs."""
    layers = [f"layers.{index}.mlp" for index in range(len(formats))]
    return PrecisionPlan(
        {layer: dict.fromkeys(GEMMS, name) for layer, name in zip(layers, formats, strict=True)},
        {layer: dict.fromkeys(GEMMS, 2.0) for layer in layers},
        tuple(tuple(layers[stage::stages]) for stage in range(stages)),
        PlanProvenance(step=3, policy=policy, target_fp4_fraction=target),
    )


def write_run(output_dir: Path, plan: PrecisionPlan, *events: Event) -> None:
    folder = output_dir / "snip"
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    (folder / "history.jsonl").write_text("".join(json.dumps(event.to_record()) + "\n" for event in events))


def metadata(card: bytes | str) -> dict[str, Any]:
    text = card.decode() if isinstance(card, bytes) else card
    return yaml.safe_load(text.split("---\n")[1])


def in_other_process(folder: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "hf-home"),
        # The server speaks Git LFS, not Xet.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, pushing_runs.__file__, str(folder)]
    return subprocess.run(command, env=kept | settings, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Path, dict[str, Any]]]:
    """(the server after all runs, the folder that holds their output folders, what the process printed last)."""
    folder = tmp_path_factory.mktemp("pushed")
    with Hub.running() as hub:
        hub.read_only.add(f"{USER}/read-only")
        result = in_other_process(folder, hub.url)
        assert result.returncode == 0, result.stderr
        yield hub, folder, json.loads(result.stdout.splitlines()[-1])


def repository(hub: Hub, name: str) -> Repository:
    return hub.repositories[f"{USER}/{name}"]


@pytest.mark.slow
def test_the_client_asked_the_server_nothing_that_it_does_not_know(pushed: Any) -> None:
    hub = pushed[0]
    assert hub.unknown == []
    assert any(request.startswith("PUT /lfs/") for request in hub.requests)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every-save", "last-checkpoint", "at-the-end", "kept-card"])
def test_plan_history_divergences_and_figures_travel_with_the_model(pushed: Any, name: str) -> None:
    hub, folder, _ = pushed
    files = repository(hub, name).files
    for file in ("plan.json", "history.jsonl", "divergence-1.json", "plan.png", "README.md"):
        assert files[f"snip/{file}"] == (folder / name / "snip" / file).read_bytes()
    for file in ("model.safetensors", "config.json"):
        assert files[file] == (folder / name / file).read_bytes()
    assert json.loads(files["snip/history.jsonl"].splitlines()[-1])["status"] == "applied"
    assert not any("tmp" in path or path.startswith("_") for path in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every-save", "last-checkpoint"])
def test_a_push_during_training_carries_card_section_and_tags(pushed: Any, name: str) -> None:
    hub, folder, _ = pushed
    message, files = repository(hub, name).commits[0]
    assert message == "Training in progress, step 2"
    assert metadata(files["README.md"])["tags"] == TAGS
    assert b"1 applied of 1" in files["README.md"]
    assert (folder / name / "snip" / "README.md").read_bytes().strip() in files["README.md"]


@pytest.mark.slow
def test_a_pushed_checkpoint_is_the_one_on_disk_with_the_state_to_resume_from(pushed: Any) -> None:
    hub, folder, _ = pushed
    files = repository(hub, "last-checkpoint").files
    local = sorted((folder / "last-checkpoint" / "checkpoint-2").iterdir())
    assert "snip_state.json" in [path.name for path in local]
    for path in local:
        assert files[f"last-checkpoint/{path.name}"] == path.read_bytes()


@pytest.mark.slow
def test_the_trainer_keeps_our_tags_but_not_our_section_in_its_own_card(pushed: Any) -> None:
    # Fails when transformers gets an event after create_model_card: then keep_model_card is no longer needed.
    card = repository(pushed[0], "at-the-end").files["README.md"]
    assert set(metadata(card)["tags"]) == {*TAGS, "generated_from_trainer", "mine"}
    assert b"How this model was trained" not in card


@pytest.mark.slow
def test_a_kept_model_card_has_the_trainers_text_and_our_section_once(pushed: Any) -> None:
    hub, folder, _ = pushed
    card = repository(hub, "kept-card").files["README.md"]
    assert set(metadata(card)["tags"]) == {*TAGS, "generated_from_trainer"}
    assert b"### Training hyperparameters" in card
    assert card.count(b"How this model was trained") == 1
    section = (folder / "kept-card" / "snip" / "README.md").read_text().strip()
    assert card.count(with_figures_from_the_top(section).encode()) == 1
    for figure in ("plan.png", "divergence.png"):
        assert f"]({figure})" in section and f"](snip/{figure})".encode() in card
        assert repository(hub, "kept-card").files[f"snip/{figure}"].startswith(b"\x89PNG")
    assert re.search(rb"\| speed of the training \| [\d.,]+ steps and [\d.,]+ samples per second, in [\d.]+ s", card)
    assert re.search(rb"\| time for refreshes \| [\d.]+ s in probes, [\d.]+ s waiting for the solver \|", card)


@pytest.mark.slow
def test_the_pushed_checkpoint_is_an_ordinary_one(pushed: Any) -> None:
    # The other process loaded it from the server with `from_pretrained`.
    assert pushed[2]["same weights"] is True


@pytest.mark.slow
def test_a_hub_that_refuses_the_push_lets_training_end_and_a_push_by_hand_says_so(pushed: Any) -> None:
    hub, folder, printed = pushed
    assert printed["refused at step"] == 2
    assert "The repository is read-only now." in printed["error"]
    assert repository(hub, "read-only").files == {}
    assert (folder / "read-only" / "snip" / "plan.json").exists()
    assert (folder / "read-only" / "model.safetensors").exists()


@pytest.mark.slow
def test_an_unreachable_hub_stops_the_run_before_the_first_step(tmp_path: Path) -> None:
    with socket.socket() as silent:
        # Bound, so that nobody else gets the port, and not listening, so that every connection is refused.
        silent.bind(("127.0.0.1", 0))
        result = in_other_process(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert result.returncode != 0
    assert "ConnectError" in result.stderr
    assert list(tmp_path.rglob("plan.json")) == []


def test_section_tells_policy_target_share_refreshes_arithmetic_and_source() -> None:
    history = [START, APPLIED, KEPT, APPLIED]
    text = model_card_section(plan("fp4", "fp4", "fp8"), history, Training(arithmetic=EMULATED.arithmetic))
    assert "| policy | `snip` |" in text
    assert "| target | at least 50.0% of the linear FLOPs in FP4 |" in text
    assert "| 66.7% of the linear FLOPs in FP4 (not a reduction of FLOPs) |" in text
    assert "| refreshes of the plan | 2 applied of 3 |" in text
    assert "| arithmetic | emulated: " in text
    assert "(at the end: FP4, FP8)" in text
    assert "(https://arxiv.org/abs/2602.01410)" in text
    assert "ordinary checkpoint" in text


def test_section_of_a_native_run_does_not_speak_of_emulation() -> None:
    text = model_card_section(plan("fp4"), [], Training(arithmetic=HOPPER.arithmetic))
    assert "FP8 tensor cores" in text and "emulated" not in text


def test_section_names_the_smallest_share_among_the_stages() -> None:
    text = model_card_section(plan("fp4", "fp4", "fp4", "fp8", stages=2), [], Training(arithmetic=EMULATED.arithmetic))
    assert "75.0% of the linear FLOPs" in text and "50.0% or more in each of 2 stages" in text


@pytest.mark.parametrize("policy", ["bf16", "uniform-fp8", "uniform-fp4"])
def test_section_of_a_policy_that_ignores_the_target_states_none(policy: str) -> None:
    assert "| target | none |" in model_card_section(
        plan("fp8", policy=policy), [], Training(arithmetic=EMULATED.arithmetic)
    )


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
    assert list(model.state_dict()) == ["weight", "bias"]


def test_a_card_that_the_user_wrote_keeps_its_text_and_metadata(tmp_path: Path) -> None:
    write_run(tmp_path, plan("fp4", "fp8"), START)
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags:\n- poetry\n---\n\n# Mine\n\nBackslash \\1, über.\n")
    model = nn.Linear(2, 2)
    for _ in range(2):
        prepare_push(tmp_path, model, Training(arithmetic=EMULATED.arithmetic))
    assert model.model_tags == TAGS
    card = (tmp_path / "README.md").read_text()
    assert metadata(card) == {"license": "mit", "tags": ["poetry", *TAGS]}
    assert "# Mine\n\nBackslash \\1, über.\n" in card
    assert card.count("How this model was trained") == 1


def test_text_below_the_section_stays_where_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, plan("fp4", "fp8"), START)
    prepare_push(tmp_path, nn.Linear(2, 2), Training(arithmetic=EMULATED.arithmetic))
    with open(tmp_path / "README.md", "a") as file:
        file.write("\n## Below\n")
    write_run(tmp_path, plan("fp4", "fp8"), START, APPLIED)
    prepare_push(tmp_path, nn.Linear(2, 2), Training(arithmetic=EMULATED.arithmetic))
    card = (tmp_path / "README.md").read_text()
    assert card.endswith("\n## Below\n") and "1 applied of 1" in card and "0 applied of 0" not in card


def test_a_card_that_the_trainer_creates_without_a_push_has_the_section(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Kept(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            keep_model_card(self)
            self.create_model_card()

    run = train(tmp_path, SnipConfig(**SCHEDULE), trainer_class=Kept, max_steps=4)
    (warning,) = [text for text in caplog.messages if "model card" in text]
    assert warning == (
        "The model card does not say, or no longer, how the model was trained: "
        f"{tmp_path / 'snip' / 'README.md'} does not exist. A run with a SnipCallback writes it, when it pushes or "
        "after it has trained."
    )
    assert "How this model was trained" not in (tmp_path / "README.md").read_text()
    run.trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert card.count("How this model was trained") == 1 and "1 applied of 1" in card
    assert set(TAGS) <= set(metadata(card)["tags"])


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ("<script>alert(1)</script>", "| policy | `<script>alert(1)</script>` |"),
        ("a`|<b>| x |`", "| policy | `a<b> x ` |"),
        ("![x](http://a.b/c)", "| policy | `![x](http://a.b/c)` |"),
        ("x" * 4096, f"| policy | `{'x' * 57}...` |"),
    ],
)
def test_a_policy_from_elsewhere_is_code_in_one_cell_of_the_card(policy: str, shown: str) -> None:
    assert (
        shown
        in model_card_section(plan("fp4", policy=policy), [], Training(arithmetic=EMULATED.arithmetic)).splitlines()
    )


def test_the_name_of_the_folder_is_text_in_the_title_of_a_card(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"my_run <b>[x](y)`\xe2\x80\xae\xff")
    write_run(folder, plan("fp4"), START)
    prepare_push(folder, nn.Linear(2, 2), Training(arithmetic=EMULATED.arithmetic))
    title = "# my_run \\<b\\>\\[x\\](y)\\`\\\\u202e\\\\udcff"
    assert title in (folder / "README.md").read_text().splitlines()


@pytest.mark.parametrize("name", ["README.md", "snip/README.md", "snip/history.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "too large"])
def test_what_is_no_card_or_no_history_gives_a_warning_and_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, kind: str
) -> None:
    write_run(tmp_path, plan("fp4"), START)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 2**40)
    with caplog.at_level(logging.WARNING, "snip_hf.integrations.hub"):
        prepare_push(tmp_path, nn.Linear(2, 2), Training(arithmetic=EMULATED.arithmetic))
    # Our own text is written anew.
    assert len(caplog.messages) == (name != "snip/README.md")


def test_a_card_whose_tags_are_one_word_keeps_it_beside_ours(tmp_path: Path) -> None:
    write_run(tmp_path, plan("fp4"), START)
    (tmp_path / "README.md").write_text("---\ntags: poetry\n---\n")
    prepare_push(tmp_path, nn.Linear(2, 2), Training(arithmetic=EMULATED.arithmetic))
    assert metadata((tmp_path / "README.md").read_text())["tags"] == ["poetry", *model_tags(plan("fp4"))]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("snip/plan.json", '{"kind": ', "plan.json is not a usable precision plan"),
        ("snip/history.jsonl", json.dumps(START.to_record()) + '\n{"event": "ref', "history: it is not valid JSON"),
        ("snip/history.jsonl", json.dumps(START.to_record()) + "\n[1]\n", "Line 2 of"),
        ("README.md", "---\ntags: [unclosed\n---\n\n# Mine\n", "while parsing a flow sequence"),
        ("README.md", "---\ntags: 7\n---\n", "the metadata of README.md cannot be read: 'int' object"),
        ("README.md", "---\n- a list\n---\n\n# Mine\n", "metadata block should be a dict"),
    ],
)
def test_a_broken_file_gives_a_warning_and_leaves_the_card(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, content: str, message: str
) -> None:
    write_run(tmp_path, plan("fp4", "fp8"), START)
    (tmp_path / "README.md").write_text("# Mine\n")
    (tmp_path / file).write_text(content)
    card = (tmp_path / "README.md").read_text()
    with caplog.at_level(logging.WARNING, "snip_hf.integrations.hub"):
        prepare_push(tmp_path, nn.Linear(2, 2), Training(arithmetic=EMULATED.arithmetic))
    assert message in caplog.text
    assert (tmp_path / "README.md").read_text() == card


def test_the_section_says_what_the_plan_covers_and_why_the_rest_is_not() -> None:
    section = model_card_section(plan("fp4", "fp8"), [START, counted_event()], Training(arithmetic="emulated"))
    assert (
        "| coverage | the plan decides on 40.0% of the model's matmul FLOPs (output head and attention products "
        "aside), which makes 20.0% of all of them in FP4 |\n"
        "| not covered | MoE experts 50.0% (no layer kind takes a \\[Bank\\]); router 10.0% (router) |\n"
    ) in section
    assert "coverage" not in model_card_section(plan("fp4"), [START], Training(arithmetic="emulated"))


def test_the_section_has_formats_speed_device_figures_and_citation() -> None:
    log = [{"loss": 1.0}, {"train_runtime": 12.5, "train_steps_per_second": 8, "train_samples_per_second": 32000.4}, {}]
    training = Training(arithmetic="emulated", device="Some GPU [a]", figures=("losses.png", "plan.png"), log=log)
    timed = replace(APPLIED, seconds={"probe": 1.5, "solver": 0.5, "waited": 0.25})
    section = model_card_section(plan("fp4", "fp4", "fp8"), [START, timed, timed], training)
    rows = dict(re.findall(r"^\| (.+?) \| (.*) \|$", section, re.MULTILINE))
    assert rows["formats"] == "FP4 66.7%, FP8 33.3% of the linear FLOPs"
    assert rows["speed of the training"] == "8 steps and 32,000 samples per second, in 12.5 s with refreshes"
    assert rows["trained on"] == "Some GPU \\[a\\]"
    assert rows["time for refreshes"] == "3.0 s in probes, 0.5 s waiting for the solver"
    figures = re.findall(r"^!\[(.*)\]\((.*)\)$", section, re.MULTILINE)
    assert [name for _, name in figures] == ["plan.png", "losses.png"] and all(text for text, _ in figures)
    assert "```bibtex\n@article{pan2026snip,\n" in section and section.endswith("```\n<!-- snip-hf: end -->\n")


def test_a_training_without_a_recorded_speed_has_no_such_row() -> None:
    section = model_card_section(plan("fp4"), [START], Training(arithmetic="emulated", log=[{"loss": 1.0}]))
    assert not any(word in section for word in ("speed of", "time for refreshes", "trained on", "!["))


def test_figures_are_drawn_once_for_a_record_that_does_not_change(tmp_path: Path) -> None:
    write_run(tmp_path, START.plan, START)
    assert draw_figures(tmp_path) == ["plan.png"]
    before = (tmp_path / "snip" / "plan.png").stat().st_mtime_ns
    assert draw_figures(tmp_path) == ["plan.png"]
    assert (tmp_path / "snip" / "plan.png").stat().st_mtime_ns == before
    os.utime(tmp_path / "snip" / "history.jsonl", ns=(before + 10**9, before + 10**9))
    assert draw_figures(tmp_path) == ["plan.png"]
    assert (tmp_path / "snip" / "plan.png").stat().st_mtime_ns != before


def test_a_broken_record_costs_the_figures_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, plan("fp4"), START)
    (tmp_path / "snip" / "history.jsonl").write_text("[")
    assert draw_figures(tmp_path) == []
    assert caplog.messages[0].startswith("The model card has no figures: ")


@pytest.mark.parametrize(("name", "base"), [("org/base", "org/base"), ("", None), ("a b", None), (None, None)])
def test_a_card_names_the_model_that_it_was_made_from(tmp_path: Path, name: Any, base: str | None) -> None:
    write_run(tmp_path, plan("fp4", "fp8"), START)
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(_name_or_path=name)  # type: ignore[assignment]
    prepare_push(tmp_path, model, Training(arithmetic="emulated"))
    assert metadata((tmp_path / "README.md").read_text()).get("base_model") == base


def test_a_folder_is_no_base_model_and_one_that_the_user_named_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert repository_name("runs/mine") is None and repository_name("runs/other") == "runs/other"
    card = with_metadata("---\nbase_model: a/b\n---\n", ["snip-hf"], "c/d")
    assert metadata(card) == {"base_model": "a/b", "tags": ["snip-hf"]}
