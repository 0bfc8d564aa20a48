"""The files that are shipped beside the package, and links that work from anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snip_hf.shipped_files import REPOSITORY, absolute_links, shipped_files

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](docs/b.md)", f"[a]({REPOSITORY}/blob/main/docs/b.md)"),
        ("[a](docs/b.md#c-d)", f"[a]({REPOSITORY}/blob/main/docs/b.md#c-d)"),
        ("![a](docs/b.png)", f"![a]({REPOSITORY}/raw/main/docs/b.png)"),
        ("[![a](b.png)](c.md)", f"[![a]({REPOSITORY}/raw/main/b.png)]({REPOSITORY}/blob/main/c.md)"),
        ("| [a](b) | [c](d) |", f"| [a]({REPOSITORY}/blob/main/b) | [c]({REPOSITORY}/blob/main/d) |"),
        ("[a](https://x.org/y)", "[a](https://x.org/y)"),
        ("[a](mailto:me)", "[a](mailto:me)"),
        ("[a](#below)", "[a](#below)"),
        ("```python\nx[i](y)\n```\n", "```python\nx[i](y)\n```\n"),
    ],
)
def test_relative_links_lead_into_the_repository_and_all_else_stays(link: str, expected: str) -> None:
    assert absolute_links(link) == expected


def test_links_of_a_page_in_a_folder_start_there() -> None:
    assert absolute_links("[a](../docs/b.md) [c](d.py)", "recipes") == (
        f"[a]({REPOSITORY}/blob/main/docs/b.md) [c]({REPOSITORY}/blob/main/recipes/d.py)"
    )


def test_every_link_of_the_readme_is_absolute_and_leads_to_a_file_of_the_repository() -> None:
    text = absolute_links((ROOT / "README.md").read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    ours = [link.partition("#")[0] for link in links if link.startswith(REPOSITORY)]
    assert len(ours) > 10
    files = [re.sub(rf"{REPOSITORY}/(blob|raw)/main/", "", link) for link in ours]
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/tutorial.md"])
def test_the_commands_to_begin_with_clone_the_repository(page: str) -> None:
    first = (ROOT / page).read_text(encoding="utf-8").partition("```bash\n")[2]
    assert first.startswith(f"git clone {REPOSITORY} && cd {REPOSITORY.rpartition('/')[2]}\n")


def test_recipes_and_what_runs_and_scores_them_are_shipped_and_comparisons_are_not() -> None:
    files = shipped_files(ROOT)
    assert {
        "recipes/quickstart.yaml",
        "recipes/pretrain.py",
        "recipes/parts/data.py",
        "recipes/accelerate/single.yaml",
        "eval/run.py",
        "eval/scoring/evaluate.py",
    } <= set(files)
    assert [file for file in files if "compare" in file or "__pycache__" in file] == []
