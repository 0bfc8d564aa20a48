"""Does every policy reach the FP4 share that was asked for, in every stage and never from below?"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from configs import fp4_config
from oracles.brute_force import best_map
from policy_settings import (
    LISTS,
    RULES,
    RULES_AT,
    TIES,
    assert_complete,
    decided,
    llama_flops,
    plain_flops,
    plan_of,
    setting_by_layer,
    setting_of,
    stage_shares,
)
from registries import restored
from small import tiny_llama

from snip_hf import SnipController, register_format
from snip_hf.config import POLICIES, SnipConfig
from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.estimation.table import ROWS, Divergence, DivergenceTable
from snip_hf.layers.state import block_of, snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.program import problem
from snip_hf.planning.solver import ilp
from snip_hf.policies.registry import Policy, policy_of, register_policy, rule_assignment
from snip_hf.policies.rules import rule
from snip_hf.policies.setting import Setting, find_stages

SCORED = ("fisher", "hessian-trace", "greedy", "kl")
PROBED = ("snip", "snip-paper", "min-abs-err", "min-rel-err", *SCORED)
# Policy, granularity.
ONE_FIGURE = ("snip-paper", "gemm")
PROBED_AT = [(policy, unit) for policy in PROBED for unit in ("layer", "gemm") if (policy, unit) != ONE_FIGURE]
SHARING_AT = [*RULES_AT, *PROBED_AT]
TARGETS = (0.0, 0.25, 0.5, 0.75, 0.8, 1.0)


def ordered_table(setting: Setting, seed: int = 0) -> DivergenceTable:
    """Random rows in which FP4 always does more damage than FP8."""
    rng = random.Random(seed)
    rows = []
    for layer, costs in setting.flops.items():
        for fmt, size in zip(fp4_config().formats[::-1], (0.05, 1.0), strict=True):
            for gemm in ROWS:
                cost = sum(costs.values()) if gemm == "layer" else costs[gemm]
                values = [size * rng.uniform(0.2, 2) for _ in range(5)]
                rows.append(Divergence(layer, gemm, fmt, values[0], values[1], cost, 0.5 * values[1], *values[2:]))
    return DivergenceTable(2.0, tuple(rows))


def uniform(flops: dict[str, dict[str, float]], fmt: str = "fp8") -> dict[str, dict[str, str]]:
    return {layer: dict.fromkeys(GEMMS, fmt) for layer in flops}


# ----------------------------------------------------------------------------------------------------- the target share


@pytest.mark.parametrize(("policy", "granularity"), SHARING_AT)
@pytest.mark.parametrize(("stages", "ties"), [(None, ()), (LISTS, TIES)], ids=["none-free", "lists-tied"])
def test_every_stage_meets_every_target_and_exceeds_it_by_less_than_a_unit(
    policy: str, granularity: str, stages: Any, ties: Any
) -> None:
    flops = llama_flops()
    for target in TARGETS:
        setting = setting_of(
            flops,
            policy=policy,
            granularity=granularity,
            stages=stages,
            ties=ties,
            target_fp4_fraction=target,
            solver="greedy",
        )
        assert sorted(layer for stage in setting.stages for layer in stage) == sorted(flops)
        assignment = decided(setting, ordered_table)
        assert_complete(setting, assignment)
        for stage, share in zip(setting.stages, stage_shares(setting, assignment), strict=True):
            assert share >= target - 1e-9
            largest = max(setting.shares(stage).values()) * (3 if ties else 1)
            assert share < target + largest + 1e-9
            assert needs_all(setting, stage, assignment, share)
            if target == 0:
                assert share == 0
            if target == 1:
                assert share == pytest.approx(1)
        for names in ties:
            for layer, formats in assignment.items():
                parent, _, last = layer.rpartition(".")
                if last in names:
                    assert all(assignment[f"{parent}.{name}"] == formats for name in names)


def needs_all(setting: Setting, stage: Any, assignment: dict[str, dict[str, str]], share: float) -> bool:
    """No unit in FP4 could go back to FP8 with the target still met."""
    parts: dict[Any, float] = {}
    shares = setting.shares(stage)
    for group in setting.groups(stage):
        layer, gemm = setting.members(group)[0]
        parent, _, last = layer.rpartition(".")
        tie = next((names for names in setting.ties if last in names), last)
        key = (parent, tie, gemm)
        if assignment[layer][gemm] == "fp4":
            parts[key] = parts.get(key, 0) + shares[group]
    return all(share - part < setting.config.target_fp4_fraction - 1e-9 for part in parts.values())


@pytest.mark.parametrize(("policy", "granularity"), RULES_AT)
def test_a_target_that_whole_groups_can_make_up_exactly_is_met_exactly_where_all_are_equal(
    policy: str, granularity: str
) -> None:
    flops = plain_flops(*[1.0] * 20)
    for target in TARGETS:
        setting = setting_of(flops, policy=policy, granularity=granularity, target_fp4_fraction=target)
        # 60 GEMMs or 20 layers: all of these targets are whole numbers of both.
        assert stage_shares(setting, rule_assignment(setting)) == pytest.approx((target,))


def least_sufficient(shares: list[float], target: float) -> float:
    """The least sum of a subset that reaches the target, by trying all."""
    sums = (sum(part) for size in range(len(shares) + 1) for part in itertools.combinations(shares, size))
    return min(total for total in sums if total >= target - 1e-9)


@pytest.mark.parametrize("policy", RULES)
def test_a_rule_exceeds_the_target_by_less_than_its_smallest_layer_in_fp4(policy: str) -> None:
    """Rules keep their order, so they need not hit the best subset-sum; no layer of theirs can be spared, though."""
    rng = random.Random(5)
    exact = 0
    for _ in range(60):
        flops = plain_flops(*[float(rng.randint(1, 40)) for _ in range(9)])
        target = rng.choice([0.25, 0.5, 0.75, 0.8])
        setting = setting_by_layer(flops, policy=policy, target_fp4_fraction=target, seed=rng.randint(0, 99))
        (stage,) = setting.stages
        assignment = rule_assignment(setting)
        shares = {layer: setting.shares(stage)[layer] for layer in flops}
        taken = [share for layer, share in shares.items() if assignment[layer]["forward"] == "fp4"]
        best = least_sufficient(list(shares.values()), target)
        assert best - 1e-9 <= sum(taken) < target + min(taken) + 1e-9
        exact += sum(taken) <= best + 1e-9
    assert exact > 0


@pytest.mark.parametrize(("policy", "formats"), [("uniform-fp4", ("bf16",)), ("uniform-nvfp4", ("fp4", "fp8"))])
def test_uniform_policies_run_their_own_format_whatever_the_others_are(policy: str, formats: tuple[str, ...]) -> None:
    setting = setting_of(llama_flops(), policy=policy, formats=formats)
    assert rule_assignment(setting) == uniform(llama_flops(), policy.removeprefix("uniform-"))
    model = tiny_llama()
    plan = SnipController(model, torch.optim.SGD(model.parameters(), 0.1), setting.config).plan
    assert plan.fp4_fraction == 1.0
    assert {layer.formats["forward"] for layer in snip_linears(model).values()} == {policy.removeprefix("uniform-")}


def test_a_format_registered_later_brings_its_uniform_policy() -> None:
    assert "uniform-later" not in POLICIES
    with restored(FORMATS):
        register_format(replace(FORMATS["fp8"], name="later"))
        setting = setting_of(llama_flops(), policy="uniform-later")
        assert rule_assignment(setting) == uniform(llama_flops(), "later")
    assert "uniform-later" not in POLICIES


@pytest.mark.parametrize("policy", ["bf16", "uniform-fp8", "uniform-fp4"])
@pytest.mark.parametrize("granularity", ["layer", "gemm"])
@pytest.mark.parametrize("stages", [None, 2])
def test_uniform_policies_give_every_gemm_one_format(policy: str, granularity: str, stages: int | None) -> None:
    setting = setting_of(llama_flops(), policy=policy, granularity=granularity, stages=stages)
    assert rule_assignment(setting) == uniform(llama_flops(), policy.removeprefix("uniform-"))


def test_a_gemm_without_flops_counts_for_nothing_and_stays_in_fp8() -> None:
    flops = plain_flops(*[1.0] * 6)
    flops["layers.2.fc"]["grad_weight"] = 0.0  # a frozen weight
    for policy in (*RULES, "backward-first"):
        for target in (0.5, 0.9):
            setting = setting_of(flops, policy=policy, granularity="gemm", target_fp4_fraction=target)
            assignment = rule_assignment(setting)
            assert assignment["layers.2.fc"]["grad_weight"] == "fp8"
            assert stage_shares(setting, assignment)[0] >= target - 1e-9


# ---------------------------------------------------------------------------------------------------- what a rule means


def fp4_layers(assignment: dict[str, dict[str, str]]) -> set[str]:
    return {layer for layer, formats in assignment.items() if "fp4" in formats.values()}


@pytest.mark.parametrize("granularity", ["layer", "gemm"])
def test_layer_position_protects_the_first_and_last_blocks(granularity: str) -> None:
    flops = plain_flops(*[1.0] * 8)
    for count in range(1, 8):
        setting = setting_of(flops, policy="layer-position", granularity=granularity, target_fp4_fraction=count / 8)
        chosen = {int(layer.split(".")[1]) for layer in fp4_layers(rule_assignment(setting))}
        # The middle ones, with one of the two at the edge where the number is odd.
        assert chosen in (
            set(range((8 - count) // 2, (8 - count) // 2 + count)),
            set(range((9 - count) // 2, (9 - count) // 2 + count)),
        )


def test_first2_last8_is_the_published_rule_at_its_depth_and_share() -> None:
    """arXiv:2509.25149: of 62 blocks the first 2 and the last 8 stay in a higher precision."""
    setting = setting_of(plain_flops(*[1.0] * 62), policy="first2-last8", target_fp4_fraction=52 / 62)
    assert fp4_layers(rule_assignment(setting)) == {f"layers.{index}.fc" for index in range(2, 54)}


@pytest.mark.parametrize("granularity", ["layer", "gemm"])
@pytest.mark.parametrize("blocks", [8, 16, 31, 40])
def test_first2_last8_keeps_its_proportion_at_other_depths_and_shares(blocks: int, granularity: str) -> None:
    flops = plain_flops(*[1.0] * blocks)
    for kept in range(1, blocks):
        options = {"granularity": granularity, "target_fp4_fraction": 1 - kept / blocks}
        setting = setting_of(flops, policy="first2-last8", **options)
        assignment = rule_assignment(setting)
        in_fp8 = [index for index, layer in enumerate(flops) if assignment[layer]["forward"] == "fp8"]
        first = [index for place, index in enumerate(in_fp8) if index == place]
        # A run at the beginning, one at the end, and two in ten of them in the first.
        assert in_fp8 == [*range(len(first)), *range(blocks - kept + len(first), blocks)]
        assert abs(len(first) - 0.2 * kept) <= 0.5 + 1e-9


def test_last_15_percent_is_the_published_rule_at_its_share() -> None:
    """torchtitan's NVFP4 recipe: of 32 blocks the first 27 are in FP4, of 36 the first 30."""
    for blocks, in_fp4 in ((32, 27), (36, 30), (20, 17)):
        setting = setting_of(
            plain_flops(*[1.0] * blocks), policy="last-15-percent", target_fp4_fraction=in_fp4 / blocks
        )
        chosen = fp4_layers(rule_assignment(setting))
        assert chosen == {f"layers.{index}.fc" for index in range(in_fp4)}


def test_the_rules_by_block_count_over_the_whole_model_also_with_stages() -> None:
    flops = plain_flops(*[1.0] * 20)
    for policy, chosen in (
        ("last-15-percent", {*range(5), *range(10, 15)}),
        # Away from the model's ends, four times as much from its last block as from its first.
        ("first2-last8", {*range(3, 8), *range(10, 15)}),
    ):
        setting = setting_of(flops, policy=policy, target_fp4_fraction=0.5, stages=2)
        assert fp4_layers(rule_assignment(setting)) == {f"layers.{index}.fc" for index in chosen}


def test_backward_first_takes_all_of_the_backward_pass_before_any_forward_gemm() -> None:
    flops = plain_flops(*[1.0] * 8)

    def in_fp4(target: float) -> dict[str, set[int]]:
        setting = setting_of(flops, policy="backward-first", granularity="gemm", target_fp4_fraction=target)
        assignment = rule_assignment(setting)
        return {
            gemm: {index for index, formats in enumerate(assignment.values()) if formats[gemm] == "fp4"}
            for gemm in GEMMS
        }

    middle = {2, 3, 4, 5}
    assert in_fp4(1 / 3) == {"forward": set(), "grad_input": middle, "grad_weight": middle}
    assert in_fp4(2 / 3) == {"forward": set(), "grad_input": set(range(8)), "grad_weight": set(range(8))}
    assert in_fp4(5 / 6) == {"forward": middle, "grad_input": set(range(8)), "grad_weight": set(range(8))}


@pytest.mark.parametrize("attention", ["self_attn", "SelfAttention", "EncDecAttention", "attn", "self_attention"])
def test_layer_type_takes_the_mlp_before_attention_which_it_knows_by_every_usual_name(attention: str) -> None:
    flops = {layer.replace("self_attn", attention): costs for layer, costs in llama_flops().items()}
    mlp = sum(sum(costs.values()) for layer, costs in flops.items() if ".mlp." in layer)
    total = sum(sum(costs.values()) for costs in flops.values())
    setting = setting_of(flops, policy="layer-type", target_fp4_fraction=mlp / total)
    assert fp4_layers(rule_assignment(setting)) == {layer for layer in flops if ".mlp." in layer}


@pytest.mark.parametrize("names", [lambda groups: groups[:2], lambda groups: [name.split(":")[0] for name in groups]])
def test_an_order_of_other_names_than_the_groups_is_refused(names: Any) -> None:
    flops = plain_flops(1.0, 3.0)
    with restored(POLICIES):
        register_policy(rule("mine", lambda setting, layers: names(setting.groups(layers))))
        message = r"^The order of policy='mine' has \d names \(first: 'layers.*\); expected each of the 6 groups once"
        with pytest.raises(ValueError, match=message):
            rule_assignment(setting_of(flops, policy="mine"))


@pytest.mark.parametrize("granularity", ["layer", "gemm"])
def test_random_repeats_with_its_seed_and_differs_with_another(granularity: str) -> None:
    def plan(seed: int) -> dict[str, dict[str, str]]:
        return rule_assignment(setting_of(llama_flops(), policy="random", seed=seed, granularity=granularity, stages=2))

    state = random.getstate()
    plans = [plan(seed) for seed in range(8)]
    assert [plan(seed) for seed in range(8)] == plans
    assert all(a != b for a, b in itertools.combinations(plans, 2))
    assert random.getstate() == state


def test_random_gives_every_layer_about_the_same_chance() -> None:
    flops = plain_flops(*[1.0] * 8)
    times = dict.fromkeys(flops, 0)
    for seed in range(400):
        setting = setting_by_layer(flops, policy="random", seed=seed, target_fp4_fraction=0.5)
        for layer in fp4_layers(rule_assignment(setting)):
            times[layer] += 1
    # Binomial(400, 1/2): standard deviation 10.
    assert all(150 < count < 250 for count in times.values())


def test_random_draws_each_stage_by_itself() -> None:
    flops = plain_flops(*[1.0] * 24)
    setting = setting_of(flops, policy="random", target_fp4_fraction=0.5, stages=2)
    chosen = {int(layer.split(".")[1]) for layer in fp4_layers(rule_assignment(setting))}
    assert {index for index in chosen if index < 12} != {index - 12 for index in chosen if index >= 12}


# --------------------------------------------------------------------------------------------------------------- stages


def test_a_number_of_stages_cuts_the_blocks_into_equal_runs() -> None:
    layers = list(llama_flops(8))
    for count in (1, 2, 4, 8):
        stages = find_stages(layers, fp4_config(stages=count))
        assert [layer for stage in stages for layer in stage] == layers
        assert [len(stage) for stage in stages] == [len(layers) // count] * count
    sizes = [len(stage) // 7 for stage in find_stages(layers, fp4_config(stages=3))]
    assert sum(sizes) == 8
    assert max(sizes) - min(sizes) == 1


def test_layers_outside_the_blocks_are_in_the_stage_of_those_before_them() -> None:
    layers = list(llama_flops(8))
    first, second = find_stages(layers, fp4_config(stages=2))
    around = find_stages(["linear_1", *layers, "lm_head"], fp4_config(stages=2))
    assert around == (("linear_1", *first), (*second, "lm_head"))
    assert find_stages(["score", "fc2"], fp4_config(stages=2)) == (("score",), ("fc2",))


def test_no_stages_means_one_for_the_whole_model_and_lists_are_kept() -> None:
    layers = list(llama_flops())
    assert find_stages(layers, fp4_config()) == (tuple(layers),)
    assert find_stages(layers, fp4_config(stages=LISTS)) == LISTS


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (3, "stages=3, but the model has 2 blocks; expected at most one stage per block."),
        (
            (("layers.0.fc",),),
            "stages: layer 'layers.1.fc' is named 0 times and is a swapped layer; "
            "expected every swapped layer in exactly one stage.",
        ),
        (
            (("layers.0.fc",), ("layers.1.fc", "layers.0.fc")),
            "stages: layer 'layers.0.fc' is named 2 times and is a swapped layer; "
            "expected every swapped layer in exactly one stage.",
        ),
        (
            (("layers.0.fc", "layers.1.fc", "lm_head"),),
            "stages: layer 'lm_head' is named 1 times and is not a swapped layer; "
            "expected every swapped layer in exactly one stage.",
        ),
        (
            (("layers.0.fc", "layers.1"),),
            "stages: layer 'layers.1' is named 1 times and is not a swapped layer; "
            "expected every swapped layer in exactly one stage.",
        ),
        (
            (),
            "stages: layer 'layers.0.fc' is named 0 times and is a swapped layer; "
            "expected every swapped layer in exactly one stage.",
        ),
    ],
)
def test_stages_that_do_not_fit_the_model_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_stages(["layers.0.fc", "layers.1.fc"], fp4_config(stages=stages))


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        ("model.layers.3.self_attn.q_proj", "model.layers.3"),  # Llama
        ("model.layers.13.mlp.down_proj", "model.layers.13"),
        ("gpt_neox.layers.0.attention.query_key_value", "gpt_neox.layers.0"),  # GPT-NeoX
        ("transformer.h.11.mlp.dense_4h_to_h", "transformer.h.11"),  # BLOOM
        ("model.decoder.layers.2.fc1", "model.decoder.layers.2"),  # OPT
        ("model.layers.1.mlp.experts.7.w1", "model.layers.1"),
        ("layers.10.fc", "layers.10"),
        ("0.fc", "0"),
        ("model.layer3b.fc", "model.layer3b.fc"),  # no number of its own
        ("lm_head", "lm_head"),
    ],
)
def test_the_block_of_a_layer_ends_with_the_first_number(layer: str, block: str) -> None:
    assert block_of(layer) == block


# -------------------------------------------------------------------------------------------------------------- problem


def row(layer: str, gemm: str, fmt: str, *values: float) -> Divergence:
    return Divergence(layer, gemm, fmt, values[0], values[1], 1.0, None, *values[2:])


def hand_table() -> tuple[dict[str, dict[str, float]], DivergenceTable]:
    """Two layers of 1 and 3 FLOPs per GEMM; losses sum to 0.4 and weights to 0.02 under everything in FP4."""
    flops = plain_flops(1.0, 3.0)
    rows = [
        row("layers.0.fc", "layer", "fp8", 0.01, 0.001, 1.0, 0.1),
        row("layers.0.fc", "layer", "fp4", 0.10, 0.015, 2.0, 0.4),
        row("layers.1.fc", "layer", "fp8", 0.02, 0.002, 3.0, 0.2),
        row("layers.1.fc", "layer", "fp4", 0.30, 0.005, 4.0, 0.3),
    ]
    for index, layer in enumerate(flops):
        for gemm in GEMMS:
            rows.append(row(layer, gemm, "fp8", 0.0, 0.001, 0.5, 0.05))
            rows.append(row(layer, gemm, "fp4", 0.1 * index, 0.004, 1.0, 0.2))
    return flops, DivergenceTable(2.0, tuple(rows))


def costs_of(program: dict[str, Any]) -> dict[str, list[float]]:
    return {group["name"]: [option["cost"] for option in group["options"]] for group in program["groups"]}


def test_the_paper_s_costs_are_both_divergences_by_their_totals_in_fp4() -> None:
    flops, table = hand_table()
    program = problem(setting_by_layer(flops, objective="paper"), table)
    assert costs_of(program) == {
        "layers.0.fc": [pytest.approx(0.01 / 0.4 + 0.001 / 0.02), pytest.approx(0.1 / 0.4 + 0.015 / 0.02)],
        "layers.1.fc": [pytest.approx(0.02 / 0.4 + 0.002 / 0.02), pytest.approx(0.3 / 0.4 + 0.005 / 0.02)],
    }


def test_additive_costs_are_the_loss_divergence_and_a_tenth_of_the_weight_divergence_s_square() -> None:
    flops, table = hand_table()
    total = 0.015**2 + 0.005**2
    assert costs_of(problem(setting_by_layer(flops), table)) == {
        "layers.0.fc": [
            pytest.approx(0.01 / 0.4 + 0.1 * 0.001**2 / total),
            pytest.approx(0.1 / 0.4 + 0.1 * 0.015**2 / total),
        ],
        "layers.1.fc": [
            pytest.approx(0.02 / 0.4 + 0.1 * 0.002**2 / total),
            pytest.approx(0.3 / 0.4 + 0.1 * 0.005**2 / total),
        ],
    }


def test_a_cost_that_is_not_finite_is_refused_by_the_name_of_its_group() -> None:
    flops, table = hand_table()
    with restored(POLICIES):
        register_policy(Policy(name="at-nan", cost=lambda config, table: lambda row: math.nan))
        message = "^policy='at-nan' prices 'layers.0.fc' in fp8 at nan; expected a finite number.$"
        with pytest.raises(ValueError, match=message):
            problem(setting_by_layer(flops, policy="at-nan"), table)


def test_a_cost_that_raises_is_refused_by_the_name_of_its_policy() -> None:
    flops, table = hand_table()
    with restored(POLICIES):
        register_policy(Policy(name="by-0", cost=lambda config, table: lambda row: 1 / 0))
        message = "^policy='by-0' cannot price 'layers.0.fc' in fp8: ZeroDivisionError: division by zero$"
        with pytest.raises(ValueError, match=message):
            problem(setting_by_layer(flops, policy="by-0"), table)


@pytest.mark.parametrize("number", [np.float32, torch.tensor])
def test_a_cost_may_be_a_number_of_numpy_or_torch(number: Any) -> None:
    flops, table = hand_table()
    with restored(POLICIES):
        register_policy(
            Policy(name="by-loss", cost=lambda config, table: lambda row: number(row.loss_divergence * 100))
        )
        program = problem(setting_by_layer(flops, policy="by-loss"), table)
    assert json.loads(json.dumps(costs_of(program))) == {
        "layers.0.fc": pytest.approx([1, 10]),
        "layers.1.fc": pytest.approx([2, 30]),
    }


def test_gemm_costs_use_the_rows_of_single_gemms_and_the_totals_of_whole_layers() -> None:
    flops, table = hand_table()
    costs = costs_of(problem(setting_of(flops, granularity="gemm", objective="paper"), table))
    assert list(costs) == [f"{layer}:{gemm}" for layer in flops for gemm in GEMMS]
    assert costs["layers.0.fc:grad_input"] == [pytest.approx(0.001 / 0.02), pytest.approx(0.004 / 0.02)]
    assert costs["layers.1.fc:forward"] == [pytest.approx(0.001 / 0.02), pytest.approx(0.1 / 0.4 + 0.004 / 0.02)]


@pytest.mark.parametrize(("policy", "fp8", "fp4"), [("min-abs-err", 3.0, 4.0), ("min-rel-err", 0.2, 0.3)])
def test_error_policies_cost_the_operands_errors(policy: str, fp8: float, fp4: float) -> None:
    flops, table = hand_table()
    costs = costs_of(problem(setting_by_layer(flops, policy=policy), table))
    assert costs["layers.1.fc"] == [fp8, fp4]
    by_gemm = costs_of(problem(setting_of(flops, policy=policy, granularity="gemm"), table))
    assert by_gemm["layers.1.fc:forward"] == ([0.5, 1.0] if policy == "min-abs-err" else [0.05, 0.2])


@pytest.mark.parametrize("policy", SCORED)
def test_criteria_are_costs_divided_by_their_total_in_fp4(policy: str) -> None:
    flops, table = hand_table()
    figures = {("layers.0.fc", "layer"): 1e-9, ("layers.1.fc", "layer"): 3e-9}
    rows = tuple(
        dataclasses.replace(row, criterion=figures.get((row.layer, row.gemm), 5e-10) * (row.format == "fp4"))
        for row in table.rows
    )
    table = DivergenceTable(2.0, rows)
    program = problem(setting_by_layer(flops, policy=policy, solver="highs"), table)
    # And a thousandth of the share that is in FP4.
    assert costs_of(program) == {
        "layers.0.fc": [0.0, pytest.approx(0.25 + 0.25e-3)],
        "layers.1.fc": [0.0, pytest.approx(0.75 + 0.75e-3)],
    }
    assert program["solver"] == ("greedy" if policy == "greedy" else "highs")
    by_gemm = costs_of(problem(setting_of(flops, policy=policy, granularity="gemm"), table))
    assert by_gemm["layers.1.fc:forward"] == [0.0, pytest.approx(0.125 + 0.25e-3)]


@pytest.mark.parametrize(("criterion", "message"), [(None, "missing in 16 of 16 rows"), (0.0, "sums to 0.0 in FP4")])
def test_a_criterion_that_is_not_there_decides_nothing(criterion: float | None, message: str) -> None:
    flops, table = hand_table()
    table = DivergenceTable(2.0, tuple(dataclasses.replace(row, criterion=criterion) for row in table.rows))
    with pytest.raises(ValueError, match=f"policy='fisher' cannot decide: .*{message}"):
        problem(setting_of(flops, policy="fisher"), table)


@pytest.mark.parametrize("policy", ["fisher", "hessian-trace", "greedy"])
@pytest.mark.parametrize("solver", ["greedy", "highs"])
def test_if_only_the_forward_gemm_costs_something_the_backward_pass_goes_first(policy: str, solver: str) -> None:
    """And no more of it than the target asks for."""
    flops = plain_flops(1.0, 1.0, 1.0)
    rows = tuple(
        Divergence(layer, gemm, fmt, 0.0, 0.0, 1.0, criterion=float(fmt == "fp4" and gemm in ("forward", "layer")))
        for layer in flops
        for gemm in ROWS
        for fmt in fp4_config().formats[::-1]
    )
    for target in (1 / 3, 2 / 3, 7 / 9):
        options = {"policy": policy, "granularity": "gemm", "target_fp4_fraction": target, "solver": solver}
        setting = setting_of(flops, **options)
        solution = ilp.solve(problem(setting, DivergenceTable(1.0, rows)))
        chosen = [name for name, fmt in solution["choices"].items() if fmt == "fp4"]
        assert len(chosen) == round(9 * target)
        assert sum(name.endswith("forward") for name in chosen) == max(0, len(chosen) - 6)


def test_weights_are_shares_of_the_stage_and_the_rest_comes_from_the_config() -> None:
    flops, table = hand_table()
    setting = setting_by_layer(flops, target_fp4_fraction=0.6, solver="highs", solver_time_limit=7.0)
    program = problem(setting, table)
    weights = {group["name"]: [option["weight"] for option in group["options"]] for group in program["groups"]}
    assert weights == {"layers.0.fc": [0.0, pytest.approx(0.25)], "layers.1.fc": [0.0, pytest.approx(0.75)]}
    assert [[option["name"] for option in group["options"]] for group in program["groups"]] == [["fp8", "fp4"]] * 2
    assert program["constraints"] == [{"name": "stage 0", "groups": ["layers.0.fc", "layers.1.fc"], "minimum": 0.6}]
    assert (program["solver"], program["time_limit"], program["relative_gap"], program["ties"]) == (
        "highs",
        7.0,
        1e-4,
        [],
    )
    staged = problem(setting_by_layer(flops, target_fp4_fraction=0.6, stages=2), table)
    assert staged["constraints"] == [
        {"name": "stage 0", "groups": ["layers.0.fc"], "minimum": 0.6},
        {"name": "stage 1", "groups": ["layers.1.fc"], "minimum": 0.6},
    ]
    assert [group["options"][1]["weight"] for group in staged["groups"]] == [1.0, 1.0]


def test_a_layer_without_rows_costs_nothing() -> None:
    flops, table = hand_table()
    flops["layers.2.fc"] = dict.fromkeys(GEMMS, 4.0)
    assert costs_of(problem(setting_by_layer(flops), table))["layers.2.fc"] == [0.0, 0.0]


def test_a_table_of_zeros_gives_costs_of_zero() -> None:
    flops = plain_flops(1.0, 1.0)
    rows = [
        row(layer, gemm, fmt, 0.0, 0.0, 0.0, 0.0)
        for layer in flops
        for gemm in ROWS
        for fmt in fp4_config().formats[::-1]
    ]
    program = problem(setting_by_layer(flops), DivergenceTable(1.0, tuple(rows)))
    assert costs_of(program) == {"layers.0.fc": [0.0, 0.0], "layers.1.fc": [0.0, 0.0]}
    assert set(ilp.solve(program)["choices"].values()) <= {"fp8", "fp4"}


def test_ties_join_siblings_of_one_block_and_single_gemms_of_the_same_kind() -> None:
    flops = llama_flops(2)
    table = ordered_table(setting_of(flops))
    by_layer = problem(setting_by_layer(flops, ties=TIES), table)["ties"]
    assert [[f"model.layers.{b}.self_attn.{name}_proj" for name in "qkv"] for b in range(2)] == by_layer[:2]
    assert len(by_layer) == 4
    by_gemm = problem(setting_of(flops, ties=TIES, granularity="gemm"), table)["ties"]
    assert len(by_gemm) == 12
    assert ["model.layers.1.mlp.gate_proj:grad_input", "model.layers.1.mlp.up_proj:grad_input"] in by_gemm
    alone = problem(setting_by_layer(flops, ties=(("q_proj", "Wqkv"),)), table)["ties"]
    assert alone == []


@pytest.mark.parametrize(("policy", "granularity"), PROBED_AT)
@pytest.mark.parametrize("ties", [(), (("q", "k"),)], ids=["free", "tied"])
def test_the_solution_is_the_best_of_all_assignments(policy: str, granularity: str, ties: Any) -> None:
    # 3 layers of 9 GEMMs whose shares are eighths of their stage's, so that sums are exact.
    flops = {
        "layers.0.q": {"forward": 1.0, "grad_input": 1.0, "grad_weight": 0.0},
        "layers.0.k": {"forward": 1.0, "grad_input": 1.0, "grad_weight": 2.0},
        "layers.1.q": {"forward": 1.0, "grad_input": 1.0, "grad_weight": 0.0},
    }
    for seed, target in enumerate((0.25, 0.5, 0.75)):
        options = {"policy": policy, "granularity": granularity, "ties": ties, "target_fp4_fraction": target}
        setting = setting_of(flops, **options)
        program = problem(setting, ordered_table(setting, seed))
        best = best_map(program)
        assert best is not None
        solution = ilp.solve({**program, "solver": "highs", "relative_gap": 0.0})
        assert solution["objective"] == pytest.approx(best[0], rel=1e-9)
        assert solution["choices"] == best[1]
        assert stage_shares(setting, setting.assignment(solution["choices"]))[0] >= target


# -------------------------------------------------------------------------------------------------------- measured time


def timed(setting: Setting, seconds: dict[str, float]) -> Setting:
    """The same setting with every GEMM of a layer taking so many seconds in FP8; those in BF16 and FP4 mislead."""
    times = {
        layer: {gemm: {"bf16": 9.0, "fp8": seconds[layer], "fp4": 1.0 / seconds[layer]} for gemm in GEMMS}
        for layer in setting.flops
    }
    machine = Machine("a GPU", "2.11.0", "hopper", "bfloat16")
    return dataclasses.replace(setting, measured=MeasuredCost(machine=machine, tokens=64, seconds=times))


def shares_of(setting: Setting, assignment: dict[str, dict[str, str]]) -> tuple[float, float]:
    """Shares of FLOPs and of time in FP4, as a plan gives them."""
    plan = plan_of(setting, assignment)
    assert plan.fp4_time_fraction is not None
    return plan.fp4_fraction, plan.fp4_time_fraction


def test_the_best_plans_by_flops_and_by_time_differ_and_each_meets_its_own_target() -> None:
    """`a` has half of the FLOPs and an eighth of the time; it is the cheapest in FP4."""
    flops = dict(zip(("layers.0.a", "layers.0.b", "layers.0.c", "layers.0.d"), [4.0, 2.0, 1.0, 1.0], strict=True))
    seconds = dict(zip(flops, [1.0, 1.0, 2.0, 4.0], strict=True))
    costs = dict(zip(flops, [1.0, 4.0, 3.0, 5.0], strict=True))
    rows = [
        row(layer, gemm, fmt, cost if fmt == "fp4" else 0.0, 0.0, 0.0, 0.0)
        for layer, cost in costs.items()
        for gemm in ROWS
        for fmt in fp4_config().formats[::-1]
    ]
    table = DivergenceTable(1.0, tuple(rows))
    by_flops = setting_by_layer(
        {layer: dict.fromkeys(GEMMS, cost) for layer, cost in flops.items()}, target_fp4_fraction=0.5
    )
    by_time = timed(by_flops, seconds)
    found = {}
    for name, setting in (("flops", by_flops), ("time", by_time)):
        program = problem(setting, table)
        best = best_map(program)
        solution = ilp.solve({**program, "solver": "highs", "relative_gap": 0.0})
        assert best is not None and solution["choices"] == best[1]
        found[name] = setting.assignment(solution["choices"])
    in_fp4 = {
        name: [layer for layer in flops if assignment[layer]["forward"] == "fp4"] for name, assignment in found.items()
    }
    assert in_fp4 == {"flops": ["layers.0.a"], "time": ["layers.0.d"]}
    assert shares_of(by_time, found["flops"]) == (0.5, 0.125)
    assert shares_of(by_time, found["time"]) == (0.125, 0.5)


@pytest.mark.parametrize(("policy", "granularity"), SHARING_AT)
def test_with_times_every_stage_meets_its_share_of_time_and_exceeds_it_by_less_than_a_unit(
    policy: str, granularity: str
) -> None:
    flops = llama_flops()
    rng = random.Random(3)
    seconds = {layer: rng.uniform(0.1, 1.0) for layer in flops}
    differs = False
    for target in TARGETS:
        options = {"policy": policy, "granularity": granularity, "stages": 2, "target_fp4_fraction": target}
        by_flops = setting_of(flops, **options)
        setting = timed(by_flops, seconds)
        assignment = decided(setting, ordered_table)
        assert_complete(setting, assignment)
        for stage in setting.stages:
            pairs = [(layer, gemm) for layer in stage for gemm in GEMMS]
            total = sum(seconds[layer] for layer, _ in pairs)
            share = sum(seconds[layer] for layer, gemm in pairs if assignment[layer][gemm] == "fp4") / total
            assert share >= target - 1e-9
            if target < 1 and policy not in PROBED:
                assert share < target + max(setting.shares(stage).values())
        differs = differs or assignment != decided(by_flops, ordered_table)
    assert differs


def test_a_frozen_weight_s_gradient_weighs_nothing_by_time_either() -> None:
    flops = plain_flops(1.0, 1.0)
    flops["layers.0.fc"]["grad_weight"] = 0.0
    setting = timed(setting_of(flops, granularity="gemm"), {"layers.0.fc": 1.0, "layers.1.fc": 2.0})
    assert setting.measured is not None
    times = {layer: dict(row) for layer, row in setting.measured.seconds.items()}
    times["layers.0.fc"]["grad_weight"] = {"bf16": 0.0, "fp8": 0.0, "fp4": 0.0}
    setting = dataclasses.replace(setting, measured=dataclasses.replace(setting.measured, seconds=times))
    shares = setting.shares(setting.stages[0])
    assert shares["layers.0.fc:grad_weight"] == 0.0
    assert shares["layers.1.fc:forward"] == 0.25
    assert sum(shares.values()) == 1.0


def test_a_rule_leaves_layers_that_fp4_slows_down_in_high_precision() -> None:
    """The middle one, which "layer-position" would take first, so that the speed-up takes both others."""
    flops = plain_flops(1.0, 1.0, 1.0)
    options: dict[str, Any] = {"formats": ("fp4", "bf16"), "target_linear_speedup": 1.5, "budget": "measured"}
    fp4 = dict(zip(flops, (1.0, 3.0, 1.0), strict=True))
    times = {layer: {gemm: {"bf16": 2.0, "fp8": 1.0, "fp4": fp4[layer]} for gemm in GEMMS} for layer in flops}
    machine = Machine("a GPU", "2.11.0", "hopper", "bfloat16")
    setting = setting_by_layer(flops, policy="layer-position", timing_tokens=64, **options)
    setting = dataclasses.replace(setting, measured=MeasuredCost(machine=machine, tokens=64, seconds=times))
    assert fp4_layers(rule_assignment(setting)) == {"layers.0.fc", "layers.2.fc"}


# -------------------------------------------------------------------------------------------------------- needs a probe


def accepted(policy: str) -> SnipConfig:
    """A configuration that the policy can work under."""
    granularity = "layer" if policy == "snip-paper" else "gemm"
    return SnipConfig(policy=policy, granularity=granularity, formats=("fp4", "bf16"))


def test_uniform_policies_published_rules_and_plan_files_aim_at_no_share() -> None:
    found = {policy for policy in POLICIES if policy_of(accepted(policy)).aims_at_share}
    assert found == {*RULES, "backward-first", *PROBED}
    assert not any(policy_of(fp4_config(policy=policy, fixed_plan="plan.json")).aims_at_share for policy in POLICIES)


def test_only_the_measuring_policies_need_a_probe_and_a_plan_file_needs_none() -> None:
    found = {policy for policy in POLICIES if policy_of(accepted(policy)).needs_probe}
    assert found == set(PROBED)
    assert not any(policy_of(fp4_config(policy=policy, fixed_plan="plan.json")).needs_probe for policy in POLICIES)


def test_groups_members_and_shares_follow_the_granularity() -> None:
    flops = plain_flops(1.0, 3.0)
    by_layer, by_gemm = setting_by_layer(flops), setting_of(flops)
    stage = by_layer.stages[0]
    assert by_layer.groups(stage) == ["layers.0.fc", "layers.1.fc"]
    assert by_layer.members("layers.0.fc") == [("layers.0.fc", gemm) for gemm in GEMMS]
    assert by_layer.shares(stage)["layers.1.fc"] == 0.75
    assert by_gemm.groups(stage)[:2] == ["layers.0.fc:forward", "layers.0.fc:grad_input"]
    assert by_gemm.members("layers.1.fc:grad_weight") == [("layers.1.fc", "grad_weight")]
    assert by_gemm.shares(stage)["layers.1.fc:grad_weight"] == 0.25
    assert by_gemm.assignment({"layers.1.fc:forward": "fp4"}) == {"layers.0.fc": {}, "layers.1.fc": {"forward": "fp4"}}
