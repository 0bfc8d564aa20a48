"""Only some modules import torch.distributed, a rule that the import contract in setup.cfg cannot express."""

from __future__ import annotations

import ast
from pathlib import Path

import snip_hf

PACKAGE = Path(snip_hf.__file__).parent


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
