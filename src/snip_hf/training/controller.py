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

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..config import SnipConfig
from ..costs.gemm_timing import read_times
from ..estimation.batch import Batch
from ..estimation.divergence import divergences_at
from ..estimation.memory import bounded, kept_tokens, measured_peak, probe_memory
from ..estimation.samples import read
from ..estimation.table import DivergenceTable
from ..kernels.backend import select_backend
from ..layers.convert import keep_states_apart
from ..layers.state import set_rank, set_step, snip_linears
from ..optimizers.deepspeed_zero import find_zero
from ..optimizers.response import check_optimizer, responses
from ..parallel.pipeline import ModelParts, Pipeline, parts_of
from ..parallel.ranks import Attempt, RankError, describe
from ..parallel.sharding import own_part
from ..parallel.wrappers import unwrap
from ..planning.drift import rank_correlation, ranking
from ..planning.plan import PlanProvenance, PrecisionPlan
from ..planning.program import problem
from ..planning.solver.process import SolverProcess, SolverResult
from ..policies.registry import needs_probe, needs_weights, policy_of, rule_assignment
from ..policies.setting import Setting, check_ties, find_stages, siblings
from ..records.run_folder import RunFolder, describe_plan, shares, start_line
from .captured_step import StepWatch
from .checks import check_launch, check_model, check_parts, check_sizes
from .preparation import cost_of_all, find_processes, flops_of_all, swap, use_backend

logger = logging.getLogger(__name__)
# What all ranks have to say, the first one says.
_replica = logging.getLogger(f"{__name__}.replica")
_replica.setLevel(logging.ERROR)

SCHEMA_VERSION = 2
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
    ) -> None:
        self.model = unwrap(model) if isinstance(model, nn.Module) else ModelParts([unwrap(part) for part in model])
        self.config = config
        self.step = 0
        """Optimizer steps done."""
        check_launch(config, accelerator)
        self.processes = find_processes(config, pipeline)
        """Those of this run, and how they agree."""
        for rank, other in enumerate(self.processes.everyone.gather(config.to_dict())):
            if different := _differences(config, other):
                raise ValueError(
                    f"This rank's configuration is not that of rank {rank}: they differ in {', '.join(different)}. "
                    "Expected the same SnipConfig on all ranks."
                )
        is_first = self.processes.everyone.is_first
        self._log = logger if is_first else _replica
        self._optimizer = optimizer
        self._zero = find_zero(optimizer, model, accelerator) if needs_probe(config) else None
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
        self._kernels = select_backend(config.backend, next(self.model.parameters()).device, config.formats)
        self.backend = self._kernels.name
        """Name of the backend in use."""
        swap(self.model, config, self.processes.pipeline)
        keep_states_apart([model] if isinstance(model, nn.Module) else model)
        self._layers = snip_linears(self.model)
        mixed_precision = getattr(accelerator, "mixed_precision", None)
        use_backend(
            self._layers,
            self._kernels,
            self.processes.data,
            mixed_precision,
            config.backend != "auto",
            self._log,
        )
        self.needs_probe = needs_probe(config)
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
        if config.cost_file is not None:
            read_times(config.cost_file)  # What is wrong with it comes out now and not at the first refresh.
        if config.cost_tokens is not None and needs_weights(config) and not self.needs_probe:
            self._measure(config.cost_tokens)
        name = getattr(getattr(self.model, "config", None), "_name_or_path", "")
        self.model_name = name or type(self.model).__name__.removeprefix("FSDP")
        self.plan = self._first_plan()
        self.plan.apply(self.model, elsewhere=flops)
        set_step(self._layers, config.seed, 1, 0)
        self._hooks: list[Any] = [part.register_forward_pre_hook(self._before_chunk) for part in parts_of(self.model)]
        self._chunks: Counter[nn.Module] = Counter()
        if self._zero is not None:
            self._hooks.append(self._zero.before_step(lambda: self._before_optimizer_step(self.step + 1)))
        groups = [group for group in siblings(self._setting) if group[0] in self._layers]
        self._kernels.share_inputs(self._layers, groups)
        self._log.info("snip-hf: policy %s, %s.", config.policy, describe_plan(self.plan))

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
        if self.needs_probe and not self._checked_labels:
            Batch.of(batch)
            self._checked_labels = True
        if not self._started:
            self.start()
        step = self.step + 1
        set_step(self._layers, self.config.seed, step, self._micro_batch)
        data = self.processes.data
        if data.size > 1:  # DDP that was built before the layers were swapped gives all ranks the first one's
            set_rank(self._layers, data.rank, data.size)
        if self._keeps_weights:
            self._kernels.before_pass(self._layers, everything=self._micro_batch == 0)
        if self._micro_batch == 0 and (self._refreshes(step) or self._checks(step)):
            parameters = self.model.parameters() if self._zero is None else ()
            self._armed = StepWatch(batch, self._probe_batch_tokens, self._layers, parameters)
        self._micro_batch += 1

    def before_optimizer_step(self, step: int) -> None:
        """To be called with the gradients of optimizer step `step` (from 1) complete and clipped; probes if due.

        Under DeepSpeed, whose step is over by then, it does nothing: the controller is in that step itself.
        """
        if self._zero is None:
            self._before_optimizer_step(step)

    def _before_optimizer_step(self, step: int) -> None:
        watch, refreshes = self._disarm(), self._refreshes(step)
        # By the schedule and not by what was captured: the ranks have the schedule in common.
        if refreshes or self._checks(step):
            # With apply_delay = refresh_every the plan before is due after this very step, whose passes are done.
            self._apply_due(step)
            refreshes = refreshes or self._has_drifted(step, watch)
        if refreshes:
            self._last_probe = step
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
        """Stops a solver that is still running. The model keeps the plan in force."""
        self._kernels.release(self._layers)
        for hook in self._hooks:
            hook.remove()
        pending = self._stop()
        if pending is not None:
            reason = f"training ended at step {self.step}, before step {pending.due} at which its plan was due"
            self._keep(self.step, pending.record, reason, "was not applied")

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

    def load_state_dict(self, state: Mapping[str, Any], at_step: int | None = None) -> None:
        """Continues from a `state_dict`. Nothing is changed if it does not fit.

        Args:
            state: what `state_dict` returned, also through JSON.
            at_step: the optimizer steps that the weights have done; the state must be of the same. None: not checked.

        Raises:
            ValueError: another schema version, another configuration, another step, or a state that is not complete.
            KeyError: the plan in it is for another model.
        """
        if not isinstance(state, Mapping) or state.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"The SNIP state has no schema_version {SCHEMA_VERSION}; it is not a state of this version."
            )
        try:
            # Fields that a later version added were then what their defaults are.
            saved = SnipConfig().to_dict() | dict(state["config"])
            step, pending = int(state["step"]), state["pending"]
            plan = PrecisionPlan.from_dict(state["plan"])
            resumed = None if pending is None else _Pending.of(pending)
            last_probe = None if state["last_probe"] is None else int(state["last_probe"])
            ranked = _read_ranking(state["ranking"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"The SNIP state is not complete or damaged ({error!r}); restore the file from another checkpoint."
            ) from error
        mine, different = self.config.to_dict(), _differences(self.config, saved)
        if different:
            name = different[0]
            raise ValueError(
                f"The checkpoint was trained with {name}={saved.get(name)!r}, this run asks for {name}={mine[name]!r} "
                f"(different fields: {', '.join(different)}). Use the checkpoint's configuration to resume its run, or "
                "SnipCallback(..., resume=False) to start a new plan from its weights."
            )
        if at_step not in (None, step):
            raise ValueError(
                f"The SNIP state is of step {step}, but the weights are of step {at_step}. Take both from the same "
                "checkpoint folder."
            )
        check_sizes(plan, self._setting.flops)
        plan.apply(self.model, elsewhere=self._setting.flops)
        self._stop()
        self.plan, self.step, self._micro_batch = plan, step, 0
        self._last_probe, self._ranking = last_probe, ranked
        self._setting = replace(self._setting, measured=plan.measured)
        set_step(self._layers, self.config.seed, step + 1, 0)
        self._started = True
        self._folder.cut(step, None if resumed is None else resumed.step, self._start_line())
        self._folder.save_plan(plan)
        if resumed is not None:
            with self._keeping_plan(step, resumed.record):
                resumed.process = self._start_solver(resumed.problem)
                self._pending = resumed

    def _first_plan(self) -> PrecisionPlan:
        setting, config = self._setting, self.config
        if config.plan is not None:
            try:
                plan = PrecisionPlan.load(config.plan)
            except OSError as error:
                raise ValueError(f"plan={config.plan!r} cannot be read: {error}.") from error
            check_sizes(plan, self._setting.flops)
            return plan
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
            self.config,
            self._setting.flops,
            self.processes,
            self._log,
        )
        self._setting = replace(self._setting, measured=measured)

    def _refreshes(self, step: int) -> bool:
        """Tells whether the schedule refreshes at this step, counted from the last probe."""
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
        return (step - self._last_probe) % self.config.drift_every == 0

    def _before_chunk(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        """Gives each chunk that a pipeline runs through a part random numbers of its own."""
        set_step(snip_linears(part), self.config.seed, self.step + 1, self._chunks[part])
        self._chunks[part] += 1

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
            self._check_finite(gradients)
            clip_factor = watch.clip_factor(gradients, self.processes.everyone)
            answers = responses(self._optimizer, weights)
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

    def _check_finite(self, gradients: Mapping[str, Tensor]) -> None:
        """Raises, on all ranks, if a gradient on one of them is not finite."""
        attempt = Attempt()
        with attempt:
            finite = read([torch.isfinite(own_part(gradient)).all() for gradient in gradients.values()])
            for name, is_finite in zip(gradients, finite, strict=True):
                if not is_finite:
                    raise ValueError(f"The gradient of layer {name!r} is not finite; expected finite numbers.")
        self.processes.everyone.agree(attempt.error)

    def _check_watch(self, watch: StepWatch | None) -> StepWatch:
        """Returns what the step's micro-batch was noted in; raises, on all ranks, if one of them cannot probe its."""
        attempt = Attempt()
        with attempt:
            if watch is None:
                raise ValueError("No micro-batch of it was given to capture().")
            _ = watch.batch
        self.processes.everyone.agree(attempt.error)
        assert watch is not None
        return watch

    def _has_drifted(self, step: int, watch: StepWatch | None) -> bool:
        """Checks whether the ranking has moved since the plan in force was made, and writes a line of the history."""
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
        policy = policy_of(self.config)
        if policy is not None and (missing := policy.missing(self.config, table)) is not None:
            self._log.warning("snip-hf: at step %d %s", step, missing)
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
        self._pending = _Pending(step, step + self.config.apply_delay, program, record, ranked, process)

    def _start_solver(self, program: dict[str, Any]) -> SolverProcess | None:
        """Starts solving on the first rank; raises on all of them if that fails."""
        started: list[SolverProcess] = []
        self.processes.everyone.by_first(lambda: started.append(SolverProcess.start(program)))
        return started[0] if started else None

    def _apply_due(self, step: int) -> None:
        pending = self._pending
        if pending is not None and step >= pending.due:
            self._pending = None
            with self._keeping_plan(step, pending.record):
                self._apply(pending, step)

    def _apply(self, pending: _Pending, step: int) -> None:
        began = time.perf_counter()

        def solution() -> dict[str, Any]:
            assert pending.process is not None
            return asdict(pending.process.result(self.config.solver_time_limit + _GRACE))

        result = SolverResult(**self.processes.everyone.by_first(solution))
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


def _read_ranking(saved: Mapping[str, Any]) -> dict[str, float]:
    return {str(layer): float(cost) for layer, cost in dict(saved).items()}


# Fields that decide the course of a run; the others may differ on resume.
_FREE = ("solver_time_limit", "rank_timeout", "backend", "cost_file")


def _differences(config: SnipConfig, other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the deciding fields that another configuration, as a dict, has otherwise."""
    own = config.to_dict()
    return [name for name in own if name not in _FREE and other.get(name) != own[name]]
