"""Names of formats, backends, policies and layer kinds are written where these are defined, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import snip_hf
from snip_hf.config import POLICIES
from snip_hf.kernels.backend import BACKENDS
from snip_hf.numerics.formats import FORMATS
from snip_hf.text import WITHOUT_PROBE

SOURCE = Path(snip_hf.__file__).parent
# Names of something else there.
OTHER_MEANINGS = {
    "training/checks.py": {"fp8", "bf16"},  # Accelerate's mixed_precision
    "kernels/backend.py": {"bf16"},  # the same
    "cli/doctor.py": {"bf16"},  # an argument of TrainingArguments
    "optimizers/deepspeed_zero.py": {"bf16"},  # DeepSpeed's section
    "planning/solver/ilp.py": {"greedy"},  # a solver
    "planning/solver/process.py": {"greedy"},
    "records/run_folder.py": {"snip"},  # a folder
}
# Files that define them, and those whose presets or defaults choose one.
OF_FORMATS = {
    "numerics/formats.py",
    "kernels/hopper/backend.py",
    "kernels/hopper/tiles.py",
    "config.py",
    "costs/rates.py",
    "integrations/export.py",  # what other libraries call them
    "integrations/export_checkpoint.py",
}
OF_BACKENDS = {
    "kernels/emulated.py",
    "kernels/hopper/backend.py",
    "kernels/blackwell/backend.py",
    "kernels/tensor_scaled/backend.py",
}


@cache
def texts(path: Path) -> tuple[str, ...]:
    """The string literals of a file but for docstrings; an f-string as one text with NUL for each of its values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            found.append("".join(parts))
            skipped |= set(map(id, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            found.append(node.value)
    return tuple(found)


def names_in(text: str, names: set[str]) -> Iterator[str]:
    """Those of the names that a text is, has in quotes, has as a word that is no English one, or can be filled to."""
    filled = re.escape(text).replace("\0", r"[\w-]*") if "\0" in text and len(text.strip("\0")) > 1 else None
    for name in names:
        is_word = bool(re.search(r"[\d-]", name)) and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
        is_quoted = re.search(rf"(['\"`]){re.escape(name)}\1", text)
        if text == name or is_word or is_quoted or (filled and re.fullmatch(filled, name)):
            yield name


def places(names: set[str]) -> dict[str, set[str]]:
    """File of the source -> those of the names that its string literals have."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        here = {name for text in texts(path) for name in names_in(text, names)} - OTHER_MEANINGS.get(file, set())
        if here:
            found[file] = here
    return found


def test_formats_are_named_by_their_file_a_backend_s_kernels_policies_and_presets_alone() -> None:
    found = places(set(FORMATS))
    assert {file for file in found if not file.startswith("policies/")} == OF_FORMATS


def test_backends_are_named_by_their_own_files_alone() -> None:
    assert set(places(set(BACKENDS))) == OF_BACKENDS


def test_policies_are_named_in_policies_and_as_the_default_alone() -> None:
    # "snip" is also the name of folders, keys and an implementation of experts.
    found = places({name for name in POLICIES if name not in FORMATS and name != "snip"})
    assert found.pop("config.py") == found.pop("reporting/run_report.py") == {"greedy"}  # a solver
    assert found.pop("text.py") == {"layer-position"}
    assert [file for file in found if not file.startswith("policies/")] == []
    assert {"random", "fisher", "kl", "hessian-trace", "backward-first"} <= set().union(*found.values())


def test_the_policy_that_is_advised_needs_no_probe() -> None:
    assert "policy='layer-position'" in WITHOUT_PROBE
    assert not POLICIES["layer-position"].needs_probe


def test_exempt_names_exist() -> None:
    for file, names in OTHER_MEANINGS.items():
        assert {name for text in texts(SOURCE / file) for name in names_in(text, names)} == names, file


@pytest.mark.parametrize(
    "code", ["'fp8'", "f'fp{bits}'", "f'takes {x} in fp8'", "print('format=\\'fp8\\'')", "{'fp8': 1}"]
)
def test_a_name_is_found_in_literals_of_any_kind(code: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(f'"""Of fp8."""\nX = {code}\n"""Also fp8."""\n')
    assert {name for text in texts(tmp_path / "module.py") for name in names_in(text, {"fp8"})} == {"fp8"}


def test_docstrings_and_labels_name_no_format(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text('"""Of fp8."""\nX = 1\n"""Also \'fp8\'."""\nY = "FP8 kernels"\n')
    assert [name for text in texts(tmp_path / "module.py") for name in names_in(text, {"fp8"})] == []


def test_kinds_of_layers_are_named_in_layers_alone() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in (getattr(node, "attr", None), getattr(node, "id", None))
        }
        file = path.relative_to(SOURCE).as_posix()
        has_kinds = names & {"Linear", "SnipLinear", "Conv1D", "SnipConv1D"} != set()
        assert has_kinds == (file == "layers/linear.py"), file
