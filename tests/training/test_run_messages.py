"""What does the log say of a run as a whole, at its begin and at its end?"""

from __future__ import annotations

import logging
import threading

import pytest
from own_loop import Loop
from thread_ranks import on_ranks
from tiny_runs import SCHEDULE

from snip_hf import SnipConfig
from snip_hf.kernels.emulated import Emulated
from snip_hf.parallel.ranks import Ranks


def said(loop: Loop, caplog: pytest.LogCaptureFixture, until: int) -> list[str]:
    """The messages of a run as a whole."""
    caplog.set_level(logging.INFO, "snip_hf")
    loop.run(until)
    assert loop.controller is not None
    for _ in range(2):
        loop.controller.close()
    whole = ("snip-hf: training under SNIP.", "snip-hf: ended after")
    return [message for message in caplog.messages if message.startswith(whole)]


def lines(message: str) -> dict[str, str]:
    """Name -> text of the first message."""
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in message.splitlines()[1:]}


def test_a_run_says_what_it_begins_with_and_what_it_came_to_once(caplog: pytest.LogCaptureFixture) -> None:
    begin, end = said(Loop(), caplog, until=8)
    assert list(lines(begin)) == ["plan", "target", "formats", "backend", "coverage", "refreshes", "speed"]
    assert lines(begin)["plan"].startswith("policy snip, 0.0% of the linear FLOPs in FP4")
    assert lines(begin)["refreshes"].endswith("every 4 steps; a plan is applied 2 steps later; until then FP8")
    assert end.startswith("snip-hf: ended after step 8: 75.4% of the linear FLOPs in FP4 (per stage: 75.4%). New plans")
    assert ". New plans: 2; refreshes that kept the plan: 0. Probes took " in end


def test_a_refresh_that_came_to_nothing_is_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    _, end = said(Loop(), caplog, until=3)  # before the plan of step 2 is due
    assert "New plans: 0; refreshes that kept the plan: 1. " in end


def test_a_run_that_took_no_step_came_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert said(Loop(), caplog, until=0) == []


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        ({"policy": "uniform-fp8"}, "target", "none"),
        ({"policy": "uniform-fp8"}, "refreshes", "none: the policy takes no probe"),
        ({"target_fp4_fraction": ((1, 0.9), (5, 0.5))}, "target", "at least 90.0% from step 1, 50.0% from step 5 of "),
        ({"decides": "forward", "granularity": "gemm"}, "target", "at least 75.0% of the forward GEMMs' FLOPs in FP4"),
        ({"refresh_every": None}, "refreshes", "at step 2, no more; a plan is applied 2 steps later; until then FP8"),
        ({"formats": ("nvfp4", "mxfp8")}, "formats", "NVFP4, MXFP8, decided per gemm"),
    ],
)
def test_the_begin_names_what_was_asked_for(
    options: dict[str, object], name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SCHEDULE | options if "policy" not in options else options
    begin, _ = said(Loop(SnipConfig(**settings)), caplog, until=1)  # type: ignore[arg-type]
    assert text in lines(begin)[name]


def test_the_begin_names_the_speed_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Emulated, "measured_speeds", {32: 1.2}, raising=False)
    begin, _ = said(Loop(), caplog, until=1)
    assert lines(begin)["speed"] == "less than was measured (docs/hopper.md), as the warning says"


def test_the_first_rank_alone_says_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    own = threading.local()
    monkeypatch.setattr(Ranks, "of_all", lambda timeout: own.ranks)
    caplog.set_level(logging.INFO, "snip_hf")

    def work(ranks: Ranks) -> None:
        own.ranks = ranks
        loop = Loop()
        while loop.step < 4:
            loop.one_step()
        assert loop.controller is not None and loop.controller.plan.fp4_fraction > 0
        loop.controller.close()

    on_ranks(2, work)
    for begin in ("snip-hf: training under SNIP.", "snip-hf: plan of step 2 applied", "snip-hf: ended after step 4"):
        assert len([message for message in caplog.messages if message.startswith(begin)]) == 1
