"""The definition of a policy: its name, what it needs, what it refuses, and how it decides.

A policy of your own is one file: a `Policy` with a `cost` for each option or an `assign`ment, registered by
`register_policy`, or a `LayerCriterion` registered by `register_criterion`.
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

# `Policy.spare` of criteria, which give some groups no cost: a thousandth of all cost per stage (ours).
_SPARE = 1e-3


def _accept(config: SnipConfig) -> None:
    """Refuses nothing."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides formats: prices each option for the integer program (`cost`), or assigns formats itself (`assign`)."""

    name: str
    cost: Callable[[SnipConfig, DivergenceTable], Cost] | None = None
    """Returns what a row of a table of measurements costs; None for a rule."""
    assign: Callable[[Setting], dict[str, dict[str, str]]] | None = None
    """Returns layer -> GEMM -> format without measurements; None for a policy that needs a probe."""
    aims_at_share: bool = True
    """Whether it meets `target_fp4_fraction`; uniform policies do not."""
    granularities: tuple[Granularity, ...] = ("gemm", "layer")
    """Supported granularities; the first is the default of `SnipConfig.granularity`."""
    criterion: type[LayerCriterion] = LayerCriterion
    """Statistic that it needs for each layer besides the divergences."""
    weighs_updates: bool = False
    """Whether it uses the weight divergence, which needs gradients and an optimizer that the estimate understands."""
    spare: float = 0.0
    """Cost of running a whole stage in formats that count towards the target. It stops free groups from exceeding the
    target; plans that meet it exactly all pay the same."""
    solver: str | None = None
    """Solver to use in place of the configured one."""
    check: Callable[[SnipConfig], None] = _accept
    """Raises ValueError for a configuration under which the policy cannot work."""

    @property
    def needs_probe(self) -> bool:
        return self.cost is not None


def register_policy(policy: Policy) -> Policy:
    """Adds a user's own policy, which `SnipConfig.policy` may then name. Returns it.

    Raises:
        ValueError: there is another policy of this name, or it has both or neither of `cost` and `assign`.
    """
    if (policy.cost is None) == (policy.assign is None):
        raise ValueError(f"Policy {policy.name!r} has both or neither of cost and assign; expected one of them.")
    POLICIES.register(policy)
    return policy


def policy_of(config: SnipConfig) -> Policy | None:
    """Returns the policy of the run; None: a plan file is held."""
    if config.fixed_plan is not None:
        return None
    found: Policy = POLICIES[config.policy]
    return found


def needs_probe(config: SnipConfig) -> bool:
    """Returns True if the run decides from measurements and refreshes, False for a rule or a plan file."""
    policy = policy_of(config)
    return policy is not None and policy.needs_probe


def aims_at_share(config: SnipConfig) -> bool:
    """Returns True if the run aims at a share of FLOPs or time; uniform policies and a plan file do not."""
    policy = policy_of(config)
    return policy is not None and policy.aims_at_share


def weighs_updates(config: SnipConfig) -> bool:
    """Returns True if the policy uses the weight divergence."""
    policy = policy_of(config)
    return policy is not None and policy.weighs_updates


def cost_of(config: SnipConfig, table: DivergenceTable) -> Cost:
    """Returns the function that prices a row of the table, for a policy that needs a probe."""
    policy: Policy = POLICIES[config.policy]
    if policy.cost is None:
        raise ValueError(f"policy={config.policy!r} is a rule; it prices nothing.")
    return policy.cost(config, table)


def rule_assignment(setting: Setting) -> dict[str, dict[str, str]]:
    """Returns the assignment of a policy that needs no probe.

    Raises:
        ValueError: the policy measures, or gives another format to what it does not decide on (`SnipConfig.decides`).
    """
    policy: Policy = POLICIES[setting.config.policy]
    if policy.assign is None:
        raise ValueError(f"policy={setting.config.policy!r} needs measurements; it assigns nothing without them.")
    assignment = policy.assign(setting)
    low = setting.config.least_precise
    for layer in setting.flops if policy.aims_at_share else ():
        for gemm, name in assignment[layer].items():
            if gemm not in setting.decided(layer) and name != low:
                raise ValueError(
                    f"policy={policy.name!r} with decides={setting.config.decides!r} put the {gemm} of layer {layer!r} "
                    f"into {name}; expected {low}. Decide on `setting.groups(stage)`, and return "
                    "`setting.assignment(choices)`."
                )
    return assignment


def first_total(config: SnipConfig, table: DivergenceTable, figure: Callable[[Divergence], float]) -> float:
    """Returns the sum of a figure over all layers, each wholly in the least precise format.

    It serves as a unit. If it is not above 0, the next format's total is returned, so that the other formats still have
    prices; 0 if all totals are 0.
    """
    for name in config.formats:
        total = sum(figure(row) for row in table.rows if row.format == name and row.gemm == LAYER)
        if total > 0:
            return total
    return 0.0


def criterion_cost(config: SnipConfig, table: DivergenceTable) -> Cost:
    """The criterion, divided by its total with everything in the least precise format: some are near 1e-9."""
    criteria = {(row.layer, row.gemm, row.format): row.criterion for row in table.rows}
    total = first_total(config, table, lambda row: row.criterion or 0.0)
    missing = sum(value is None for value in criteria.values())
    if missing or total <= 0:
        raise ValueError(
            f"policy={config.policy!r} cannot decide: its criterion is missing in {missing} of {len(criteria)} rows, "
            f"and sums to {total} in {config.least_precise.upper()}. Expected a table made under this policy, and a "
            "sum above 0."
        )
    return lambda row: (row.criterion or 0.0) / total


def register_criterion(name: str, criterion: type[LayerCriterion], **facts: Any) -> Policy:
    """Registers the policy that decides by a criterion, and returns it."""
    return register_policy(Policy(name=name, cost=criterion_cost, criterion=criterion, spare=_SPARE, **facts))


def config_warnings(config: SnipConfig, recompiles_for_bf16: bool) -> list[str]:
    """Returns what to warn about when a run starts: settings that work, but maybe not as intended.

    Args:
        config: the run's.
        recompiles_for_bf16: property of the backend in use (`Backend.recompiles_for_bf16`).
    """
    policy = policy_of(config)
    if policy is None:
        return _warnings_of_file(config)
    found: list[str] = []
    if not policy.aims_at_share and config.target_fp4_fraction not in (None, DEFAULT_FP4_FRACTION):
        found.append(
            f"target_fp4_fraction={config.target_fp4_fraction!r} has no effect with policy={config.policy!r}, which "
            "meets no target."
        )
    if policy.aims_at_share and not policy.needs_probe and len(config.formats) > 2:
        found.append(
            f"policy={config.policy!r} chooses between the first and the last of formats; "
            f"{_listed(config.formats[1:-1])} will not run."
        )
    idle = [name for name in config.formats if FORMATS[name].is_quantized and not FORMATS[name].counts_as_fp4]
    has_bf16 = UNQUANTIZED.name in config.formats
    if policy.needs_probe and has_bf16 and idle and config.target_linear_speedup is None:
        found.append(
            f"target_fp4_fraction does not say how fast the rest must be. {_listed(idle)} will hardly run anywhere: "
            f"{UNQUANTIZED.label} does no damage and counts as much. Set target_linear_speedup in its place, or leave "
            f"{UNQUANTIZED.name!r} out of formats."
        )
    if recompiles_for_bf16 and has_bf16 and policy.needs_probe:
        found.append(
            f"under torch.compile, a layer whose GEMMs change to or from {UNQUANTIZED.label} is compiled again, and "
            "each pattern in a compiled module takes one of torch._dynamo.config.recompile_limit graphs (8 by "
            f"default); beyond that it runs uncompiled. Raise the limit, or leave {UNQUANTIZED.name!r} out of formats "
            "(docs/hopper.md)."
        )
    return found


def _warnings_of_file(config: SnipConfig) -> list[str]:
    if config.decides == ALL:
        return []
    return [
        f"decides={config.decides!r} has no effect with fixed_plan={config.fixed_plan!r}: no policy is asked, and the "
        "plan in the file is held as it is, in all GEMMs. Shares are those of the file's plan."
    ]


def _listed(formats: list[str] | tuple[str, ...]) -> str:
    return ", ".join(FORMATS[name].label for name in formats)
