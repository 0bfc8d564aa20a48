"""Does the script that a shell loads complete commands, options and files?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snip_hf.cli import build_parser, completion, main
from snip_hf.cli.completion import SHELLS

shtab = pytest.importorskip("shtab", reason="the extra `completion` is not installed")

# Completes the last word as bash does: the script's function fills COMPREPLY.
COMPLETE = """
source "$1"; shift
compopt() { :; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_snip_hf snip-hf "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["comp"], ["compare", "completion"]),
        (["export", "plan.json", "--ov"], ["--overwrite"]),
        (["export", "plan.json", "--to", "torch"], ["torchao"]),
        (["completion", "z"], ["zsh"]),
        (["inspect", "pl"], ["plan.json"]),
        (["report", ""], ["runs"]),
        (["compare", "runs", ""], ["plan.json", "runs"]),
    ],
)
def test_bash_completes(
    words: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "completion").write_text(script("bash", capsys))
    (tmp_path / "folder" / "runs").mkdir(parents=True)
    (tmp_path / "folder" / "plan.json").touch()
    command = ["bash", "--norc", "-c", COMPLETE, "bash", str(tmp_path / "completion"), "snip-hf", *words]
    done = subprocess.run(command, cwd=tmp_path / "folder", capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.split()) == expected


def test_what_each_option_takes_is_known() -> None:
    """A metavar of another name is completed as nothing: files and folders must be among those that are known."""
    found = {
        action.metavar for action in completion._actions(build_parser()) if action.choices is None and action.metavar
    }
    assert found <= {*completion._FOLDERS, *completion._FILES, "N", "MODULE", "NAME"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_that_names_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(command in text for command in ("inspect", "compare", "doctor"))


def test_without_its_package_the_command_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == (
        "snip-hf: The command 'completion' needs shtab, which is not installed. Install it: "
        'pip install "snip-hf[completion]"\n'
    )
