"""Real Trainer runs that push to a local HTTP server, plans that are pushed and loaded, and runs read from there.

`huggingface_hub` reads the endpoint when it is imported, so the runs take place in a process of their own that gets the
server's address in `HF_ENDPOINT`, as a user's process would.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pushing_runs
import pytest
import yaml
from hub_server import TOKEN, USER, Hub, Repository
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from transformers import LlamaConfig

from snip_hf import PrecisionPlan, load_plan, push_plan
from snip_hf.cli.plans import empty_model
from snip_hf.integrations import hub as hub_module
from snip_hf.integrations.hub import run_folder
from snip_hf.integrations.model_card import trained_section
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance

TAGS = ["snip-hf", "snip-plan", "fp4", "fp8", "mixed-precision-training"]


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
    for file in ("plan.json", "history.jsonl", "divergence-1.json", "plan.png"):
        assert files[f"snip/{file}"] == (folder / name / "snip" / file).read_bytes()
    for file in ("model.safetensors", "config.json"):
        assert files[file] == (folder / name / file).read_bytes()
    assert json.loads(files["snip/history.jsonl"].splitlines()[-1])["status"] == "applied"
    assert not any("tmp" in path or path.startswith("_") for path in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every-save", "last-checkpoint"])
def test_a_push_during_training_carries_card_section_and_tags(pushed: Any, name: str) -> None:
    message, files = repository(pushed[0], name).commits[0]
    assert message == "Training in progress, step 2"
    assert metadata(files["README.md"])["tags"] == TAGS
    assert files["README.md"].count(b"How this model was trained") == 1


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
    card = repository(pushed[0], "kept-card").files["README.md"]
    assert set(metadata(card)["tags"]) == {*TAGS, "generated_from_trainer"}
    assert b"### Training hyperparameters" in card
    assert card.count(b"How this model was trained") == 1 and b"| arithmetic | emulated: " in card


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


# --- plans

NAME = f"{USER}/plans"
BASE = "org/base-1b"


def make_plan(low: str = "fp4", model_name: str | None = BASE) -> PrecisionPlan:
    formats = {"layers.0.mlp": low, "layers.1.mlp": "fp8"}
    return PrecisionPlan(
        {layer: dict.fromkeys(GEMMS, name) for layer, name in formats.items()},
        {layer: dict.fromkeys(GEMMS, 2.0) for layer in formats},
        (tuple(formats),),
        PlanProvenance(step=7, policy="snip", target_fp4_fraction=0.5, model_name=model_name),
    )


@pytest.fixture
def apart_from_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client neither takes the machine's cache, nor a proxy, nor that it is offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


@pytest.fixture
def hub(apart_from_the_machine: None) -> Iterator[Hub]:
    with Hub.running() as hub:
        yield hub
        assert hub.unknown == []


def client(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


def card_of(hub: Hub, name: str = NAME) -> tuple[dict[str, Any], str]:
    """(metadata, text)"""
    _, metadata, text = hub.repositories[name].files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_pushed_plan_is_the_one_that_is_loaded(hub: Hub) -> None:
    plan = make_plan()
    url = push_plan(plan, NAME, api=client(hub))
    assert url.startswith(f"{hub.url}/{NAME}/commit/")
    assert load_plan(NAME, api=client(hub)) == plan
    assert [message for message, _ in hub.repositories[NAME].commits] == ["Plan of step 7 by snip-hf"]
    assert set(hub.repositories[NAME].files) == {"README.md", "snip/plan.json"}


def test_a_plan_is_found_by_its_tag_and_by_the_model_that_it_is_for(hub: Hub) -> None:
    push_plan(make_plan(), NAME, api=client(hub))
    push_plan(make_plan("nvfp4", model_name=None), f"{USER}/others", api=client(hub), base_model="org/other")
    client(hub).create_repo(f"{USER}/empty")

    def found(*tags: str) -> list[str]:
        return [model.id for model in client(hub).list_models(filter=list(tags))]

    assert found("snip-plan") == [f"{USER}/others", NAME]
    assert found("snip-plan", f"base_model:{BASE}") == [NAME]
    assert found("snip-plan", "nvfp4") == [f"{USER}/others"]
    assert len(found()) == 3


def test_the_card_says_what_the_plan_is_for_and_how_it_is_used(hub: Hub) -> None:
    push_plan(make_plan(), NAME, api=client(hub))
    metadata, text = card_of(hub)
    assert metadata == {
        "library_name": "snip-hf",
        "base_model": BASE,
        "tags": ["snip-hf", "snip-plan", "fp4", "fp8", "mixed-precision-training"],
    }
    assert text.startswith("\n# plans\n") and f"| for the model | {BASE} |" in text
    assert "| layers | 2 |" in text and "| formats | FP4 50.0%, FP8 50.0% of the linear FLOPs |" in text
    assert f'load_plan("{NAME}").save("plan.json")' in text and "@article{pan2026snip," in text


def test_a_second_push_replaces_its_section_and_keeps_the_rest_of_the_card(hub: Hub) -> None:
    push_plan(make_plan(), NAME, api=client(hub))
    files = hub.repositories[NAME].files
    files["README.md"] = files["README.md"].replace(b"tags:\n", b"license: mit\ntags:\n- mine\n") + b"\nMy own words.\n"
    push_plan(make_plan("nvfp4"), NAME, api=client(hub))
    metadata, text = card_of(hub)
    assert metadata["license"] == "mit" and {"mine", "fp4", "nvfp4"} <= set(metadata["tags"])
    assert text.endswith("\nMy own words.\n") and text.count("## Precision plan") == 1
    assert "| formats | NVFP4 50.0%, FP8 50.0% of the linear FLOPs |" in text


def test_a_plan_is_pushed_from_a_file_or_the_folder_of_a_run(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "run" / "snip").mkdir(parents=True)
    make_plan().save(tmp_path / "run" / "snip" / "plan.json")
    for source in (tmp_path / "run", str(tmp_path / "run" / "snip" / "plan.json")):
        push_plan(source, NAME, api=client(hub))
        assert load_plan(NAME, api=client(hub)) == make_plan()


@pytest.mark.parametrize("inside", ["", "snip", "snip/plan.json"])
def test_a_plan_is_loaded_from_a_run_its_folder_or_its_file_without_the_hub(tmp_path: Path, inside: str) -> None:
    (tmp_path / "run" / "snip").mkdir(parents=True)
    make_plan().save(tmp_path / "run" / "snip" / "plan.json")
    assert load_plan(tmp_path / "run" / inside) == make_plan()


def test_a_model_name_that_is_a_folder_is_no_base_model(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "base-1b").mkdir(parents=True)
    push_plan(make_plan(), NAME, api=client(hub))
    assert "base_model" not in card_of(hub)[0]


def test_a_run_s_section_stays_beside_the_plan_s(hub: Hub) -> None:
    client(hub).create_repo(NAME)
    run = trained_section(make_plan("nvfp4"), None, "emulated", None)
    hub.repositories[NAME].files["README.md"] = f"---\ntags: [snip-hf]\n---\n# Model\n\n{run}".encode()
    for _ in range(2):
        push_plan(make_plan(), NAME, api=client(hub))
    assert run.strip() in card_of(hub)[1] and card_of(hub)[1].count("## Precision plan") == 1


def test_a_repository_without_a_plan_is_refused_with_the_files_looked_for(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has neither snip/plan\.json nor plan\.json; expected the output"):
        load_plan(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist and cannot be the name of a repository"):
        load_plan(tmp_path / "a" / "b" / "c")
    with pytest.raises(FileNotFoundError, match=r"plna\.json does not exist and cannot be the name"):
        load_plan("plna.json", api=client(hub))
    client(hub).create_repo(NAME)
    for name in (NAME, "org/none"):
        with pytest.raises(FileNotFoundError, match=f"There is no folder '{name}' here, and snip/plan.json of a repos"):
            load_plan(name, api=client(hub))
    hub.repositories[NAME].files["snip/plan.json"] = b'{"kind": "of tomorrow"}'
    with pytest.raises(ValueError, match=r"plan\.json cannot be used as a precision plan: kind is 'of tomorrow'"):
        load_plan(NAME, api=client(hub))


def test_a_hub_that_refuses_says_so_and_a_card_without_readable_metadata_is_left(hub: Hub) -> None:
    hub.read_only.add(NAME)
    with pytest.raises(HfHubHTTPError, match="read-only now"):
        push_plan(make_plan(), NAME, api=client(hub))
    hub.read_only.clear()
    hub.repositories[NAME].files["README.md"] = b"---\ntags: 7\n---\n"
    with pytest.raises(ValueError, match=r"the metadata of README\.md cannot be read"):
        push_plan(make_plan(), NAME, api=client(hub))
    assert hub.repositories[NAME].files == {"README.md": b"---\ntags: 7\n---\n"}


def test_the_hub_s_revision_is_asked_for(hub: Hub) -> None:
    push_plan(make_plan(), NAME, api=client(hub))
    load_plan(NAME, revision="v1", api=client(hub))
    assert any(re.search(r"/resolve/v1/snip/plan.json$", request) for request in hub.requests)


# --- runs


def test_a_folder_is_preferred_to_a_repository_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_module, "snapshot_download", None)
    Path("runs/one").mkdir(parents=True)
    for name in ("runs/one", str(tmp_path / "none"), "one", "a/b/c", "./one"):
        assert run_folder(name) == Path(name)


@pytest.mark.parametrize(
    ("name", "asked"), [("someone/model", ("someone/model", None)), ("someone/model@v1.0", ("someone/model", "v1.0"))]
)
def test_a_repository_is_downloaded_at_its_revision(
    name: str, asked: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repository, revision) == asked and "snip/history.jsonl" in allow_patterns
        return str(tmp_path / "snapshot")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_module, "snapshot_download", snapshot)
    assert run_folder(name) == tmp_path / "snapshot"


def test_a_name_that_is_neither_a_folder_nor_a_repository_is_reported_as_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(*args: Any, **kwargs: Any) -> str:
        raise RuntimeError("404: there is none")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_module, "snapshot_download", snapshot)
    with pytest.raises(FileNotFoundError) as caught:
        run_folder("runs/misspelt")
    assert str(caught.value) == (
        "There is no folder runs/misspelt here, and no run can be read from a Hub repository of this name: "
        "404: there is none"
    )


# --- models given to the command line


def endpoint_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends the client to a server, and fails if it waits to try again."""

    def sleep(seconds: float) -> None:
        raise AssertionError("retried")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def test_a_misspelt_model_is_refused_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint_at(hub.url, monkeypatch)
    with pytest.raises(
        ValueError, match=r"^Cannot build the model 'org/misspelt' from its config: .*not a valid model"
    ):
        empty_model("org/misspelt")


def test_a_model_is_built_from_its_config_on_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint_at(hub.url, monkeypatch)
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=32)
    hub.repositories[BASE] = Repository({"config.json": config.to_json_string().encode()}, [("first", {})])
    assert empty_model(BASE).config.hidden_size == 64
