"""`snip-hf recipe list` and `snip-hf recipe copy`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from parts.recipe import load_recipe

from snip_hf.cli import main
from snip_hf.cli.recipe import find_root, needed_files, recipe_files

ROOT = Path(__file__).resolve().parents[2]


def copied(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_list_has_each_recipe_with_what_it_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("quickstart        A first SNIP run, of two to six minutes on two CPU cores")
    shown = "The quickstart by layer, as in the paper, with at least 50% of the linear FLOPs in FP4, in each stage"
    assert f"snip-50           {shown}" in lines
    assert "pipeline          A pipeline that trains under SNIP without a Trainer: four stages" in "\n".join(lines)
    names = [line.split()[0] for line in lines]
    assert names == list(recipe_files(ROOT)) and all(len(line.split()) > 4 for line in lines)
    assert not any(name.startswith("pretrain") for name in names)


def test_a_copied_recipe_is_complete_with_its_base_and_is_the_same_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "copy", "snip-50", "--to", str(tmp_path)]) == 0
    files = copied(tmp_path)
    assert {"recipes/snip-50.yaml", "recipes/quickstart.yaml", "recipes/pretrain.py", "eval/run.py"} <= files
    assert "recipes/snip-75.yaml" not in files
    assert load_recipe(tmp_path / "recipes" / "snip-50.yaml") == load_recipe(ROOT / "recipes" / "snip-50.yaml")
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"  accelerate launch --config_file {tmp_path}/recipes/accelerate/single.yaml {tmp_path}/recipes/pretrain.py "
        f"{tmp_path}/recipes/snip-50.yaml"
    )


def test_without_a_name_all_recipes_are_copied_into_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", "copy"]) == 0
    assert copied(tmp_path) == set(needed_files(ROOT, list(recipe_files(ROOT).values())))
    assert (
        "accelerate launch --config_file recipes/accelerate/single.yaml recipes/pretrain.py" in capsys.readouterr().out
    )


def test_the_command_names_the_configuration_that_a_recipe_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "copy", "hopper.yaml", "--to", str(tmp_path)]) == 0
    assert f"--config_file {tmp_path}/recipes/accelerate/compile.yaml" in capsys.readouterr().out
    assert main(["recipe", "copy", "pipeline", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"  python {tmp_path}/recipes/pipeline.py --help"


def test_links_of_the_copied_page_lead_to_the_repository(tmp_path: Path) -> None:
    main(["recipe", "copy", "bf16", "--to", str(tmp_path)])
    page = (tmp_path / "recipes" / "README.md").read_text(encoding="utf-8")
    assert "](../" not in page and "/blob/main/docs/adapters.md)" in page


def test_a_file_that_differs_is_kept_and_nothing_is_copied_unless_it_may_be_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "recipes" / "quickstart.yaml"
    mine.parent.mkdir()
    mine.write_text("mine\n")
    assert main(["recipe", "copy", "--to", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"snip-hf: {mine} exists and differs (1 such files in all); nothing was copied. Give another folder with --to, "
        "or use --overwrite.\n"
    )
    assert copied(tmp_path) == {"recipes/quickstart.yaml"} and mine.read_text() == "mine\n"
    for _ in range(2):  # the second time everything is there already
        assert main(["recipe", "copy", "--to", str(tmp_path), "--overwrite"]) == 0
    assert mine.read_bytes() == (ROOT / "recipes" / "quickstart.yaml").read_bytes()
    assert main(["recipe", "copy", "--to", str(tmp_path)]) == 0


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "copy", "quick-start", "--to", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    start = "snip-hf: There is no recipe 'quick-start'. Did you mean 'quickstart'? `snip-hf recipe list` lists all "
    assert error.startswith(start) and copied(tmp_path) == set()


def test_no_two_recipes_have_one_name() -> None:
    files = [path for path in (ROOT / "recipes").iterdir() if path.suffix in (".yaml", ".py")]
    names = [path.stem for path in files]
    assert sorted(set(names)) == sorted(names)


def test_listing_and_copying_wait_for_no_library(tmp_path: Path) -> None:
    program = (
        "import sys; from snip_hf.cli import main; main(['recipe', 'copy', '--to', sys.argv[1]]); "
        "main(['recipe', 'list']); print({'torch', 'transformers', 'yaml', 'rich'} & set(sys.modules))"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_repository_s_own_recipes_are_found_without_an_installation() -> None:
    assert find_root() == ROOT
