"""Hides warnings of torchao's import, which transformers triggers, about parts that snip-hf does not use."""

from __future__ import annotations

import logging

# torchao's CUDA extensions that do not load with this Python or torch.
_EXTENSIONS = ("Failed to load ", "Skipping import of cpp extensions ")
# torch, about an enum that torchao registers.
_ENUM = "%s is an Enum subclass and is now natively supported by "


def hide_import_warnings() -> None:
    """Filters exactly these messages from the loggers of torchao and torch."""
    logging.getLogger("torchao").addFilter(_is_about_no_extension)
    logging.getLogger("torch.utils._pytree").addFilter(_is_about_no_torchao_enum)


def _is_about_no_extension(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_EXTENSIONS)


def _is_about_no_torchao_enum(record: logging.LogRecord) -> bool:
    args = record.args if isinstance(record.args, tuple) else ()
    return not (str(record.msg).startswith(_ENUM) and args and args[0].__module__.startswith("torchao."))  # type: ignore[union-attr]
