"""The package as it is published: its metadata, its two archives, and what is in them."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml

import snip_hf
from snip_hf.shipped_files import REPOSITORY, shipped_files

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".ci", ".github", "benchmarks", "docs", "eval", "recipes", "src", "tests")
PATTERNS = (
    "*.cff",
    "*.cfg",
    "*.in",
    "*.md",
    "*.py",
    "*.toml",
    "*.yaml",
    "*.yml",
    ".gitignore",
    "Dockerfile",
    "LICENSE",
)
FILES = sorted({path.name for pattern in PATTERNS for path in ROOT.glob(pattern)})


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if not line.startswith("#")]


def test_the_version_is_semantic_and_in_one_place(setup_cfg: configparser.ConfigParser) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", snip_hf.__version__)
    assert setup_cfg["metadata"]["version"] == "attr: snip_hf.__version__"
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_metadata_name_the_authors_and_every_address_is_in_the_repository(
    setup_cfg: configparser.ConfigParser,
) -> None:
    metadata = setup_cfg["metadata"]
    addresses = dict(re.split(r" = ", line) for line in lines(metadata["project_urls"]))
    assert metadata["author"] == "The snip-hf developers"
    assert list(addresses) == ["Homepage", "Repository", "Documentation", "Changelog", "Issues"]
    assert all(address.startswith("https://") for address in addresses.values())
    assert addresses["Repository"] == REPOSITORY
    assert addresses["Changelog"] == f"{REPOSITORY}/blob/main/CHANGELOG.md"


def test_the_pythons_that_are_named_are_those_that_hosted_ci_runs(setup_cfg: configparser.ConfigParser) -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)$", setup_cfg["metadata"]["classifiers"], re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["ci"]
    assert job["strategy"]["matrix"]["python"] == classifiers == ["3.10", "3.11", "3.12", "3.13"]
    assert setup_cfg["options"]["python_requires"] == ">=" + classifiers[0]
    assert setup_cfg["mypy"]["python_version"] == classifiers[0]
    assert f'target-version = "py{classifiers[0].replace(".", "")}"' in (ROOT / "ruff.toml").read_text()
    assert job["steps"][-1]["run"] == ".ci/run" and os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_citation_names_the_paper_and_the_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert citation["repository-code"] == REPOSITORY
    paper = citation["preferred-citation"]
    assert {"type", "title", "authors"} <= set(paper) and paper["url"] == "https://arxiv.org/abs/2602.01410"
    assert [author["family-names"] for author in paper["authors"]] == ["Pan", "Yang", "Yang", "Mahlke"]


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line]


def test_the_dockerfile_copies_what_is_there_and_all_that_the_build_reads() -> None:
    # An image is not built here; this checks what can be checked without one.
    found = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    sources = [source for name, rest in found if name == "COPY" for source in rest.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    build = ["pyproject.toml", "setup.cfg", "setup.py", "README.md", "LICENSE", "src", "recipes", "eval"]
    assert sorted(sources) == sorted(build)
    assert "SHIPPED" in (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the unpacked source distribution, the wheel that is built from it)."""
    pytest.importorskip("setuptools", minversion="77", reason="the archives are built with setuptools")
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "repository" / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "repository" / name)
    build(folder / "repository", "sdist")
    (archive,) = (folder / "repository" / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    copy = folder / "for the wheel"  # which leaves files of its own
    shutil.copytree(unpacked, copy)
    build(copy, "wheel")
    (wheel,) = (copy / "dist").glob("*.whl")
    return unpacked, wheel


def build(folder: Path, what: str) -> None:
    program = f"from setuptools import build_meta; build_meta.build_{what}('dist')"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(archives: Any) -> None:
    unpacked = archives[0]
    assert unpacked.name == f"snip_hf-{snip_hf.__version__}"
    there = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    of_the_build = {"PKG-INFO", *(str(path) for path in there if "snip_hf.egg-info" in path.parts)}
    here = {
        path.relative_to(ROOT)
        for name in FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not {"__pycache__", "snip_hf.egg-info"} & set(path.parts)
    }
    assert {path for path in there if str(path) not in of_the_build} == here | {*map(Path, FILES)}


@pytest.mark.slow
def test_the_wheel_has_the_package_its_types_and_the_recipes(archives: Any) -> None:
    with zipfile.ZipFile(archives[1]) as archive:
        names = set(archive.namelist())
        source = ROOT / "src" / "snip_hf"
        files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
        package = {f"snip_hf/{path.as_posix()}" for path in files if "__pycache__" not in path.parts}
        shipped = {f"snip_hf/shipped/{file}" for file in shipped_files(ROOT)}
        assert {name for name in names if ".dist-info/" not in name} == package | shipped
        assert "snip_hf/py.typed" in names
        assert (
            archive.read("snip_hf/shipped/recipes/quickstart.yaml")
            == (ROOT / "recipes" / "quickstart.yaml").read_bytes()
        )
        assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_metadata_of_the_wheel_are_complete(archives: Any) -> None:
    metadata = metadata_of(archives[1])
    assert metadata["Name"] == "snip-hf" and metadata["Version"] == snip_hf.__version__
    assert metadata["Author"] == "The snip-hf developers" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata["Keywords"]
    labels = [address.split(",")[0] for address in metadata.get_all("Project-URL")]
    assert labels == ["Homepage", "Repository", "Documentation", "Changelog", "Issues"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    text = str(metadata.get_payload())
    assert text.lstrip().startswith("# snip-hf\n")
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("https://")] == []


@pytest.mark.slow
def test_recipes_of_an_installed_wheel_are_listed_copied_and_read(archives: Any, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(archives[1]) as archive:
        archive.extractall(site)
    # The other packages are those of this Python; its own snip-hf comes after the wheel's.
    (site / "others.pth").write_text(
        "\n".join(path for path in sys.path if Path(path).is_dir() and path != str(ROOT / "src"))
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def python(*arguments: str) -> str:
        command = [str(tmp_path / "venv" / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(site) in python("-c", "import snip_hf; print(snip_hf.__file__)")
    assert python("-m", "snip_hf", "recipe", "list").startswith("quickstart")
    assert "recipes/pretrain.py recipes/snip-50.yaml" in python("-m", "snip_hf", "recipe", "copy", "snip-50")
    program = (
        "import sys; sys.path[0] = 'recipes'; from parts.recipe import load_recipe; from pathlib import Path; "
        "print(load_recipe(Path('recipes/snip-50.yaml')).snip.target_fp4_fraction); "
        "import runpy; runpy.run_path('recipes/pretrain.py', run_name='__main__')"
    )
    shown = python("-c", program, "--help")
    assert shown.startswith("0.5\n") and "--override KEY=VALUE" in shown
