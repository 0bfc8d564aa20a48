"""Plans that are pushed to a local Hub, found by their tags, and read back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from hub_server import TOKEN, USER, Hub
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from snip_hf import PrecisionPlan, load_plan, push_plan
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance

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


@pytest.fixture(autouse=True)
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
def hub() -> Iterator[Hub]:
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
    run = "<!-- snip-hf: this section is written anew at every push -->\nof a run\n<!-- snip-hf: end -->\n"
    hub.repositories[NAME].files["README.md"] = f"---\ntags: [snip-hf]\n---\n# Model\n\n{run}".encode()
    push_plan(make_plan(), NAME, api=client(hub))
    assert run.strip() in card_of(hub)[1] and "## Precision plan" in card_of(hub)[1]


def test_what_is_no_plan_is_refused_with_what_was_looked_for(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has neither snip/plan\.json nor plan\.json; expected the output"):
        load_plan(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist, and is no name of a repository"):
        load_plan(tmp_path / "a" / "b" / "c")
    client(hub).create_repo(NAME)
    with pytest.raises(FileNotFoundError, match=rf"The repository '{NAME}' has no snip/plan\.json"):
        load_plan(NAME, api=client(hub))
    with pytest.raises(FileNotFoundError, match=r"There is no folder 'org/none' here, and no repository of this name"):
        load_plan("org/none", api=client(hub))
    hub.repositories[NAME].files["snip/plan.json"] = b'{"kind": "of tomorrow"}'
    with pytest.raises(ValueError, match=r"plan\.json is not a usable precision plan: kind is 'of tomorrow'"):
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
