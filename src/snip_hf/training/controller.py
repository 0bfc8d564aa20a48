"""When to probe, solve and apply. Knows no Trainer, so that a plain Accelerate loop can drive it.

One refresh at optimizer step s: `capture` keeps the step's first micro-batch; `before_optimizer_step` probes it and
starts the solver in a process of its own; training goes on; `after_step(s + apply_delay)` reads the solution, waiting
for it only if it is not there yet, and applies it. Between refreshes, cheap checks may look whether the ranking of the
layers has moved (`drift`); if so, the check's own step refreshes. The planner may fail, training may not: whatever goes
wrong on the way keeps the plan in force, with a warning and a line in the history.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..config import SnipConfig
from ..costs.flops import Weights
from ..costs.gemm_timing import read_times
from ..estimation.batch import Batch
from ..estimation.divergence import divergences_at
from ..estimation.memory import bounded, kept_tokens, measured_peak, probe_memory
from ..estimation.table import DivergenceTable
from ..kernels.backend import select_backend
from ..layers.convert import keep_states_apart
from ..layers.linear import SnipLinear
from ..layers.run_hooks import RunHook
from ..layers.state import set_rank, set_step, snip_linears
from ..numerics.random_state import RandomState
from ..optimizers.deepspeed_zero import find_zero
from ..optimizers.response import check_optimizer, responses
from ..parallel.pipeline import ModelParts, Pipeline, parts_of
from ..parallel.ranks import Attempt, RankError, describe
from ..parallel.wrappers import unwrap
from ..planning.drift import rank_correlation, ranking
from ..planning.plan import MAX_TEXT, PlanProvenance, PrecisionPlan
from ..planning.program import problem
from ..planning.solver.process import SolverProcess, SolverResult, check_solver
from ..policies.registry import needs_probe, needs_weights, rule_assignment, weighs_updates
from ..policies.setting import Setting, check_ties, find_stages, siblings
from ..records.run_folder import RunFolder, describe_plan, shares, start_line
from ..text import printable
from .agreement import check_alike, check_configs, check_plans, differences
from .captured_step import StepWatch, TrainingPass
from .checks import check_launch, check_model, check_parts, check_sizes
from .fingerprint import weights_fingerprint
from .loop_checks import OptimizerWatch, check_gradients, check_layers, why_no_update, why_untrained
from .preparation import cost_of_all, find_processes, flops_of_all, swap, use_backend

logger = logging.getLogger(__name__)
# What all ranks have to say, the first one says.
_replica = logging.getLogger(f"{__name__}.replica")
_replica.setLevel(logging.ERROR)

SCHEMA_VERSION = 2
# Why ranks may wait for each other in training.
_RUNS_OUT = "a rank that runs out of batches, as under DDP's Join, never comes to it"
# Seconds that training waits for a solver beyond its time limit before the plan in force is kept.
_GRACE = 30.0


@dataclass
class _Pending:
    """A refresh between its probe and its application."""

    step: int
    due: int
    problem: dict[str, Any]
    record: dict[str, Any]
    """The history line so far."""
    ranking: dict[str, float]
    """What later checks compare with once the plan is applied."""
    process: SolverProcess | None = None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> _Pending:
        """Reads what `to_dict` gave; raises KeyError, TypeError or ValueError if it is not that."""
        record = dict(saved["record"]) | {"step": int(saved["step"]), "seconds": dict(saved["record"]["seconds"])}
        ranked = _read_ranking(saved["ranking"])
        return cls(int(saved["step"]), int(saved["due"]), dict(saved["problem"]), record, ranked)

    def to_dict(self) -> dict[str, Any]:
        parts = {"problem": self.problem, "record": self.record, "ranking": self.ranking}
        return {"step": self.step, "due": self.due, **parts}


@dataclass(frozen=True)
class _Saved:
    """What a state holds."""

    config: dict[str, Any]
    step: int
    plan: PrecisionPlan
    pending: _Pending | None
    last_probe: int | None
    ranking: dict[str, float]
    weights: tuple[str, ...]
    """Fingerprints of the weights that it was saved with, one of which must be theirs; none: not known."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Saved:
        """Reads a state; raises ValueError if it is none, or not complete."""
        if not isinstance(state, Mapping) or state.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"The SNIP state has no schema_version {SCHEMA_VERSION}; it is not a state of this version."
            )
        try:
            pending, last_probe = state["pending"], state["last_probe"]
            return cls(
                # Fields that a later version added were then what their defaults are.
                config=SnipConfig().to_dict() | dict(state["config"]),
                step=int(state["step"]),
                plan=PrecisionPlan.from_dict(state["plan"]),
                pending=None if pending is None else _Pending.of(pending),
                last_probe=None if last_probe is None else int(last_probe),
                ranking=_read_ranking(state["ranking"]),
                weights=_read_fingerprints(state.get("weights")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"The SNIP state is not complete or damaged ({error!r}); restore the file from another checkpoint."
            ) from error


class SnipController:
    """Drives the precision of one model through one training run.

    With several processes, each has a controller, built and called at the same points; they agree on every plan. Build
    it when the model is prepared (wrapped by DDP, sharded by FSDP2).

    Args:
        model: a causal LM, converted or not; wrappers (DDP, DeepSpeed, compile) are looked through. With
            `pipeline`, the parts of it that this process holds, whose layers have the names that they have in the whole
            model.
        optimizer: the optimizer that trains it, wrapped or not.
        config: what the user asks for.
        accelerator: the Accelerate object of the loop, if there is one; its settings are checked.
        output_dir: folder that gets `snip/` with the plan, the history and the divergences, from the first process;
            None writes nothing.
        pipeline: how to run the whole model where this process holds only parts of it.
        max_steps: the last optimizer step, if it is known: refreshes whose plan would be due after it are left out.

    Raises:
        ValueError, TypeError, NotImplementedError, KeyError: anything that cannot work, before training starts.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        config: SnipConfig,
        accelerator: Any = None,
        output_dir: str | os.PathLike[str] | None = None,
        pipeline: Pipeline | None = None,
        max_steps: int | None = None,
    ) -> None:
        self.model = unwrap(model) if isinstance(model, nn.Module) else ModelParts([unwrap(part) for part in model])
        self.config = config
        self.step = 0
        """Optimizer steps done."""
        check_launch(config, accelerator)
        self.processes = find_processes(config, pipeline)
        """Those of this run, and how they agree."""
        check_configs(config, self.processes.everyone)
        is_first = self.processes.everyone.is_first
        self._log = logger if is_first else _replica
        self._optimizer = optimizer
        self._max_steps = max_steps
        self._said_too_late = False
        self._folder = RunFolder(output_dir if is_first else None)
        self._micro_batch = 0
        self._armed: StepWatch | None = None
        self._pending: _Pending | None = None
        self._last_probe: int | None = None
        self._ranking: dict[str, float] = {}
        """Of the probe that the plan in force was made from; empty without such a probe, or if nothing is checked."""
        self._checked_labels = False
        self._started = False
        self._keeps_weights = False
        attempt = Attempt()
        with attempt:  # what one rank refuses, all of them do
            self._prepare(model, accelerator)
        try:
            self.processes.everyone.agree(attempt.error)
            check_alike(self._layers, self.plan, max_steps, self.processes)
            self._begin()
        except BaseException:
            self._folder.release()  # An error, and this object with it, may be kept for long, as in a notebook.
            raise

    def _begin(self) -> None:
        """Puts the hooks in place and says what the run starts with."""
        config = self.config
        set_step(self._layers, config.seed, 1, 0)
        before_chunk = RunHook(self._before_chunk)
        self._hooks: list[Any] = [part.register_forward_pre_hook(before_chunk) for part in parts_of(self.model)]
        self._chunks: Counter[nn.Module] = Counter()
        self._optimizer_watch: OptimizerWatch | None = None
        if self._zero is not None:
            self._hooks.append(self._zero.before_step(lambda: self._before_optimizer_step(self.step + 1)))
        elif self.needs_probe:
            self._optimizer_watch = OptimizerWatch(self._optimizer, self._swapped)
        self._share_inputs()
        self._log.info("snip-hf: policy %s, %s.", config.policy, describe_plan(self.plan))
        self._said_untrained: str | None = None
        reasons = self.processes.everyone.gather(self._why_untrained())
        if None not in reasons:
            self._say_untrained(reasons[0])

    def _prepare(self, model: nn.Module | Sequence[nn.Module], accelerator: Any) -> None:
        """Checks the model, swaps its layers and gives them their first plan."""
        config = self.config
        self.needs_probe = needs_probe(config)
        self._zero = find_zero(self._optimizer, model, accelerator) if self.needs_probe else None
        self._kernels = select_backend(config.backend, next(self.model.parameters()).device, config.formats)
        self.backend = self._kernels.name
        """Name of the backend in use."""
        if needs_probe(config):
            self.processes.everyone.by_first(lambda: check_solver(config, self._log))
        swap(self.model, config, self.processes.pipeline)
        keep_states_apart([model] if isinstance(model, nn.Module) else model)
        self._swapped = snip_linears(self.model)
        mixed_precision = getattr(accelerator, "mixed_precision", None)
        use_backend(
            self._layers,
            self._kernels,
            self.processes.data,
            mixed_precision,
            config.backend != "auto",
            self._log,
        )
        # As `config`, with as many tokens as the bound on memory allows.
        self._probe_config = config
        if self.needs_probe:
            if self._zero is None:
                check_optimizer(self._optimizer)
            check_model(self.model, self._log)
            check_parts(parts_of(self.model))
            self._probe_config = bounded(config, self.model)
        flops = flops_of_all(self.model, self.processes.pipeline)
        self._setting = Setting(config, flops, find_stages(list(flops), config))
        check_ties(self._setting)
        # Where it is now: training may change to another folder.
        self._cost_file = None if config.cost_file is None else os.path.abspath(config.cost_file)
        if self._cost_file is not None:
            read_times(self._cost_file)  # What is wrong with it comes out now and not at the first refresh.
        if config.cost_tokens is not None and needs_weights(config) and not self.needs_probe:
            self._measure(config.cost_tokens)
        name = getattr(getattr(self.model, "config", None), "_name_or_path", "")
        # It may be a path, of which any character may be a part.
        self.model_name = printable(name, MAX_TEXT) or type(self.model).__name__.removeprefix("FSDP")
        self.plan = self._first_plan()
        self._folder.hold()
        self.plan.apply(self.model, elsewhere=flops)

    def start(self) -> None:
        """Begins a new record: the plan and the first line of the history. `capture` does it if nobody did before."""
        self._started = True
        self._folder.clear()
        self._folder.save_plan(self.plan)
        self._folder.append(self._start_line())

    def capture(self, batch: Mapping[str, Any]) -> None:
        """Tells the controller that a training micro-batch is about to run forward.

        Args:
            batch: keyword arguments of the model's forward. References are kept until the optimizer step if this step
                refreshes the plan or checks whether it should.

        Raises:
            ValueError: the very first batch has no labels, and the policy needs them.
        """
        self.count(self.offer(batch))

    def offer(self, batch: Mapping[str, Any]) -> TrainingPass:
        """Tells the controller that a forward pass is about to run, whose loss may be backpropagated or not.

        `count` says that it was. A pass that is not counted leaves the numbers of all others as they would be; so
        several that run before one backward pass draw the same random numbers.
        """
        set_step(self._layers, self.config.seed, self.step + 1, self._micro_batch)
        data = self.processes.data
        if data.size > 1:  # DDP that was built before the layers were swapped gives all ranks the first one's
            set_rank(self._layers, data.rank, data.size)
        self.keep_weights(everything=self._micro_batch == 0)
        step = self.step + 1
        is_probed = self._micro_batch == 0 and (self._refreshes(step) or self._checks(step))
        if is_probed and self._armed is None:
            parameters = self.model.parameters() if self._zero is None else ()
            self._armed = StepWatch(self._probe_batch_tokens, self._layers, parameters)
        is_read = is_probed or (self.needs_probe and not self._checked_labels)
        return TrainingPass(batch if is_read else {}, RandomState.now() if is_probed else None)

    def count(self, one: TrainingPass) -> None:
        """Tells the controller that a pass is a micro-batch of the step: its gradient is on its way.

        Raises:
            ValueError: as `capture`.
        """
        if one.counted:
            return
        one.counted = True
        if self.needs_probe and not self._checked_labels:
            Batch.of(one.batch)
            self._checked_labels = True
        if not self._started:
            self.start()
        if self._micro_batch == 0 and self._armed is not None and one.random_state is not None:
            self._armed.take(one)
        self._micro_batch += 1

    def keep_weights(self, everything: bool = True) -> None:
        """Quantizes the weights for a forward pass that may be backpropagated, if they are kept."""
        if self._keeps_weights:
            self._kernels.before_pass(self._layers, everything)

    def before_optimizer_step(self, step: int) -> None:
        """To be called with the gradients of optimizer step `step` (from 1) complete and clipped; probes if due.

        Under DeepSpeed, whose step is over by then, it does nothing: the controller is in that step itself.
        """
        if self._zero is None:
            self._before_optimizer_step(step)

    def _before_optimizer_step(self, step: int) -> None:
        if self._optimizer_watch is not None:
            self._optimizer_watch.note_step()
        self._say_too_late(step)
        watch, refreshes = self._disarm(), self._refreshes(step)
        # By the schedule and not by what was captured: the ranks have the schedule in common.
        if refreshes or self._checks(step):
            # With apply_delay = refresh_every the plan before is due after this very step, whose passes are done.
            self._apply_due(step)
            refreshes = refreshes or self._has_drifted(step, watch)
        if refreshes:
            self._last_probe = step
            self.processes.note(f"at the refresh of step {step} ({_RUNS_OUT})")
            with self._keeping_plan(step):
                self._refresh(step, watch)

    def after_step(self, step: int) -> None:
        """To be called when optimizer step `step` (from 1) is done; applies a plan that is due."""
        # Several micro-batches per step: weights quantized once are worth their memory. A single one quantizes each
        # layout once as it is.
        self._keeps_weights |= self._micro_batch > 1
        self.step, self._micro_batch = step, 0
        self._chunks.clear()
        self._apply_due(step)
        set_step(self._layers, self.config.seed, step + 1, 0)
        self._kernels.after_step(self._layers)

    def close(self) -> None:
        """Stops a solver that is still running, and ends the record. The model keeps the plan in force."""
        self._kernels.release(self._layers)
        for hook in self._hooks:
            hook.remove()
        if self._optimizer_watch is not None:
            self._optimizer_watch.close()
        pending = self._stop()
        if pending is not None:
            reason = f"training ended at step {self.step}, before step {pending.due} at which its plan was due"
            self._keep(self.step, pending.record, reason, "was not applied")
        self._folder.release()

    def retake(self) -> None:
        """Takes the model back after another run has trained it: the layers, kernels, formats and keys of this run."""
        swap(self.model, self.config, self.processes.pipeline)
        self._swapped = snip_linears(self.model)
        use_backend(self._layers, self._kernels, self.processes.data, None, False, _replica)
        self.plan.apply(self.model, elsewhere=self._setting.flops)
        set_step(self._layers, self.config.seed, self.step + 1, self._micro_batch)
        self._share_inputs()

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON data from which `load_state_dict` continues exactly here, also in the middle of a refresh."""
        pending = self._pending
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "config": self.config.to_dict(),
            "plan": self.plan.to_dict(),
            "pending": None if pending is None else pending.to_dict(),
            "last_probe": self._last_probe,
            "ranking": self._ranking,
        }

    def load_state_dict(self, state: Mapping[str, Any], at_step: int | None = None, weights: str | None = None) -> None:
        """Continues from a `state_dict`. Nothing is changed if it does not fit. With several ranks it is collective.

        Args:
            state: what `state_dict` returned, also through JSON; with the entry "weights", a list of
                `weights_fingerprint` of those that it may have been saved with.
            at_step: the optimizer steps that the weights have done; the state must be of the same. None: not checked.
            weights: the `weights_fingerprint` of the model; the state must be of the same. None: not checked.

        Raises:
            ValueError: another schema version, another configuration, another step, other weights, a state that is not
                complete, or different states on different ranks.
            KeyError: the plan in it is for another model.
        """
        self.processes.note("at the loading of a state (every rank loads the same one)")
        saved, attempt = None, Attempt()
        with attempt:
            saved = self._checked(state, at_step, weights)
        self.processes.everyone.agree(attempt.error)
        assert saved is not None
        check_plans(saved.plan, self.processes.everyone)
        saved.plan.apply(self.model, elsewhere=self._setting.flops)
        self._stop()
        self.plan, self.step, self._micro_batch = saved.plan, saved.step, 0
        self._last_probe, self._ranking = saved.last_probe, saved.ranking
        self._setting = replace(self._setting, measured=saved.plan.measured)
        set_step(self._layers, self.config.seed, saved.step + 1, 0)
        self._started = True
        self._folder.cut(saved.step, None if saved.pending is None else saved.pending.step, self._start_line())
        self._folder.save_plan(saved.plan)
        if saved.pending is not None:
            with self._keeping_plan(saved.step, saved.pending.record):
                saved.pending.process = self._start_solver(saved.pending.problem)
                self._pending = saved.pending

    def _checked(self, state: Mapping[str, Any], at_step: int | None, weights: str | None) -> _Saved:
        """Returns what `load_state_dict` continues from; raises as that does."""
        saved = _Saved.of(state)
        mine, different = self.config.to_dict(), differences(self.config, saved.config)
        if different:
            name = different[0]
            raise ValueError(
                f"The checkpoint was trained with {name}={saved.config.get(name)!r}, this run asks for "
                f"{name}={mine[name]!r} (different fields: {', '.join(different)}). Use the checkpoint's configuration "
                "to resume its run, or SnipCallback(..., resume=False) to start a new plan from its weights."
            )
        if at_step not in (None, saved.step):
            raise ValueError(
                f"The SNIP state is of step {saved.step}, but the weights are of step {at_step}. Take both from the "
                "same checkpoint folder."
            )
        fitting = replace(saved, plan=_fitting(saved.plan, self._setting.flops))
        if weights is not None and saved.weights and weights not in saved.weights:
            raise ValueError(
                "The SNIP state was saved with other weights than those that were loaded: the two are of different "
                "runs, or one of them was exchanged. Name the folder of the weights in SnipCallback(resume=FOLDER), or "
                "say SnipCallback(resume=False) to start a new plan from them."
            )
        return fitting

    def weights_fingerprint(self) -> str | None:
        """Returns what tells these weights from others, as `load_state_dict` takes it, on the first process.

        None without a probe, where the plan does not come from the weights, and in a pipeline.
        """
        is_whole = self.needs_probe and self.processes.run is None
        return weights_fingerprint(self.model) if is_whole and self.processes.everyone.is_first else None

    def _first_plan(self) -> PrecisionPlan:
        setting, config = self._setting, self.config
        if config.plan is not None:
            try:
                plan = PrecisionPlan.load(config.plan)
            except OSError as error:
                raise ValueError(f"plan={config.plan!r} cannot be read: {error}.") from error
            try:
                return _fitting(plan, setting.flops)
            except (KeyError, ValueError) as error:
                raise ValueError(f"plan={config.plan!r} does not fit the model: {error.args[0]}") from error
        provenance = PlanProvenance(step=0, **self._origin())
        if self.needs_probe:
            return PrecisionPlan.uniform(setting.flops, config.format_at_start, setting.stages, provenance)
        return PrecisionPlan(rule_assignment(setting), setting.flops, setting.stages, provenance, setting.measured)

    def _measure(self, tokens: int) -> None:
        """Times the GEMMs, by which all decisions of the run then count them."""
        measured = cost_of_all(
            self.model,
            tokens,
            self.backend,
            replace(self.config, cost_file=self._cost_file),
            self._setting.flops,
            self.processes,
            self._log,
        )
        self._setting = replace(self._setting, measured=measured)

    def _share_inputs(self) -> None:
        groups = [group for group in siblings(self._setting) if group[0] in self._layers]
        self._kernels.share_inputs(self._layers, groups)

    def _refreshes(self, step: int) -> bool:
        """Tells whether the schedule refreshes at this step, counted from the last probe."""
        return self._is_scheduled(step) and not self._is_too_late(step)

    def _is_scheduled(self, step: int) -> bool:
        first, every = self.config.first_refresh, self.config.refresh_every
        if every is None:
            if self.plan.provenance.step > 0 or self._pending is not None:
                return False
            every = first
        last = first if self._last_probe is None else self._last_probe
        return self.needs_probe and step >= first and (step - last) % every == 0

    def _checks(self, step: int) -> bool:
        """Tells whether this step checks if the ranking has moved; if it refreshes anyway, that goes first."""
        if self._last_probe is None or not self._ranking or self._pending is not None:
            return False
        return (step - self._last_probe) % self.config.drift_every == 0 and not self._is_too_late(step)

    def _is_too_late(self, step: int) -> bool:
        """Returns True if training ends before the plan of a refresh at this step could be applied."""
        return self._max_steps is not None and step + self.config.apply_delay > self._max_steps

    def _say_too_late(self, step: int) -> None:
        if not self._said_too_late and self._is_too_late(step) and self._is_scheduled(step):
            self._said_too_late = True
            self._log.info(
                "snip-hf: the refresh of step %d is left out: its plan would be applied after step %d, and training "
                "ends at step %d.",
                step,
                step + self.config.apply_delay,
                self._max_steps,
            )

    def _why_untrained(self) -> str | None:
        """Returns why this rank has no weight divergence to measure, where the policy goes by it; None if it has."""
        if not weighs_updates(self.config):
            return None
        optimizer = self._zero or self._optimizer_watch
        assert optimizer is not None
        return why_untrained(self._layers.values(), optimizer.holds)

    def _say_untrained(self, reason: str) -> None:
        if reason != self._said_untrained:
            self._said_untrained = reason
            self._log.info("snip-hf: %s, so that the loss divergence alone decides.", reason)

    def _before_chunk(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        """Gives each chunk that a pipeline runs through a part random numbers of its own."""
        set_step(snip_linears(part), self.config.seed, self.step + 1, self._chunks[part])
        self._chunks[part] += 1

    @property
    def _layers(self) -> dict[str, SnipLinear]:
        """The swapped layers, without those that `restore_model` turned back in mid-run."""
        return {name: layer for name, layer in self._swapped.items() if isinstance(layer, SnipLinear)}

    @property
    def _probe_batch_tokens(self) -> int | None:
        """Tokens that this rank's part of the probe may run on; a pipeline takes whole batches only."""
        tokens = self.config.probe_batch_tokens
        return None if tokens is None or self.processes.run else max(1, tokens // self.processes.data.size)

    def _stop(self) -> _Pending | None:
        """Ends what is under way, hooks and solver, and returns the refresh that comes to nothing by it."""
        self._disarm()
        pending, self._pending = self._pending, None
        if pending is not None and pending.process is not None:
            pending.process.kill()
        return pending

    def _disarm(self) -> StepWatch | None:
        """Ends what `capture` began for a refresh, and returns it."""
        watch, self._armed = self._armed, None
        if watch is not None:
            watch.end()
        return watch

    def _estimate(self, step: int, watch: StepWatch, probes: int | None = None) -> DivergenceTable:
        """Returns the divergences of the step that is running; raises ValueError if anything is not finite."""
        weights = {name: layer.weight for name, layer in self._layers.items()}
        gradients: Mapping[str, Tensor]
        if self._zero is None:
            gradients = {name: weight.grad.detach() for name, weight in weights.items() if weight.grad is not None}
            if not gradients and any(isinstance(module, FSDPModule) for module in self.model.modules()):
                raise ValueError(
                    "No swapped layer has a gradient where its weight is; FSDP2 with set_reshard_after_backward(False) "
                    "hides them. Leave resharding on, or use a policy that needs no probe."
                )
            answers = responses(self._optimizer, weights)
            check_gradients(gradients, bool(answers), self.processes.everyone)
            clip_factor = watch.clip_factor(gradients, self.processes.everyone)
        else:
            clip_factor = self._zero.clip_factor()
            gradients, answers = self._zero.gradients(weights, clip_factor), self._zero.responses(weights)
        table = divergences_at(
            self.model,
            watch.batch,
            answers,
            gradients,
            self._probe_config,
            step,
            gradient_scale=clip_factor,
            micro_batches=self._micro_batch,
            probes=probes,
            labelled=watch.labelled,
            processes=self.processes,
            micro_batch_tokens=watch.tokens,
        )
        bad = [
            row
            for row in table.rows
            if not all(map(math.isfinite, (row.loss_divergence, row.weight_divergence, row.criterion or 0.0)))
        ]
        if bad:
            raise ValueError(
                f"The divergences of layer {bad[0].layer!r} are not finite; expected finite activations and gradients."
            )
        # Stages that one process of a pipeline holds need not be neighbours.
        order = {layer: index for index, layer in enumerate(self._setting.flops)}
        return replace(table, rows=tuple(sorted(table.rows, key=lambda row: order[row.layer])))

    def _check_watch(self, watch: StepWatch | None) -> StepWatch:
        """Returns what the step's micro-batch was noted in; raises, on all ranks, if one of them cannot probe its."""
        attempt = Attempt()
        with attempt:
            if watch is None:
                raise ValueError("No micro-batch of it was given to capture().")
            _ = watch.batch
            self._check_loop()
        self.processes.everyone.agree(attempt.error)
        assert watch is not None
        return watch

    def _check_loop(self) -> None:
        """Raises ValueError if the training loop has replaced what the refresh is about."""
        check_layers(self.model, self._swapped, self._setting.flops)
        if self._optimizer_watch is not None:
            self._optimizer_watch.check()

    def _has_drifted(self, step: int, watch: StepWatch | None) -> bool:
        """Checks whether the ranking has moved since the plan in force was made, and writes a line of the history."""
        self.processes.note(f"at the check of step {step} ({_RUNS_OUT})")
        began = time.perf_counter()
        correlation, reason = None, None
        try:
            table = self._estimate(step, self._check_watch(watch), probes=0)
            correlation = rank_correlation(self._ranking, ranking(self._setting, table))
        except RankError:
            raise
        except Exception as error:  # as for a refresh: it costs the check and nothing else
            reason = describe(error)
            self._log.warning("snip-hf: the check of step %d failed, the plan in force stays: %s", step, reason)
        threshold = self.config.refresh_on_drift
        drifted = correlation is not None and threshold is not None and correlation < threshold
        if drifted:
            self._log.info("snip-hf: the ranking has moved by step %d (%.3f): refreshing early.", step, correlation)
        line = {"event": "drift", "step": step, "correlation": correlation, "refresh": drifted, "reason": reason}
        self._folder.append(line | {"seconds": time.perf_counter() - began})
        return drifted

    def _refresh(self, step: int, armed: StepWatch | None) -> None:
        watch = self._check_watch(armed)
        if self.config.cost == "measured" and self._setting.measured is None:
            self._measure(self.config.cost_tokens or watch.tokens)
            # Where a resumed run finds the times.
            self.plan = replace(self.plan, measured=self._setting.measured)
            self._folder.save_plan(self.plan)
        began = time.perf_counter()
        with measured_peak(next(iter(self._layers.values())).weight) as peak:
            table = self._estimate(step, watch)
        if table.totals(self.config.least_precise)["weight"] == 0 and weighs_updates(self.config):
            self._say_no_update(step)
        program = problem(self._setting, table, self.plan.assignment)
        tokens = kept_tokens(self._probe_config, watch.batch.tokens, self.processes.data.size)
        predicted = probe_memory(self.model, self.config.probes, tokens)
        seconds = time.perf_counter() - began
        self._folder.write_divergences(step, table)
        record = {
            "event": "refresh",
            "step": step,
            "loss": table.loss,
            "divergence": {fmt: table.totals(fmt) for fmt in reversed(self.config.formats)},
            "memory_mib": {"predicted": predicted, "measured": peak[0]},
            "seconds": {"probe": seconds, "solver": None, "waited": None},
        }
        ranked = {} if self.config.refresh_on_drift is None else ranking(self._setting, table)
        process = self._start_solver(program)
        if self._optimizer_watch is not None:
            self._optimizer_watch.expect_gradients()
        self._pending = _Pending(step, step + self.config.apply_delay, program, record, ranked, process)

    def _say_no_update(self, step: int) -> None:
        if untrained := self._why_untrained():
            self._say_untrained(untrained)
            return
        self._log.warning(
            "snip-hf: all weight divergences of step %d are 0, since %s; the loss divergence alone decides.",
            step,
            why_no_update(self._layers.values(), self._optimizer.param_groups),
        )

    def _start_solver(self, program: dict[str, Any]) -> SolverProcess | None:
        """Starts solving on the first rank; raises on all of them if that fails."""
        started: list[SolverProcess] = []
        self.processes.everyone.by_first(lambda: started.append(SolverProcess.start(program)))
        return started[0] if started else None

    def _apply_due(self, step: int) -> None:
        pending = self._pending
        if pending is not None and step >= pending.due:
            self._pending = None
            self.processes.note(f"at the application of the plan of step {pending.step} ({_RUNS_OUT})")
            with self._keeping_plan(step, pending.record):
                self._apply(pending, step)

    def _apply(self, pending: _Pending, step: int) -> None:
        began = time.perf_counter()

        def solution() -> dict[str, Any]:
            assert pending.process is not None
            return asdict(pending.process.result(self.config.solver_time_limit + _GRACE))

        result = SolverResult(**self.processes.everyone.by_first(solution))
        attempt = Attempt()
        with attempt:
            check_layers(self.model, self._swapped, self._setting.flops)
            if self._optimizer_watch is not None:
                self._optimizer_watch.check_gradients_used()
        self.processes.everyone.agree(attempt.error)
        pending.record["seconds"] |= {"solver": result.seconds, "waited": time.perf_counter() - began}
        plan = self._new_plan(pending.step, result)
        changes = self.plan.changes(plan)
        plan.apply(self.model, elsewhere=self._setting.flops)
        self.plan, self._ranking = plan, pending.ranking
        self._folder.save_plan(self.plan)
        layers_changed = len({change.rpartition(":")[0] for change in changes})
        self._folder.append(
            pending.record
            | {
                "applied_step": step,
                "decided_step": step,
                "status": "applied",
                "reason": None,
                **shares(plan),
                "changes": changes,
                "layers_changed": layers_changed,
                "objective": result.objective,
                "bound": result.bound,
                "gap": result.gap,
                "solver": result.solver,
                "solver_version": result.solver_version,
            }
        )
        self._log.info(
            "snip-hf: plan of step %d applied after step %d: %s, %d layers changed.",
            pending.step,
            step,
            describe_plan(plan),
            layers_changed,
        )

    def _new_plan(self, step: int, result: SolverResult) -> PrecisionPlan:
        provenance = PlanProvenance(
            step=step,
            objective=result.objective,
            bound=result.bound,
            gap=result.gap,
            solver=result.solver,
            solver_version=result.solver_version,
            seconds=result.seconds,
            **self._origin(),
        )
        return PrecisionPlan(
            self._setting.assignment(result.choices),
            self._setting.flops,
            self._setting.stages,
            provenance,
            self._setting.measured,
        )

    def _origin(self) -> dict[str, Any]:
        """Returns what the provenance of all plans of this run has in common."""
        return {
            "policy": self.config.policy,
            "granularity": self.config.granularity,
            "target_fp4_fraction": self.config.target_fp4_fraction,
            "config": self.config.to_dict(),
            "model_name": self.model_name,
        }

    @contextlib.contextmanager
    def _keeping_plan(self, step: int, record: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Turns any failure inside into a warning and a history line; the plan in force stays."""
        try:
            yield
        except RankError:  # who does not hear of the others cannot train with them either
            raise
        except Exception as error:  # the planner may fail; training may not
            record = record or {"event": "refresh", "step": step}
            self._keep(step, record, describe(error))

    def _keep(self, step: int, record: Mapping[str, Any], reason: str, what: str = "failed") -> None:
        self._log.warning(
            "snip-hf: the refresh of step %d %s, the plan in force stays: %s", record["step"], what, reason
        )
        kept: dict[str, Any] = {
            "applied_step": None,
            "decided_step": step,
            "status": "kept",
            "reason": reason,
            **shares(self.plan),
            "changes": {},
            "layers_changed": 0,
        }
        self._folder.append(dict(record) | kept)

    def _start_line(self) -> dict[str, Any]:
        return start_line(self.plan, self.step, self.config, self.model_name)


def _fitting(plan: PrecisionPlan, flops: Weights) -> PrecisionPlan:
    """Returns a plan from a file with the model's own FLOPs; raises KeyError or ValueError if it is for another one."""
    check_sizes(plan, flops)
    return plan.with_flops(flops)


def _read_fingerprints(saved: Any) -> tuple[str, ...]:
    if not isinstance(saved, list | None) or not all(isinstance(one, str) for one in saved or ()):
        raise ValueError("weights is no list of digests")
    return tuple(saved or ())


def _read_ranking(saved: Mapping[str, Any]) -> dict[str, float]:
    return {str(layer): float(cost) for layer, cost in dict(saved).items()}
