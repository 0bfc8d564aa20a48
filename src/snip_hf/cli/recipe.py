"""`snip-hf recipe`: lists and copies the complete runs in the folder `recipes`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path, PurePosixPath

from ..extras import EXTRAS
from ..json_io import write_atomic
from ..shipped_files import FOLDER, absolute_links, shipped_files
from ..text import printable

_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPES = PurePosixPath("recipes")
# Files in the folder that are not recipes.
_NO_RECIPES = ("pretrain.py", "__init__.py", "README.md")
_FIRST = "quickstart"
_SINGLE = "recipes/accelerate/single.yaml"


def recipe(arguments: argparse.Namespace) -> int:
    return _list() if arguments.action == "list" else _copy(arguments)


def _list() -> int:
    root = find_root()
    recipes = recipe_files(root)
    width = max(map(len, recipes))
    for name, file in recipes.items():
        print(f"{name:{width}}  {_first_sentence(_head(root / file))}")
    return 0


def _copy(arguments: argparse.Namespace) -> int:
    root = find_root()
    recipes = recipe_files(root)
    chosen = [recipes[_known(name, recipes)] for name in arguments.names] or list(recipes.values())
    wanted = {arguments.to / file: _content(root, file) for file in needed_files(root, chosen)}
    new = [path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content]
    differ = [path for path in new if os.path.lexists(path)]
    if differ and not arguments.overwrite:
        raise FileExistsError(
            f"{printable(differ[0])} exists and differs ({len(differ)} such files in all); nothing was copied. Give "
            "another folder with --to, or use --overwrite."
        )
    for path in new:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, wanted[path])
    print(f"{len(wanted)} files are in {printable(arguments.to / 'recipes')} and {printable(arguments.to / 'eval')}.")
    if missing := EXTRAS["recipes"].missing:
        print(f"Recipes need {', '.join(missing)}, which are not installed: {EXTRAS['recipes'].command}")
    print(f"To run {chosen[0]}:\n  {_command(root, chosen[0], arguments.to)}")
    return 0


def find_root() -> Path:
    """Returns the folder that holds `recipes` and `eval`: inside the installed package, or the repository.

    Raises:
        FileNotFoundError: neither is there.
    """
    repository = _PACKAGE.parents[1]
    for root, is_ours in ((_PACKAGE / FOLDER, True), (repository, (repository / "setup.cfg").is_file())):
        if is_ours and (root / _RECIPES).is_dir():
            return root
    raise FileNotFoundError(
        f"{_PACKAGE / FOLDER} does not exist, so this installation has no recipes; install snip-hf again."
    )


def recipe_files(root: Path) -> dict[str, str]:
    """Returns name -> file of each recipe, the quickstart first."""
    files = [PurePosixPath(file) for file in shipped_files(root)]
    files = [file for file in files if file.parent == _RECIPES and file.name not in _NO_RECIPES]
    files.sort(key=lambda file: (file.stem != _FIRST, file.suffix != ".yaml", file.stem))
    return {file.stem: str(file) for file in files}


def needed_files(root: Path, chosen: list[str]) -> list[str]:
    """Returns the chosen recipes, their bases, and the code that runs and scores them."""
    recipes = set(recipe_files(root).values())
    needed = {file for file in shipped_files(root) if file not in recipes}
    left = list(chosen)
    while left:
        file = left.pop()
        needed.add(file)
        base = re.search(r"^base: *(\S+)", (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        if base is not None:
            left.append(str(PurePosixPath(file).parent / base[1]))
    return sorted(needed)


def _known(name: str, recipes: dict[str, str]) -> str:
    stem = name.removesuffix(".yaml").removesuffix(".py")
    if stem not in recipes:
        from ..registry import choices, did_you_mean

        guess = did_you_mean(stem, recipes)
        raise ValueError(f"There is no recipe {name!r}{choices(recipes, guess, '`snip-hf recipe list`')}")
    return stem


def _content(root: Path, file: str) -> bytes:
    if not file.endswith(".md"):
        return (root / file).read_bytes()
    # Relative links would point to pages that are not copied.
    return absolute_links((root / file).read_text(encoding="utf-8"), str(PurePosixPath(file).parent)).encode()


def _head(path: Path) -> str:
    """Returns the description of a recipe: its first comment, or its docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text.split('"""')[1]
    comment = re.match(r"(?:#.*\n)*", text)
    return re.sub(r"^# ?", "", comment[0] if comment else "", flags=re.MULTILINE)


def _first_sentence(head: str) -> str:
    return re.split(r"(?<=[\w).])\.\s", " ".join(head.split()))[0].rstrip(".")


def _command(root: Path, file: str, folder: Path) -> str:
    """Returns the command that runs a copied recipe."""
    script, runner = (shlex.quote(str(folder / name)) for name in (file, "recipes/pretrain.py"))
    if file.endswith(".py"):
        return f"python {script} --help"
    launcher = re.search(r"recipes/accelerate/\w+\.yaml", _head(root / file))
    config = shlex.quote(str(folder / (launcher[0] if launcher else _SINGLE)))
    return f"accelerate launch --config_file {config} {runner} {script}"
