"""Readers accept whatever writers write, also of the largest models, and writers refuse what no reader accepts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from configs import fp4_config

from snip_hf import json_io as json_io_module
from snip_hf.costs import timing as timing_module
from snip_hf.costs.timing import GemmShape, Machine, MeasuredCost, gemm_times
from snip_hf.estimation.table import LAYER, Divergence, DivergenceTable
from snip_hf.json_io import MAX_JSON_BYTES, append_json_line, read_json, write_json_atomic
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
from snip_hf.planning.program import problem
from snip_hf.policies.setting import Setting, find_stages
from snip_hf.records.events import RefreshBegun
from snip_hf.records.load import read_divergence
from snip_hf.records.run_folder import RunFolder
from snip_hf.training.checkpoint import PendingRefresh

CHOICES = fp4_config().formats[::-1]
# Linears of DeepSeek-V3, whose experts are counted one by one.
LARGEST = 45_032


class Decided:
    """The documents that a refresh writes for a model of so many linears, by GEMM and with measured times."""

    def __init__(self, layers: int) -> None:
        rng = random.Random(0)
        names = [f"model.layers.{i // 770}.mlp.experts.{i % 770}.down_proj" for i in range(layers)]
        config = fp4_config(granularity="gemm")
        flops = {name: dict.fromkeys(GEMMS, 2.0 * 7168 * 2048) for name in names}
        setting = Setting(config, flops, find_stages(names, config))
        self.table = DivergenceTable(
            3.2,
            tuple(
                Divergence(name, gemm, fmt, rng.random(), rng.random(), 2.0 * 7168 * 2048, *random_numbers(rng, 4))
                for name in names
                for gemm in (*GEMMS, LAYER)
                for fmt in CHOICES
            ),
        )
        seconds = {
            name: {gemm: dict.fromkeys(("bf16", "fp8", "fp4"), rng.random()) for gemm in GEMMS} for name in names
        }
        machine = Machine("NVIDIA H200", "2.11.0+cu130", "hopper", "bfloat16")
        self.plan = PrecisionPlan(
            {name: {gemm: rng.choice(CHOICES) for gemm in GEMMS} for name in names},
            flops,
            setting.stages,
            PlanProvenance(step=40, policy="snip", config=config.to_dict()),
            MeasuredCost(machine=machine, tokens=16384, seconds=seconds),
        )
        program = problem(setting, self.table)
        pending = PendingRefresh(40, 50, program, RefreshBegun(step=40))
        self.state = {"step": 41, "plan": self.plan.to_dict(), "pending": pending.to_dict()}


def random_numbers(rng: random.Random, count: int) -> list[float]:
    return [rng.random() for _ in range(count)]


def assert_round_trip(decided: Decided, folder: Path, layers: int) -> None:
    """Plan, state and table come back as they were, and for `LARGEST` layers would stay below the limit."""
    run = RunFolder(folder)
    run.save_plan(decided.plan)
    run.write_divergences(40, decided.table)
    write_json_atomic(folder / "snip" / "state.json", decided.state)
    for path in (folder / "snip").iterdir():
        assert path.stat().st_size * LARGEST / layers < 0.8 * MAX_JSON_BYTES
    assert PrecisionPlan.load(folder / "snip" / "plan.json") == decided.plan
    assert read_json(folder / "snip" / "state.json") == decided.state
    assert read_divergence(folder / "snip" / "divergence-40.json") == (40, decided.table)


def test_files_of_a_refresh_are_read_back_and_grow_to_the_largest_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_round_trip(Decided(500), tmp_path, 500)
    assert caplog.messages == []


def test_large_documents_are_written_without_indentation_and_small_ones_for_people(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": [1, 2]})
    assert path.read_text() == '{\n "a": [\n  1,\n  2\n ]\n}\n'
    write_json_atomic(path, {"a": [1] * 2**20})
    assert path.stat().st_size == len('{"a":[') + 2 * 2**20 - 1 + len("]}\n")


def test_a_writer_refuses_what_a_reader_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    monkeypatch.setattr(json_io_module, "MAX_JSON_BYTES", 100)
    for write in (write_json_atomic, append_json_line):
        write(path, "x" * 97)  # and two quotation marks and a line break
        with pytest.raises(
            ValueError, match=r"10[0-9] bytes of JSON are not written, because at most 100 can be read back"
        ):
            write(path, "x" * 99)
        assert read_json(path) == "x" * 97
        path.unlink()


def test_times_that_are_too_many_to_be_read_cost_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(json_io_module, "MAX_JSON_BYTES", 100)
    shape = GemmShape("forward", 8, 8, 8)
    monkeypatch.setattr(timing_module, "time_gemm", lambda *args: 1.0)
    times = gemm_times([shape], "emulated", torch.device("cpu"), tmp_path / "times.json", tuple(FORMATS))
    assert times == {shape: dict.fromkeys(FORMATS, 1.0)}
    assert not list(tmp_path.iterdir())
    (message,) = caplog.messages
    assert message.startswith("snip-hf: could not write the times of GEMMs to ")
