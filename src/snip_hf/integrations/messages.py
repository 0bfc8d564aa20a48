"""Shows the package's log messages at transformers' verbosity."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm
from transformers import TrainingArguments

from ..progress import logger as progress_logger

_PACKAGE = logging.getLogger(__package__.partition(".")[0])


class _ToStandardError(logging.StreamHandler):  # type: ignore[type-arg]  # takes no argument in Python 3.10
    """Writes messages to standard error, unless the root logger has handlers, which get them anyway.

    Clears the Trainer's progress bars while it writes.
    """

    level_given = logging.NOTSET
    """The level that this module, and not the user, gave the package's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # notebooks replace it
            with tqdm.external_write_mode(file=self.stream):
                super().emit(record)


_HANDLER = _ToStandardError()


def follow_transformers(args: TrainingArguments) -> None:
    """Sets the level of messages by `args.log_level`, and shows progress bars unless `args.disable_tqdm`.

    A level that the user gave the logger `snip_hf`, or a root logger that shows more, is kept.
    """
    _PACKAGE.addHandler(_HANDLER)  # adding it again has no effect
    progress_logger.setLevel(logging.CRITICAL if args.disable_tqdm else logging.NOTSET)
    if _PACKAGE.level not in (logging.NOTSET, _HANDLER.level_given):
        return
    _PACKAGE.setLevel(logging.NOTSET)
    level = args.get_process_log_level()
    shows_more_or_asks_for_less = level < _PACKAGE.getEffectiveLevel() or level > logging.WARNING
    _HANDLER.level_given = level if shows_more_or_asks_for_less else logging.NOTSET
    _PACKAGE.setLevel(_HANDLER.level_given)
