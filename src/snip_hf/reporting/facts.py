"""Sentences for reports on a run: policy, target, attained share, coverage, alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import FORWARD, POLICIES, mean_share, read_shares, shares_text
from ..estimation.coverage import Coverage
from ..json_io import short
from ..planning.plan import PrecisionPlan
from ..records.events import RAISED, Alarm, Retarget
from ..records.load import Run


def policy_text(config: Mapping[str, Any]) -> str:
    """Names the policy or the fixed plan that decided."""
    if config.get("fixed_plan"):
        return f"fixed plan {config['fixed_plan']}"
    return f"policy {config.get('policy')}"


def makes_plans_without_probe(config: Mapping[str, Any]) -> bool:
    """Returns True for a known policy that does not probe."""
    policy = POLICIES.get(config.get("policy", ""))
    return policy is not None and not policy.needs_probe


def coverage_text(coverage: Coverage, plan: PrecisionPlan) -> str:
    """Describes the plan's coverage of the model, and the FP4 share of the whole model."""
    share = coverage.share * plan.fp4_fraction
    return f"The plan decides on {coverage.describe()}. FP4 share of all of them: {share:.4f}."


def mean_shares_text(run: Run) -> list[str]:
    """Returns a sentence on the mean share of a run with a changing target; [] if its steps are unknown, or a resume
    replaced the target."""
    mean, shares = run.mean_fp4_fraction, read_shares(run.config.get("target_fp4_fraction"))
    if mean is None or shares is None or run.retargets:
        return []
    steps = run.last_step
    of = "forward" if run.config.get("decides") == FORWARD else "linear"
    target = mean_share(shares, steps)
    return [
        f"Mean up to step {steps:,}, the last in the files of the run: {mean:.4f} of the {of} FLOPs in FP4, with a "
        f"target of {target:.4f}."
    ]


def alarm_sentences(alarms: Sequence[Alarm]) -> list[str]:
    """Returns a sentence per alarm."""
    return [f"Step {alarm.step}: guard. {alarm.reason}{_followed(alarm)}." for alarm in alarms]


def retarget_sentences(retargets: Sequence[Retarget]) -> list[str]:
    """Returns a sentence per resume with another target."""
    return [
        f"Step {event.step}: resumed with another target. "
        f"{'; '.join(f'{name} was {_value(old)} and is {_value(new)}' for name, (old, new) in event.fields.items())}."
        for event in retargets
    ]


def _followed(alarm: Alarm) -> str:
    left_out = ", and skipped the step" if alarm.left_out else ""
    if alarm.action == RAISED:
        return f"; raised the formats of {len(alarm.changes)} GEMMs{left_out}"
    return left_out


def _value(value: object) -> str:
    shares = read_shares(value)
    return short(value) if shares is None else shares_text(shares)
