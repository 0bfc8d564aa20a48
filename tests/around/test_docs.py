"""Files, tests, modules, links and commands that the documentation names exist, and its lines are short.

Commands and examples that no other test runs are run or read here.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from parts.recipe import load_recipe
from transformers import HfArgumentParser, TrainingArguments
from written_runs import random_assignments, write_losses, write_run

from snip_hf import PrecisionPlan, SnipArguments, SnipConfig
from snip_hf.cli import build_parser, main
from snip_hf.costs.timing import read_times

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "snip_hf"
OTHERS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "eval/README.md", "recipes/README.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in OTHERS)]
# The log names files as they were at the time of an entry.
CURRENT = [page for page in PAGES if page.parent.name != "log"]
LONGEST_LINE = 120
# A file, as code names it: from the repository's root, or from the package's folder.
FILE = re.compile(r"(?<![\w./-])((?:[\w.-]+/)+[\w.{},-]+\.(?:py|yaml|jsonl\.gz|jsonl))(?![\w/])")
# A file of tests, or a test (perhaps only its beginning) of the file that was named last.
TEST = re.compile(r"(tests/[\w/]+\.py)|::([\w{},]+)(\.\.\.)?")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = {"tests", "src", "benchmarks", "recipes", "eval", "docs"}


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_generated(text: str) -> str:
    """Returns the text without generated tables, which stand between markers."""
    return re.sub(r"<!-- ([\w:-]+) -->\n.*?<!-- /\1 -->", "", text, flags=re.DOTALL)


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def expanded(name: str) -> Iterator[str]:
    """Yields the names that a pattern with {a,b} stands for."""
    parts = [part[1:-1].split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", name)]
    return map("".join, product(*parts))


def defined_in(path: Path) -> set[str]:
    """Names of a module, and Class.name of what its classes define, as the source has them."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)]
                found.update(prefix + name.id for name in names)

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def is_missing_module_name(dotted: str) -> bool:
    """True for a name in the package, of a module or of what one defines, that is not there."""
    parts = dotted.removeprefix("snip_hf.").split(".")
    if dotted.startswith("snip_hf.") and parts[0] in defined_at_the_door():
        return False
    if not dotted.startswith("snip_hf.") and not (PACKAGE / parts[0]).is_dir():
        return False
    for count in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:count])
        if count == len(parts) and path.is_dir():
            return False
        if path.with_suffix(".py").is_file():
            rest = ".".join(parts[count:])
            return bool(rest) and rest not in defined_in(path.with_suffix(".py"))
    return True


def defined_at_the_door() -> set[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def is_missing_file(path: str) -> bool:
    """True for a path from the repository's root, or from the package's folder, where nothing is."""
    first = path.split("/")[0]
    if first in FOLDERS:
        return not (ROOT / path).is_file()
    return first != ".." and (PACKAGE / first).is_dir() and not (PACKAGE / path).is_file()


@pytest.mark.parametrize("page", CURRENT, ids=ids)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = without_generated(page.read_text(encoding="utf-8"))  # which says how old lines were made, by old names
    named = {path for match in FILE.finditer(text) for path in expanded(match[1])}
    assert sorted(filter(is_missing_file, named)) == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_paths_of_tests_begin_at_the_root(page: Path) -> None:
    named = re.findall(r"[\w./]*\btest_\w+\.py", page.read_text(encoding="utf-8"))
    assert [path for path in named if not path.startswith(("tests/", "../tests/"))] == []


@pytest.mark.parametrize("page", CURRENT, ids=ids)
def test_every_test_that_a_page_names_is_in_the_file_that_it_names(page: Path) -> None:
    missing, file = [], ""
    for match in TEST.finditer(page.read_text(encoding="utf-8")):
        if match[1]:
            file = match[1]
            continue
        source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        for name in expanded(match[2]):
            end = "" if match[3] else r"\b"
            if not re.search(rf"^\s*(?:def|class) {name}{end}", source, re.MULTILINE):
                missing.append(f"{file}::{name}")
    assert missing == []


@pytest.mark.parametrize("page", CURRENT, ids=ids)
def test_every_test_that_a_page_names_without_a_file_is_somewhere(page: Path) -> None:
    named = {code for code in CODE.findall(page.read_text(encoding="utf-8")) if re.fullmatch(r"test_\w+", code)}
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


# `training.max_steps` and the like are keys of a recipe or of a comparison.
@pytest.mark.parametrize("page", [page for page in CURRENT if page.parent.name not in ("recipes", "eval")], ids=ids)
def test_every_module_and_name_of_the_package_that_a_page_names_exists(page: Path) -> None:
    text = without_fences(page.read_text(encoding="utf-8"))
    named = {code for code in CODE.findall(text) if DOTTED.fullmatch(code)}
    assert sorted(name for name in named if is_missing_module_name(name)) == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=ids)
def test_every_relative_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    broken = []
    for link in LINK.findall(without_fences(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", without_fences(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_line_of_prose_is_longer_than_a_screen(page: Path) -> None:
    lines = without_fences(without_generated(page.read_text(encoding="utf-8"))).splitlines()
    assert [line for line in lines if len(line) > LONGEST_LINE and not line.startswith("|")] == []


def commands_of(page: Path) -> Iterator[list[str]]:
    """The commands of a page's shell blocks, as words; continued lines are joined, here documents left out."""
    for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        block = re.sub(r"<<'EOF'.*?^EOF$", "", block, flags=re.DOTALL | re.MULTILINE)
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            for command in line.split("&&"):
                if words := shlex.split(command, comments=True):
                    yield words[: words.index(">")] if ">" in words else words


def script_of(words: list[str]) -> Path | None:
    """The file of this repository that a command runs, if it runs one."""
    if "-m" in words[:2]:
        module = ROOT / words[2].replace(".", "/")
        return module.with_suffix(".py") if words[2].partition(".")[0] in FOLDERS else None
    return next((ROOT / word for word in words if re.match(r"(?:benchmarks|eval|recipes)/.*\.py$", word)), None)


@pytest.mark.parametrize("page", CURRENT, ids=ids)
def test_every_command_of_a_page_runs_a_script_that_has_its_options(page: Path) -> None:
    for words in commands_of(page):
        if words[0] == "snip-hf":
            build_parser().parse_args(words[1:])
        elif (script := script_of(words)) is not None:
            sources = [script, *script.parent.glob("parts/*.py")]
            text = "".join(path.read_text(encoding="utf-8") for path in sources)
            place = words.index("-m") + 1 if "-m" in words[:2] else words.index(script.relative_to(ROOT).as_posix())
            options = [word.partition("=")[0] for word in words[place:] if word.startswith("--")]
            missing = [option for option in options if f'"{option}"' not in text]
            assert missing == [], shlex.join(words)


@pytest.mark.parametrize("page", CURRENT, ids=ids)
def test_every_recipe_of_a_command_loads_with_the_values_that_the_command_sets(page: Path) -> None:
    for words in commands_of(page):
        for index, word in enumerate(words):
            # SLURM's script takes values without `--override`.
            if re.fullmatch(r"recipes/[\w-]+\.yaml", word):
                load_recipe(ROOT / word, [value for value in words[index + 1 :] if "=" in value])


@pytest.mark.parametrize("page", ["docs/cli.md", "docs/reports.md", "docs/tutorial.md"])
def test_the_commands_that_show_runs_show_them(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("snip", "a", "b", "dpo", "quickstart", "snip-50"):
        write_run(tmp_path / "runs" / name, random_assignments(2))
    for name in ("a", "bf16"):
        write_losses(tmp_path / "runs" / name / "trainer_state.json", 30)
    monkeypatch.chdir(tmp_path)
    # Others run checkpoints (tests/records/test_checkpoints.py) and the Hub's models (tests/around/test_tutorial.py).
    commands = [
        words
        for words in commands_of(ROOT / page)
        if words[:2] in (["snip-hf", "report"], ["snip-hf", "compare"])
        and not any("checkpoint-" in word or word.startswith(("someone/", "YOU/")) for word in words)
    ]
    assert commands
    for words in commands:
        assert main(words[1:]) == 0
        assert capsys.readouterr().out


def test_the_command_line_of_the_configuration_sets_what_it_says() -> None:
    (words,) = commands_of(ROOT / "docs/config.md")
    parser = HfArgumentParser((TrainingArguments, SnipArguments))
    args, config = parser.parse_args_into_dataclasses(words[2:], look_for_args_file=False)
    shares = ((1, 0.9), (800, 0.5))
    assert args.output_dir == "run"
    assert config == SnipConfig(target_fp4_fraction=shares, stages=2, ties="auto", refresh_every=None)


def test_the_examples_of_files_are_files_that_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/files.md").read_text(encoding="utf-8")
    plan, measured, times, problem = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    document = json.loads(plan) | json.loads(f"{{{measured}}}")
    for gemms in document["measured"]["seconds"].values():  # cut short on the page
        gemms.update(dict.fromkeys(gemms, gemms["forward"]))
    assert PrecisionPlan.from_dict(document).fp4_fraction == 1
    (tmp_path / "times.json").write_text(times, encoding="utf-8")
    assert len(read_times(tmp_path / "times.json")) == 1
    (tmp_path / "problem.json").write_text(problem, encoding="utf-8")
    assert main(["solve", str(tmp_path / "problem.json")]) == 0
    assert json.loads(capsys.readouterr().out)["choices"] == {"a": "fp8", "b": "fp4"}


def stacks() -> list[list[str]]:
    """The cells of the table of what ran, row by row."""
    section = (ROOT / "docs/distributed.md").read_text(encoding="utf-8").partition("\n## What ran\n")[2]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("row", stacks(), ids=lambda row: ", ".join(row[:2]))
def test_claims_name_a_test_on_cpus_and_a_test_and_a_commit_on_gpus(row: list[str]) -> None:
    _, _, *cpu, gpu = row
    for cell in cpu:
        named = re.findall(r"tests/[\w/]+\.py", cell)
        assert named or cell in ("not run", "needs a GPU", "refused"), cell
        for path in named:
            source = (ROOT / path).read_text(encoding="utf-8")
            assert not re.search(r"^pytestmark = (on_two_gpus|\[?\s*pytest\.mark\.gpu)", source, re.MULTILINE), path
    for path in re.findall(r"tests/[\w/]+\.py", gpu):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(r"mark\.gpu|on_two_gpus", source), path
        assert re.search(r"^\([1-4]\)", gpu), gpu
    if "tests/" not in gpu:
        assert gpu in ("not run", "refused") or "results-speed.md" in gpu, gpu
