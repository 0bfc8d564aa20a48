"""Can anything that is read become code? No module of the package uses what could make it so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sources import SOURCES, names

# Modules whose loading runs what the file says, and calls that run text.
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "codeop", "runpy"}
CALLS = {
    *["eval", "exec", "__import__", "builtins.eval", "builtins.exec", "os.system", "os.popen"],
    *["yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "torch.jit.load", "np.load", "numpy.load"],
    *["pd.read_pickle", "torch.hub"],
}


def trespasses(text: str) -> list[str]:
    tree = ast.parse(text)
    found = names(tree, CALLS.__contains__)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [module for module in modules if module.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            if ast.unparse(node.func) == "torch.load" and words.get("weights_only") is not True:
                found.append("torch.load")
            found += [word for word in ("shell", "allow_pickle", "trust_remote_code") if words.get(word, False)]
    return found


@pytest.mark.parametrize("folder", ["benchmarks", "eval", "recipes", pytest.param("tests", marks=pytest.mark.slow)])
def test_no_script_unpickles_what_it_loads(folder: str) -> None:
    found = set()
    for path in (Path(__file__).parents[2] / folder).rglob("*.py"):
        text = path.read_text()
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if "load" in text else []
        loads = [call for call in calls if getattr(call.func, "attr", "") == "load"]
        loads = [call for call in loads if ast.unparse(call.func) == "torch.load"]
        found |= {path.name} if any(trespasses(ast.unparse(load)) for load in loads) else set()
    # Their subject is that layers and models can be pickled.
    assert found <= {"test_linear.py", "test_the_users_own_callbacks.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_module_unpickles_or_evaluates(path: Path) -> None:
    assert trespasses(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        *["import pickle", "from pickle import loads", "eval(text)", "exec(text)", "yaml.load(text)"],
        *[
            "torch.load(path)",
            "torch.load(path, weights_only=False)",
            "import marshal",
            "subprocess.run(text, shell=True)",
        ],
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert trespasses(text) != []
