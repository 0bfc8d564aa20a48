"""The guard: watches loss and gradient norm of each step, and raises formats if training goes wrong.

All ranks combine their measurements once the gradients of a step are complete, and so reach the same verdict. A step is
sick if its loss or norm is not finite, or is a spike: more than 6 standard deviations above the mean of the last 128
healthy values. Then all layers run one format more precise from the next step on, for `guard_patience` steps; after
that the plan is refreshed. A step with gradients that are not finite is left out.

The rule and its defaults are those of OLMo-core's optimizers that skip steps (`SkipStepOptimizer`: 128 steps, 6
standard deviations; https://github.com/allenai/OLMo-core), with three changes of ours. A sick value does not count
towards the mean. The deviation is at least a tenth of the mean; otherwise anything would be a spike in a nearly
constant run. And after `guard_patience` spikes in a row, later values are compared with these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn

from ..estimation.samples import read
from ..parallel.ranks import Processes
from ..parallel.sharding import number_of_parts, own_part
from ..planning.plan import raised_plan
from ..policies.registry import policy_of
from ..records.events import GRADIENT_NORM, LOSS, NOTED, RAISED, Alarm, Changes, known_shares
from ..records.run_folder import RunRecord
from .gradients import BackwardEnd, LossScaling
from .plan_in_force import PlanInForce
from .refresh import Refresher
from .schedule import Schedule

# Standard deviations above the mean at which a value is a spike.
SPIKE = 6.0
# Healthy steps that a value is compared with.
WINDOW = 128
# The least standard deviation, as a part of the mean. With 6 deviations, a spike is at least 1.6 times the mean.
_MIN_DEVIATION = 0.1


@dataclass(frozen=True)
class Finding:
    """The reason why a step is sick."""

    figure: str
    """"loss" or "gradient norm"."""
    value: float
    limit: float | None
    """None: the value is not finite."""

    @property
    def is_finite(self) -> bool:
        return self.limit is not None

    @property
    def reason(self) -> str:
        if self.limit is None:
            return f"The {self.figure} is {self.value}"
        return f"The {self.figure} {self.value:.4g} is above {self.limit:.4g}, the limit for a healthy step"


@dataclass
class Health:
    """Tells sick steps from healthy ones. Checkpoints save it as JSON."""

    recent: dict[str, list[float]] = field(default_factory=dict)
    """Figure -> its last healthy values."""
    risen: dict[str, list[float]] = field(default_factory=dict)
    """Figure -> its spikes since its last healthy value, which become the level if they last."""
    failures: int = 0
    """Alarms in a row: less than twice `guard_patience` steps apart."""
    alarmed: int | None = None
    """Step of the last alarm; None if it is long ago."""

    def look(self, step: int, values: Mapping[str, float | None], patience: int) -> Finding | None:
        """Judges a step, and remembers its values if they are healthy.

        Args:
            step: from 1.
            values: name -> value; None: unknown.
            patience: `SnipConfig.guard_patience`.
        """
        known = {name: value for name, value in values.items() if value is not None}
        for name, value in known.items():
            if not math.isfinite(value):
                return Finding(name, value, None)
        finding = None
        for name, value in known.items():
            limit = self.limit(name, patience)
            if limit is not None and value > limit:
                finding = finding or Finding(name, value, limit)
                self._note_rise(name, value, patience)
            else:
                self.risen.pop(name, None)
                self.recent[name] = [*self.recent.get(name, []), value][-WINDOW:]
        # While raised formats hold, spikes raise no alarm.
        is_held = self.alarmed is not None and step <= self.alarmed + patience
        return None if is_held else finding

    def limit(self, name: str, patience: int) -> float | None:
        """Returns the value above which a figure is a spike; None while too few values are known."""
        values = self.recent.get(name, [])
        if len(values) < min(WINDOW // 2, patience):
            return None
        mean = fmean(values)
        return mean + SPIKE * max(pstdev(values, mean), _MIN_DEVIATION * abs(mean))

    def _note_rise(self, name: str, value: float, patience: int) -> None:
        """Makes spikes the level once there are `patience` of them in a row."""
        risen = self.risen.setdefault(name, [])
        risen.append(value)
        if len(risen) >= patience:
            self.recent[name] = self.risen.pop(name)[-WINDOW:]

    def note_alarm(self, step: int) -> None:
        self.failures, self.alarmed = self.failures + 1, step

    def note_calm(self, step: int, patience: int) -> None:
        """Forgets alarms of long ago."""
        if self.alarmed is not None and step > self.alarmed + 2 * patience:
            self.failures, self.alarmed = 0, None


class StepMeter(BackwardEnd):
    """Measures raw loss and gradient norm of each step: before clipping, and before a Trainer filters its log.

    Args:
        model: the model whose gradients are measured.
        scaling: the loss scale.
        processes: those of the run.
    """

    def __init__(self, model: nn.Module, scaling: LossScaling, processes: Processes) -> None:
        self._model, self._scaling, self._processes = model, scaling, processes
        self._losses: list[Tensor] = []
        self._norms: Tensor | None = None
        """Norms of this rank's parts of the gradients of `_parameters`."""
        self._parameters: list[Tensor] = []
        super().__init__(model.parameters())

    def note_loss(self, loss: Tensor | float) -> None:
        """Notes the share of a micro-batch in the loss of its step."""
        self._losses.append(torch.as_tensor(loss, dtype=torch.float32).detach())

    @torch.no_grad()
    def note(self) -> None:
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        if self._parameters:
            gradients = [own_part(one.grad) for one in self._parameters if one.grad is not None]
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            self._norms = torch.stack([norm.to(norms[0].device) for norm in norms])

    def take(self) -> tuple[float | None, float | None]:
        """Returns loss and gradient norm of the step whose gradients are complete. Collective.

        The norm is that of all gradients before clipping; None: there are none, or a GradScaler is about to skip the
        step.
        """
        gathered = self._processes.everyone.gather(list(self._take_local()), "the guard's figures")
        losses = [loss for loss, _ in gathered if loss is not None]
        squares = [square for _, square in gathered if square is not None]
        norm = math.sqrt(sum(squares)) if squares else None
        if norm is not None and self._scaling.is_on:
            norm = norm / self._scaling.scale if math.isfinite(norm) else None
        return sum(losses) / len(losses) if losses else None, norm

    def leave_out(self) -> bool:
        """Removes the gradients, so that the optimizer changes nothing; returns True if it did.

        A GradScaler skips such a step itself.
        """
        if self._scaling.is_on:
            return False
        for parameter in self._model.parameters():
            parameter.grad = None
        return True

    def _take_local(self) -> tuple[float | None, float | None]:
        """Returns this rank's loss, and its share of the squared norm."""
        losses, norms, parameters = self._losses, self._norms, self._parameters
        self._losses, self._norms, self._parameters = [], None, []
        total = [torch.stack([one.to(losses[0].device).reshape(()) for one in losses]).sum()] if losses else []
        if norms is None:
            return next(iter(read(total)), None), None
        holders = self._processes.data.size * self._processes.tensor.size
        # Gradients that several ranks hold count once.
        shares = [number_of_parts(parameter) / holders for parameter in parameters]
        square = (norms.square() * torch.tensor(shares, dtype=norms.dtype, device=norms.device)).sum()
        *loss, own_square = read([*total, square])
        return next(iter(loss), None), own_square


class Guard:
    """Watches one run; `config.guard` is not "off".

    Args:
        meter: measures the steps.
        in_force: the plan, whose formats it raises.
        refresher: loses the pending refresh if formats are raised.
        schedule: of refreshes.
        processes: those of the run.
        record: gets alarms.
    """

    def __init__(
        self,
        meter: StepMeter,
        in_force: PlanInForce,
        refresher: Refresher,
        schedule: Schedule,
        processes: Processes,
        record: RunRecord,
    ) -> None:
        self.meter, self._in_force, self._refresher, self._schedule = meter, in_force, refresher, schedule
        self._processes, self._record = processes, record
        self._config = in_force.setting.config
        self.health = Health()
        self._sick: tuple[Finding, bool] | None = None
        """Verdict on the running step: the reason, and whether it is left out; None: healthy."""

    def leaves_out(self, step: int) -> bool:
        """Judges a step whose gradients are complete; returns True if it removed them. Collective."""
        self._processes.note(f"at the guard's look at step {step}")
        loss, norm = self.meter.take()
        finding = self.health.look(step, {LOSS: loss, GRADIENT_NORM: norm}, self._config.guard_patience)
        self._sick = None
        if finding is None:
            return False
        is_left_out = not finding.is_finite and self.meter.leave_out()
        self._sick = finding, is_left_out
        return is_left_out

    def end_step(self, step: int) -> None:
        """Raises formats if the step that has ended was sick."""
        self.health.note_calm(step, self._config.guard_patience)
        sick, self._sick = self._sick, None
        if sick is None:
            return
        finding, is_left_out = sick
        self.health.note_alarm(step)
        before = self._in_force.plan
        plan = raised_plan(before, self._config.formats)
        changes = before.changes(plan)
        if changes:
            self._in_force.put(plan)
            self._refresher.drop(step, f"the guard raised formats after step {step}")
            if policy_of(self._config).needs_probe:
                self._schedule.postponed = step + self._config.guard_patience + 1
        self._report(step, finding, is_left_out, changes)

    def restore(self, health: Health) -> None:
        """Continues from the health in a checkpoint."""
        self.health, self._sick = health, None

    def _report(self, step: int, finding: Finding, is_left_out: bool, changes: Changes) -> None:
        """Writes the event and the line of the log."""
        plan = self._in_force.plan
        shares = known_shares(plan)
        self._record.add(
            Alarm(
                step=step,
                figure=finding.figure,
                value=finding.value if finding.is_finite else None,
                limit=finding.limit,
                action=RAISED if changes else NOTED,
                reason=finding.reason,
                failures=self.health.failures,
                left_out=is_left_out,
                changes=changes,
                fp4_fraction=shares["fp4_fraction"],
                forward_fp4_fraction=shares.get("forward_fp4_fraction"),
            )
        )
        if changes:
            text = f"the formats of {len(changes)} GEMMs are raised by one: {plan.describe()}"
        else:
            text = (
                "nothing is left to raise. If this continues, stop and resume from a checkpoint of before the first "
                "alarm (docs/reliability.md, Rolling back)"
            )
        left_out = "; the step was left out" if is_left_out else ""
        self._record.log.warning("snip-hf: guard, step %d: %s; %s%s.", step, finding.reason, text, left_out)
