"""The state of a run in a checkpoint: how it is written and read, and which run it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import SnipConfig, as_names
from ..costs.flops import Work
from ..estimation.coverage import Coverage
from ..estimation.shared_inputs import Ties
from ..parallel.ranks import Attempt, Ranks
from ..planning.plan import PrecisionPlan
from ..planning.solver.process import SolverProcess
from ..records.coverage import read_coverage
from ..records.events import RefreshBegun
from ..records.interventions import TARGETS
from .checks import check_plans, differences
from .plans import fitting
from .spikes import read_guard

SCHEMA_VERSION = 2
# Fields that decide which layers there are, and nothing else.
_CHOICE = {"skip_modules", "include_modules"}
# Fields that say what happens when training goes wrong, as one may find out when it has.
GUARD = ("guard", "guard_patience")


@dataclass
class PendingRefresh:
    """A refresh between its probe and its application."""

    step: int
    due: int
    problem: dict[str, Any]
    begun: RefreshBegun
    """What its event will say, so far."""
    process: SolverProcess | None = None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> PendingRefresh:
        """Reads what `to_dict` gave; raises KeyError, TypeError or ValueError if it is not that."""
        begun = replace(RefreshBegun.from_record(saved["record"]), step=int(saved["step"]))
        if not begun.seconds:
            raise ValueError("record has no entry 'seconds'")
        problem = dict(saved["problem"])
        return cls(begun.step, int(saved["due"]), problem, begun)

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "due": self.due, "problem": self.problem, "record": self.begun.to_record()}

    def stop(self) -> None:
        """Ends the solver, if it still runs."""
        if self.process is not None:
            self.process.kill()


@dataclass(frozen=True)
class CountedState:
    """That a run has counted its first micro-batch, or tried to."""

    coverage: Coverage | None


@dataclass(frozen=True)
class SavedState:
    """What a state holds."""

    config: dict[str, Any]
    step: int
    plan: PrecisionPlan
    pending: PendingRefresh | None
    last_probe: int | None
    weights: str | None = None
    """Fingerprint of the weights that it was saved with; None: not known."""
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a backend -> what its passes depend on (`Backend.state_dict`)."""
    postponed: int | None = None
    """The step to which a refresh was put off."""
    counted: CountedState | None = None
    """None: nothing was counted yet."""
    ties: Ties | None = None
    """Those in force; None: not known."""
    guard: dict[str, Any] = field(default_factory=dict)
    """Of the guard (`spikes.Health`); empty without one."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedState:
        """Reads a state; raises ValueError if it is none, or not complete."""
        if not isinstance(state, Mapping) or state.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"The SNIP state has no schema_version {SCHEMA_VERSION}; it is not a state of this version."
            )
        try:
            pending, last_probe, postponed = state["pending"], state["last_probe"], state.get("postponed")
            return cls(
                # Fields that a later version added were then what their defaults are.
                config=SnipConfig().to_dict() | dict(state["config"]),
                step=int(state["step"]),
                plan=PrecisionPlan.from_dict(state["plan"]),
                pending=None if pending is None else PendingRefresh.of(pending),
                last_probe=None if last_probe is None else int(last_probe),
                weights=None if state.get("weights") is None else str(state["weights"]),
                counted=_read_counted(state),
                kernels={str(name): dict(entry) for name, entry in dict(state.get("kernels", {})).items()},
                postponed=None if postponed is None else int(postponed),
                ties=tuple(as_names("ties", tie) for tie in state["ties"]) if "ties" in state else None,
                guard=read_guard(state.get("guard", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"The SNIP state is not complete or damaged ({error!r}); restore the file from another checkpoint."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON data; without the fingerprint, which whoever writes the file adds."""
        kernels = {"kernels": self.kernels} if self.kernels else {}
        postponed = {} if self.postponed is None else {"postponed": self.postponed}
        found = None if self.counted is None else self.counted.coverage
        counted = {} if self.counted is None else {"coverage": None if found is None else found.to_dict()}
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "config": self.config,
            "plan": self.plan.to_dict(),
            "pending": None if self.pending is None else self.pending.to_dict(),
            "last_probe": self.last_probe,
            "ties": [list(tie) for tie in self.ties or ()],
            **kernels,
            **postponed,
            **counted,
            **({"guard": self.guard} if self.guard else {}),
        }

    def other_targets(self, config: SnipConfig) -> dict[str, tuple[Any, Any]]:
        """Returns the fields of the target that a config has otherwise -> (here, there)."""
        own = config.to_dict()
        changed = set(differences(config, self.config))
        return {name: (self.config.get(name), own[name]) for name in TARGETS if name in changed}

    def fitted(self, config: SnipConfig, flops: Work, at_step: int | None, weights: str | None) -> SavedState:
        """Returns the state as a run continues from it, with the FLOPs of the run's model in its plan.

        Args:
            config: the run's.
            flops: of the run's model.
            at_step: the optimizer steps that the weights have done; None: not checked.
            weights: fingerprint of the weights; None: not checked.

        Raises:
            ValueError: another configuration (the target aside), another step, or other weights.
            KeyError: the plan is for another model.
        """
        mine = config.to_dict()
        different = [name for name in differences(config, self.config) if name not in (*TARGETS, *GUARD, "solver")]
        # What earlier versions left alone, such as experts, has to be named in order to go on without it.
        is_same_choice = _CHOICE.issuperset(different) and self.plan.assignment.keys() == flops.keys()
        if different and not is_same_choice:
            name = different[0]
            raise ValueError(
                f"The checkpoint was trained with {name}={self.config.get(name)!r}, this run asks for "
                f"{name}={mine[name]!r} (different fields: {', '.join(different)}). Use the checkpoint's configuration "
                "to resume its run, or SnipCallback(..., resume=False) to start a new plan from its weights."
            )
        if at_step not in (None, self.step):
            raise ValueError(
                f"The SNIP state is of step {self.step}, but the weights are of step {at_step}. Take both from the "
                "same checkpoint folder."
            )
        fitted = replace(self, plan=fitting(self.plan, flops))
        if None not in (weights, self.weights) and weights != self.weights:
            raise ValueError(
                "The SNIP state was saved with other weights than those that were loaded: the two are of different "
                "runs, or one of them was exchanged. Name the folder of the weights in SnipCallback(resume=FOLDER), or "
                "say SnipCallback(resume=False) to start a new plan from them. If the Trainer warned of missing keys, "
                "as it does for some mixtures of experts, load the model from the checkpoint by from_pretrained first."
            )
        return fitted


def agreed_state(
    state: Mapping[str, Any],
    config: SnipConfig,
    flops: Work,
    everyone: Ranks,
    at_step: int | None,
    weights: str | None,
) -> SavedState:
    """Returns the state that all ranks continue from. Collective.

    Args:
        state: as a checkpoint has it.
        config: as `SavedState.fitted` takes it, and so what follows.
        flops: as above.
        everyone: all ranks.
        at_step: as above.
        weights: as above.

    Raises:
        ValueError, KeyError: as `SavedState.of` and `SavedState.fitted` on any rank, or states that differ.
    """
    saved, attempt = None, Attempt()
    with attempt:
        saved = SavedState.of(state).fitted(config, flops, at_step, weights)
    everyone.agree(attempt.error)
    assert saved is not None
    check_plans(saved.plan, everyone)
    return saved


def _read_counted(state: Mapping[str, Any]) -> CountedState | None:
    if "coverage" not in state:
        return None
    return CountedState(None if state["coverage"] is None else read_coverage(state["coverage"]))
