"""Is every GEMM timed once per machine and shape, and is a file of times read as strictly as it is written?"""

from __future__ import annotations

import gc
import itertools
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from snip_hf.costs import timing
from snip_hf.costs.timing import GemmShape, Machine, read_times, time_gemm, write_times
from snip_hf.kernels.emulated import Emulated
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

CPU = torch.device("cpu")
FORMATS = ("bf16", "fp8", "fp4")  # those of a run by default, and what is not quantized
SHAPES = [GemmShape(gemm, 64, 32, 48) for gemm in GEMMS] + [GemmShape("forward", 64, 32, 96)]
gemm_times = partial(timing.gemm_times, formats=("fp4", "fp8"))
MADE_UP = {"bf16": 4e-3, "fp8": 2e-3, "fp4": 1e-3}


class Clock:
    """A timer that notes what it is asked for; every GEMM takes `MADE_UP` times a number that grows with each call."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, GemmShape, str]] = []

    def __call__(self, backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
        self.asked.append((backend, shape, format))
        return MADE_UP[format] * len(self.asked)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time_gemm", clock)
    return clock


def test_equal_shapes_are_timed_once_in_every_format(clock: Clock) -> None:
    times = gemm_times([*SHAPES, *SHAPES[::-1]], "emulated", CPU)
    assert clock.asked == [("emulated", shape, fmt) for shape in SHAPES for fmt in FORMATS]
    assert times[SHAPES[1]] == {"bf16": 4e-3 * 4, "fp8": 2e-3 * 5, "fp4": 1e-3 * 6}
    assert list(times) == SHAPES


def test_a_file_is_completed_and_what_it_has_is_not_timed_again(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    first = gemm_times(SHAPES[:2], "emulated", CPU, path)
    written = path.read_bytes()
    assert gemm_times(SHAPES[:2], "emulated", CPU, path) == first
    assert len(clock.asked) == 6
    assert path.read_bytes() == written
    second = gemm_times(SHAPES[1:], "emulated", CPU, path)
    assert [shape for _, shape, _ in clock.asked[6:]] == [shape for shape in SHAPES[2:] for _ in FORMATS]
    assert second[SHAPES[1]] == first[SHAPES[1]]
    machine = Machine.of(CPU, "emulated")
    assert read_times(path) == {(machine, shape): seconds for shape, seconds in (first | second).items()}
    assert [entry.name for entry in path.parent.iterdir()] == ["times.json"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("field", ["device", "torch_version", "backend", "dtype"])
def test_times_of_another_machine_are_kept_and_not_used(field: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    here = Machine.of(CPU, "emulated")
    other = Machine(**{**vars(here), field: "another"})
    write_times(path, {(other, SHAPES[0]): dict.fromkeys(FORMATS, 7.0)})
    times = gemm_times(SHAPES[:1], "emulated", CPU, path)
    assert times[SHAPES[0]]["bf16"] == MADE_UP["bf16"]
    assert {machine: seconds["bf16"] for (machine, _), seconds in read_times(path).items()} == {
        other: 7.0,
        here: MADE_UP["bf16"],
    }


def good() -> dict[str, Any]:
    machine = {"device": "d", "torch_version": "2", "backend": "emulated", "dtype": "float32"}
    shape = {"gemm": "forward", "tokens": 64, "in_features": 32, "out_features": 48}
    row = {"machine": machine, "shape": shape, "seconds": dict(MADE_UP)}
    return {"schema_version": 1, "kind": "snip-hf GEMM times", "times": [row]}


def edited(*path: Any, value: Any) -> str:
    document = good()
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(document)


DAMAGED = {
    "cut off": (json.dumps(good())[:99], "it is not valid JSON, perhaps truncated"),
    "no object": ("[]", "it is a list of 0, expected kind"),
    "no times": (json.dumps(good() | {"times": None}), "times is None, expected a list."),
    "version": (edited("schema_version", value=2), "it is an object of 3, expected kind"),
    "kind": (edited("kind", value="times"), "it is an object of 3, expected kind 'snip-hf GEMM times'"),
    "gemm": (edited("times", 0, "shape", "gemm", value="backward"), "the entry of 'backward' is not a GEMM"),
    "formats": (edited("times", 0, "seconds", value={}), "the entry of 'forward' is not a GEMM with times above 0"),
    "zero": (edited("times", 0, "seconds", "fp4", value=0), "the entry of 'forward' is not a GEMM with times above 0"),
}


def test_the_file_that_the_damaged_ones_come_from_is_read(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(good()))
    assert read_times(path) == {(Machine("d", "2", "emulated", "float32"), SHAPES[0]): MADE_UP}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_name_and_left_as_it_is(name: str, clock: Clock, tmp_path: Path) -> None:
    text, message = DAMAGED[name]
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        gemm_times(SHAPES, "emulated", CPU, path)
    assert str(caught.value).startswith(f"{path} is not a usable file of GEMM times: {message}")
    assert str(caught.value).endswith("Remove it, or name another as timing_file; missing times are measured again.")
    assert path.read_text() == text
    assert clock.asked == []


def test_another_file_of_snip_hf_and_a_folder_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    flops = {"a": dict.fromkeys(GEMMS, 1.0)}
    PrecisionPlan.uniform(flops, "fp8", [["a"]], PlanProvenance(step=0, policy="snip")).save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()
    for path in (tmp_path / "plan.json", tmp_path):
        with pytest.raises(ValueError, match="is not a usable file of GEMM times"):
            gemm_times(SHAPES, "emulated", CPU, path)
    assert (tmp_path / "plan.json").read_bytes() == before


@pytest.mark.usefixtures("clock")
def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" / "times.json"
    times = gemm_times(SHAPES, "emulated", CPU, path)
    assert list(times) == SHAPES
    assert f"could not write the times of GEMMs to {path}" in caplog.text


# ---------------------------------------------------------------------------------------------------------- one timing


def test_the_median_of_the_runs_after_warm_up_is_taken_of_the_call_that_training_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    now = 0.0
    durations = itertools.chain([1000.0] * timing._WARM_UP, random.Random(0).sample(range(1, 16), 15))

    def gemm_call(*arguments: Any) -> Any:
        def call() -> Tensor:
            nonlocal now
            now += next(durations)
            return arguments[2]

        given.append(arguments)
        return call

    monkeypatch.setattr(Emulated, "gemm_call", gemm_call)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert time_gemm("emulated", CPU, GemmShape("grad_input", 5, 6, 7), "fp4") == 8.0
    assert next(durations, None) is None
    ((kernels, gemm, x, weight, grad_output, state),) = given
    assert (kernels.name, gemm) == ("emulated", "grad_input")
    assert (x.shape, weight.shape, grad_output.shape) == ((5, 6), (7, 6), (5, 7))
    assert all(tensor.unique().numel() == tensor.numel() for tensor in (x, weight, grad_output))
    assert state.tolist() == [2, 2, 2, 0, 0, 1]  # formats, key, rank 0 of 1


@pytest.mark.parametrize("gemm", GEMMS)
def test_more_work_takes_longer_and_no_generator_is_touched(gemm: str) -> None:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    for fmt in FORMATS:
        small, large = (time_gemm("emulated", CPU, GemmShape(gemm, size, size, size), fmt) for size in (32, 512))
        assert 0 < small < large
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert random.getstate() == before[2]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_gpu_s_times_are_its_own_and_leave_no_memory_behind(gemm: str) -> None:
    device = torch.device("cuda")
    torch.ones(8, 8, dtype=torch.bfloat16, device=device) @ torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    gc.collect()  # of the tests before
    # With what cuBLAS keeps for itself from a process's first product on.
    allocated, random_state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    shape = GemmShape(gemm, 4096, 4096, 4096)
    seconds = time_gemm("emulated", device, shape, "bf16")
    # The launch of a single small kernel takes Python longer than this; a GPU makes 50 to 2,500 TFLOP/s in BF16.
    assert 2 * 4096**3 / 2.5e15 < seconds < 2 * 4096**3 / 5e13
    tiny = time_gemm("emulated", device, GemmShape(gemm, 128, 128, 128), "bf16")
    assert tiny < seconds
    assert torch.cuda.memory_allocated() == allocated
    assert torch.equal(torch.cuda.get_rng_state(), random_state)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_gpus_without_bf16_are_timed_in_fp16(
    capability: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert Machine.of(torch.device("cuda"), "emulated").dtype == dtype
