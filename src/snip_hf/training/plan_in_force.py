"""The plan in force: the first plan, plans from a solver's choices, and what happens if a refresh fails."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..config import SnipConfig
from ..costs.flops import Tokens, Work
from ..costs.timing import MeasuredCost
from ..estimation.ties import Ties
from ..numerics.gemms import Assignment
from ..parallel.ranks import RankError, describe
from ..planning.plan import PlanProvenance, PrecisionPlan
from ..planning.solver.process import SolverResult
from ..policies.registry import policy_of, rule_assignment
from ..policies.setting import Setting
from ..records.events import Changes, RefreshBegun, Start, installed_versions
from ..records.run_folder import RunRecord

_EXPECTED_PLAN = "Expected a plan that a run wrote (OUTPUT_DIR/snip/plan.json) or `PrecisionPlan.save`."


def first_plan(setting: Setting, model_name: str) -> PrecisionPlan:
    """Returns the first plan of a run.

    Raises:
        ValueError: the plan file cannot be read, or is for another model.
    """
    config = setting.config
    if config.fixed_plan is not None:
        return _loaded(config.fixed_plan, setting.flops)
    provenance = PlanProvenance(step=0, **_origin(config, model_name, 0))
    if policy_of(config).needs_probe:
        plan = PrecisionPlan.uniform(setting.flops, config.format_at_start, setting.stages, provenance)
        return replace(plan, measured=setting.measured, tokens=setting.tokens)
    return rule_plan(setting, model_name, 0)


def rule_plan(setting: Setting, model_name: str, step: int) -> PrecisionPlan:
    """Returns the plan of a policy without a probe.

    Args:
        setting: the policy's view of the model.
        model_name: for the plan's provenance.
        step: the optimizer step at which it is made, whose target it meets; 0: before training.
    """
    provenance = PlanProvenance(step=step, **_origin(setting.config, model_name, step))
    assignment = rule_assignment(setting.at_step(step))
    try:
        return _planned(setting, assignment, provenance)
    except ValueError as error:
        raise ValueError(f"policy={setting.config.policy!r} made no usable plan: {error}") from error


def solved_plan(setting: Setting, model_name: str, step: int, result: SolverResult) -> PrecisionPlan:
    """Returns the plan of a solver's choices.

    Args:
        setting: the policy's view of the model.
        model_name: for the plan's provenance.
        step: the optimizer step that was probed.
        result: the choices.
    """
    provenance = PlanProvenance(
        step=step,
        objective=result.objective,
        bound=result.bound,
        gap=result.gap,
        solver=result.solver,
        solver_version=result.solver_version,
        seconds=result.seconds,
        **_origin(setting.config, model_name, step),
    )
    return _planned(setting, setting.assignment(result.choices), provenance)


class PlanInForce:
    """The plan that the model runs in. It stays if a refresh fails, with a warning and an event.

    Args:
        plan: the first one.
        setting: the policy's view of the model.
        model: its layers get the plan.
        model_name: for the provenance of plans.
        record: gets the plan, and refreshes that failed.
        measure: times the GEMMs with a number of tokens, if the budget is measured time.
    """

    def __init__(
        self,
        plan: PrecisionPlan,
        setting: Setting,
        model: nn.Module,
        model_name: str,
        record: RunRecord,
        measure: Callable[[int], MeasuredCost],
    ) -> None:
        self.plan = plan
        self.setting = setting
        self.model_name = model_name
        self._gave_up: float | None = None
        """The last target for which no plan could be made."""
        self._model = model
        self._record = record
        self._measure = measure

    def put(self, plan: PrecisionPlan) -> None:
        """Puts a plan in force that `solved_plan` made or a checkpoint holds, and writes it into the run's folder."""
        plan.apply(self._model, elsewhere=self.setting.flops)
        self.plan = plan
        # Later decisions use the same times and tokens as the plan.
        self.setting = replace(self.setting, measured=plan.measured, tokens=plan.tokens)
        self.save()

    def apply(self) -> None:
        """Gives the layers of the model their formats."""
        self.plan.apply(self._model, elsewhere=self.setting.flops)

    def tie(self, ties: Ties) -> bool:
        """Ties layers by the last parts of their names if the config asks for it; returns True if that is new."""
        before = self.setting.ties
        self.setting = replace(self.setting, found_ties=ties)
        return self.setting.ties != before

    def save(self) -> None:
        """Writes the plan into the run's folder."""
        self._record.save_plan(self.plan)

    def measure_cost(self, tokens: int) -> None:
        """Times the GEMMs; all later decisions use the times, and the plan keeps them."""
        self.setting = replace(self.setting, measured=self._measure(tokens))
        # A resumed run reads the times from its plan.
        self.plan = replace(self.plan, measured=self.setting.measured)
        self.save()

    def count_by(self, tokens: Tokens | None, decides: bool) -> Changes:
        """Bases all later decisions on these tokens; the plan keeps them.

        Args:
            tokens: of each layer (`costs.flops.relative_tokens`).
            decides: whether a policy without a probe makes its plan again, by the tokens.

        Returns: the changes of the plan (`PrecisionPlan.changes`).

        Raises:
            ValueError: no layer of a stage saw a token.
        """
        same, setting = replace(self.plan, tokens=tokens), replace(self.setting, tokens=tokens)
        decides = decides and tokens is not None and setting.config.fixed_plan is None
        plan = first_plan(setting, self.model_name) if decides else same
        changes = same.changes(plan)
        self.plan, self.setting = plan, setting
        if changes:
            self.apply()
        return changes

    def start(self, step: int) -> Start:
        """Returns the first event of a run that begins at a step."""
        return Start(
            step=step,
            config=self.setting.config.to_dict(),
            plan=self.plan,
            model_name=self.model_name,
            versions=installed_versions(),
        )

    def begun(self, step: int) -> RefreshBegun:
        """Returns the beginning of the event of a refresh at a step."""
        config = self.setting.config
        changes = config.at_step(step) is not config
        return RefreshBegun(step=step, target_fp4_fraction=config.target_at(step) if changes else None)

    def follow_target(self, step: int) -> None:
        """Makes the plan of a policy without a probe again, after a step with another target than the plan's.

        Policies with a probe refresh at such a step.
        """
        config, made = self.setting.config, self.plan.provenance.step
        target = config.target_at(step)
        policy = policy_of(config)
        if not policy.aims_at_share or policy.needs_probe or target in (config.target_at(made), self._gave_up):
            return
        self._gave_up = target  # reset below if it works
        self.retarget(step)

    def retarget(self, step: int) -> None:
        """Makes the plan of a rule with a target again, for the target of this step."""
        with self.keeping(step):
            plan = rule_plan(self.setting, self.model_name, step)
            changes = self.plan.changes(plan)
            self.put(plan)
            self._record.add(self.begun(step).applied(step, plan, changes, None))
            self._gave_up = None
            self._record.log.info("snip-hf: plan for the share of step %d applied: %s.", step, plan.describe())

    @contextlib.contextmanager
    def keeping(self, step: int, begun: Callable[[], RefreshBegun] | None = None) -> Iterator[None]:
        """Turns any failure inside into a warning and an event; the plan stays.

        Args:
            step: the optimizer step that it happens at.
            begun: returns the refresh so far; None: it begins at this step.
        """
        try:
            yield
        except RankError:  # ranks that lost each other cannot train on
            raise
        except Exception as error:  # the planner may fail; training may not
            self.keep(step, self.begun(step) if begun is None else begun(), describe(error))
            # Text: a handler that keeps log records would also keep the error's frames, and so the model.
            self._record.log.debug("snip-hf: where it failed: %s", traceback.format_exc())

    def keep(self, step: int, begun: RefreshBegun, reason: str, outcome: str = "failed") -> None:
        """Logs and records that a refresh failed or was dropped.

        Args:
            step: the optimizer step at which that is known.
            begun: the refresh so far.
            reason: why.
            outcome: "failed" or "was not applied".
        """
        self._record.log.warning(
            "snip-hf: the refresh of step %d %s, the plan in force stays: %s", begun.step, outcome, reason
        )
        self._record.add(begun.kept(step, self.plan, reason))


def _planned(setting: Setting, assignment: Assignment, provenance: PlanProvenance) -> PrecisionPlan:
    return PrecisionPlan(assignment, setting.flops, setting.stages, provenance, setting.measured, setting.tokens)


def formats_in_use(config: SnipConfig) -> tuple[str, ...]:
    """Returns the names of the formats that a run may use: those in its plan file, or of its policy.

    Raises:
        ValueError: the plan file cannot be read.
    """
    if config.fixed_plan is None:
        return policy_of(config).formats or config.formats
    return tuple(sorted(_read(config.fixed_plan).formats))


def _read(path: str) -> PrecisionPlan:
    try:
        return PrecisionPlan.load(path)
    except OSError as error:
        raise ValueError(f"fixed_plan={path!r} cannot be read: {error}. {_EXPECTED_PLAN}") from error
    except ValueError as error:
        raise ValueError(f"fixed_plan: {error} {_EXPECTED_PLAN}") from error


def _loaded(path: str, flops: Work) -> PrecisionPlan:
    plan = _read(path)
    try:
        return plan.with_flops(flops)
    except (KeyError, ValueError) as error:
        raise ValueError(f"fixed_plan={path!r} does not fit the model: {error.args[0]}") from error


def _origin(config: SnipConfig, model_name: str, step: int) -> dict[str, Any]:
    """Returns the part of a plan's provenance that does not come from a solver."""
    return {
        "policy": config.policy,
        "granularity": config.granularity,
        "target_fp4_fraction": config.target_at(step) if policy_of(config).aims_at_share else None,
        "config": config.to_dict(),
        "model_name": model_name,
    }
