"""A Trainer on the backend "tensor-scaled": refreshed, compiled once, resumed, and with the losses of the emulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from kernels.test_hopper_training import TIES, run
from tiny_runs import refreshes
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from snip_hf.kernels.tensor_scaled import gated
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.layers.state import snip_linears

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(TENSOR_SCALED.lacks(torch.device("cuda")) is not None, reason="needs a GPU with FP8"),
    pytest.mark.filterwarnings("default"),
]
FORMATS = ("mxfp4", "fp8-delayed")


@pytest.mark.parametrize("ties", [(), TIES], ids=["untied", "tied"])
def test_refreshes_change_formats_and_compile_nothing(
    ties: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    ours, watch, losses = run(tmp_path, compiled=True, formats=FORMATS, ties=ties, backend="tensor-scaled")
    assert ours.controller.backend == "tensor-scaled"
    lines = refreshes(tmp_path)
    assert [line["status"] for line in lines] == ["applied"] * 3
    assert lines[0]["layers_changed"] > 0 and lines[0]["fp4_fraction"] >= 0.5
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == watch.graphs > 0
    assert all(torch.isfinite(torch.tensor(loss)) for loss in losses.values()) and losses[11] < losses[1]


# torch says so once where a Trainer's `full_determinism` leaves less to cuBLAS than cuBLASLt asks for; it gets along.
@pytest.mark.filterwarnings("ignore:Requested unified CUBLASLT workspace size:UserWarning")
@pytest.mark.usefixtures("full_determinism_ends_here")
@pytest.mark.parametrize("wide", ["fp8-delayed", "fp8-tensor"])
@pytest.mark.parametrize(
    "option",
    [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "checkpointing", "accumulation"],
)
def test_losses_in_cuda_graphs_are_those_without(
    option: dict[str, Any], wide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit with `full_determinism`. Without it a compiled embedding adds up its gradient in any order."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    arguments = {"full_determinism": True, **option}
    snip = {"formats": ("mxfp4", wide), "ties": TIES, "backend": "tensor-scaled"}
    in_graphs = arguments | {"torch_compile_mode": "reduce-overhead"}
    _, _, replayed = run(tmp_path / "graphs", compiled=True, arguments=in_graphs, **snip)
    assert [line["status"] for line in refreshes(tmp_path / "graphs")] == ["applied"] * 3
    assert counters["inductor"]["cudagraph_skips"] == 0
    _, _, launched = run(tmp_path / "launched", compiled=True, arguments=arguments, **snip)
    assert replayed == launched


class Plans(TrainerCallback):
    """Changes formats between steps, and counts the graphs that torch.compile has captured by then."""

    changes: ClassVar[dict[int, dict[str, str]]] = {
        4: {"forward": "fp8-delayed"},
        6: {"forward": "mxfp4", "grad_input": "fp8-delayed", "grad_weight": "fp8-delayed"},
        8: {"grad_input": "fp8-tensor"},
    }
    """Step -> the formats of the first decoder layer's linears after it, where they change."""

    def __init__(self, captured: list[Any]) -> None:
        self._captured, self.counts = captured, {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        self.counts[step] = len(self._captured)
        for name, layer in snip_linears(kwargs["model"]).items():
            if "layers.0." in name and step in self.changes:
                layer.set_formats(layer.formats | self.changes[step])


def test_a_plan_in_the_default_formats_captures_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    captured: list[Any] = []
    record = CUDAGraphTreeManager.record_function

    def counted(self: Any, *arguments: Any) -> Any:
        captured.append(arguments[-1])
        return record(self, *arguments)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counted)
    plans = Plans(captured)
    snip = {"policy": "uniform-mxfp4", "ties": TIES, "backend": "tensor-scaled"}
    in_graphs = {"torch_compile_mode": "reduce-overhead"}
    run(tmp_path, compiled=True, arguments=in_graphs, callbacks=[plans], formats=FORMATS, **snip)
    assert 0 < plans.counts[4] == plans.counts[8] < plans.counts[11], plans.counts
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_losses_are_those_of_the_emulation_up_to_rounding(tmp_path: Path) -> None:
    _, _, tensor_cores = run(tmp_path / "tensor-scaled", compiled=False, formats=FORMATS, backend="tensor-scaled")
    _, _, emulated = run(tmp_path / "emulated", compiled=False, formats=FORMATS, backend="emulated")
    assert abs(tensor_cores[1] - emulated[1]) < 1e-3 * emulated[1]
    assert all(abs(tensor_cores[step] - emulated[step]) < 2e-2 * emulated[step] for step in emulated)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    _, _, whole = run(tmp_path, compiled=False, formats=FORMATS, backend="tensor-scaled")
    kept = str(tmp_path / "checkpoint-5")
    _, _, resumed = run(tmp_path, compiled=False, formats=FORMATS, backend="tensor-scaled", resume=kept)
    assert {step: whole[step] for step in range(6, 12)} == {step: resumed[step] for step in range(6, 12)}


def test_a_captured_graph_takes_new_exponents_and_notes_what_it_sees() -> None:
    """`torch.compile(mode="reduce-overhead")` replays graphs in this way."""
    from kernels.test_tensor_scaled import numbers

    from snip_hf.kernels.tensor_scaled.exponents import EXPONENT, LARGEST, Records, bits_of, follow

    x = torch.randn(256, 256, device="cuda").bfloat16()
    state, records = numbers(("mxfp4",) * 3).cuda(), Records.new(x.device)
    encode = torch.ops.snip_hf.encode_operand
    encode(x, state, records.record, records.table, 0, (0, 2), True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, parameters, *_ = encode(x, state, records.record, records.table, 0, (0, 2), True)
    graph.replay()
    before = rows.float() * parameters[0]
    follow([records])
    assert records.record[0, LARGEST] == 0
    graph.replay()
    assert parameters[0] == 2.0 ** int(records.record[0, EXPONENT])
    assert torch.equal(rows.float() * parameters[0], before)
    assert records.record[0, LARGEST] == bits_of(float(x.abs().max()))


def test_gated_mlps_that_run_as_one_train_as_their_linears_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def note(inputs: Any, operands: Any, *rest: Any) -> Any:
        values = launch_backward(inputs, operands, *rest)
        launched.append(sum(of_one is not None for of_one in values))
        return values

    launch_backward = gated.launch_backward
    monkeypatch.setattr(gated, "launch_backward", note)
    _, _, as_one = run(tmp_path / "one", compiled=True, formats=FORMATS, ties=TIES, backend="tensor-scaled")
    assert len(launched) == 2 * len(as_one)  # layers and steps
    assert launched[0] == 3 and 0 in launched  # in BF16, before the first exponents and later
    monkeypatch.setattr(type(TENSOR_SCALED), "runs_gates", False)
    _, _, apart = run(tmp_path / "apart", compiled=True, formats=FORMATS, ties=TIES, backend="tensor-scaled")
    assert len(launched) == 2 * len(as_one)
    assert all(abs(as_one[step] - apart[step]) < 1e-2 * apart[step] for step in apart)
