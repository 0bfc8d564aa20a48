"""Trackers are told of what the history gets, after it, in order, and cost no more than a warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from events import refresh_event, start_event
from tiny_runs import history

from snip_hf.records.events import Event
from snip_hf.records.run_folder import RunRecord

LOG = logging.getLogger("snip_hf.of_the_test")
EVENTS: list[Event] = [start_event(), refresh_event(2), refresh_event(6)]


def test_all_trackers_are_told_of_each_event_once_it_is_in_the_history(tmp_path: Path) -> None:
    log = RunRecord(tmp_path, True, LOG)
    told: list[tuple[str, Event, int]] = []
    for name in "ab":
        log.add_tracker(lambda event, name=name: told.append((name, event, len(history(tmp_path)))))
    for event in EVENTS:
        log.add(event)
    assert told == [(name, event, number) for number, event in enumerate(EVENTS, 1) for name in "ab"]
    assert history(tmp_path) == [event.to_record() for event in EVENTS]


def test_a_tracker_is_told_where_nothing_is_recorded() -> None:
    log, told = RunRecord(None, True, LOG), []
    log.add_tracker(told.append)
    log.add(EVENTS[0])
    assert told == EVENTS[:1]


def test_a_tracker_that_fails_costs_a_warning_and_is_told_of_the_next_event(caplog: pytest.LogCaptureFixture) -> None:
    log, told = RunRecord(None, True, LOG), []

    def fail(event: Event) -> None:
        told.append(event)
        raise ConnectionError("no\nnetwork")

    log.add_tracker(fail)
    log.add_tracker(told.append)
    for event in EVENTS[1:]:
        log.add(event)
    assert told == [EVENTS[1], EVENTS[1], EVENTS[2], EVENTS[2]]
    assert caplog.messages == [
        f"snip-hf: a tracker failed at the refresh event of step {step}, training continues: "
        "ConnectionError('no\\nnetwork')"
        for step in (2, 6)
    ]
    assert all(record.exc_info is None for record in caplog.records)


def test_on_other_ranks_than_the_first_nobody_is_told() -> None:
    log, told = RunRecord(None, False, LOG), []
    log.add_tracker(told.append)
    log.add(EVENTS[0])
    assert told == []
