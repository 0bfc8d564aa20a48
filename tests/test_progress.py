"""When is a progress bar shown?"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from snip_hf import progress as progress_module
from snip_hf.progress import progress


@pytest.fixture(autouse=True)
def asked_for_bars() -> Iterator[None]:
    """Whatever a Trainer's `disable_tqdm` said in this process before."""
    logger = logging.getLogger("snip_hf.progress")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, is_first: bool = True, after: float = 0.0) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "_SECONDS", after)
    with progress("timing of GEMMs", 4, is_first) as tell:
        for _ in range(4):
            tell()
    return stream.getvalue()


def test_work_that_takes_long_shows_a_bar_on_a_terminal_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert "snip-hf: timing of GEMMs" in text and "4" in text
    assert text.endswith("\r")


def test_work_that_is_soon_done_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Terminal(), after=600.0).strip() == ""


def test_a_file_and_other_processes_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, Terminal(), is_first=False) == ""


def test_its_logger_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("snip_hf.progress")
    logger.setLevel(logging.CRITICAL)
    try:
        assert shown(monkeypatch, Terminal()) == ""
    finally:
        logger.setLevel(logging.NOTSET)
