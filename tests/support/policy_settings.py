"""Settings of policies for made-up models, and what their assignments come to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from configs import fp4_config

from snip_hf.estimation.table import ROWS, Divergence, DivergenceTable
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
from snip_hf.planning.program import problem
from snip_hf.planning.solver import ilp
from snip_hf.policies.registry import policy_of, rule_assignment
from snip_hf.policies.setting import Setting, find_stages

RULES = ("random", "layer-type", "layer-position", "first2-last8", "last-15-percent")
RULES_AT = [*itertools.product(RULES, ("layer", "gemm")), ("backward-first", "gemm")]
TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
SIZES = {  # in_features * out_features of a Llama with grouped queries
    "self_attn.q_proj": 64 * 64,
    "self_attn.k_proj": 64 * 32,
    "self_attn.v_proj": 64 * 32,
    "self_attn.o_proj": 64 * 64,
    "mlp.gate_proj": 64 * 176,
    "mlp.up_proj": 64 * 176,
    "mlp.down_proj": 176 * 64,
}


def llama_flops(blocks: int = 4) -> dict[str, dict[str, float]]:
    return {
        f"model.layers.{block}.{name}": dict.fromkeys(GEMMS, 2.0 * size)
        for block in range(blocks)
        for name, size in SIZES.items()
    }


def plain_flops(*layers: float) -> dict[str, dict[str, float]]:
    """FLOPs of one layer per block, `layers.<n>.fc`, each GEMM of the given cost."""
    return {f"layers.{index}.fc": dict.fromkeys(GEMMS, cost) for index, cost in enumerate(layers)}


def setting_of(flops: dict[str, dict[str, float]], **options: Any) -> Setting:
    config = fp4_config(**options)
    return Setting(config, flops, find_stages(list(flops), config))


def setting_by_layer(flops: dict[str, dict[str, float]], **options: Any) -> Setting:
    return setting_of(flops, granularity="layer", **options)


def random_table(setting: Setting) -> DivergenceTable:
    """Random rows of the quantized formats, in no order of precision: any format may do more damage than any other."""
    rng = random.Random(0)
    rows = []
    for layer, name, gemm in itertools.product(setting.flops, setting.config.quantized_formats, ROWS):
        values = [rng.uniform(0.1, 2) for _ in range(5)]
        rows.append(Divergence(layer, gemm, name, values[0], values[1], 1.0, 0.5 * values[1], *values[2:]))
    return DivergenceTable(2.0, tuple(rows))


def decided(
    setting: Setting, table_of: Callable[[Setting], DivergenceTable] = random_table
) -> dict[str, dict[str, str]]:
    """The assignment of a policy, as the controller gets it: the program's solution, or the rule's."""
    if not policy_of(setting.config).needs_probe:
        return rule_assignment(setting)
    return setting.assignment(ilp.solve(problem(setting, table_of(setting)))["choices"])


def plan_of(setting: Setting, assignment: dict[str, dict[str, str]]) -> PrecisionPlan:
    provenance = PlanProvenance(step=0, policy=setting.config.policy, config=setting.config.to_dict())
    return PrecisionPlan(assignment, setting.flops, setting.stages, provenance, setting.measured, setting.tokens)


def stage_shares(setting: Setting, assignment: dict[str, dict[str, str]]) -> tuple[float, ...]:
    """The FP4 shares of the stages, as the plan computes them."""
    return plan_of(setting, assignment).stage_fp4_fractions


def assert_complete(setting: Setting, assignment: dict[str, dict[str, str]]) -> None:
    assert list(assignment) == list(setting.flops)
    for formats in assignment.values():
        assert set(formats) == set(GEMMS)
        if setting.config.granularity == "layer":
            assert len(set(formats.values())) == 1


# Stages of `llama_flops()` that are no runs of blocks.
LISTS = (
    tuple(name for name in llama_flops() if ".0." in name or ".3." in name),
    tuple(name for name in llama_flops() if ".1." in name),
    tuple(name for name in llama_flops() if ".2." in name),
)
