"""Runs of TensorBoard, W&B and Trackio that take more than numbers: SNIP's configuration, and figures as images."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..extras import needed_by
from ..numerics.random_state import RandomState
from ..records.load import load_run
from ..reporting.quantities import PREFIX
from ..text import printable

logger = logging.getLogger(__name__)

# Layers that a figure names at most. To name all of a deep model takes several times as long, and training waits.
_MOST_NAMED = 64

Images = Mapping[str, "np.ndarray[Any, Any]"]
"""Name -> (height, width, 3), uint8."""
FIGURES = "figures"
"""Name of the drawing of figures for a `Guard`."""
CONFIG = PREFIX.removesuffix("/")
"""The entry of a run's configuration that holds SNIP's."""


class TrackerRun(Protocol):
    """A run of a tracker, as far as this module writes to it."""

    name: str

    def write_settings(self, settings: Mapping[str, Any]) -> None: ...

    def write_images(self, images: Images, step: int) -> None: ...


class TensorBoardRun:
    """Settings as text, since TensorBoard keeps hyperparameters in a run of their own; figures as images."""

    name = "tensorboard"

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        lines = json.dumps(settings, indent=2).splitlines()
        self._writer.add_text(f"{CONFIG}_config", "\n".join(f"    {line}" for line in lines))
        self._writer.flush()

    def write_images(self, images: Images, step: int) -> None:
        for name, image in images.items():
            self._writer.add_image(name, image, step, dataformats="HWC")
        self._writer.flush()


class LoggedRun:
    """A run with `config` and `log`, as W&B and Trackio have them.

    Args:
        name: of the tracker, which is that of its module.
        run: the run.
        counts_steps: whether `log` gets the step as such; else as an entry, where the Trainer's reports write it.
    """

    def __init__(self, name: str, run: Any, counts_steps: bool) -> None:
        self.name = name
        self._run = run
        self._counts_steps = counts_steps

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        options = {"allow_val_change": True} if self.name == "wandb" else {}
        self._run.config.update({CONFIG: dict(settings)}, **options)

    def write_images(self, images: Images, step: int) -> None:
        as_image = sys.modules[self.name].Image
        entries: dict[str, Any] = {name: as_image(image) for name, image in images.items()}
        if self._counts_steps:
            self._run.log(entries, step=step)
        else:
            self._run.log({**entries, "train/global_step": step})


class Guard:
    """Lets writing to a tracker fail once: it is left out from then on, with a warning, and training goes on."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        """Names of what is left out."""

    def __call__(self, name: str, write: Callable[[], object]) -> None:
        """Calls `write`, unless a call with this name has failed before."""
        if name in self.failed:
            return
        try:
            write()
        except Exception as error:  # a tracker may fail; training may not
            self.failed.add(name)
            what = "no more figures are drawn for trackers" if name == FIGURES else f"{name} is told no more of SNIP"
            # What is not installed is no mishap.
            level = logging.INFO if isinstance(error, ImportError) else logging.WARNING
            logger.log(level, "snip-hf: %s: %s", what, printable(repr(error), 1000))


def write_settings(runs: Iterable[TrackerRun], settings: Mapping[str, Any], guard: Guard) -> None:
    """Writes SNIP's configuration to each run."""
    for run in runs:
        guard(run.name, partial(run.write_settings, settings))


class Drawing:
    """Decides when the figures of a run are drawn: at its 1st, 2nd, 4th, 8th ... new plan, and at the end.

    A figure shows the whole run up to its step, so that few are enough, and drawing takes time.
    """

    def __init__(self) -> None:
        self._plans, self._drawn = 0, 0

    def is_due(self) -> bool:
        """Returns True if the figures are to be drawn at this new plan."""
        self._plans += 1
        return self._plans & (self._plans - 1) == 0

    @property
    def is_behind(self) -> bool:
        """Whether there are plans that no figure shows."""
        return self._plans > self._drawn

    def draw(self, folder: str | Path, runs: Iterable[TrackerRun], step: int) -> None:
        """Draws the figures of the run in a folder, and writes them to runs of trackers.

        Random numbers that are drawn on the way are not the training's.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        self._drawn = self._plans
        before = RandomState.now()
        try:
            images = figures_of(folder)
            for run in runs:
                run.write_images(images, step)
        finally:
            before.restore()


def figures_of(folder: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the figures of the plan and of the divergences of the run in a folder, as far as there is data for them.

    Losses are left out: trackers plot them, and those in the folder may be of an earlier run.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError, ValueError: the record of the run cannot be read.
    """
    with needed_by("figures for trackers"):
        from ..reporting.figures import write_figures
    from PIL import Image  # which Matplotlib needs

    run = dataclasses.replace(load_run(folder), losses={})
    with tempfile.TemporaryDirectory() as made:
        found = {}
        for path in write_figures(run, made, _MOST_NAMED):
            with Image.open(path) as image:
                found[f"{CONFIG}/{path.stem}"] = np.asarray(image.convert("RGB"))
        return found
