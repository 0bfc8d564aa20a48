"""Shows a progress bar for slow work, only on terminals and in the first process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

# Most probes are faster than this, so they show no bar.
_SECONDS = 3.0


@contextmanager
def progress(what: str, total: int, is_first: bool = True) -> Iterator[Callable[[], object]]:
    """Yields a function to call after each of `total` parts of the work.

    There is no bar if standard error is not a terminal, or if the logger `snip_hf.progress` does not log warnings.

    Args:
        what: description of the work.
        total: number of parts.
        is_first: whether this is the first process.
    """
    is_shown = is_first and logger.isEnabledFor(logging.WARNING)
    with tqdm(
        total=total, desc=f"snip-hf: {what}", delay=_SECONDS, leave=False, disable=None if is_shown else True
    ) as bar:
        yield bar.update
