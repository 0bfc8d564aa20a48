"""GPT-2's `Conv1D` against the same model of linears: arithmetic, estimates, plans, training, checkpoints, exports."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from conv1d_twins import NAMES, as_linears, gpt2, state_as_linears
from small import convert_in_formats, tokens
from tiny_runs import SCHEDULE, differing, train, weights
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from snip_hf import PrecisionPlan, SnipCallback, convert_model, estimate_divergence, measure_divergence, restore_model
from snip_hf.costs.flops import linear_flops
from snip_hf.integrations.export import TARGETS, NotExpressible
from snip_hf.integrations.export_checkpoint import export_checkpoint
from snip_hf.layers.linear import SnipConv1D
from snip_hf.layers.selection import skip_reasons
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance

I, O = 200, 136  # ragged in every tiling  # noqa: E741
BATCH = tokens(2, 16, 128)
EXACT: dict[str, Any] = {"probe_tokens": None, "probe_batch_tokens": None}


def alone(layer: nn.Module) -> nn.Module:
    """A model whose one block has nothing but the layer."""
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"c": layer})])})


def conv1d(dtype: torch.dtype = torch.float32) -> Conv1D:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = Conv1D(O, I).to(dtype)
        nn.init.normal_(layer.bias)
    return layer


def swapped(layer: nn.Module, formats: tuple[str, ...]) -> nn.Module:
    model = alone(copy.deepcopy(layer))
    convert_model(model, fp4_config())
    (found,) = snip_linears(model).values()
    found.set_formats(dict(zip(GEMMS, formats, strict=True)))
    return found


def one_pass(layer: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output and gradients of input, bias and weight, the last as (O, I)."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 75, I, generator=draw).to(dtype).requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=draw).to(dtype))
    gradient = layer.weight.grad if isinstance(layer, nn.Linear) else layer.weight.grad.t()
    return [y, x.grad, layer.bias.grad, gradient]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_bf16_it_is_a_conv1d_to_the_bit(dtype: torch.dtype) -> None:
    layer = conv1d(dtype)
    for got, expected in zip(one_pass(swapped(layer, ("bf16",) * 3), dtype), one_pass(layer, dtype), strict=True):
        assert got.dtype == expected.dtype == dtype and torch.equal(got, expected)


@pytest.mark.parametrize("formats", [("fp8", "fp4", "bf16"), ("fp4",) * 3, ("mxfp4-rht",) * 3])
def test_it_rounds_and_multiplies_as_a_linear_of_the_same_numbers_to_the_bit(formats: tuple[str, ...]) -> None:
    layer = conv1d()
    linear = as_linears(alone(copy.deepcopy(layer)), ["layers.0.c"])["layers"][0]["c"]
    found = one_pass(swapped(layer, formats)), one_pass(swapped(linear, formats))
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_it_stays_a_conv1d_with_its_keys_and_says_its_formats() -> None:
    layer = conv1d()
    keys = list(layer.state_dict())
    snip = swapped(layer, ("fp8", "fp4", "bf16"))
    assert type(snip) is SnipConv1D and isinstance(snip, Conv1D)
    assert repr(snip) == f"SnipConv1D(nf={O}, nx={I}, formats=fp8/fp4/bf16)"
    assert (snip.in_features, snip.out_features, list(snip.state_dict())) == (I, O, keys)
    assert snip.matrix.shape == (O, I) and torch.equal(snip.laid_out(snip.matrices(snip.weight)), snip.weight)


def test_copies_share_nothing_and_restoring_gives_the_class_back() -> None:
    model = gpt2()
    before, keys = model.state_dict(), list(model.state_dict())
    assert convert_in_formats(model, fp4_config(start_format="fp4")) == NAMES
    twin = copy.deepcopy(model)
    restore_model(model)
    assert {type(model.get_submodule(name)) for name in NAMES} == {Conv1D}
    assert list(model.state_dict()) == list(twin.state_dict()) == keys
    assert all(model.state_dict()[key].data_ptr() == tensor.data_ptr() for key, tensor in before.items())
    assert {name: layer.formats["forward"] for name, layer in snip_linears(twin).items()} == dict.fromkeys(NAMES, "fp4")


def test_subclasses_and_the_head_are_left_alone_with_the_reason() -> None:
    class Scaled(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = gpt2()
    model.transformer.h[0].mlp.c_fc = Scaled(128, 32)
    reasons = skip_reasons(model, fp4_config(skip_modules=("*.c_attn",)))
    assert reasons.pop("transformer.h.0.mlp.c_fc") == "class Scaled" and reasons.pop("lm_head") == "output head"
    assert {name for name, reason in reasons.items() if reason == "skip_modules"} == {NAMES[0], NAMES[4]}
    assert len([name for name, reason in reasons.items() if reason is None]) == 5


def plan_of(folder: Path) -> PrecisionPlan:
    return PrecisionPlan.load(folder / "snip" / "plan.json")


def test_gpt2_is_probed_planned_trained_saved_and_restored_as_its_twin_of_linears(tmp_path: Path) -> None:
    config = fp4_config(**SCHEDULE, target_fp4_fraction=0.5, granularity="gemm")
    accumulated = {"gradient_accumulation_steps": 2}
    run = train(
        tmp_path / "conv1d", config, model=gpt2(), save_strategy="steps", save_steps=3, max_steps=5, **accumulated
    )
    linears = train(tmp_path / "linear", config, model=gpt2(nn.Linear), max_steps=5, **accumulated)
    assert plan_of(linears.folder).assignment == plan_of(run.folder).assignment
    assert list(plan_of(run.folder).assignment) == NAMES
    assert plan_of(linears.folder).flops == plan_of(run.folder).flops
    for name, tensor in state_as_linears(weights(run.model)).items():
        # Sums have another order, and AdamW's steps are 1e-2 also where a gradient is nearly zero.
        other = weights(linears.model)[name]
        assert float((tensor - other).norm()) <= 0.03 * float(other.norm()), name
    # Saved between a probe and the application of its plan.
    checkpoint = tmp_path / "conv1d" / "checkpoint-3"
    callback = SnipCallback(config)
    resumed = train(
        tmp_path / "resumed", callback=callback, model=gpt2(), resume=checkpoint, max_steps=5, **accumulated
    )
    assert differing(weights(resumed.model), weights(run.model)) == []
    restore_model(run.model)
    run.model.save_pretrained(tmp_path / "plain")
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "plain")
    assert torch.equal(plain.eval()(**BATCH).logits, run.model.eval()(**BATCH).logits)


def after_two_steps(kind: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for name, parameter in model.named_parameters() if name.removesuffix(".weight") in NAMES]
    optimizer = kind(trained, lr=1e-2)
    for seed in (3, 4):
        model(**tokens(2, 16, 128, seed=seed)).loss.backward()
        optimizer.step()
        model.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "policy", "noise"),
    [
        (torch.optim.AdamW, "snip", 1e-2),
        (torch.optim.AdamW, "hessian-trace", 1e-5),
        (torch.optim.Adafactor, "hessian-trace", 1e-5),
    ],
)
def test_divergences_are_those_of_linears(kind: type[torch.optim.Optimizer], policy: str, noise: float) -> None:
    """Differences of passes, which the policy snip takes, multiply FP32's rounding by 1000."""
    config = fp4_config(policy=policy, loss_estimator="token-fisher", **EXACT)
    found = []
    for layer in (Conv1D, nn.Linear):
        model = gpt2(layer)
        found.append(estimate_divergence(model, BATCH, after_two_steps(kind, model), config).rows)
    assert len(found[0]) == len(NAMES) * 4 * 2
    for one, other in zip(*found, strict=True):
        assert one.loss_divergence == pytest.approx(other.loss_divergence, rel=1e-4, abs=1e-9), one
        assert (one.absolute_error, one.relative_error) == pytest.approx((other.absolute_error, other.relative_error))
        size = other.weight_divergence
        assert one.weight_divergence == pytest.approx(size, rel=noise), one
        assert one.weight_bias**2 == pytest.approx(other.weight_bias**2, abs=2 * noise * size**2), one
        assert one.criterion == (None if other.criterion is None else pytest.approx(other.criterion, rel=1e-2)), one


def test_the_measured_truth_is_that_of_linears() -> None:
    found = []
    for layer in (Conv1D, nn.Linear):
        model = gpt2(layer)
        optimizer = after_two_steps(torch.optim.AdamW, model)
        found.append(measure_divergence(model, BATCH, optimizer, fp4_config(**EXACT), draws=1, gemms=("layer",)).rows)
    assert len(found[0]) == len(NAMES) * 2
    for one, other in zip(*found, strict=True):
        assert one.loss_divergence == pytest.approx(other.loss_divergence, rel=1e-2, abs=1e-6), one
        assert one.weight_divergence == pytest.approx(other.weight_divergence, rel=1e-3), one


def test_a_matrix_wise_optimizer_is_asked_for_its_update_of_the_weight_as_the_model_stores_it() -> None:
    """Muon's steps are longer by the root of a parameter's rows / columns where it has more rows."""
    found = []
    for kind in (Conv1D, nn.Linear):
        model = gpt2(kind)
        optimizer = torch.optim.Muon([model.get_submodule(name).weight for name in NAMES])
        rows = estimate_divergence(model, BATCH, optimizer, fp4_config(**EXACT)).rows
        found.append([row for row in rows if row.gemm == "grad_weight"])
    assert len(found[0]) == 2 * len(NAMES)
    ratios = {"c_attn": 3, "c_fc": 4}
    for conv, linear in zip(*found, strict=True):
        wider = next((ratio for end, ratio in ratios.items() if conv.layer.endswith(end)), None)
        factor = wider**-0.5 if wider else 2 if conv.layer.endswith("mlp.c_proj") else 1
        assert conv.weight_divergence == pytest.approx(factor * linear.weight_divergence, rel=1e-2), conv


def test_recomputed_activations_and_autocast_change_no_number() -> None:
    losses, gradients = [], []
    for checkpoints in (True, False):
        model = gpt2().train()
        model.config.use_cache = False
        convert_in_formats(model, fp4_config(start_format="fp4"))
        set_step(snip_linears(model), 0, 1, 0)
        if checkpoints:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**BATCH).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert torch.equal(*losses)
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


def exported_plan() -> PrecisionPlan:
    model = gpt2()
    convert_model(model, fp4_config())
    provenance = PlanProvenance(step=1, policy="snip", config=fp4_config().to_dict())
    formats = dict.fromkeys(GEMMS, "nvfp4")
    return PrecisionPlan(dict.fromkeys(NAMES, formats), linear_flops(model), (tuple(NAMES),), provenance)


def test_megatron_is_told_the_formats_of_gpt2_s_modules() -> None:
    assert "decoder.layers.1.self_attention.linear_qkv" in TARGETS["megatron"](exported_plan())


def test_a_quantized_checkpoint_is_refused_with_every_layer_s_class(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "model")
    with pytest.raises(NotExpressible) as error:
        export_checkpoint(exported_plan(), tmp_path / "model", tmp_path / "quantized")
    assert error.value.reasons == dict.fromkeys(NAMES, "its class is Conv1D, expected nn.Linear itself")
    assert not (tmp_path / "quantized").exists()
