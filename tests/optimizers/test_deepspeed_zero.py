"""`ZeroOptimizer` sees the same as one process with all the data: two processes under DeepSpeed, and a stand-in."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_scenarios
from torch import Tensor, nn
from zero_scenarios import RANKS, SCENARIOS, STEPS, Scenario

from snip_hf.optimizers.deepspeed_zero import Stage3Optimizer, ZeroOptimizer, check_deepspeed, find_zero
from snip_hf.optimizers.response import Response, responses
from snip_hf.parallel.sharding import whole
from snip_hf.parallel.zero3 import partitions_as_shards

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SEEDED = torch.Generator().manual_seed(0)
EXACT = [name for name, scenario in SCENARIOS.items() if not scenario.bf16]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Returns rank -> scenario -> what `zero_worker.train` returned there."""
    folder = tmp_path_factory.mktemp("zero")
    settings = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    done = subprocess.run(
        [*command, str(Path(__file__).parents[1] / "support" / "zero_worker.py"), str(folder)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    yield [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@needs_deepspeed
@pytest.mark.parametrize("name", EXACT)
def test_gradients_states_weights_and_clip_factor_are_those_of_one_process_with_the_whole_batch(
    found: list[dict[str, Any]], name: str
) -> None:
    for rank in range(RANKS):
        seen = found[rank][name]["seen"]
        for step, expected in enumerate(_single_process(SCENARIOS[name])):
            assert seen[step]["rule"] == "torch.AdamW"
            assert seen[step]["factor"] == pytest.approx(expected["factor"], rel=1e-5)
            assert (expected["factor"] < 0.9) == (SCENARIOS[name].clip > 0)  # clipping does something
            for weight in expected["weights"]:
                got = seen[step][weight]
                _assert_close(got["gradient"], expected["gradients"][weight])
                _assert_close(got["weight"], expected["weights"][weight])
                assert set(got["state"]) == set(expected["states"][weight])
                for key, value in expected["states"][weight].items():
                    _assert_close(got["state"][key], value)
                for key, value in expected["groups"][weight].items():
                    assert got["group"][key] == value, key


@needs_deepspeed
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_response_predicts_deepspeeds_next_master_weights(found: list[dict[str, Any]], name: str) -> None:
    seen = found[0][name]["seen"]
    for step in range(STEPS - 1):
        for weight in [key for key, value in seen[step].items() if isinstance(value, dict)]:
            now = seen[step][weight]
            decayed = now["weight"] * (1 - now["group"]["lr"] * now["group"]["weight_decay"])
            torch.testing.assert_close(decayed - now["update"], seen[step + 1][weight]["weight"], rtol=0, atol=3e-7)


@needs_deepspeed
@pytest.mark.parametrize("name", SCENARIOS)
def test_looking_and_probing_change_nothing_to_the_bit(found: list[dict[str, Any]], name: str) -> None:
    for rank in range(RANKS):
        watched, unwatched = found[rank][name]["weights"], found[rank][name]["unwatched"]
        for weight, value in watched.items():
            assert torch.equal(value, unwatched[weight]), weight


@needs_deepspeed
@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_see_the_same_once_per_optimizer_step(found: list[dict[str, Any]], name: str) -> None:
    first, second = (found[rank][name] for rank in range(RANKS))
    assert first["looks"] == second["looks"] == STEPS
    for one, other in zip(first["seen"], second["seen"], strict=True):
        assert one["factor"] == other["factor"]
        for weight in [key for key, value in one.items() if isinstance(value, dict)]:
            assert torch.equal(one[weight]["gradient"], other[weight]["gradient"])
            assert torch.equal(one[weight]["weight"], other[weight]["weight"])
            for key, value in one[weight]["state"].items():
                assert torch.equal(value, other[weight]["state"][key])


@needs_deepspeed
def test_all_classes_of_deepspeed_were_seen(found: list[dict[str, Any]]) -> None:
    classes = {name: run["class"] for name, run in found[0].items()}
    assert classes.pop("ZeRO-1, BF16 with FP32 gradients") == "BF16_Optimizer"
    assert set(classes.values()) == {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"}


@pytest.mark.parametrize(
    ("changes", "reason", "instead"),
    [
        ({"zero_optimization": {"stage": 0}}, "stage=0 does not partition", "ZeRO stage 1, 2 or 3"),
        ({"zero_optimization": {}}, "stage=0 does not partition", "ZeRO stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "state on disk", "device 'cpu'"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "weights on disk", "device 'cpu'"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5}}}, "two optimizers", "ratio 1"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "integers", "false there"),
        ({"tensor_parallel": {"autotp_size": 2}}, "replaces the linears", "only data parallelism"),
        ({"compile": {"deepcompile": True}}, "into compiled graphs", "torch.compile"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_what_to_use_instead(
    changes: dict[str, Any], reason: str, instead: str
) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        check_deepspeed({"zero_optimization": {"stage": 2}} | changes)
    assert f"Use {instead}" in str(refusal.value)
    assert "policy='layer-position'" in str(refusal.value)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_configurations_that_are_tested_here_are_not_refused(name: str) -> None:
    check_deepspeed(SCENARIOS[name].config())


def test_a_run_without_deepspeed_has_no_zero_optimizer() -> None:
    model, adamw = zero_scenarios.model_and_optimizer()
    assert find_zero(adamw) is None
    assert find_zero(adamw, model, None) is None


@pytest.mark.parametrize(
    ("kind", "adam_w_mode", "rule"),
    [
        ("FusedAdam", True, "torch.AdamW"),
        ("FusedAdam", False, "torch.Adam"),
        ("DeepSpeedCPUAdam", 1, "torch.AdamW"),
        ("DeepSpeedCPUAdam", 0, "torch.Adam"),
    ],
)
def test_deepspeeds_own_adams_have_the_rule_of_their_mode(kind: str, adam_w_mode: bool, rule: str) -> None:
    inner = _of_deepspeed(kind, torch.optim.Optimizer, adam_w_mode=adam_w_mode)
    assert ZeroOptimizer(_zero(inner)).rule == rule


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (torch.optim.Adafactor, "torch.optim.Adafactor on flat partitions is not known"),
        (torch.optim.NAdam, r"torch.optim\S*.NAdam on flat partitions is not known"),
    ],
)
def test_an_inner_optimizer_without_a_rule_is_refused(inner: type[torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ZeroOptimizer(_zero(inner([nn.Parameter(torch.zeros(4))])))


def test_other_optimizers_of_deepspeed_are_refused_by_what_they_are() -> None:
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(4))])
    for kind, reason in [
        ("ZenFlowZeroOptimizer", "its optimizer is a ZenFlowZeroOptimizer"),
        ("FP16_UnfusedOptimizer", "its optimizer is a FP16_UnfusedOptimizer"),
    ]:
        with pytest.raises(ValueError, match=reason):
            find_zero(SimpleNamespace(optimizer=_zero(adamw, kind)))
    with pytest.raises(ValueError, match="fp16 scales"):
        find_zero(_zero(adamw, dtype=torch.float16))
    with pytest.raises(ValueError, match="at different times"):
        find_zero(_stage_3(adamw, [], zenflow=True))
    wrapper = type("DeepSpeedOptimizerWrapper", (), {})()
    wrapper.optimizer = adamw
    with pytest.raises(ValueError, match="stage 0 does not partition"):
        find_zero(wrapper)
    base = type("DeepSpeedEngine", (), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(ValueError, match="stage 0 does not partition"):
        find_zero(None, _of_deepspeed("DeepSpeedEngine", object, optimizer=adamw))
    with pytest.raises(ValueError, match="pipeline engine"):
        find_zero(None, _of_deepspeed("PipelineEngine", base, optimizer=_zero(adamw)))


def test_a_callback_is_taken_away_without_a_trace_and_under_a_later_wrapper_falls_silent() -> None:
    calls: list[str] = []
    zero = _zero(torch.optim.AdamW([nn.Parameter(torch.zeros(4))]))
    type(zero).step = lambda self: calls.append("step")
    first = ZeroOptimizer(zero).before_step(lambda: calls.append("first"))
    zero.step()
    second = ZeroOptimizer(zero).before_step(lambda: calls.append("second"))
    zero.step()
    first.remove()
    zero.step()
    second.remove()
    second.remove()
    zero.step()
    assert calls == ["first", "step", "second", "first", "step", "second", "step", "step"]
    del zero.step
    ZeroOptimizer(zero).before_step(lambda: None).remove()
    assert "step" not in vars(zero)


def test_a_weight_that_is_not_trained_is_left_out() -> None:
    zero = ZeroOptimizer(_zero(torch.optim.AdamW([nn.Parameter(torch.zeros(4))])))
    frozen = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    assert zero.responses({"frozen": frozen}) == {}
    assert "frozen" not in zero.gradients({"frozen": frozen}, 1.0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for what DeepSpeed offers to read a partitioned optimizer; `_partitioned` knows the sums over ranks."""
    functions = {
        "deepspeed": {},
        "deepspeed.comm": {"all_reduce": lambda tensor, group: tensor.add_(group.pop(0))},
        "deepspeed.utils": {
            "safe_get_full_grad": lambda weight: weight.whole_gradient,
            "safe_get_full_fp32_param": lambda weight: weight.master,
        },
        "deepspeed.runtime": {},
        "deepspeed.runtime.utils": {"get_global_norm_of_tensors": lambda tensors, mpu: torch.cat(tensors).norm()},
    }
    for name, members in functions.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["deepspeed"], "comm", sys.modules["deepspeed.comm"], raising=False)


def _partitioned(**options: Any) -> tuple[Any, list[nn.Parameter], dict[str, Response]]:
    """Returns the first of two ranks' ZeRO optimizers, its BF16 weights, and the responses of torch's AdamW on all.

    The first rank holds all of the first weight but its last two elements, and nothing of the second one.
    """
    masters = [nn.Parameter(torch.randn(shape, generator=SEEDED)) for shape in ((6, 4), (5, 4))]
    adamw = torch.optim.AdamW(masters, lr=0.1)
    for _ in range(2):
        for master in masters:
            master.grad = torch.randn(master.shape, generator=SEEDED)
        adamw.step()
    kept = sum(master.numel() for master in masters) // 2
    flat = nn.Parameter(torch.cat([master.detach().flatten() for master in masters])[:kept])
    inner = torch.optim.AdamW([flat], lr=0.1)
    inner.param_groups[0] |= options
    states = [adamw.state[master] for master in masters]
    inner.state[flat] = {
        "step": states[0]["step"],
        **{key: torch.cat([one[key].flatten() for one in states])[:kept] for key in ("exp_avg", "exp_avg_sq")},
    }
    weights = [nn.Parameter(master.detach().bfloat16()) for master in masters]
    fragments = [SimpleNamespace(start=0, numel=kept), None]
    for weight, master, state, part in zip(weights, masters, states, fragments, strict=True):
        held = 0 if part is None else part.numel
        beyond = [state[key].flatten().clone() for key in ("exp_avg", "exp_avg_sq")]
        for tensor in beyond:
            tensor[:held] = 0
        mapping = part and SimpleNamespace(lp_fragment_address=part, hp_fragment_address=part)
        found = {"_dp_group": beyond * 9, "_hp_mapping": mapping, "master": master, "whole_gradient": master.grad}
        vars(weight).update(found)
    zero = _zero(inner)
    zero.bit16_groups = [weights]
    return zero, weights, responses(adamw, dict(zip(("first", "second"), masters, strict=True)))


@pytest.mark.usefixtures("library")
def test_a_weight_in_parts_has_the_response_of_one_process_with_the_whole() -> None:
    zero, weights, expected = _partitioned()
    named = dict(zip(expected, weights, strict=True))
    found = ZeroOptimizer(zero).responses(named)
    assert list(found) == list(expected) and all(one.is_spread for one in found.values())
    for name, one in found.items():
        gradient, tangent = torch.randn(2, *named[name].shape, generator=SEEDED)
        assert torch.equal(one.update(gradient), expected[name].update(gradient))
        assert torch.equal(one.pushforward(gradient, tangent), expected[name].pushforward(gradient, tangent))
        assert torch.equal(one.pullback(gradient, tangent), expected[name].pullback(gradient, tangent))
        assert torch.equal(one.meaningful(gradient), expected[name].meaningful(gradient))
        at = one.gathered().at
        assert torch.equal(at.state["exp_avg_sq"], expected[name].at.state["exp_avg_sq"]) and at.step == 3


@pytest.mark.usefixtures("library")
def test_an_adam_of_deepspeed_without_bias_correction_has_none() -> None:
    zero, (weight, _), _ = _partitioned(bias_correction=False)
    assert ZeroOptimizer(zero).context(weight).step == math.inf


@pytest.mark.usefixtures("library")
def test_gradients_are_read_when_they_are_asked_for_and_clipped() -> None:
    zero, weights, _ = _partitioned()
    waits: list[int] = []
    vars(zero).update(cpu_offload=True, _wait_for_offload_copies=lambda: waits.append(1))
    gradients = ZeroOptimizer(zero).gradients(dict(zip("ab", weights, strict=True)), 0.5)
    assert (list(gradients), len(gradients), waits) == (["a", "b"], 2, [])
    assert torch.equal(gradients["b"], 0.5 * weights[1].whole_gradient) and waits == [1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("bound", "norm", "factor"), [(0.0, 4.0, 1.0), (2.0, 4.0, 2 / (4 + 1e-6)), (2.0, 1.5, 1.0), (2.0, 0.0, 1.0)]
)
@pytest.mark.usefixtures("library")
def test_the_clip_factor_is_that_of_both_classes_of_deepspeed(bound: float, norm: float, factor: float) -> None:
    zero, _, _ = _partitioned()
    vars(zero).update(clip_grad=bound, scaled_global_norm=lambda: norm)
    assert ZeroOptimizer(zero).clip_factor() == pytest.approx(factor, rel=1e-7)
    in_bf16 = _zero(zero.optimizer, "BF16_Optimizer")
    vars(in_bf16).update(
        clip_grad=bound, bf16_groups=zero.bit16_groups, mpu=None, get_grads_for_norm=lambda: ([torch.tensor([norm])], 0)
    )
    assert ZeroOptimizer(in_bf16).clip_factor() == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("norm", [-1.0, math.inf])
def test_a_norm_that_is_not_finite_is_refused(norm: float) -> None:
    zero, _, _ = _partitioned()
    vars(zero).update(clip_grad=1.0, scaled_global_norm=lambda: norm)
    with pytest.raises(ValueError, match="norm of all gradients is not finite"):
        ZeroOptimizer(zero).clip_factor()


@pytest.mark.usefixtures("library")
def test_a_weight_that_stage_3_partitions_has_the_response_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, whose part is the whole weight."""
    weights = {name: nn.Parameter(torch.randn(shape, generator=SEEDED)) for name, shape in (("a", (6, 4)), ("b", (5,)))}
    adamw = torch.optim.AdamW(weights.values(), lr=0.1)
    gradients = {name: torch.randn(weight.shape, generator=SEEDED) for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.grad = gradients[name].clone()
    adamw.step()
    expected = responses(adamw, weights)
    flat = nn.Parameter(torch.cat([weight.detach().flatten() for weight in weights.values()]))
    inner = torch.optim.AdamW([flat], lr=0.1)
    states = [adamw.state[weight] for weight in weights.values()]
    averages = {key: torch.cat([one[key].flatten() for one in states]) for key in ("exp_avg", "exp_avg_sq")}
    inner.state[flat] = {"step": states[0]["step"], **averages}
    places = {id(weight): slice(0, 24) if name == "a" else slice(24, 29) for name, weight in weights.items()}
    functions = {
        "safe_get_local_grad": lambda weight: weight.grad.flatten(),
        "safe_get_local_fp32_param": lambda weight: flat[places[id(weight)]],
        "safe_get_local_optimizer_state": lambda weight, key: averages[key][places[id(weight)]],
    }
    vars(sys.modules["deepspeed.utils"]).update(functions)
    utils = sys.modules["deepspeed.runtime.utils"]
    monkeypatch.setattr(utils, "combine_grad_norm_groups", lambda norms: torch.stack(norms).norm(), raising=False)
    frozen, model = nn.Parameter(torch.zeros(2), requires_grad=False), nn.Module()
    for name, weight in {**weights, "frozen": frozen}.items():
        model.register_parameter(name, weight)
    zero = _stage_3(inner, list(weights.values()), flat)
    vars(zero).update(clip_grad=1.0, _get_norm_groups=lambda: [torch.tensor(3.0), torch.tensor(4.0)])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for weight in model.parameters():
            vars(weight).update(
                ds_tensor=weight.detach().flatten(), ds_shape=weight.shape, ds_process_group=dist.group.WORLD
            )
        with partitions_as_shards(model):
            views, found = dict(model.named_parameters()), find_zero(zero)
            assert type(found) is Stage3Optimizer and found.clip_factor() == pytest.approx(1 / 5)
            answers, given = found.responses(views), found.gradients(views, 0.5)
            assert list(answers) == list(given) == ["a", "b"] and len(answers) == 2 and "frozen" not in answers
            for name, one in answers.items():
                gradient = gradients[name]
                assert torch.equal(whole(given[name]), 0.5 * gradient)
                assert torch.equal(one.gathered().update(gradient), expected[name].update(gradient))
                own = one.of_own_part()
                assert own is not None
                assert torch.equal(own.pullback(gradient, gradient), expected[name].pullback(gradient, gradient))
    finally:
        dist.destroy_process_group()


def _stage_3(inner: Any, weights: list[nn.Parameter], flat: Any = None, **attributes: Any) -> Any:
    zero = _zero(inner, "DeepSpeedZeroOptimizer_Stage3")
    vars(zero).update(
        fp16_groups=[weights], sub_group_to_group_id={0: 0}, fp32_partitioned_groups_flat=[flat], **attributes
    )
    return zero


def _of_deepspeed(name: str, base: type, **attributes: Any) -> Any:
    """An object that shows itself as one of DeepSpeed's classes; nothing else of it is real."""
    made = object.__new__(type(name, (base,), {"__module__": "deepspeed.somewhere"}))
    vars(made).update(attributes)
    return made


def _zero(inner: Any, kind: str = "DeepSpeedZeroOptimizer", dtype: torch.dtype = torch.bfloat16) -> Any:
    base = type("DeepSpeedOptimizer", (), {"__module__": "deepspeed.runtime.base_optimizer"})
    weights = [[nn.Parameter(torch.zeros(4, dtype=dtype))]]
    return _of_deepspeed(kind, base, optimizer=inner, bit16_groups=weights)


def _single_process(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Yields, before each step, what plain torch has when one process trains on the ranks' batches together."""
    model, adamw = zero_scenarios.model_and_optimizer()
    names = {id(weight): name for name, weight in model.named_parameters()}
    for step in range(STEPS):
        for group in adamw.param_groups:
            group["lr"] = zero_scenarios.learning_rate(step) * group["relative"]
        for micro_batch in range(scenario.micro_batches):
            parts = [zero_scenarios.batch(step, micro_batch, rank) for rank in range(RANKS)]
            whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            (model(**whole).loss / scenario.micro_batches).backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), scenario.clip or float("inf")))
        states = {
            names[id(weight)]: dict(adamw.state[weight]) for group in adamw.param_groups for weight in group["params"]
        }
        yield {
            "factor": min(1.0, scenario.clip / norm) if scenario.clip else 1.0,
            "gradients": gradients,
            "weights": {name: weight.detach().clone() for name, weight in model.named_parameters()},
            "states": {name: {key: value.clone() for key, value in state.items()} for name, state in states.items()},
            "groups": {
                names[id(weight)]: {key: value for key, value in group.items() if key != "params"}
                for group in adamw.param_groups
                for weight in group["params"]
            },
        }
        adamw.step()
        adamw.zero_grad()


def _assert_close(got: Tensor, expected: Tensor) -> None:
    """Up to the order in which FP32 sums are taken."""
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().mean()))
