"""The public names of the package: their list, their modules, and when they are loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import snip_hf


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, snip_hf; print({name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers'})"
    assert python(program) == "set()\n"


def test_the_names_are_listed_before_any_is_loaded() -> None:
    program = "import sys, snip_hf; print(set(snip_hf.__all__) <= set(dir(snip_hf)), 'torch' in sys.modules)"
    assert python(program) == "True False\n"


@pytest.mark.parametrize("name", snip_hf.__all__)
def test_every_name_is_there_and_the_same_each_time(name: str) -> None:
    assert getattr(snip_hf, name) is getattr(snip_hf, name)
    assert getattr(snip_hf, name).__doc__


def test_type_checkers_are_told_the_names_that_are_loaded() -> None:
    tree = ast.parse(Path(snip_hf.__file__).read_text(encoding="utf-8"))
    told = {
        alias.asname: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == snip_hf._HOMES
    assert sorted(told) == sorted(snip_hf.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'convert'"):
        _ = snip_hf.convert
    with pytest.raises(ImportError):
        exec("from snip_hf import convert")


def test_the_formats_are_a_mapping_that_cannot_be_written_to() -> None:
    assert list(snip_hf.formats)[:3] == ["bf16", "fp8", "fp4"] and "nvfp4" in snip_hf.formats
    with pytest.raises(TypeError):
        snip_hf.formats["fp4"] = None  # type: ignore[index]
