"""The definition of a policy, and the functions that register policies and ask them.

A policy of your own is one file. Register a `Policy` that prices options (`cost`) or assigns formats (`assign`) with
`register_policy`, or a `LayerCriterion` with `register_criterion`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import ALL, DEFAULT_FP4_FRACTION, POLICIES, Granularity, SnipConfig
from ..estimation.criterion import LayerCriterion
from ..estimation.table import LAYER, Divergence, DivergenceTable
from ..numerics.formats import FORMATS, UNQUANTIZED
from .setting import Setting

Cost = Callable[[Divergence], float]

# `Policy.spare` of criteria, which give some groups no cost: a thousandth of the whole cost per stage (our choice).
_SPARE = 1e-3


def _accept(config: SnipConfig) -> None:
    """Refuses nothing."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides formats: either prices options for the integer program (`cost`), or assigns formats (`assign`)."""

    name: str
    cost: Callable[[SnipConfig, DivergenceTable], Cost] | None = None
    """Returns the function that prices a row of the divergence table; None for a rule."""
    assign: Callable[[Setting], dict[str, dict[str, str]]] | None = None
    """Returns layer -> GEMM -> format without measurements; None for a policy that needs a probe."""
    aims_at_share: bool = True
    """True if it aims at the target; uniform policies do not."""
    formats: tuple[str, ...] = ()
    """The formats that it runs whatever `SnipConfig.formats` names; (): those."""
    granularities: tuple[Granularity, ...] = ("gemm", "layer")
    """Supported granularities; the first is the default of `SnipConfig.granularity`."""
    criterion: type[LayerCriterion] = LayerCriterion
    """Statistic of each layer that it needs besides the divergences."""
    weighs_updates: bool = False
    """True if it uses the weight divergence, which needs gradients and a supported optimizer."""
    spare: float = 0.0
    """Cost of running a whole stage in formats that count towards the target. It keeps groups without a cost from
    exceeding the target; all plans that meet the target exactly pay the same."""
    solver: str | None = None
    """Solver to use instead of the configured one."""
    check: Callable[[SnipConfig], None] = _accept
    """Raises ValueError for a config that the policy cannot work with."""

    @property
    def needs_probe(self) -> bool:
        return self.cost is not None


def register_policy(policy: Policy) -> Policy:
    """Registers a policy for `SnipConfig.policy`, and returns it.

    Raises:
        ValueError: the name is taken, or the policy has both or neither of `cost` and `assign`.
    """
    if (policy.cost is None) == (policy.assign is None):
        raise ValueError(f"Policy {policy.name!r} has both or neither of cost and assign; expected one of them.")
    POLICIES.register(policy)
    return policy


# Stands for the policy of a run with a fixed plan, which decides nothing.
_FIXED_PLAN = Policy(name="fixed plan", aims_at_share=False)


def policy_of(config: SnipConfig) -> Policy:
    """Returns the policy of the run; with a fixed plan, one that neither probes nor has a target."""
    return _FIXED_PLAN if config.fixed_plan is not None else POLICIES[config.policy]


def rule_assignment(setting: Setting) -> dict[str, dict[str, str]]:
    """Returns the assignment of a policy that needs no probe."""
    policy: Policy = POLICIES[setting.config.policy]
    assert policy.assign is not None
    return policy.assign(setting)


def first_total(config: SnipConfig, table: DivergenceTable, figure: Callable[[Divergence], float]) -> float:
    """Returns the sum of a quantity over all layers in the least precise format, for use as a unit.

    If that sum is 0, the next format's sum is returned, so that the other formats still get prices; 0 if all sums are.
    """
    for name in config.formats:
        total = sum(figure(row) for row in table.rows if row.format == name and row.gemm == LAYER)
        if total > 0:
            return total
    return 0.0


def criterion_cost(config: SnipConfig, table: DivergenceTable) -> Cost:
    """Prices by the criterion, divided by its total with everything in the least precise format: some are near 1e-9."""
    criteria = {(row.layer, row.gemm, row.format): row.criterion for row in table.rows}
    total = first_total(config, table, lambda row: row.criterion or 0.0)
    missing = sum(value is None for value in criteria.values())
    if missing or total <= 0:
        raise ValueError(
            f"policy={config.policy!r} cannot decide: its criterion is missing in {missing} of {len(criteria)} rows "
            f"and sums to {total} in {config.least_precise.upper()}; expected a table made under this policy, with a "
            "sum above 0."
        )
    return lambda row: (row.criterion or 0.0) / total


def register_criterion(name: str, criterion: type[LayerCriterion], **facts: Any) -> Policy:
    """Registers a policy that decides by a criterion, and returns it."""
    return register_policy(Policy(name=name, cost=criterion_cost, criterion=criterion, spare=_SPARE, **facts))


def config_warnings(config: SnipConfig, recompiles_for_bf16: bool) -> list[str]:
    """Returns warnings about settings that work, but perhaps not as intended.

    Args:
        config: the config of the run.
        recompiles_for_bf16: `Backend.recompiles_for_bf16` of the backend in use.
    """
    policy = policy_of(config)
    if policy is _FIXED_PLAN:
        no_effect = (
            f"decides={config.decides!r} has no effect with fixed_plan={config.fixed_plan!r}: the plan in the file is "
            "applied to all GEMMs as it is."
        )
        return [] if config.decides == ALL else [no_effect]
    found: list[str] = []
    if not policy.aims_at_share and config.target_fp4_fraction not in (None, DEFAULT_FP4_FRACTION):
        found.append(
            f"target_fp4_fraction={config.target_fp4_fraction!r} has no effect with policy={config.policy!r}, which "
            "has no target."
        )
    if policy.aims_at_share and not policy.needs_probe and len(config.formats) > 2:
        found.append(
            f"policy={config.policy!r} only uses the first and the last of formats; "
            f"{_listed(config.formats[1:-1])} will not run."
        )
    idle = [name for name in config.formats if FORMATS[name].is_quantized and not FORMATS[name].counts_as_fp4]
    has_bf16 = UNQUANTIZED.name in config.formats
    if policy.needs_probe and has_bf16 and idle and config.target_linear_speedup is None:
        found.append(
            f"target_fp4_fraction does not say how fast the rest must be, so {_listed(idle)} will hardly be used: "
            f"{UNQUANTIZED.label} costs nothing and counts the same. Set target_linear_speedup instead, or leave "
            f"{UNQUANTIZED.name!r} out of formats."
        )
    if recompiles_for_bf16 and has_bf16 and policy.needs_probe:
        found.append(
            f"under torch.compile, a layer whose GEMMs change to or from {UNQUANTIZED.label} is compiled again. After "
            "torch._dynamo.config.recompile_limit graphs of a compiled module (8 by default) it runs uncompiled. Raise "
            f"the limit, or leave {UNQUANTIZED.name!r} out of formats (docs/hopper.md)."
        )
    return found


def _listed(formats: list[str] | tuple[str, ...]) -> str:
    return ", ".join(FORMATS[name].label for name in formats)
