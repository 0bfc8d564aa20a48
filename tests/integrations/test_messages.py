"""Do transformers' settings show the package's messages, and does the user's own setting of them stay?"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from configs import fp4_config
from tiny_runs import SCHEDULE, one_thread, train
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from snip_hf import SnipConfig
from snip_hf.integrations.messages import follow_transformers

PACKAGE = logging.getLogger("snip_hf")
REPORTS = Path(__file__).resolve().parents[2] / "docs" / "reports.md"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(verbosity)
    logging.getLogger("snip_hf.progress").setLevel(logging.NOTSET)


def standard_error(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Replaces stderr and removes pytest's handlers, as in a process that has not set up logging."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def follow(folder: Path, **options: Any) -> int:
    """Returns the level of the package's messages."""
    follow_transformers(TrainingArguments(output_dir=str(folder), report_to=[], **options))
    return PACKAGE.getEffectiveLevel()


def test_a_run_with_log_level_info_says_what_it_begins_with_each_refresh_and_what_it_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = standard_error(monkeypatch)
    with one_thread():
        train(
            tmp_path,
            fp4_config(start_format="bf16", target_fp4_fraction=0.75, **SCHEDULE),
            max_steps=5,
            log_level="info",
        )
    text = stderr.getvalue()
    begin = text[text.index("snip-hf: training under SNIP.") :].splitlines()[1:8]
    assert begin == [
        "  plan       policy snip, 0.0% of the linear FLOPs in FP4",
        "  target     at least 75.0% of the linears' FLOPs in FP4",
        "  formats    FP4, FP8, decided per gemm",
        "  backend    emulated",
        "  coverage   the plan can decide on 100.0% of the model's matmul FLOPs (output head and attention products "
        "aside)",
        "  refreshes  at step 2, then every 4 steps; a plan is applied 2 steps later; until then BF16",
        "  speed      slower than BF16: the backend emulates",
    ]
    shares = "75.4% of the linear FLOPs in FP4"
    assert text.count("snip-hf: training under SNIP.") == 1
    assert (
        text.count(f"snip-hf: plan of step 2 applied after step 4: {shares}, 14 layers changed; the probe took ") == 1
    )
    assert text.count(f"snip-hf: ended after step 5: {shares}. New plans: 1; refreshes that kept the plan: 0. ") == 1


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def test_the_documentation_shows_what_a_run_by_default_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shown, _ = REPORTS.read_text(encoding="utf-8").replace("```text\n", "```\n").rsplit("```\n", 2)
    stderr = standard_error(monkeypatch)
    train(tmp_path, SnipConfig(), callbacks=[Stop()], max_steps=1000, log_level="info")
    assert shown in stderr.getvalue()


def test_a_run_shows_no_messages_of_that_kind_by_default_but_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = standard_error(monkeypatch)
    with one_thread():
        train(tmp_path, fp4_config(**SCHEDULE), max_steps=2)
    text = stderr.getvalue()
    assert "snip-hf: training under" not in text
    assert text.startswith("snip-hf: training ends at step 2, before the plan of a refresh at step 2 would be applied")


def test_transformers_verbosity_decides_where_the_arguments_say_nothing(tmp_path: Path) -> None:
    assert follow(tmp_path) == logging.WARNING
    transformers_logging.set_verbosity_info()
    assert follow(tmp_path) == logging.INFO
    transformers_logging.set_verbosity_warning()
    assert follow(tmp_path) == logging.WARNING
    assert follow(tmp_path, log_level="error") == logging.ERROR


def test_a_level_of_the_users_own_stays(tmp_path: Path) -> None:
    PACKAGE.setLevel(logging.DEBUG)
    assert follow(tmp_path, log_level="error") == logging.DEBUG


def test_a_root_logger_that_shows_more_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    PACKAGE.manager._clear_cache()  # type: ignore[attr-defined]
    assert follow(tmp_path, log_level="warning") == logging.INFO


def test_handlers_of_the_root_logger_get_each_message_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert follow(tmp_path, log_level="info") == logging.INFO
    PACKAGE.info("snip-hf: a message")
    assert (caplog.messages, stream.getvalue()) == (["snip-hf: a message"], "")


def test_disable_tqdm_turns_the_bars_off(tmp_path: Path) -> None:
    bars = logging.getLogger("snip_hf.progress")
    follow(tmp_path, disable_tqdm=True)
    assert not bars.isEnabledFor(logging.WARNING)
    follow(tmp_path, disable_tqdm=False)
    assert bars.isEnabledFor(logging.WARNING)
