"""Does a page hold all that the terminal shows, load nothing, and run nothing that a file brought along?"""

from __future__ import annotations

import json
import re
from pathlib import Path

from configs import fp4_config
from pages import Page, hash_of
from written_runs import random_assignments, write_divergence, write_losses, write_run

from snip_hf import SnipConfig
from snip_hf.records.load import load_run
from snip_hf.reporting.page import blocks, config_code, page, write_page
from snip_hf.reporting.run_report import run_contents

HOSTILE = "model.layers.0.</script><img src=x onerror=alert(1)>&amp;\u202e"


def full_run(folder: Path) -> None:
    """A run that has every kind of data that one stage can have."""
    assignments = random_assignments(4)
    write_run(folder, assignments, kept=(2,))
    write_losses(folder / "trainer_state.json", 400)
    for step in (100, 300):
        write_divergence(folder, step, {(layer, "layer"): (0.1, 0.2) for layer in assignments[0]})


def images(found: Page) -> list[str]:
    """The files whose figures a page shows."""
    shown = [attributes for tag, attributes in found.elements if tag == "img"]
    assert all(str(one["src"]).startswith("data:image/png;base64,iVBORw0KGgo") for one in shown)
    return [str(one["alt"]) for one in shown]


def test_a_page_loads_nothing_runs_nothing_and_allows_its_own_style_alone(tmp_path: Path) -> None:
    full_run(tmp_path)
    found = Page(page({"a run": load_run(tmp_path)}))
    assert images(found) == ["plan.png", "divergence.png", "losses.png"]
    assert found.policy == (
        f"default-src 'none'; style-src {hash_of(found.styles[0])}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert not any(tag in ("script", "link", "iframe") for tag, _ in found.elements)
    links = [value for _, attributes in found.elements for name, value in attributes.items() if name == "href"]
    assert links == []
    handlers = [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert handlers == [] and not any("style" in attributes for _, attributes in found.elements)
    assert not re.search(r"https?://|@import|url\(", found.styles[0])


def test_names_and_texts_of_files_are_text_in_a_page(tmp_path: Path) -> None:
    full_run(tmp_path)
    for file in (tmp_path / "snip").iterdir():
        text = json.dumps(HOSTILE).strip('"')
        file.write_text(file.read_text().replace("model.layers.0.self_attn.q_proj", text).replace("tiny", text))
    text = page({HOSTILE: load_run(tmp_path)})
    found = Page(text)
    assert len(images(found)) == 3 and not any(tag == "script" for tag, _ in found.elements)
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert shown in found.texts and ["Model", shown] in found.rows
    assert "\u202e" not in text


def test_every_table_and_sentence_of_the_terminal_is_in_the_page(tmp_path: Path) -> None:
    full_run(tmp_path)
    run = load_run(tmp_path)
    found = Page(page({"a run": run}))
    shown = blocks(run_contents(run))
    assert [block["title"] for block in shown if "title" in block] == ["Refreshes", "Losses", "Plan", "Why"]
    for block in shown:
        if "text" in block:
            assert block["text"] in found.texts
        else:
            assert block["headings"] in found.rows
            assert all(list(row) in found.rows for row in block["rows"])
    assert "Step 200: plan kept. The solver [cbc] was killed after 60 s." in found.texts
    headings = next(block["headings"] for block in shown if block.get("title") == "Refreshes")
    assert headings[-3:] == ["probe [s]", "solver [s]", "waited [s]"]


def test_several_runs_stand_side_by_side_and_below_each_other(tmp_path: Path) -> None:
    for name, steps in (("first", 400), ("second", 300)):
        full_run(tmp_path / name)
        write_losses(tmp_path / name / "trainer_state.json", steps)
    runs = {name: load_run(tmp_path / name) for name in ("first", "second")}
    found = Page(page(runs, ("theirs", {100: {"loss": 8.0, "eval_loss": 10.0}, 200: {"loss": 4.5}})))
    assert found.rows[0] == ["", "first", "second", "theirs"]
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["Training loss, last"] == ["6 (step 400)", "7 (step 300)", "4.5 (step 200)"]
    assert rows["Plans"] == ["2 new, 1 kept", "2 new, 1 kept", "-"]
    assert rows["Seconds in all"][0] == "probe 3.8, solver 9.0, waited 0.0"
    # The last step at which both have a validation loss.
    assert rows["Loss against theirs"] == ["+9, +90.00% (validation, step 100)"] * 2 + ["-"]
    assert [attributes["id"] for tag, attributes in found.elements if tag == "section" and attributes] == [
        "run-0",
        "run-1",
    ]
    assert images(found) == ["losses.png", *["plan.png", "divergence.png"] * 2]


def test_two_runs_without_bf16_are_compared_with_the_first_at_a_step_that_both_have(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        write_run(tmp_path / name, random_assignments(1))
    write_losses(tmp_path / "first" / "trainer_state.json", 40)
    write_losses(tmp_path / "second" / "trainer_state.json", 30)
    found = Page(page({name: load_run(tmp_path / name) for name in ("first", "second", "third")}))
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["Loss against first"] == ["-", "+0, +0.00% (training, step 30)", "no step in common"]


def test_the_code_of_a_page_builds_the_configuration_of_the_run() -> None:
    config = fp4_config(target_fp4_fraction=((1, 0.9), (800, 0.5)), skip_modules=("a'b",), stages=2)
    built: dict[str, object] = {}
    exec(config_code(config.to_dict()), built)
    assert built["config"] == config
    assert "SnipConfig(\n    granularity='gemm',\n)" in config_code(SnipConfig().to_dict())


def test_the_section_on_reproducing_has_versions_and_numbers(tmp_path: Path) -> None:
    full_run(tmp_path)
    history = tmp_path / "snip" / "history.jsonl"
    start, *rest = history.read_text().splitlines()
    history.write_text("\n".join([json.dumps(json.loads(start) | {"versions": {"torch": "2.13.0"}}), *rest]) + "\n")
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"max_steps": 400, "best_metric": 1.0}))
    found = Page(page({"a run": load_run(tmp_path)}))
    for text in ("torch: 2.13.0", "max_steps: 400"):
        assert text in found.texts
    assert not any("best_metric" in text for text in found.texts)


def test_a_page_replaces_a_file_or_a_link_and_is_not_written_through_it(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("mine")
    path.symlink_to(victim)
    assert write_page(path, {"a run": load_run(tmp_path)}) == path
    assert victim.read_text() == "mine" and not path.is_symlink()
    assert path.read_text().startswith("<!doctype html>")
