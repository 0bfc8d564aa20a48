"""A progress bar for work that takes more than some seconds; on a terminal, and by the first process alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

# Until then nothing is shown, and most probes are done.
_SECONDS = 3.0


@contextmanager
def progress(what: str, total: int, is_first: bool = True, after: float = _SECONDS) -> Iterator[Callable[[], object]]:
    """Gives a function to call after each of `total` parts of the work.

    There is no bar where standard error is no terminal, nor where warnings of the logger `snip_hf.progress` are off.

    Args:
        what: the work, for the bar.
        total: number of parts.
        is_first: whether this is the first process.
        after: seconds that the work takes at least for the bar to be shown.
    """
    is_shown = is_first and logger.isEnabledFor(logging.WARNING)
    with tqdm(
        total=total, desc=f"snip-hf: {what}", delay=after, leave=False, disable=None if is_shown else True
    ) as bar:
        yield bar.update
