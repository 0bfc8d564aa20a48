"""Does a process compile the probe's kernels beside training, and does it do no harm?"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import CONFIG, Loop

from snip_hf.estimation.foreseen import parts
from snip_hf.estimation.objective import Objective
from snip_hf.kernels.ahead import find_kernels
from snip_hf.planning.solver.process import import_paths
from snip_hf.training import compiling, kernels_ahead
from snip_hf.training.captured_step import TrainingPass
from snip_hf.training.kernels_ahead import KernelsAhead

HOPPER = (9, 0)
SCRIPT = Path(__file__).parents[1] / "support" / "probe_after_compiling.py"
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One as on the first GPU of a machine, whose process only sleeps."""
    monkeypatch.setattr(kernels_ahead, "PROGRAM", SLEEP)
    monkeypatch.setattr(kernels_ahead, "is_compiled", lambda device: True)
    monkeypatch.setattr(kernels_ahead, "capability", lambda device: HOPPER)
    loop = Loop()
    loop.controller._ahead._may_begin = True
    yield loop
    loop.controller.close()


def first_pass(loop: Loop) -> TrainingPass:
    return TrainingPass(loop.batch(0), None)


def started(loop: Loop) -> subprocess.Popen[bytes]:
    assert loop.controller is not None
    process = loop.controller._ahead._process
    assert process is not None
    return process


def test_a_run_on_a_cpu_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    assert loop.controller is not None
    for first in (False, True):
        loop.controller._ahead._may_begin = first
        monkeypatch.setattr(KernelsAhead, "_start", None)
        loop.controller._ahead.begin(first_pass(loop), refreshes=True)
        assert loop.controller._ahead._process is None


def test_the_first_micro_batch_starts_a_process_that_ends_with_the_run(
    loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert loop.controller._ahead._process is None
    loop.run(1)
    process = started(loop)
    assert process.poll() is None
    loop.run(2)
    assert started(loop) is process
    with caplog.at_level(logging.DEBUG, "snip_hf"):
        loop.controller.close()
    assert process.wait(10) < 0 and "(ended by the run)" in caplog.text


def test_the_process_ends_with_its_owner(loop: Any) -> None:
    ahead = KernelsAhead(loop.controller._probe, loop.model, CONFIG, "emulated", True, logging.getLogger())
    ahead.begin(first_pass(loop), refreshes=True)
    process = ahead._process
    assert process is not None and process.poll() is None
    del ahead
    assert process.wait(10) < 0


def test_the_process_is_told_before_the_first_forward_pass(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(KernelsAhead, "_tell", lambda self, given: told.append(given))
    ahead = loop.controller._ahead
    ahead.prepare(refreshes=True)
    waiting = started(loop)
    assert [set(given) for given in told] == [{"paths", "parent", "gpu", "folders", "scratch"}]
    loop.controller.offer(loop.batch(0))
    assert started(loop) is waiting and told[1:] == [asdict(ahead.foreseen(first_pass(loop)))]
    loop.run(1)
    assert started(loop) is waiting and len(told) == 2


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_process_that_has_waited_for_too_long_is_replaced(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    before, ahead = open_files(), loop.controller._ahead
    ahead.prepare(refreshes=True)
    first, scratch = started(loop), Path(ahead._scratch)
    first.kill()
    first.wait()
    with caplog.at_level(logging.DEBUG, "snip_hf"):
        ahead.begin(first_pass(loop), refreshes=True)
    assert started(loop) is not first and started(loop).poll() is None
    assert "(exit code -9)" in caplog.text and not scratch.exists()
    scratch = Path(ahead._scratch)
    assert scratch.is_dir()
    ahead.close()
    assert open_files() <= before and not scratch.exists()


def test_a_process_that_cannot_be_told_is_given_up_and_tried_again(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = loop.controller._ahead
    with monkeypatch.context() as patch:
        patch.setattr(KernelsAhead, "_tell", no_process)
        ahead.prepare(refreshes=True)
    assert ahead._process is None and ahead._may_begin
    loop.run(1)
    assert started(loop).poll() is None


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs SIGPIPE")
def test_a_process_that_has_ended_sends_training_no_signal(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    ahead, received = loop.controller._ahead, list[int]()
    ahead.prepare(refreshes=True)
    started(loop).kill()
    started(loop).wait()
    own = signal.signal(signal.SIGPIPE, lambda number, frame: received.append(number))
    try:
        with pytest.raises(BrokenPipeError):
            ahead._tell({})
    finally:
        signal.signal(signal.SIGPIPE, own)
    assert received == []


def test_what_only_the_pass_shows_is_told_when_it_counts(loop: Any) -> None:
    ids = loop.batch(0)["input_ids"]
    one = TrainingPass({"input_ids": ids}, None, Objective(lambda model, batch: model(**batch)["logits"].mean()))
    ahead = loop.controller._ahead
    ahead.begin(one, refreshes=True)
    assert ahead._process is None
    one.counted, one.seen = True, 7
    ahead.begin(one, refreshes=True)
    assert started(loop).poll() is None and ahead.foreseen(one).micro_batch == 7


def test_a_line_that_a_socket_does_not_hold_ends_the_process(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    foreseen = KernelsAhead.foreseen(loop.controller._ahead, first_pass(loop))
    loop.controller._ahead.foreseen = lambda first: replace(foreseen, tokens=[48] * 2**19)
    with caplog.at_level(logging.DEBUG, "snip_hf"):
        loop.run(1)
    assert "A socket does not hold" in caplog.text and loop.controller._ahead._process is None


def test_a_run_that_ends_before_its_first_plan_starts_none(loop: Any) -> None:
    loop.controller._schedule.max_steps = 3  # the plan is due after step 4
    loop.run(1)
    assert loop.controller._ahead._process is None


def test_another_process_of_the_machine_starts_none(loop: Any) -> None:
    loop.controller._ahead._may_begin = False
    loop.run(1)
    assert loop.controller._ahead._process is None


def no_process(*given: Any, **options: Any) -> None:
    raise OSError("Too many processes.")


def not_foreseen(self: KernelsAhead, first: TrainingPass) -> None:
    raise ValueError("An odd model.")


@pytest.mark.parametrize(
    ("owner", "name", "fails", "said"),
    [
        (subprocess, "Popen", no_process, "Too many processes."),
        (KernelsAhead, "foreseen", not_foreseen, "An odd model."),
    ],
)
def test_what_fails_is_only_logged(
    owner: Any,
    name: str,
    fails: Callable[..., None],
    said: str,
    loop: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, "snip_hf"):
        patch.setattr(owner, name, fails)
        loop.run(1)
    (record,) = [record for record in caplog.records if said in record.message]
    assert record.levelno == logging.DEBUG and loop.controller._ahead._process is None


def test_what_is_foreseen_follows_from_model_batch_config_and_optimizer(loop: Any) -> None:
    found = asdict(loop.controller._ahead.foreseen(first_pass(loop)))
    shapes = [layer.pop("shape") for layer in found["layers"]]
    assert shapes == [[32, 32], [16, 32], [80, 32], [32, 80]]
    assert all(layer.pop("stride") == [shape[1], 1] for layer, shape in zip(found["layers"], shapes, strict=True))
    assert found == {
        "layers": [{"dtype": "float32", "is_trained": True}] * 4,
        "tokens": [48],
        "attention": [2, 24, 4, 2, 8],
        "formats": list(CONFIG.quantized_formats),
        "probes": CONFIG.probes,
        "probe_tokens": CONFIG.probe_tokens,
        "loss_estimator": "saliency",
        "backend": "emulated",
        "micro_batch": 48,
        "response": "adam",
        "gates": [],
    }


def test_heads_that_differ_from_block_to_block_leave_attention_out_alone(loop: Any) -> None:
    vars(loop.model.config)["num_attention_heads"] = [4, 2]
    found = loop.controller._ahead.foreseen(first_pass(loop))
    assert found.attention is None and len(found.layers) == 4


def test_formats_that_a_user_registered_are_left_to_the_probe(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    foreseen = loop.controller._ahead.foreseen(first_pass(loop))
    find_kernels(parts(replace(foreseen, formats=[*foreseen.formats, "fp4-of-a-user"])))
    assert capsys.readouterr().err == ""


def test_the_process_imports_what_this_one_does_and_this_package() -> None:
    own, paths = str(Path(kernels_ahead.__file__).resolve().parents[2]), kernels_ahead._paths()
    standard = os.path.realpath(os.path.dirname(os.__file__))
    assert paths.count(own) == 1 and [path for path in paths if path in import_paths()] == import_paths()
    assert standard in paths


def test_a_part_that_fails_leaves_the_others_alone(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    foreseen = loop.controller._ahead.foreseen(first_pass(loop))
    foreseen.layers.insert(0, {**foreseen.layers[0], "dtype": "float31"})
    find_kernels(parts(foreseen))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("float31" in line and "AttributeError" in line for line in said)


@pytest.mark.slow
def test_the_process_ends_when_the_run_is_killed() -> None:
    with waiting(parent=1) as process:
        assert process.wait(60) < 0


@pytest.mark.slow
def test_a_process_that_is_told_of_no_micro_batch_ends_silently() -> None:
    with waiting(parent=os.getpid()) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.close()
        assert process.stderr.read() == b"" and process.wait(60) == 0


@pytest.mark.slow
def test_the_process_imports_nothing_that_takes_long_before_the_first_micro_batch() -> None:
    heavy = {"transformers", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor"}
    program = f"import sys; print(*({heavy} & set(sys.modules)), file=sys.stderr)"
    with waiting(os.getpid(), program) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.close()
        assert process.stderr.read() == b"\n" and process.wait(60) == 0


@pytest.mark.slow
def test_forks_compile_what_one_process_does(tmp_path: Path) -> None:
    case: dict[str, Any] = {
        "layers": [{"shape": [256, 256], "stride": [256, 1], "dtype": "float32", "is_trained": True}],
        "tokens": [512],
        "attention": None,
        "formats": ["mxfp4", "fp8-tensor"],
        "probes": 1,
        "probe_tokens": 256,
        "loss_estimator": "saliency",
        "backend": "tensor-scaled",
        "micro_batch": 512,
        "response": "adam",
        "gates": [256],
    }
    keys: list[set[str]] = []
    for count in (1, 3):
        setting = f"import {compiling.__name__} as module; module.processes_here = lambda: {count}; main(given)"
        program, folder = compiling.PROGRAM.replace("main(given)", setting), tmp_path / str(count)
        with waiting(os.getpid(), program=program, folder=folder) as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(json.dumps(case).encode() + b"\n")
            said = process.stderr.read().decode().splitlines()
        assert process.returncode == 0 and "kernels in" in said[-1]
        keys.append({entry.name for entry in folder.iterdir() if any(entry.glob("*.cubin"))})
        assert len(keys[-1]) == int(said[-1].split()[0])
    assert keys[0] == keys[1] and len(keys[0]) > 40


@contextmanager
def waiting(
    parent: int, then: str = "", program: str = compiling.PROGRAM, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process as it waits for the first micro-batch.

    Args:
        parent: whom it ends with.
        then, program: what it runs after its program, and this.
        folder: the cache.
    """
    pytest.importorskip("triton")
    given = {
        "paths": [entry for entry in sys.path if entry],
        "parent": parent,
        "gpu": HOPPER,
        "folders": [str(folder or "")],
        "scratch": tempfile.gettempdir(),
    }
    command = [sys.executable, "-I", "-c", f"{program}; {then}"]
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, bufsize=0, start_new_session=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(given).encode() + b"\n")
        yield process


SMALL = {"vocab_size": 128, "num_hidden_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "a part of the tokens": {
        "config": {"formats": ["mxfp4", "fp8-tensor"]},
        "model": {
            **SMALL,
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "batch": [10, 128],
        "dtype": "float32",
    },
    "all tokens, odd widths, BF16": {
        "config": {"formats": ["fp4", "fp8"]},
        "model": {**SMALL, "hidden_size": 210, "intermediate_size": 300, "num_attention_heads": 3, "head_dim": 64},
        "batch": [7, 100],
        "dtype": "bfloat16",
    },
}


def probed(folder: Path, **case: Any) -> dict[str, Any]:
    """What the script prints of a case, with caches in a folder."""
    pytest.importorskip("triton")
    folders = {"TRITON_HOME": str(folder / "home"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, **folders, "PYTHONPATH": paths, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_CACHE_DIR", None)
    command = [sys.executable, str(SCRIPT), json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_probe_compiles_no_kernel_after_it(case: str, tmp_path: Path) -> None:
    found = probed(tmp_path, **CASES[case])
    assert found["missed"] == [] and found["rows"] > 0
    compiled = int(found["said"].split()[0])
    assert found["code"] == 0 and compiled >= found["asked"] > 25
    for folder in (tmp_path / "home" / ".triton" / "cache", tmp_path / "inductor" / "triton" / "0"):
        assert len([entry for entry in folder.iterdir() if any(entry.glob("*.cubin"))]) == compiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_probe_on_a_gpu_compiles_no_kernel_after_it(tmp_path: Path) -> None:
    found = probed(tmp_path, **CASES["a part of the tokens"], device="cuda")
    assert found["code"] == 0 and found["missed"] == [] and found["asked"] > 0 and found["rows"] > 0
