"""The documentation site holds every page and every public name, and its notebooks run."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import snip_hf

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def pages_of(navigation: Any) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    else:
        for entry in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from pages_of(entry)


@pytest.fixture(autouse=True)
def _tools_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "tools")


def hooks() -> ModuleType:
    return importlib.import_module("site_hooks")


def test_every_page_of_the_documentation_is_in_the_navigation_once() -> None:
    shown = list(pages_of(SITE["nav"]))
    paths = [path for kind in ("*.md", "*.ipynb") for path in DOCS.rglob(kind) if path.parent.name != "log"]
    written = {path.relative_to(DOCS).as_posix() for path in paths}
    assert sorted(set(shown)) == sorted(shown)
    assert written - set(shown) == set()
    assert set(shown) - written == set(hooks().FROM_ELSEWHERE)


def test_the_home_page_names_every_page_beside_it() -> None:
    named = set(re.findall(r"\]\(([\w/-]+\.(?:md|ipynb))", (DOCS / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in DOCS.glob("*.md")} - named == {"README.md"}


def test_the_reference_shows_every_public_name() -> None:
    shown = re.findall(r"^::: snip_hf\.(\S+)$", (DOCS / "python.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(snip_hf.__all__)


@pytest.mark.parametrize(
    ("link", "here", "page", "expected"),
    [
        ("method.md#2-loss", "docs/config.md", "config.md", "method.md#2-loss"),
        ("../results.md", "docs/notebooks/plan.md", "notebooks/plan.md", "../results.md"),
        ("../README.md#more", "docs/config.md", "config.md", "overview.md#more"),
        ("../../recipes/README.md", "docs/notebooks/plan.md", "notebooks/plan.md", "../recipes.md"),
        ("docs/config.md", "README.md", "overview.md", "config.md"),
        ("../src/snip_hf/config.py", "docs/config.md", "config.md", "REPOSITORY/blob/main/src/snip_hf/config.py"),
        ("log/2026-11.md", "docs/troubleshooting.md", "troubleshooting.md", "REPOSITORY/blob/main/docs/log/2026-11.md"),
        ("../eval/results/", "docs/results.md", "results.md", "REPOSITORY/tree/main/eval/results"),
        ("parts/recipe.py", "recipes/README.md", "recipes.md", "REPOSITORY/blob/main/recipes/parts/recipe.py"),
        ("#fields", "docs/config.md", "config.md", "#fields"),
        ("https://arxiv.org", "docs/config.md", "config.md", "https://arxiv.org"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_to_the_repository(link: str, here: str, page: str, expected: str) -> None:
    assert hooks().site_link(link, here, page, "REPOSITORY") == expected


def test_code_blocks_keep_what_looks_like_a_link() -> None:
    text = "[a](b)\n```\n[a](b)\n```\n[a](b)\n"
    assert hooks().outside_fences(text, str.upper) == "[A](B)\n```\n[a](b)\n```\n[A](B)\n"


def test_the_pictures_are_those_that_the_script_draws() -> None:
    pictures = importlib.import_module("pictures")
    written = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    assert {name: draw() for name, draw in pictures.PICTURES.items()} == written


def test_the_site_links_to_the_project_s_repository() -> None:
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert f"Repository = {SITE['repo_url']}" in setup["metadata"]["project_urls"].splitlines()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_one_run_of_all_its_cells(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {(output["output_type"], output.get("name")) for cell in cells for output in cell["outputs"]}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient runs notebooks; the extra docs has it")
    copy = tmp_path / path.name
    text = path.read_text(encoding="utf-8")
    assert text.count("train_batch_size=8") == 1
    copy.write_text(text.replace("train_batch_size=8", "train_batch_size=2"), encoding="utf-8")
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", "--timeout=280", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-4000:]
