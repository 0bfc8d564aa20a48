"""What `benchmarks/step_profile.py` makes of a profile."""

from __future__ import annotations

from functools import partial

import pytest
import step_profile
import torch

pytest.importorskip("triton")

from snip_hf.kernels.tensor_scaled import gated_operators, operators
from snip_hf.kernels.tensor_scaled.records import Records
from snip_hf.numerics.formats import FORMATS

SPANS = [(0.0, 10.0, "scales_kernel"), (10.0, 30.0, "fold_kernel"), (34.0, 84.0, "nvjet_sm90_qqtst_256x128")]


def test_kernels_are_added_up_by_kind_and_waits_lie_between_them() -> None:
    found = step_profile.by_kind(SPANS, steps=2)
    assert found["ms"] == {"find its scales": 0.005, "fold an operand": 0.01, "FP8 product": 0.025}
    assert found["launches"] == dict.fromkeys(found["ms"], 0.5)
    assert (found["step_ms"], found["idle_ms"]) == (0.042, 0.002)
    assert found["waits"] == [[0.004, 0.0, "fold_kernel", "nvjet_sm90_qqtst_256x128"]]
    assert found["idle_ms_up_to"] == {2: 0.0, 5: 0.002, 20: 0.002, 100: 0.002, 1000: 0.002}


def test_communication_that_no_other_kernel_covers_is_counted_once() -> None:
    spans = [(0, 10, "nccl"), (2, 4, "gemm"), (3, 6, "gemm"), (8, 20, "gemm"), (12, 15, "nccl"), (20, 30, "nccl")]
    spans += [(22, 23, "fold_kernel"), (25, 40, "nccl")]
    assert step_profile.milliseconds_alone(spans, "communication") == pytest.approx(0.004 + 0.009 + 0.010)


def test_a_refresh_is_what_its_two_steps_take_beyond_ordinary_ones() -> None:
    times = [2.0] * 11 + [50.0] + [3.0] * 2 + [2.0] * 7 + [5.0, 1.0]  # of steps 5 to 27: step 16 probes, 26 applies
    assert step_profile.of_steps(times) == {"alone_ms": 2.0}
    found = step_profile.of_steps(times, refreshes=True)
    assert found == {"alone_ms": 2.0, "refresh_ms": 50.0, "apply_ms": 5.0, "extra_ms": 51.0}


def test_folds_are_told_apart_by_operand_in_the_order_of_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(operators, "launch_fold", lambda *given, **more: launched.append("fold_kernel"))
    monkeypatch.setattr(operators, "find_scales", lambda *given: launched.append("scales_kernel"))
    monkeypatch.setattr(operators, "fold_into", partial(operators.fold_into, by_kernel=True))
    own, code = Records.new(torch.device("cpu")), FORMATS["mxfp4"].code
    x, state = torch.zeros(64, 128, dtype=torch.bfloat16), torch.tensor([code, code, code, 0, 0, 1])
    folds = step_profile.Folds()
    folds.note()
    operators.fold_operand(x, state, own.record, own.table, 0, (0, 2), True)
    folds.end()
    assert launched == ["scales_kernel", "fold_kernel"]
    rows = folds.figures(SPANS, steps=1)["folds"]
    assert rows == {
        "activation 64x128, rows and columns": {"launches": 1.0, "ms": 0.02, "bound_ms": 0.0},
        "scales of activation 64x128, rows and columns": {"launches": 1.0, "ms": 0.01, "bound_ms": 0.0},
    }
    assert folds.figures(SPANS[:1], steps=1) == {"folds": None}


def test_the_folds_of_gates_are_told_by_how_many_operands_are_written_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_operators, "launch_forward", lambda *given: None)
    monkeypatch.setattr(gated_operators, "launch_backward", lambda inputs, *given: [None, inputs[0], None])
    monkeypatch.setattr(gated_operators.Operand, "fold", lambda *given, **more: None)
    own, code = Records.new(torch.device("cpu")), FORMATS["mxfp4"].code
    x, state = torch.zeros(64, 128, dtype=torch.bfloat16), torch.tensor([code, code, code, 0, 0, 1])
    layer, folds = [state, own.record], step_profile.Folds()
    folds.note()
    gated_operators.folded_gated(x, x, own.table, layer, True, by_kernel=True)
    gated_operators.folded_gated_gradients(x, x, x, own.table, layer * 3, (True, True), by_kernel=True)
    folds.end()
    spans = [(0.0, 10.0, "fold_gated_kernel"), (10.0, 40.0, "fold_gated_gradients_kernel")]
    assert step_profile.by_kind(spans, steps=1)["ms"] == {"fold an operand": 0.04}
    monkeypatch.setattr(step_profile, "COPY_RATE", 1024.0)
    assert folds.figures(spans, steps=1)["folds"] == {
        "gate backward 64x128, 1 of 3 in BF16": {"launches": 1.0, "ms": 0.03, "bound_ms": 8.0 * (6 + 2 + 2 + 1)},
        "gate forward 64x128, 0 of 1 in BF16": {"launches": 1.0, "ms": 0.01, "bound_ms": 8.0 * (4 + 1)},
    }
