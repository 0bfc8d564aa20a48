"""The state of a run in a checkpoint: collects it, reads it, and refuses it to runs that cannot continue from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ..config import SnipConfig, as_names
from ..estimation.coverage import Coverage
from ..estimation.ties import Ties
from ..json_io import SCHEMA_VERSION, from_json
from ..layers.state import unwrapped_name
from ..parallel.zero3 import first_row
from ..planning.plan import PrecisionPlan
from ..policies.registry import policy_of
from ..records.events import TARGETS, Retarget
from .checks import differences
from .guard import Health
from .refresh import PendingRefresh
from .setup import RunParts

# Fields of the guard, which may change in mid-run.
_GUARD = ("guard", "guard_patience")
_NEW_PLAN = "SnipCallback(..., resume=False), or no load_state_dict in a loop of your own"


@dataclass(frozen=True)
class SavedState:
    """The content of a state."""

    config: dict[str, Any]
    step: int
    plan: PrecisionPlan
    pending: PendingRefresh | None
    last_probe: int | None
    postponed: int | None
    """The step to which a refresh was put off."""
    kernels: dict[str, dict[str, Any]]
    """Name of a backend -> its state (`Backend.state_dict`)."""
    is_counted: bool
    """True if the run has counted its first micro-batch, or tried to."""
    coverage: Coverage | None
    ties: Ties
    """Those in force."""
    guard: Health | None
    """None without a guard."""
    weights: str | None = None
    """Fingerprint of the weights that it was saved with; None: unknown."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedState:
        """Reads a state; raises ValueError if it is damaged or not a state."""
        if not isinstance(state, Mapping) or state.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"The SNIP state has no schema_version {SCHEMA_VERSION}; expected what `SnipController.state_dict` of "
                "this version returned."
            )
        try:
            pending = state["pending"]
            return cls(
                config=dict(state["config"]),
                step=int(state["step"]),
                plan=PrecisionPlan.from_dict(state["plan"]),
                pending=None if pending is None else PendingRefresh.of(pending),
                last_probe=from_json(int | None, state["last_probe"], "last_probe"),
                postponed=from_json(int | None, state["postponed"], "postponed"),
                kernels={name: dict(entry) for name, entry in dict(state["kernels"]).items()},
                is_counted=from_json(bool, state["is_counted"], "is_counted"),
                coverage=from_json(Coverage | None, state["coverage"], "coverage"),
                ties=tuple(as_names("ties", tie) for tie in state["ties"]),
                guard=from_json(Health | None, state["guard"], "guard"),
                weights=from_json(str | None, state.get("weights"), "weights"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"The SNIP state is not complete or damaged ({error!r}); restore the file from another checkpoint."
            ) from error

    def other_targets(self, config: SnipConfig) -> dict[str, tuple[Any, Any]]:
        """Returns the fields of the target in which a config differs -> (in the state, in the config).

        {} under a policy without a target.
        """
        fields, names = config.to_dict(), TARGETS if policy_of(config).aims_at_share else ()
        return {name: (self.config.get(name), fields[name]) for name in names if self.config.get(name) != fields[name]}

    def fitted(self, config: SnipConfig, plan: PrecisionPlan, at_step: int | None, weights: str | None) -> SavedState:
        """Returns the state as a run continues from it, with the FLOPs of the run's model in its plan.

        Args:
            config: the run's.
            plan: the run's plan in force.
            at_step: the optimizer steps that the weights have done; None: not checked.
            weights: fingerprint of the weights; None: not checked.

        Raises:
            ValueError: another configuration (the target aside), another step, or other weights.
            KeyError: the plan is for another model.
        """
        fields = config.to_dict()
        free = {*TARGETS, *_GUARD, "solver"}
        if None not in (config.fixed_plan, self.config.get("fixed_plan")) and self.plan.assignment == plan.assignment:
            free.add("fixed_plan")  # the file was moved
        different = [name for name in differences(config, self.config) if name not in free]
        if different:
            name = different[0]
            raise ValueError(
                f"The checkpoint was trained with {name}={self.config.get(name)!r}, this run asks for "
                f"{name}={fields[name]!r} (different fields: {', '.join(different)}). Use the checkpoint's "
                f"configuration to resume its run, or start a new plan from its weights: {_NEW_PLAN}."
            )
        if at_step not in (None, self.step):
            raise ValueError(
                f"The SNIP state is of step {self.step}, but the weights are of step {at_step}. Take both from the "
                "same checkpoint folder."
            )
        fitted = replace(self, plan=self.plan.with_flops(plan.flops))
        if None not in (weights, self.weights) and weights != self.weights:
            raise ValueError(
                "The SNIP state was saved with other weights than those that were loaded: they come from different "
                "runs, or one of them was replaced. Resume from the folder of the weights, or start a new plan from "
                f"them: {_NEW_PLAN}. If the Trainer warned of missing keys, as it does for some mixtures of experts, "
                "load the model from the checkpoint by from_pretrained first."
            )
        return fitted


def state_of(run: RunParts, step: int) -> dict[str, Any]:
    """Returns JSON data from which a run continues after this step; the writer of the file adds "weights"."""
    pending, coverage, guard = run.refresher.pending, run.coverage.latest, run.guard
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "config": run.config.to_dict(),
        "plan": run.in_force.plan.to_dict(),
        "pending": None if pending is None else pending.to_dict(),
        "last_probe": run.schedule.last_probe,
        "postponed": run.schedule.postponed,
        "kernels": run.layers.state_dict(),
        "is_counted": not run.coverage.is_due,
        "coverage": None if coverage is None else coverage.to_dict(),
        "ties": [list(tie) for tie in run.in_force.setting.ties],
        "guard": None if guard is None else asdict(guard.health),
    }


def restore(run: RunParts, saved: SavedState) -> None:
    """Puts the parts of a run into a saved state, and cuts later events from the record: they will happen again."""
    run.in_force.put(saved.plan)
    run.record.log.info("snip-hf: resumed at step %d: %s.", saved.step, saved.plan.describe())
    run.layers.load_state_dict(saved.kernels)  # after the formats, so that records are packed for both
    if saved.is_counted:
        run.coverage.restore(saved.coverage)
    run.refresher.stop()
    run.refresher.tie(saved.ties)
    run.schedule.last_probe, run.schedule.postponed = saved.last_probe, saved.postponed
    run.layers.set_step(saved.step + 1, 0)
    targets = saved.other_targets(run.config)
    probed = None if saved.pending is None else saved.pending.step
    run.record.cut(saved.step, probed, run.in_force.start(saved.step))
    if targets:
        _change_target(run, saved, targets)
    elif saved.pending is not None:
        run.refresher.resume(saved.pending, saved.step)
    if run.guard is not None:
        run.guard.restore(saved.guard or Health())


def _change_target(run: RunParts, saved: SavedState, targets: Mapping[str, tuple[Any, Any]]) -> None:
    """Continues under another target: estimates stay, and the next step refreshes if an earlier one did.

    A pending refresh, whose plan was for the old target, is left out.
    """
    step = saved.step + 1
    run.record.add(Retarget(step=step, fields=targets))
    changed = "; ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in targets.items())
    run.record.log.info("snip-hf: resumed with another target: %s.", changed)
    if not policy_of(run.config).needs_probe:
        run.in_force.retarget(step)
    elif saved.last_probe is not None:
        run.schedule.postponed = step
        run.schedule.warn_if_too_late(step)


def weights_fingerprint(model: nn.Module) -> str | None:
    """Returns a digest of the first row of every parameter, with its name; None if this process lacks these rows.

    Call it on the first rank, which holds the first row of everything under FSDP2 on any number of ranks. Rows are
    rounded to BF16, so that weights match whether they are saved or loaded in FP32 or in BF16. Names keep PEFT's parts.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted((unwrapped_name(name), parameter) for name, parameter in model.named_parameters()):
        row, shape = first_row(parameter)
        if row is None:
            return None
        digest.update(json.dumps([name, shape]).encode())
        digest.update(row.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
