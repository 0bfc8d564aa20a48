"""Shows the log messages of the package at the verbosity of transformers."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm
from transformers import TrainingArguments

from ..progress import logger as progress_logger

_PACKAGE = logging.getLogger(__package__.partition(".")[0])


class _ToStandardError(logging.StreamHandler):  # type: ignore[type-arg]  # takes no argument in Python 3.10
    """Writes messages to standard error, unless the root logger has handlers, which show them too.

    Hides progress bars while it writes.
    """

    level_given = logging.NOTSET
    """The level of the package's logger that this module set, in contrast to a level set by the user."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # notebooks replace it
            with tqdm.external_write_mode(file=self.stream):
                super().emit(record)


_HANDLER = _ToStandardError()


def follow_transformers(args: TrainingArguments) -> None:
    """Sets the log level from `args.log_level`, and shows progress bars unless `args.disable_tqdm` is set.

    Keeps a level that the user gave the logger `snip_hf`, and a root logger that shows more.
    """
    _PACKAGE.addHandler(_HANDLER)  # no effect if repeated
    progress_logger.setLevel(logging.CRITICAL if args.disable_tqdm else logging.NOTSET)
    if _PACKAGE.level not in (logging.NOTSET, _HANDLER.level_given):
        return
    _PACKAGE.setLevel(logging.NOTSET)
    level = args.get_process_log_level()
    shows_more_or_asks_for_less = level < _PACKAGE.getEffectiveLevel() or level > logging.WARNING
    _HANDLER.level_given = level if shows_more_or_asks_for_less else logging.NOTSET
    _PACKAGE.setLevel(_HANDLER.level_given)
