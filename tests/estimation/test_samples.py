"""Are the rows of a layer of several matrices recorded as those of its matrices, whose tokens are known?"""

from __future__ import annotations

import weakref

import pytest
import torch
from configs import fp4_config
from expert_models import routed_lm, tiny_gpt_oss, tiny_qwen3_moe
from same_samples import assert_same_samples
from small import checkpoint_activations, convert_in_formats, drawn, text, tiny_lm, tokens
from torch import Tensor

from snip_hf.estimation import samples as samples_module
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.memory import Savings
from snip_hf.estimation.probe import Probe, ProbeSettings, run_probe
from snip_hf.estimation.samples import Recorder, Rows, SamplePlan, recording
from snip_hf.layers.convert import convert_model
from snip_hf.layers.layer import Dispatch, SnipLayer
from snip_hf.layers.state import snip_linears

# Experts 0, 1 and 3 of four; token 2 goes to two of them, and the last two rows to none.
ENDS, TOKEN = torch.tensor([2, 3, 3, 5]), torch.tensor([0, 2, 2, 1, 3, 0, 1])


def up_of_four() -> tuple[SnipLayer, Tensor]:
    model = routed_lm(4, hidden=6, inner=5)
    convert_in_formats(model, fp4_config(start_format="bf16"))
    layer = snip_linears(model)["layers.0.experts.up_proj"]
    weight = layer.weight.detach().copy_(drawn(4, 5, 6, seed=3))
    return layer, weight


def recorded(plan: SamplePlan, x: Tensor, grad_output: Tensor) -> tuple[Recorder, Tensor, Tensor]:
    """Returns the recorder of one layer after a pass, the layer's output, and the gradient of its input."""
    layer, _ = up_of_four()
    recorder, x = Recorder(plan), x.clone().requires_grad_()
    with recording({"up": layer}, recorder):
        y = layer(x, Dispatch(ENDS, TOKEN, 4))
    y.backward(grad_output)
    assert x.grad is not None
    return recorder, y.detach(), x.grad


def test_outputs_and_gradients_are_those_of_each_matrix_and_zero_behind_the_last() -> None:
    x, grad_output = drawn(7, 6, seed=1), drawn(7, 5, seed=2)
    _, weight = up_of_four()
    recorder, y, grad_input = recorded(SamplePlan(None, 0, 0, 0, (4,)), x, grad_output)
    for row, matrix in enumerate([0, 0, 1, 3, 3]):
        torch.testing.assert_close(y[row], weight[matrix] @ x[row])
        torch.testing.assert_close(grad_input[row], grad_output[row] @ weight[matrix])
    assert y[5:].count_nonzero() == grad_input[5:].count_nonzero() == 0
    record = recorder.records["up"]
    assert record.tokens == 5 and torch.equal(record.x, x[:5]) and torch.equal(record.grad_output, grad_output[:5])
    assert record.rows is not None and record.rows.tokens == 4
    assert record.rows.ends.tolist() == ENDS.tolist() and record.rows.token.tolist() == TOKEN[:5].tolist()
    assert record.rows.matrix().tolist() == [0, 0, 1, 3, 3]
    energy = float((x[:5].square().sum(1) * grad_output[:5].square().sum(1)).sum())
    assert recorder.energies()["up"] == pytest.approx((energy, energy))


def test_largest_magnitudes_are_those_of_each_matrix() -> None:
    x, grad_output = drawn(7, 6, seed=1), drawn(7, 5, seed=2)
    recorder, _, _ = recorded(SamplePlan(None, 0, 0, 0, (4,), True), x, grad_output)
    of_x = [float(x[rows].abs().amax()) if rows.stop > rows.start else 0.0 for rows in SLICES]
    assert recorder.records["up"].amaxes[0].tolist() == of_x


SLICES = [slice(0, 2), slice(2, 3), slice(3, 3), slice(3, 5)]


def test_a_sampled_token_is_kept_with_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplePlan, "positions", lambda self, tokens: torch.tensor([2, 3]))
    x, grad_output = drawn(7, 6, seed=1), drawn(7, 5, seed=2)
    recorder, _, _ = recorded(SamplePlan(None, 0, 0, 0, (4,)), x, grad_output)
    record = recorder.records["up"]
    assert record.tokens == 5 and torch.equal(record.x, x[[1, 2, 4]])
    assert record.rows is not None and record.rows.tokens == 2
    assert record.rows.ends.tolist() == [1, 2, 2, 3] and record.rows.token.tolist() == [0, 0, 1]


def test_rows_of_several_calls_or_ranks_are_sorted_by_matrix_and_their_tokens_follow_each_other() -> None:
    one = Rows(torch.tensor([1, 3]), torch.tensor([1, 0, 1]), 2)
    other = Rows(torch.tensor([2, 2]), torch.tensor([0, 2]), 3)
    rows, order = Rows.joined([one, other])
    assert order.tolist() == [0, 3, 4, 1, 2]
    assert rows.ends.tolist() == [3, 5] and rows.token.tolist() == [1, 2, 4, 0, 1] and rows.tokens == 5


@pytest.mark.parametrize("build", [tiny_qwen3_moe, tiny_gpt_oss])
def test_recomputing_changes_no_number(build: object) -> None:
    """Neither the activations and moved weights that the probe makes again, nor the model's own checkpointing."""

    def probe(savings: bool, is_checkpointed: bool) -> Probe:
        model = build(0)  # type: ignore[operator]
        convert_model(model, fp4_config())
        if is_checkpointed:
            checkpoint_activations(model, reentrant=False)
            model.train()
        layers = snip_linears(model)
        pullbacks = {name: torch.ones_like(layer.weight).mul for name, layer in layers.items()}
        twice = Savings(("model.layers.0", "model.layers.1"), frozenset(layers))
        settings = ProbeSettings(probes=2, savings=twice if savings else Savings())
        return run_probe(model, Batch.of(text(2, 48)), pullbacks, settings)

    expected = probe(False, False)
    assert "model.layers.1.mlp.experts.down_proj" in expected.layers
    for found in (probe(True, False), probe(False, True)):
        assert_same_samples(found.layers, expected.layers)
        assert all(len(sample.x_dot) == 2 for sample in found.layers.values())


def test_both_sides_of_a_probe_have_the_same_rows_though_their_scores_choose_others() -> None:
    """With directions as large as the weights, so that all tokens would be sent elsewhere."""
    model = routed_lm(4, 2)
    convert_model(model, fp4_config())
    pullbacks = {name: torch.ones_like(layer.weight).mul for name, layer in snip_linears(model).items()}
    probe = run_probe(model, Batch.of(tokens(4, 64)), pullbacks, ProbeSettings(probes=2, relative_step=0.5))
    assert all(len(sample.x_dot) == 2 for sample in probe.layers.values())
    rows = probe.layers["layers.1.experts.up_proj"].rows
    assert rows is not None and rows.token.bincount().tolist() == [2] * 256


def test_a_pass_keeps_a_sample_of_an_input_and_not_the_input() -> None:
    model, plan = tiny_lm(), SamplePlan(128, 0, 0, 0, (512,))
    convert_model(model, fp4_config())
    layers, recorder = snip_linears(model), Recorder(plan)
    name, layer = next(iter(layers.items()))
    input = drawn(512, layer.in_features, seed=1).requires_grad_() * 1
    expected, left = input.detach().clone(), weakref.ref(input)
    with recording(layers, recorder):
        y = layer(input)
        del input
        assert left() is None
        y.sum().backward()
    assert torch.equal(recorder.records[name].x, expected[plan.positions(512)])


@pytest.mark.parametrize("whole_amax", [True, False])
def test_figures_of_tokens_from_one_launch_are_those_of_a_record(
    whole_amax: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of kernels are written out here; tests/kernels/test_rounding_kernels.py has the kernels."""

    def of_rows(x: Tensor) -> Tensor:
        return torch.stack([x.square().sum(1), x.abs().amax(1)], 1)

    def of_tokens(of_x: Tensor, grad_output: Tensor, is_kept: Tensor) -> Tensor:
        of_g = of_rows(grad_output)
        energies = of_x[:, 0] * of_g[:, 0]
        return torch.stack([energies, energies * is_kept, of_x[:, 1], of_g[:, 1]], 1)

    monkeypatch.setattr(samples_module, "row_figures", of_rows)
    monkeypatch.setattr(samples_module, "token_figures", of_tokens)
    x, grad_output = drawn(600, 12, seed=1), drawn(600, 7, seed=2)
    records = []
    for in_one_launch in (False, True):
        monkeypatch.setattr(samples_module, "_in_one_launch", lambda *given, found=in_one_launch: found)
        recorder = Recorder(SamplePlan(256, 0, 0, 0, (600,), whole_amax))
        recorder.keep("up", recorder.inputs_of(x), grad_output)
        records.append(recorder.records["up"])
    for one, other in zip(*records, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
    assert records[1].amaxes.shape == ((2,) if whole_amax else (0,))
