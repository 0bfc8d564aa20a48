"""The log messages about a whole run: its beginning, the speed to expect, and its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from statistics import mode
from typing import Any

from torch import nn

from ..config import SnipConfig
from ..estimation.coverage import Coverage
from ..kernels.backend import BACKENDS, Backend
from ..layers.state import snip_linears
from ..numerics.formats import FORMATS
from ..parallel.sharding import is_fully_sharded
from ..planning.plan import PrecisionPlan
from ..policies.registry import policy_of
from ..policies.target import describe_target
from ..records.events import Event, Refresh
from ..text import printable

BY_REGIONS = "compiled by regions"
AS_A_WHOLE = "compiled as a whole (by regions is faster, and compiles sooner)"
# Tokens of a micro-batch times the square of the hidden size. With less, launches take longer than the faster products
# save (docs/hopper.md, "Where it begins to pay").
LEAST_WORK = 4e10


class RunMessages:
    """Logs the beginning and the end of a run, once each.

    Args:
        config: of the run.
        backend: name of the one in use.
        log: of the first rank.
    """

    def __init__(self, config: SnipConfig, backend: str, log: logging.Logger) -> None:
        self._config, self._backend, self._log = config, backend, log
        self._has_begun, self._has_ended = False, False
        self._applied = self._kept = 0
        """Refreshes that led to a new plan, and that kept the old one."""
        self._seconds = dict.fromkeys(("probe", "solver", "waited"), 0.0)

    def note(self, event: Event) -> None:
        """Counts the refreshes among the events of the run."""
        if isinstance(event, Refresh):
            self._applied += event.applied_step is not None
            self._kept += event.applied_step is None
            for part in self._seconds:
                self._seconds[part] += event.seconds.get(part) or 0.0

    def begin(self, plan: PrecisionPlan, coverage: Coverage | None, speed: str | None, first_refresh: int) -> None:
        """Logs the beginning.

        Args:
            plan: the one in force.
            coverage: of the first micro-batch; None: unknown.
            speed: the expected speed; None: unknown.
            first_refresh: step of the first probe.
        """
        if self._has_begun:
            return
        self._has_begun = True
        config, is_emulation = self._config, BACKENDS[self._backend].is_emulation
        origin = (
            f"policy {config.policy}" if config.fixed_plan is None else f"fixed plan {printable(config.fixed_plan)}"
        )
        lines = {
            "plan": f"{origin}, {plan.describe()}",
            "target": describe_target(config.to_dict()) or "none",
            "formats": _formats(config, plan),
            "backend": self._backend,
            "coverage": "not known" if coverage is None else f"the plan can decide on {coverage.describe()}",
            "refreshes": _refreshes(config, first_refresh, plan),
            "speed": speed or ("slower than BF16: the backend emulates" if is_emulation else "not measured"),
        }
        width = max(map(len, lines))
        text = "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())
        self._log.info("snip-hf: training under SNIP.\n%s", text)

    def end(self, step: int, plan: PrecisionPlan) -> None:
        """Logs the end after an optimizer step; nothing if no step was taken."""
        if self._has_ended or not self._has_begun:
            return
        self._has_ended = True
        text, probes = plan.describe(), policy_of(self._config).needs_probe
        if probes or self._applied or self._kept:  # a rule makes a new plan if the target changes
            text += f". New plans: {self._applied}; refreshes that kept the plan: {self._kept}"
        if probes:
            times = ". Probes took {:.1f} s, solvers {:.1f} s beside training, which waited {:.1f} s for them"
            text += times.format(*self._seconds.values())
        self._log.info("snip-hf: ended after step %d: %s.", step, text)


def _formats(config: SnipConfig, plan: PrecisionPlan) -> str:
    if policy_of(config).aims_at_share:
        return f"{', '.join(FORMATS[name].label for name in config.formats)}, decided per {config.granularity}"
    return ", ".join(format.label for name, format in FORMATS.items() if name in plan.formats)


def _refreshes(config: SnipConfig, first_refresh: int, plan: PrecisionPlan) -> str:
    if config.fixed_plan is not None:
        return "none: the plan is fixed"
    if not policy_of(config).needs_probe:
        return "none: this policy does not probe"
    every = "no more" if config.refresh_every is None else f"then every {_steps(config.refresh_every)}"
    is_start = plan.provenance.step == 0  # a resumed run has the plan of its checkpoint
    before = FORMATS[config.format_at_start].label if is_start else "the plan above"
    delay = _steps(config.apply_delay)
    return f"at step {first_refresh}, {every}; a plan is applied {delay} later; until then {before}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


class SpeedForecast:
    """Forecasts the speed from measurements of the backend, and warns of missing conditions.

    Made at the first micro-batch, since models may be compiled until then.

    Args:
        backend: name of the one in use.
        model: converted; under FSDP2 sharded.
        log: gets the warning.
        mixed_precision: of the loop; None: unknown.
    """

    def __init__(self, backend: str, model: nn.Module, log: logging.Logger, mixed_precision: str | None = None) -> None:
        self.is_made = False
        self.text: str | None = None
        """The expected speed, for the log; None if the backend was not measured."""
        self._backend, self._log, layers = BACKENDS[backend], log, snip_linears(model).values()
        self._hidden = mode(layer.in_features for layer in layers)
        self._is_emulated, _ = self._backend.notice(next(iter(layers)).weight, mixed_precision, False)
        self._measured, self._runs, self._page = self._backend.measured_speeds, "runs on H100s and H200s", "hopper.md"
        if not any(layer.weight.requires_grad for layer in layers):
            self._measured, self._runs, self._page = self._backend.adapter_speeds, "LoRA on an H200", "adapters.md"
        elif is_fully_sharded(model):
            speeds = self._backend.sharded_speeds
            self._measured, self._runs, self._page = speeds, "FSDP2 on two H200s", "distributed.md"

    def make(self, compiled: str | None, tokens: int | None) -> None:
        """Makes the forecast.

        Args:
            compiled: how the model is compiled; None: it is not.
            tokens: of the first micro-batch; None: unknown.
        """
        self.is_made = True
        if not self._measured:
            return
        if self._is_emulated:
            self.text = "slower than BF16: the model does not compute in BF16, as the warning says"
            return
        missing = self._missing(compiled, tokens, min(self._measured))
        if missing:
            self.text = "less than was measured (docs/hopper.md), as the warning says"
            self._log.warning(
                "snip-hf: backend %s will not reach the speed that was measured (docs/hopper.md): %s.",
                self._backend.name,
                "; ".join(missing),
            )
            return
        hidden, speeds = nearest_speeds(self._measured, self._hidden)
        self.text = (
            f"{compiled}: at 75% in 4 bits and hidden size {hidden:,} {self._runs} had {speeds} times the speed of "
            f"compiled BF16 (docs/{self._page})"
        )

    def _missing(self, compiled: str | None, tokens: int | None, least_hidden: int) -> list[str]:
        """Returns the conditions of the measured speed that this run does not meet."""
        missing = []
        if compiled is None:
            missing.append(
                "the model is not compiled, so launches outweigh faster products: set torch_compile=True in "
                "TrainingArguments, or call layer.compile() for each decoder layer"
            )
        if self._hidden < least_hidden:
            missing.append(
                f"below a hidden size of {least_hidden:,} quantization outweighs faster products, and this model has "
                f"{self._hidden:,}: {describe_slowdown(self._backend, self._hidden)}"
            )
        elif tokens is not None and tokens < (enough := least_tokens(self._hidden)):
            missing.append(
                f"micro-batches of {tokens:,} tokens are short at this hidden size: take longer or more sequences, "
                f"with at least {enough:,} tokens; below that {describe_slowdown(self._backend, self._hidden)}"
            )
        return missing


def nearest_speeds(measured: Mapping[int, tuple[float, float]], hidden: int) -> tuple[int, str]:
    """Returns the hidden size nearest to this one that was measured, and its speeds from the lowest to the highest."""
    nearest = min(measured, key=lambda size: abs(size - hidden))
    lowest, highest = (f"{speed:.2f}" for speed in measured[nearest])
    return nearest, lowest if lowest == highest else f"{lowest} to {highest}"


def describe_slowdown(backend: Backend, hidden: int) -> str:
    """Returns that BF16 is likely to be faster, with the backend's speeds at the nearest hidden size measured."""
    verdict = "BF16 is likely to be faster"
    if not backend.layer_speeds:
        return verdict
    nearest = min(backend.layer_speeds, key=lambda size: abs(math.log(size / hidden)))
    speeds = ", ".join(f"{speed:.2f} with {tokens:,} tokens" for tokens, speed in backend.layer_speeds[nearest].items())
    return f"{verdict} (one layer of hidden size {nearest:,} on an H200, times BF16's speed: {speeds})"


def least_tokens(hidden: int) -> int:
    """Returns the tokens of a micro-batch from which on low precision pays at a hidden size."""
    return math.ceil(LEAST_WORK / hidden**2)


def compiled_by(accelerator: Any) -> str | None:
    """Returns how an Accelerator, or its state, compiles the models that it prepares; None: not at all."""
    plugin = getattr(getattr(accelerator, "state", accelerator), "dynamo_plugin", None)
    if plugin is None or plugin.backend.value == "NO":
        return None
    return BY_REGIONS if plugin.use_regional_compilation else AS_A_WHOLE


def how_compiled(model: nn.Module) -> str | None:
    """Returns how torch.compile runs a model, as far as its modules tell; None: not at all."""
    if any(_is_compiled(module) for name, module in model.named_modules() if name):
        return BY_REGIONS
    return AS_A_WHOLE if _is_compiled(model) else None


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
