"""What the import contract in setup.cfg cannot say: who imports torch.distributed, and how large things may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import snip_hf

PACKAGE = Path(snip_hf.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "eval", ROOT / "recipes") for path in folder.rglob("*.py")
)
# Lines at most. The solver's program is one file, since it runs alone.
FILE, CLASS, FUNCTION, PARAMETERS = 400, 300, 60, 8
ALONE = PACKAGE / "planning" / "solver" / "ilp.py"


def imported(path: Path) -> set[str]:
    """The modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_only_parallel_imports_torch_distributed() -> None:
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("torch.distributed") for name in imported(path))
    }
    assert users == {"parallel"}


def too_large(text: str) -> Iterator[str]:
    """Tells which classes and functions have too many lines or parameters; kernels of Triton may have."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > (CLASS if isinstance(node, ast.ClassDef) else FUNCTION):
            yield f"{node.name}: {lines} lines"
        if not isinstance(node, ast.ClassDef):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = [argument.arg for argument in given if argument.arg not in ("self", "cls", "ctx")]
            if len(names) > PARAMETERS:
                yield f"{node.name}: {len(names)} parameters"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_class_or_function_is_too_large(path: Path) -> None:
    text = path.read_text()
    lines = len(text.splitlines())
    assert path == ALONE or lines <= FILE, f"{lines} lines, expected at most {FILE}"
    assert list(too_large(text)) == []


def test_what_is_too_large_is_noticed() -> None:
    body = "    pass\n" * 61
    assert list(too_large(f"def long():\n{body}")) == ["long: 62 lines"]
    assert list(too_large(f"@triton.jit\ndef kernel():\n{body}")) == []
    assert list(too_large("class A:\n" + "    x = 1\n" * 300)) == ["A: 301 lines"]
    assert list(too_large("def f(self, a, b, c, d, e, /, f, *, g, h, i): pass")) == ["f: 9 parameters"]
    assert list(too_large("def f(self, a, b, c, d, e, /, f, *rest, g, h, **options): pass")) == []
