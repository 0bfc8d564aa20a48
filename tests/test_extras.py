"""Packages that training does not need are in the right extra, and a missing one is reported in one sentence."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import snip_hf
from snip_hf.extras import EXTRAS, MissingExtra, needed_by

ROOT = Path(__file__).parents[1]
SOURCE = Path(snip_hf.__file__).parent


def requirements() -> dict[str, set[str]]:
    """The packages of each extra in setup.cfg, with those of the extras that it names; "" is the core."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lists = {"": settings["options"]["install_requires"], **settings["options.extras_require"]}
    lines = {
        name: [line for line in text.splitlines() if line and not line.startswith("#")] for name, text in lists.items()
    }

    def packages(name: str) -> set[str]:
        found: set[str] = set()
        for line in lines[name]:
            own = re.fullmatch(r"snip-hf\[(.*)\]", line)
            if own is None:
                found.add(re.split(r"[<>=;\s]", line, maxsplit=1)[0])
            else:
                found = found.union(*map(packages, own[1].split(",")))
        return found

    return {name: packages(name) for name in lists}


def test_the_table_of_extras_is_that_of_the_installation() -> None:
    installed = requirements()
    for name, extra in EXTRAS.items():
        assert set(extra.packages.values()) <= installed[name], name
        assert installed[name] <= installed["all"] <= installed["dev"], name
    assert set(installed) - set(EXTRAS) == {"", "all", "dev", "deepspeed", "docs", "gpu"}


def test_the_core_has_what_training_needs_and_no_more() -> None:
    core = {"torch", "torchao", "transformers", "accelerate", "huggingface_hub"}
    core |= {"numpy", "pyyaml", "scipy", "tqdm", "filelock"}
    assert requirements()[""] == core


def test_a_package_that_is_not_there_is_one_sentence_with_the_command() -> None:
    with pytest.raises(MissingExtra) as caught, needed_by("snip_hf.run_report"):
        raise ModuleNotFoundError("No module named 'matplotlib.axes'", name="matplotlib.axes")
    message = "snip_hf.run_report needs matplotlib, which is not installed. Install it: "
    assert str(caught.value) == message + 'pip install "snip-hf[report]"'
    assert caught.value.name == "matplotlib.axes"


def test_a_module_that_no_extra_has_is_the_error_that_it_was() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'mine'"), needed_by("it"):
        raise ModuleNotFoundError("No module named 'mine'", name="mine")


def test_missing_packages_of_an_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert EXTRAS["report"].missing == ["rich"]
    monkeypatch.undo()
    assert EXTRAS["report"].missing == []


@cache
def imported_at_once(path: Path) -> set[str]:
    """The modules that the import of a file imports: not those that functions import, or type checkers alone."""
    package = path.relative_to(SOURCE.parent).parent.parts
    found: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    for node in waiting:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            waiting += node.body
        elif isinstance(node, ast.If):
            waiting += node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node.body + node.orelse
    return found


def reached(module: str) -> set[str]:
    """The modules that the import of a module of the package imports, directly or not."""
    found, waiting = {module}, [module]
    for name in waiting:
        path = SOURCE.parent / name.replace(".", "/")
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if name.startswith("snip_hf") and file.is_file():
            new = imported_at_once(file) - found
            found |= new
            waiting += new
    return found


def test_importing_the_callback_loads_no_scipy() -> None:
    # It takes 0.2 s of the import, and only solving and checking the ranking need it.
    found = reached("snip_hf.integrations.trainer") | reached("snip_hf.config")
    assert "torch" in found and not any(name.partition(".")[0] == "scipy" for name in found)


def test_nothing_that_training_imports_needs_an_extra() -> None:
    extra = {module for extra in EXTRAS.values() for module in extra.packages} - {"yaml"}  # which the core has too
    homes = {name: home for name, home in snip_hf._HOMES.items() if name != "run_report"}
    for home in sorted(set(homes.values())):
        assert {name for name in reached(f"snip_hf.{home}") if name.partition(".")[0] in extra} == set(), home
    assert {"rich", "matplotlib.figure", "scipy"} & reached("snip_hf.reporting.run_report") == {
        "rich",
        "matplotlib.figure",
    }
