"""Does a probe record every layer's true inputs, output gradients and their derivatives?"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from configs import fp4_config
from same_samples import assert_same_samples, tensors_of
from small import (
    BYTES,
    checkpoint_activations,
    exact_tensors,
    relative_error,
    text,
    tiny_llama,
    tiny_lm,
    tokens,
    watched,
)
from small import Batch as Inputs
from torch import Tensor, nn
from transformers import Olmo2Config, Olmo2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from snip_hf.estimation import probe as probe_module
from snip_hf.estimation import samples as samples_module
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.moved_weights import MovedWeights
from snip_hf.estimation.passes import frozen_in_a_pass, run_pass
from snip_hf.estimation.probe import Probe, ProbeSettings, run_probe
from snip_hf.estimation.products import split_product
from snip_hf.estimation.samples import SamplePlan
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Processes, Ranks
from snip_hf.python_state import collecting_no_garbage

LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
# One central difference in FP32 at a relative step of 1e-3: rounding (6e-8 / 1e-3, and more by cancellation).
FIRST_ORDER = 1e-3


def sensitivity_of(model: nn.Module, names: list[str] = LAYERS) -> dict[str, Tensor]:
    """A D that is different for every element."""
    generator = torch.Generator().manual_seed(3)
    modules = dict(model.named_modules())
    return {name: torch.rand(modules[name].weight.shape, generator=generator) for name in names}


def pullbacks_of(sensitivity: dict[str, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    return {name: d.mul for name, d in sensitivity.items()}


def probed(
    model: nn.Module, inputs: Inputs, monkeypatch: pytest.MonkeyPatch | None = None, **options: Any
) -> tuple[Probe, list[dict[str, Tensor]]]:
    """The probe of a converted copy, and the directions d = D * z that it took."""
    converted = copy.deepcopy(model)
    convert_model(converted, fp4_config())
    sensitivity = options.pop("sensitivity", None) or sensitivity_of(model, list(snip_linears(converted)))
    drawn: list[Tensor] = []
    randn = torch.randn

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        drawn.append(randn(*args, **kwargs))
        return drawn[-1]

    with monkeypatch.context() if monkeypatch else contextlib.nullcontext() as patch:
        if patch:
            patch.setattr(torch, "randn", watch)
        probe = run_probe(converted, Batch.of(inputs), pullbacks_of(sensitivity), ProbeSettings(**options))
    rounds = [drawn[start : start + len(sensitivity)] for start in range(0, len(drawn), len(sensitivity))]
    # Drawn as the one matrix of each layer, (1, O, I).
    directions = [{name: d * z[0] for (name, d), z in zip(sensitivity.items(), zs, strict=True)} for zs in rounds]
    return probe, directions


def in_float64(model: nn.Module) -> nn.Module:
    """A copy that computes in float64 throughout (Llama's own RMSNorm computes in FP32 whatever its weight is)."""
    exact = copy.deepcopy(model).double()
    for module in list(exact.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return exact


def weights_of(model: nn.Module, names: list[str] = LAYERS) -> dict[str, Tensor]:
    modules = dict(model.named_modules())
    return {f"{name}.weight": modules[name].weight.detach() for name in names}


def moving(direction: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.weight": d.double() for name, d in direction.items()}


def assert_same_probe(got: Probe, expected: Probe) -> None:
    assert got.loss == expected.loss
    assert_same_samples(got.layers, expected.layers)


def seen_by_hooks(model: nn.Module, inputs: Inputs) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """Loss, and layer -> (X, G), of one forward and backward pass of the plain model."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            x = args[0].detach().flatten(0, 1)
            output.register_hook(lambda grad: seen.update({name: (x, grad.flatten(0, 1))}))

        module.register_forward_hook(note)

    plain = copy.deepcopy(model)
    for name in LAYERS:
        watch(name, plain.get_submodule(name))
    loss = plain(**inputs)["loss"]
    loss.backward()
    return loss.item(), seen


def test_x_and_g_are_those_that_hooks_see_on_the_plain_model() -> None:
    model, inputs = tiny_lm(), tokens()
    loss, seen = seen_by_hooks(model, inputs)
    probe, _ = probed(model, inputs)
    # The mean of the two sides is right up to the square of the relative step, 1e-6 times the curvature.
    assert probe.loss == pytest.approx(loss, rel=1e-5)
    assert set(probe.layers) == set(LAYERS)
    for name, (x, grad_output) in seen.items():
        sample = probe.layers[name]
        assert sample.tokens == 18
        torch.testing.assert_close(sample.x, x, rtol=1e-4, atol=1e-5)
        assert relative_error(sample.grad_output, grad_output) < 1e-4


@pytest.mark.parametrize("nothing", ["probes", "pullbacks"])
def test_without_probes_or_directions_one_pass_shows_x_and_g_and_no_derivatives(nothing: str) -> None:
    model, inputs = tiny_lm(), tokens()
    loss, seen = seen_by_hooks(model, inputs)
    convert_model(model, fp4_config())
    calls = watched(model.embed, type)
    if nothing == "probes":
        probe = run_probe(model, Batch.of(inputs), pullbacks_of(sensitivity_of(model)), ProbeSettings(probes=0))
    else:
        probe = run_probe(model, Batch.of(inputs), {}, ProbeSettings(probes=3))
    assert len(calls()) == 1
    assert probe.loss == loss
    assert set(probe.layers) == set(LAYERS)
    for name, (x, grad_output) in seen.items():
        sample = probe.layers[name]
        assert (sample.tokens, sample.x_dot, sample.grad_output_dot) == (18, [], [])
        # The same operations; torch's own backward may only add up in another order.
        assert torch.equal(sample.x, x)
        assert relative_error(sample.grad_output, grad_output) < 1e-6


def test_without_probes_the_sample_is_that_of_a_probe() -> None:
    model, inputs = tiny_lm(), tokens(rows=4, length=160)
    one, other = (probed(model, inputs, probes=count, probe_tokens=256, step=3)[0] for count in (0, 1))
    for name, sample in one.layers.items():
        assert (sample.tokens, sample.x.shape[0]) == (640, 256)
        torch.testing.assert_close(sample.x, other.layers[name].x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("relative_step", [1e-3, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_sides_are_the_weights_plus_and_minus_the_same_step_in_one_copy(
    relative_step: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = tiny_lm().to(dtype), tokens()
    sides: list[dict[str, Tensor]] = []
    places: list[dict[str, int]] = []
    real_pass = run_pass

    def watched(model: nn.Module, batch: Batch, weights: Callable[[], Mapping[str, Tensor]], **rest: Any) -> Tensor:
        sides.append({name: weight.clone() for name, weight in weights().items()})
        places.append({name: weight.data_ptr() for name, weight in weights().items()})
        return real_pass(model, batch, weights, **rest)

    monkeypatch.setattr(probe_module, "run_pass", watched)
    _, directions = probed(model, inputs, monkeypatch, probes=2, relative_step=relative_step)
    start = {name: weight.double() for name, weight in weights_of(model).items()}
    assert len(sides) == 4
    for direction, plus, minus in zip(directions, sides[::2], sides[1::2], strict=True):
        # No weight moves further, relative to its own norm.
        epsilon = relative_step * min(
            start[f"{name}.weight"].norm() / d.double().norm() for name, d in direction.items()
        )
        for name in LAYERS:
            weight, step = start[f"{name}.weight"], epsilon * direction[name].double()
            up, down = plus[f"{name}.weight"], minus[f"{name}.weight"]
            assert up.dtype == down.dtype == torch.float32
            # One FP32 rounding for the upper side, two for the lower one.
            unit = 2.0**-24 * (2 * weight.abs() + step.abs())
            assert (((up.double() + down.double()) / 2 - weight).abs() <= unit).all()
            assert (((up.double() - down.double()) / 2 - step).abs() <= 2 * unit + 1e-6 * step.abs()).all()
    for upper, lower in zip(places[::2], places[1::2], strict=True):
        assert upper == lower


@pytest.mark.parametrize("probes", [1, 2])
def test_the_derivatives_are_those_of_jvp_in_float64(probes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_lm(), tokens()
    probe, directions = probed(model, inputs, monkeypatch, probes=probes)
    assert len(directions) == probes
    exact = in_float64(model)
    for index, direction in enumerate(directions):

        def run(weights: dict[str, Tensor]) -> Any:
            return exact_tensors(exact, inputs, weights, LAYERS)[1:]

        _, (x_dot, g_dot) = torch.func.jvp(run, (weights_of(exact),), (moving(direction),))
        for name in LAYERS[1:]:
            sample = probe.layers[name]
            assert len(sample.x_dot) == len(sample.grad_output_dot) == probes
            assert relative_error(sample.x_dot[index], x_dot[name]) < FIRST_ORDER
            assert relative_error(sample.grad_output_dot[index], g_dot[name]) < FIRST_ORDER
        # Nothing that moves lies before the first layer.
        assert probe.layers[LAYERS[0]].x_dot[index].abs().max() == 0 == x_dot[LAYERS[0]].abs().max()
        assert relative_error(probe.layers[LAYERS[0]].grad_output_dot[index], g_dot[LAYERS[0]]) < FIRST_ORDER


@pytest.mark.parametrize("scaled", [None, "self_attn.o_proj", "mlp.up_proj"])
def test_the_derivatives_of_a_llama_are_finite_differences_in_float64(
    scaled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = tiny_llama(hidden=32), text(2, 16)
    if scaled is not None:  # far above the scale of all other weights
        with torch.no_grad():
            model.model.layers[0].get_submodule(scaled).weight.mul_(1e4)
    probe, (direction,) = probed(model, inputs, monkeypatch)
    exact = in_float64(model)
    names = list(direction)
    assert len(names) == 14
    # Not smaller, because transformers takes the loss of FP32 logits; the truncation is 1e-6.
    start, step = weights_of(exact, names), 3e-5
    ends = []
    for sign in (1, -1):
        weights = {name: start[name] + sign * step * moved for name, moved in moving(direction).items()}
        ends.append(exact_tensors(exact, inputs, weights, names)[1:])
    for name, sample in probe.layers.items():
        for got, value, part in ((sample.x_dot[0], sample.x, 0), (sample.grad_output_dot[0], sample.grad_output, 1)):
            assert relative_error(value, (ends[0][part][name] + ends[1][part][name]) / 2) < 1e-4, name
            wanted = (ends[0][part][name] - ends[1][part][name]) / (2 * step)
            if wanted.norm() == 0:
                assert got.norm() == 0
            else:
                assert relative_error(got, wanted) < FIRST_ORDER, name


@pytest.mark.parametrize("layer", LAYERS)
def test_the_probe_of_all_weights_is_the_adjoint_of_an_error_in_one_layer(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """<d, change of all gradients> = <Gdot, E> for an error E of Y, and = <F, Xdot> for an error F of X's gradient."""
    model, inputs = tiny_lm(), tokens()
    probe, (direction,) = probed(model, inputs, monkeypatch)
    exact = in_float64(model)
    linear = exact.get_submodule(layer)
    generator = torch.Generator().manual_seed(8)
    size = 1e-6

    def gradients(of_output: Tensor, of_grad_input: Tensor) -> dict[str, Tensor]:
        def disturb_input(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            x = args[0].clone()
            x.register_hook(lambda grad: grad + of_grad_input.view_as(grad))
            return (x,)

        hooks = [
            linear.register_forward_pre_hook(disturb_input),
            linear.register_forward_hook(lambda _, args, output: output + of_output.view_as(output)),
        ]
        exact.zero_grad()
        exact(**inputs)["loss"].backward()
        for hook in hooks:
            hook.remove()
        return {name: exact.get_submodule(name).weight.grad.clone() for name in LAYERS}

    def response(e: Tensor, f: Tensor) -> float:
        up, down = gradients(size * e, size * f), gradients(-size * e, -size * f)
        return sum(float((direction[name] * (up[name] - down[name])).sum() / (2 * size)) for name in LAYERS)

    sample = probe.layers[layer]
    e = torch.randn(18, linear.out_features, generator=generator, dtype=torch.float64)
    f = torch.randn(18, linear.in_features, generator=generator, dtype=torch.float64)
    none_e, none_f = torch.zeros_like(e), torch.zeros_like(f)
    scale = float(sample.grad_output_dot[0].norm() * e.norm())
    assert response(e, none_f) == pytest.approx(float((sample.grad_output_dot[0] * e).sum()), abs=FIRST_ORDER * scale)
    scale = float(sample.x_dot[0].norm() * f.norm())
    assert response(none_e, f) == pytest.approx(float((sample.x_dot[0] * f).sum()), abs=FIRST_ORDER * scale + 1e-9)


def test_layers_without_sensitivity_stay_put(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_lm(), tokens()
    only = sensitivity_of(model, ["layers.1.up"])
    probe, (direction,) = probed(model, inputs, monkeypatch, sensitivity=only)
    exact = in_float64(model)

    def run(weights: dict[str, Tensor]) -> Any:
        return exact_tensors(exact, inputs, weights, LAYERS)[1:]

    _, (x_dot, g_dot) = torch.func.jvp(run, (weights_of(exact, ["layers.1.up"]),), (moving(direction),))
    assert set(probe.layers) == set(LAYERS)
    for name in LAYERS[:3]:
        assert probe.layers[name].x_dot[0].abs().max() == 0
    assert relative_error(probe.layers["layers.1.down"].x_dot[0], x_dot["layers.1.down"]) < FIRST_ORDER
    assert relative_error(probe.layers["layers.0.up"].grad_output_dot[0], g_dot["layers.0.up"]) < FIRST_ORDER


def test_the_scale_of_the_sensitivity_does_not_change_the_relative_step() -> None:
    model, inputs = tiny_lm(), tokens()
    small = {name: 1e-6 * d for name, d in sensitivity_of(model).items()}
    one, other = probed(model, inputs)[0], probed(model, inputs, sensitivity=small)[0]
    for name in LAYERS:
        assert (
            relative_error(1e6 * other.layers[name].grad_output_dot[0], one.layers[name].grad_output_dot[0])
            < FIRST_ORDER
        )


def test_a_weight_of_almost_zero_does_not_stop_the_others() -> None:
    model, inputs = tiny_lm(), tokens()
    with torch.no_grad():
        model.layers[1].down.weight.mul_(1e-12)
    found, usual = (probed(one, inputs)[0].layers["layers.1.up"].x_dot[0] for one in (model, tiny_lm()))
    assert relative_error(found, usual) < 0.01


def test_a_sensitivity_of_zeros_gives_derivatives_of_zero() -> None:
    """Also if the size of the step would be found by trial, as it is where other parameters move."""
    model = tiny_lm()
    convert_model(model, fp4_config())
    zeros = pullbacks_of({name: torch.zeros_like(d) for name, d in sensitivity_of(model).items()})
    for others in (None, {}):
        for sample in run_probe(model, Batch.of(tokens()), zeros, others=others).layers.values():
            assert torch.equal(sample.x_dot[0], torch.zeros_like(sample.x))
            assert torch.equal(sample.grad_output_dot[0], torch.zeros_like(sample.grad_output))


def test_seed_and_step_decide_the_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_lm(), tokens()
    found = []
    for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
        found.append(probed(model, inputs, monkeypatch, probes=2, seed=seed, step=step)[1])
    first = [directions[0]["layers.0.up"] for directions in found]
    assert torch.equal(first[0], first[3])
    assert len({tuple(d.flatten().tolist()) for d in first}) == 3
    assert not torch.equal(found[0][0]["layers.0.up"], found[0][1]["layers.0.up"])


def test_directions_are_standard_normal_times_the_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_lm(hidden=64, inner=128)
    ones = {name: torch.ones_like(d) for name, d in sensitivity_of(model).items()}
    _, (direction,) = probed(model, tokens(), monkeypatch, sensitivity=ones)
    z = torch.cat([d.flatten() for d in direction.values()])  # 32768 numbers; 5 standard deviations below
    assert abs(z.mean().item()) < 5 / z.numel() ** 0.5
    assert abs(z.square().mean().item() - 1) < 5 * (2 / z.numel()) ** 0.5
    assert len(set(direction["layers.0.up"].flatten().tolist()) & set(direction["layers.1.up"].flatten().tolist())) < 10


# -------------------------------------------------------------------------------------------------------- token samples


def test_a_sample_is_made_of_whole_runs_of_128_tokens_taken_from_the_whole() -> None:
    model, inputs = tiny_lm(), tokens(rows=4, length=160)  # 640 tokens = 5 runs
    whole = probed(model, inputs)[0]
    for step in range(4):
        part = probed(model, inputs, probe_tokens=300, step=step, sensitivity=sensitivity_of(model))[0]
        chosen = set()
        for name, sample in part.layers.items():
            assert sample.tokens == 640
            assert sample.x.shape[0] == sample.grad_output.shape[0] == 256  # 300 rounded down to whole runs
            assert sample.x_dot[0].shape == sample.x.shape
            assert sample.grad_output_dot[0].shape == sample.grad_output.shape
            # Other directions are at work at other steps; x of the first layer never moves.
            if name == "layers.0.up":
                runs = whole.layers[name].x.view(5, 128, -1)
                chosen = {i for i in range(5) for half in sample.x.view(2, 128, -1) if torch.equal(runs[i], half)}
        assert len(chosen) == 2


def test_the_same_tokens_are_kept_in_every_layer_and_probe() -> None:
    model, inputs = tiny_lm(), tokens(rows=4, length=160)
    whole = probed(model, inputs, probes=2)[0]
    part = probed(model, inputs, probes=2, probe_tokens=256)[0]
    runs = whole.layers["layers.0.up"].x.view(5, 128, -1)
    kept = part.layers["layers.0.up"].x.view(2, 128, -1)
    chosen = [next(i for i in range(5) if torch.equal(runs[i], half)) for half in kept]
    assert chosen == sorted(chosen)

    def pick(tensor: Tensor) -> Tensor:
        return tensor.view(5, 128, -1)[chosen].flatten(0, 1)

    for name, sample in part.layers.items():
        for got, wanted in zip(tensors_of(sample), tensors_of(whole.layers[name]), strict=True):
            assert torch.equal(got, pick(wanted))


def test_the_sample_depends_on_seed_and_step_only() -> None:
    model, inputs = tiny_lm(blocks=1), tokens(rows=4, length=160)

    def kept(**options: int) -> Tensor:
        torch.rand(3)  # the global generator must not matter
        return probed(model, inputs, probe_tokens=128, **options)[0].layers["layers.0.up"].x

    assert torch.equal(kept(seed=1, step=2), kept(seed=1, step=2))
    assert len({tuple(kept(step=step).flatten().tolist()) for step in range(8)}) > 1
    assert len({tuple(kept(seed=seed).flatten().tolist()) for seed in range(8)}) > 1


@pytest.mark.parametrize(("probe_tokens", "kept"), [(None, 200), (200, 200), (256, 200), (199, 128), (128, 128)])
def test_a_ragged_end_is_kept_only_when_everything_is(probe_tokens: int | None, kept: int) -> None:
    sample = probed(tiny_lm(), tokens(rows=1, length=200), probe_tokens=probe_tokens)[0].layers["layers.0.up"]
    assert (sample.tokens, sample.x.shape[0]) == (200, kept)


def test_sums_over_the_sample_times_t_over_n_are_unbiased() -> None:
    model, inputs = tiny_lm(blocks=1, hidden=4, inner=4), tokens(rows=4, length=160)
    whole = probed(model, inputs)[0].layers["layers.0.up"]
    wanted = (whole.grad_output.square().sum().item(), whole.x.square().sum().item())
    draws: list[tuple[float, float]] = []
    for step in range(40):
        sample = probed(model, inputs, probe_tokens=128, step=step)[0].layers["layers.0.up"]
        scale = sample.tokens / sample.x.shape[0]
        draws.append((scale * sample.grad_output.square().sum().item(), scale * sample.x.square().sum().item()))
    for index, total in enumerate(wanted):
        found = torch.tensor([draw[index] for draw in draws], dtype=torch.float64)
        assert found.std() > 0
        assert abs(found.mean().item() - total) < 4 * found.std().item() / len(draws) ** 0.5


def test_a_layer_that_is_called_twice_shows_all_its_tokens() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_lm(blocks=1)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            halves = [self.inner(input_ids[i : i + 1], labels[i : i + 1])["loss"] for i in range(2)]
            return {"loss": sum(halves) / 2}

    model, inputs = Twice(), tokens()
    probe = probed(model, inputs)[0]
    once = probed(model.inner, inputs)[0]
    for name, sample in probe.layers.items():
        other = once.layers[name.removeprefix("inner.")]
        assert sample.tokens == 18
        order = torch.cat([torch.arange(9, 18), torch.arange(9)])  # backward comes to the second call first
        assert relative_error(sample.x, other.x[order]) < 1e-5
        assert relative_error(sample.grad_output, other.grad_output[order]) < 1e-3


# -------------------------------------------------------------------------------------------- the model's circumstances


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_the_same_numbers(reentrant: bool, dropout: float) -> None:
    inputs = tokens()
    state = torch.get_rng_state()
    plain = probed(tiny_lm(dropout=dropout), inputs, probes=2)[0]
    torch.set_rng_state(state)
    assert_same_probe(probed(tiny_lm(dropout=dropout, reentrant=reentrant), inputs, probes=2)[0], plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_a_transformers_model_gives_the_same_numbers(reentrant: bool) -> None:
    inputs = text(2, 16)
    model = tiny_llama(hidden=32)
    model.train()
    calls = watched(model.model.layers[0].input_layernorm, type)
    plain = probed(model, inputs)[0]
    assert len(calls()) == 2
    checkpoint_activations(model, reentrant)
    assert_same_probe(probed(model, inputs)[0], plain)
    assert len(calls()) == 4


def test_both_sides_of_a_probe_draw_the_same_dropout_masks() -> None:
    model, inputs = tiny_lm(dropout=0.5), tokens()
    first = probed(model, inputs)[0].layers["layers.1.down"]
    torch.rand(1)
    other = probed(model, inputs)[0].layers["layers.1.down"]
    # The mean over both sides is 0 where both masks are 0, and their difference is 0 there too.
    assert 0.4 < (first.x == 0).float().mean() < 0.6
    assert first.x_dot[0][first.x == 0].abs().max() == 0
    assert not torch.equal(first.x == 0, other.x == 0)


def test_the_masks_are_those_of_the_training_pass_whose_generator_state_the_batch_holds() -> None:
    model, inputs = tiny_lm(dropout=0.5), tokens()
    converted = copy.deepcopy(model)
    convert_model(converted, fp4_config())
    batch = Batch.of(inputs)
    seen: list[Tensor] = []
    model.layers[1].down.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(**inputs)
    torch.rand(5)
    sample = run_probe(converted, batch, pullbacks_of(sensitivity_of(model))).layers["layers.1.down"]
    assert torch.equal(sample.x == 0, seen[0].flatten(0, 1) == 0)


def test_bfloat16_weights_are_probed_in_float32() -> None:
    model, inputs = tiny_lm().bfloat16(), tokens()
    wide = copy.deepcopy(model).float()
    probe = probed(model, inputs)[0]
    assert_same_probe(probe, probed(wide, inputs)[0])
    assert probe.layers["layers.0.up"].x.dtype == torch.float32


def test_autocast_does_not_reach_the_probe() -> None:
    model, inputs = tiny_lm(), tokens()
    wanted = probed(model, inputs)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_probe(probed(model, inputs)[0], wanted)


def test_a_probe_runs_where_gradients_are_switched_off() -> None:
    model, inputs = tiny_lm(), tokens()
    wanted = probed(model, inputs)[0]
    with torch.no_grad():
        assert_same_probe(probed(model, inputs)[0], wanted)


@pytest.mark.parametrize("start_format", ["fp8", "bf16"])
def test_the_formats_in_force_do_not_reach_the_probe(start_format: str) -> None:
    model, inputs = tiny_lm(), tokens()
    wanted = probed(model, inputs)[0]
    convert_model(model, fp4_config(start_format=start_format))
    for layer in snip_linears(model).values():
        layer.set_formats({"forward": "fp4", "grad_input": "fp8", "grad_weight": "fp4"})
    assert_same_probe(run_probe(model, Batch.of(inputs), pullbacks_of(sensitivity_of(model))), wanted)


def test_frozen_weights_do_not_change_what_is_recorded() -> None:
    model, inputs = tiny_lm(), tokens()
    wanted = probed(model, inputs)[0]
    model.requires_grad_(False)
    model.layers[1].down.weight.requires_grad_(True)
    assert_same_probe(probed(model, inputs)[0], wanted)


def test_every_layer_is_recorded_where_no_norm_comes_first_and_the_embedding_is_tied_to_the_head() -> None:
    sizes = {**BYTES, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = Olmo2ForCausalLM(Olmo2Config(**sizes, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    converted = convert_model(copy.deepcopy(model), fp4_config())
    for checkpointing in (False, True):
        if checkpointing:
            model.train()
            checkpoint_activations(model, reentrant=True)
        assert set(probed(model, text(2, 16))[0].layers) == set(converted)


def test_a_layer_that_takes_no_part_is_left_out() -> None:
    model = tiny_lm()
    model.layers[0].spare = nn.Linear(12, 12)
    names = [*LAYERS, "layers.0.spare"]
    assert set(probed(model, tokens(), sensitivity=sensitivity_of(model, names))[0].layers) == set(LAYERS)


# ---------------------------------------------------------------------------------------------------------------- batch


def test_a_batch_without_labels_is_refused() -> None:
    advice = (
        "so the model gives no loss to probe. Expected a causal LM batch with `labels`. If the model does not return "
        "the loss, say how it is computed: by compute_loss=... in your own loop; in a Trainer by compute_loss_func or "
        "an override of compute_loss, which training_step must call (if it does, name the input with the labels: "
        "TrainingArguments(label_names=[NAME])). Or use a policy that needs no probe, such as "
        "policy='layer-position'."
    )
    ids = tokens()["input_ids"]
    for inputs, keys in (
        ({"input_ids": ids, "attention_mask": ids}, "input_ids, attention_mask"),
        ({"input_ids": ids, "labels": None}, "input_ids, labels"),
        ({}, "none"),
    ):
        with pytest.raises(ValueError) as error:
            Batch.of(inputs)
        assert str(error.value) == f"The batch has no labels (its keys are {keys}), {advice}"


def test_num_items_in_batch_is_dropped_so_that_the_loss_is_the_mean() -> None:
    inputs = text(2, 16)
    model = tiny_llama(hidden=32)
    with_count = {**inputs, "num_items_in_batch": torch.tensor(1000)}
    assert "num_items_in_batch" not in Batch.of(with_count).kwargs
    probe = probed(model, with_count)[0]
    assert probe.loss == pytest.approx(model(**inputs).loss.item(), rel=1e-5)


# --------------------------------------------------------------------------------------------- parts of a micro-batch


def a_batch(rows: int = 6, length: int = 10) -> dict[str, Any]:
    """Everything that a transformers model may be given, each row told from the others."""
    number = torch.arange(rows)[:, None] + torch.zeros(rows, length, dtype=torch.int64)
    return {
        "input_ids": number,
        "labels": number.clone(),
        "attention_mask": number + 10,
        "position_ids": number + 20,
        "token_type_ids": number + 30,
        "inputs_embeds": number[..., None] + 40.0,
        "use_cache": False,
        "past_key_values": None,
    }


def test_a_part_has_sequences_from_all_over_the_micro_batch_of_every_input() -> None:
    batch = Batch.of(a_batch())
    part = batch.part(39)
    assert part.random_state is batch.random_state
    assert set(part.kwargs) == set(batch.kwargs)
    for name, value in part.kwargs.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, batch.kwargs[name][[0, 2, 4]])
        else:
            assert value is batch.kwargs[name]


@pytest.mark.parametrize(
    ("tokens_asked", "rows"), [(1, [0]), (10, [0]), (19, [0]), (20, [0, 3]), (40, [0, 1, 3, 4]), (59, [0, 1, 2, 3, 4])]
)
def test_a_part_holds_whole_sequences_and_at_least_one(tokens_asked: int, rows: list[int]) -> None:
    part = Batch.of(a_batch()).part(tokens_asked)
    assert part.kwargs["labels"].tolist() == [[row] * 10 for row in rows]
    assert part.tokens == 10 * len(rows)


@pytest.mark.parametrize(("ranks", "rows", "asked"), [(2, 6, 40), (2, 6, 20), (2, 8, 40), (3, 12, 60), (4, 8, 40)])
def test_the_parts_of_several_ranks_are_together_the_part_of_one_with_all_their_sequences(
    ranks: int, rows: int, asked: int
) -> None:
    """Each rank takes the same whole number of sequences."""
    whole = a_batch(rows)
    wanted = Batch.of(whole).part(asked).kwargs
    assert wanted["labels"].shape[0] < rows
    per_rank = rows // ranks
    shares = [
        {
            name: value[rank * per_rank : (rank + 1) * per_rank] if isinstance(value, Tensor) else value
            for name, value in whole.items()
        }
        for rank in range(ranks)
    ]
    parts = [Batch.of(share).part(asked // ranks).kwargs for share in shares]
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert torch.equal(torch.cat([part[name] for part in parts]), value)


@pytest.mark.parametrize("asked", [None, 60, 61])
def test_a_micro_batch_that_is_small_enough_is_taken_whole(asked: int | None) -> None:
    batch = Batch.of(a_batch())
    assert batch.part(asked) is batch


def test_a_single_sequence_is_taken_whole(caplog: pytest.LogCaptureFixture) -> None:
    positions = torch.arange(500).remainder(100).expand(3, 1, 500)  # of three axes, which say nothing of packs
    for more in ({"cu_seq_lens_q": torch.tensor([0, 500])}, {"position_ids": positions}):
        batch = Batch.of(a_batch(1, 500) | more)
        with caplog.at_level("INFO"):
            assert batch.part(128) is batch
    assert caplog.messages == []


def test_masks_of_heads_are_cut_and_what_all_sequences_share_is_kept() -> None:
    inputs = a_batch() | {
        "attention_mask": torch.ones(6, 1, 10, 10),
        "position_ids": torch.arange(10)[None],
        "scale": torch.tensor(2.0),
    }
    kwargs = Batch.of(inputs).part(20).kwargs
    assert kwargs["attention_mask"].shape == (2, 1, 10, 10)
    assert kwargs["position_ids"] is inputs["position_ids"] and kwargs["scale"] is inputs["scale"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_position", torch.arange(10)),
        ("cache_position", torch.arange(6)),  # as many as there are sequences
        ("position_ids", torch.zeros(3, 6, 10)),  # of three axes
        ("attention_mask", {"full": torch.ones(6, 10)}),
        ("pixel_values", torch.ones(6, 3, 4, 4)),
        ("attention_mask", torch.ones(2, 10)),
    ],
)
def test_an_input_that_may_belong_to_several_sequences_keeps_the_batch_whole_and_the_log_says_so(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    batch = Batch.of(a_batch() | {name: value})
    with caplog.at_level("INFO", logger="snip_hf.estimation.batch"):
        assert batch.part(20) is batch
    assert caplog.messages == [
        f"snip-hf: the probe runs the whole micro-batch of 60 tokens: its input {name!r} cannot be cut."
    ]


def test_sequences_without_labels_do_not_stand_for_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    inputs = a_batch()
    inputs["labels"][[0, 3]] = -100
    batch = Batch.of(inputs)
    with caplog.at_level("INFO", logger="snip_hf.estimation.batch"):
        assert batch.part(20) is batch
    assert caplog.messages == [
        "snip-hf: the probe runs the whole micro-batch of 60 tokens: 2 of its sequences have no labels."
    ]
    inputs["labels"][0, 9] = 1
    assert Batch.of(inputs).part(20).kwargs["labels"].shape == (2, 10)


def test_labelled_tokens_are_those_that_the_loss_of_a_causal_lm_is_a_mean_over() -> None:
    inputs = text(2, 16)
    model = tiny_llama(hidden=32)
    labels = inputs["labels"].clone()
    labels[0, :5] = labels[1, 12:] = -100
    batch = Batch.of(inputs | {"labels": labels})
    assert (batch.tokens, batch.labelled) == (32, 11 + 11)
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        every = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        assert float(model(**batch.kwargs).loss) == pytest.approx(float(every) / batch.labelled, rel=1e-5)


def test_labels_that_are_shifted_already_count_as_they_are() -> None:
    inputs, model = text(2, 16), tiny_llama(hidden=32)
    shifted = inputs["labels"].roll(-1, 1)
    shifted[:, -1] = shifted[0, :5] = -100
    batch = Batch.of(inputs | {"shift_labels": shifted})
    assert batch.labelled == 10 + 15
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"]).logits.flatten(0, 1)
        every = nn.functional.cross_entropy(logits, shifted.flatten(), reduction="sum")
        assert float(model(**batch.kwargs).loss) == pytest.approx(float(every) / batch.labelled, rel=1e-5)


def test_a_sequence_of_one_token_counts_with_its_label() -> None:
    assert Batch.of({"labels": torch.tensor([[3], [-100]])}).labelled == 1
    assert Batch.of({"labels": torch.tensor([[-100, -100]])}).labelled == 0


# --------------------------------------------------------------------------------------- what several ranks keep of it


def kept_by(every: tuple[int, ...], probe_tokens: int | None, step: int = 0) -> list[Tensor]:
    """Rank -> the positions that it keeps, counted over the tokens of all ranks, one rank's after the other's."""
    found, before = [], 0
    for rank, count in enumerate(every):
        found.append(SamplePlan(probe_tokens, 0, step, rank, every).positions(count) + before)
        before += count
    return found


@pytest.mark.parametrize("probe_tokens", [None, 128, 300, 512, 1024, 5000])
@pytest.mark.parametrize("every", [(1024, 1024), (512, 512, 512), (512,) * 4, (128, 1024, 384), (256, 0, 768)])
def test_ranks_with_whole_runs_keep_together_exactly_what_one_process_keeps(
    every: tuple[int, ...], probe_tokens: int | None
) -> None:
    for step in range(8):
        (wanted,) = kept_by((sum(every),), probe_tokens, step)
        assert torch.equal(torch.cat(kept_by(every, probe_tokens, step)), wanted)


@pytest.mark.parametrize("probe_tokens", [128, 300, 512, 1000])
@pytest.mark.parametrize("every", [(1000, 1000), (700, 900, 500), (130, 1999), (300,) * 8])
def test_ragged_ranks_keep_as_many_whole_runs_as_one_process(every: tuple[int, ...], probe_tokens: int) -> None:
    ends = torch.tensor(every).cumsum(0)
    for step in range(8):
        kept = kept_by(every, probe_tokens, step)
        assert sum(map(len, kept)) == probe_tokens // 128 * 128
        for rank, positions in enumerate(kept):
            runs = positions.view(-1, 128)
            assert torch.equal(runs, runs[:, :1] + torch.arange(128))
            assert torch.equal(positions, positions.unique())
            assert ((positions >= ends[rank] - every[rank]) & (positions < ends[rank])).all()


@pytest.mark.parametrize("every", [(100, 100), (127,) * 4, (60,)])
def test_ranks_without_a_whole_run_keep_all(every: tuple[int, ...]) -> None:
    assert [len(positions) for positions in kept_by(every, 128)] == list(every)


def test_every_run_of_every_rank_may_be_kept() -> None:
    seen = torch.cat([torch.cat(kept_by((512, 640), 256, step)) for step in range(200)])
    assert torch.equal(seen.unique(), torch.arange(1152))


def test_a_layer_that_a_router_gives_other_tokens_keeps_the_rank_s_share_of_them() -> None:
    plan = SamplePlan(512, 0, 0, 1, (1024, 1024))
    assert len(plan.positions(900)) == 256
    assert torch.equal(plan.positions(200), torch.arange(200)) and len(plan.positions(0)) == 0
    assert len(plan._replace(tokens_by_rank=(1024,) * 8).positions(900)) == 128  # never less than one run
    assert torch.equal(plan._replace(probe_tokens=None).positions(900), torch.arange(900))
    # The number equals that of one process with as many tokens, whatever other ranks have.
    assert torch.equal(plan.positions(900), SamplePlan(256, 0, 0, 0, (900,)).positions(900))


# --------------------------------------------------------------------------------------------------- products on a GPU


@pytest.mark.parametrize("bias", [True, False])
def test_with_split_products_the_derivatives_are_those_of_fp32(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the case on a GPU: errors of 2^-17 are small against a step of 1e-3."""
    model, inputs = tiny_llama(hidden=64, attention_bias=bias), text(2, 64)
    plain = probed(model, inputs)[0]
    calls: list[int] = []

    def split(left: Tensor, right: Tensor) -> Tensor:
        calls.append(left.numel())
        return split_product(left, right)

    monkeypatch.setattr(samples_module, "is_split", lambda left, right: True)
    monkeypatch.setattr(samples_module, "product", split)
    found = probed(model, inputs)[0]
    assert len(calls) == 2 * 2 * 14  # forward and backward, of both sides
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, sample in plain.layers.items():
        other = found.layers[name]
        assert relative_error(other.x, sample.x) < 1e-5 and relative_error(other.grad_output, sample.grad_output) < 1e-4
        if name != "model.layers.0.self_attn.q_proj" and sample.x_dot[0].any():
            assert relative_error(other.x_dot[0], sample.x_dot[0]) < 0.02
        assert relative_error(other.grad_output_dot[0], sample.grad_output_dot[0]) < 0.02


def test_the_moved_weights_are_asked_for_once_the_model_s_state_is_noted() -> None:
    """Until then a GPU may work on them."""
    model, inputs, found = tiny_llama(hidden=32), text(2, 16), list[bool]()

    def weights() -> dict[str, Tensor]:
        found.append(nn.functional.scaled_dot_product_attention is attention)
        return {}

    attention = nn.functional.scaled_dot_product_attention
    loss = run_pass(model, Batch.of(inputs), weights)
    assert found == [False] and torch.equal(loss, run_pass(model, Batch.of(inputs), {}))


def test_a_stage_without_layers_meets_the_others_before_its_pass_as_they_do() -> None:
    """Afterwards, they would wait for it, and it for what they pass on."""
    met: list[Any] = []

    class Stage(Ranks):
        def gather(self, value: Any, what: str = "figures") -> list[Any]:
            met.append(value)
            return [value]

    moved = MovedWeights({}, {}, (0, 0, 0), 1e-3, Processes(pipeline=Stage()))
    assert met == []
    assert moved.by_parameter() == {} and met == [[0, 0, 0, 0, []]]
    moved.turn()
    assert moved.epsilon == 1.0 and len(met) == 1


def test_stages_agree_on_the_size_of_the_step_before_any_of_them_begins_a_pass() -> None:
    attention = nn.functional.scaled_dot_product_attention
    before_a_pass: list[bool] = []

    class Stage(Ranks):
        def __init__(self) -> None:
            super().__init__()
            self.size = 2

        def gather(self, value: Any, what: str = "figures") -> list[Any]:
            before_a_pass.append(nn.functional.scaled_dot_product_attention is attention)
            return [value, value]

    model = tiny_llama(hidden=32)
    convert_model(model, fp4_config())
    pullbacks = pullbacks_of(sensitivity_of(model, list(snip_linears(model))))
    run_probe(model, Batch.of(text(2, 16)), pullbacks, ProbeSettings(), Processes(pipeline=Stage()))
    assert before_a_pass == [True]


def test_a_probe_leaves_no_tensors_for_the_garbage_collector() -> None:
    """It rests meanwhile."""
    model = tiny_llama(hidden=32)
    convert_model(model, fp4_config())
    given = Batch.of(text(2, 16)), pullbacks_of(sensitivity_of(model, list(snip_linears(model))))
    gc.collect()
    with collecting_no_garbage():
        before = {id(one) for one in gc.get_objects() if isinstance(one, Tensor)}
        assert run_probe(model, *given).loss > 0
        assert {id(one) for one in gc.get_objects() if isinstance(one, Tensor)} <= before


def test_biases_and_weights_of_norms_get_no_gradient_and_embeddings_do() -> None:
    model = tiny_llama(hidden=32)
    convert_model(model, fp4_config())
    frozen = frozen_in_a_pass(model)
    asking = {name for name, parameter in model.named_parameters() if id(parameter) not in frozen}
    assert asking == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(("dtype", "is_trained"), [(torch.float32, False), (torch.bfloat16, True)])
def test_layers_show_the_same_if_the_batch_holds_embeddings_and_no_gradient_leaves_the_model(
    dtype: torch.dtype, is_trained: bool
) -> None:
    model, inputs = tiny_llama(hidden=32).to(dtype), text(2, 16)
    convert_model(model, fp4_config())
    prompt = torch.zeros(1, dtype=dtype, requires_grad=is_trained)
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach() + prompt

    def write_in_place(_: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if inputs["inputs_embeds"] is not None:
            inputs["inputs_embeds"].add_(0)

    model.model.register_forward_pre_hook(write_in_place, with_kwargs=True)
    pullbacks = pullbacks_of(sensitivity_of(model, list(snip_linears(model))))
    batches = {"inputs_embeds": embedded, "labels": inputs["labels"]}, inputs
    found, expected = (run_probe(model, Batch.of(one), pullbacks) for one in batches)
    assert found.loss == expected.loss and set(found.layers) == set(expected.layers) == set(snip_linears(model))
    for name, sample in found.layers.items():
        assert torch.equal(sample.x, expected.layers[name].x), name
        assert torch.equal(sample.grad_output_dot[0], expected.layers[name].grad_output_dot[0]), name
    assert prompt.grad is None
