"""Plans and checkpoints with a user format are refused if it is not registered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs import fp4_config
from registries import restored
from tiny_runs import SCHEDULE, differing, model_with_dropout, train, weights

from snip_hf import SnipCallback, SnipConfig, register_format
from snip_hf.numerics.formats import FORMATS

ADVICE = (
    "A format of your own is registered first: by `snip_hf.register_format`, or by `--import MODULE` on the command "
    "line."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run over ("own-fp4", "fp8"), with a checkpoint between a probe and its plan."""
    path: Path = tmp_path_factory.mktemp("run")
    with restored(FORMATS):
        register_format(replace(FORMATS["fp4"], name="own-fp4"))
        config = SnipConfig(**SCHEDULE, formats=("own-fp4", "fp8"))
        train(path, config, save_strategy="steps", save_steps=3, max_steps=5)
    yield path


def in_a_plan(folder: Path) -> Any:
    return train(folder / "out", fp4_config(fixed_plan=str(folder / "snip" / "plan.json")), model=MODEL)


def in_a_checkpoint(folder: Path) -> Any:
    callback = SnipCallback(fp4_config(**SCHEDULE))
    return train(folder / "out", callback=callback, resume=folder / "checkpoint-3", model=MODEL)


def in_a_config(folder: Path) -> Any:
    return SnipConfig.from_dict({**SCHEDULE, "formats": ["own-fp4", "fp8"]})


MODEL = model_with_dropout()


UNKNOWN = ("Unknown format 'own-fp4' for ", ". `list(snip_hf.formats)` lists all ", ADVICE)
OTHER = (
    "The checkpoint was trained with formats=['own-fp4', 'fp8'], this run asks for formats=['fp4', 'fp8']",
    "Use the checkpoint's configuration to resume its run, or start a new plan",
)


@pytest.mark.parametrize(("named", "parts"), [(in_a_plan, UNKNOWN), (in_a_checkpoint, OTHER), (in_a_config, UNKNOWN)])
def test_a_format_that_is_not_registered_here_is_refused_before_training_and_nothing_is_written(
    folder: Path, named: Callable[[Path], Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    here = tmp_path / "run"
    shutil.copytree(folder, here)
    files, before = sorted(here.rglob("*")), weights(MODEL)
    with pytest.raises(ValueError) as error:
        named(here)
    assert all(part in str(error.value) for part in parts)
    assert sorted(path for path in here.rglob("*") if "out" not in path.parts) == files
    assert not (here / "out" / "snip").exists()
    if named is not in_a_checkpoint:  # the Trainer loads its weights first
        assert differing(weights(MODEL), before) == []
