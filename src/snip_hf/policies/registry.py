"""The definition of a policy: its name, what it needs, what it refuses, and how it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import POLICIES, Granularity, SnipConfig
from ..estimation.criterion import LayerCriterion
from ..estimation.table import Divergence, DivergenceTable
from .setting import Setting

Cost = Callable[[Divergence], float]


def _accept(config: SnipConfig) -> None:
    """Refuses nothing."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who decides: prices each option for the integer program (`cost`), or assigns formats itself (`assign`)."""

    name: str
    cost: Callable[[SnipConfig, DivergenceTable], Cost] | None = None
    """Returns what a row of a table of measurements costs; None for a rule."""
    assign: Callable[[Setting], dict[str, dict[str, str]]] | None = None
    """Returns layer -> GEMM -> format without measurements; None for a policy that needs a probe."""
    aims_at_share: bool = True
    """Whether it meets `target_fp4_fraction`; uniform policies do not."""
    granularities: tuple[Granularity, ...] = ("gemm", "layer")
    """Those that it can decide by; the first is what `SnipConfig.granularity` is where it is left out."""
    criterion: type[LayerCriterion] = LayerCriterion
    """What it wants to know of each layer beside the divergences."""
    weighs_updates: bool = False
    """Whether it uses the weight divergence, which needs gradients and an optimizer that the estimate understands."""
    spare: float = 0.0
    """Cost of the whole work of a stage in formats that count towards the target. Keeps groups that cost nothing out
    of these formats beyond the target; among plans that meet it exactly this decides nothing."""
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
    """Returns the policy that decides, None where a plan file does."""
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
    """Returns True if the weight divergence has a part in the decision."""
    policy = policy_of(config)
    return policy is not None and policy.weighs_updates


def cost_of(config: SnipConfig, table: DivergenceTable) -> Cost:
    """Returns what a row of the table costs under a policy that needs a probe."""
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
