"""The configuration of a run: one frozen, validated `SnipConfig`.

The metadata of each field holds its help text, as in transformers' `TrainingArguments`: command lines show it, and
docs/config.md repeats it.
"""

from __future__ import annotations

import dataclasses
import math
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

from .kernels.backend import BACKENDS
from .numerics.formats import FORMATS, UNQUANTIZED, check_format
from .registry import Registry, choices, did_you_mean

# The policies, which decide plans. `policies` registers the built-in ones; `policies.registry.Policy` is the interface.
POLICIES: Registry[Any] = Registry("policy", "snip_hf.policies", "`list(snip_hf.config.POLICIES)`")
_REGISTER_FIRST = (
    " A policy of your own is registered first: by `register_policy` of `snip_hf.policies.registry`, or by `--import "
    "MODULE` on the command line."
)
# The tables of how fast hardware runs each format. `costs.rates` registers the built-in ones.
RATES: Registry[Any] = Registry("table of rates", "snip_hf.costs.rates")


class DoesNotFit(ValueError):
    """A valid config that cannot work with this model."""


Share = tuple[int, float]
"""A step, and the target FP4 share from this step on."""
Granularity = Literal["layer", "gemm"]
Decides = Literal["all", "forward"]
Budget = Literal["flops", "measured"]
Objective = Literal["additive", "paper", "gradients"]
LossEstimator = Literal["saliency", "token-fisher"]
Solver = Literal["auto", "cbc", "highs", "greedy"]
Guard = Literal["off", "raise"]

# Values of `decides`.
ALL, FORWARD = "all", "forward"
# The value of `ties` that finds tied linears in the model.
AUTO_TIES = "auto"
# The target if none is given.
DEFAULT_FP4_FRACTION = 0.5
# Step of the first probe in long runs.
_LATEST_FIRST_REFRESH = 100

_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "formats": ("fp4", "fp8"),
        "target_fp4_fraction": 0.75,
        "granularity": "layer",
        "ties": (),
        "objective": "paper",
    },
}

_CHOICES = {
    "granularity": Granularity,
    "decides": Decides,
    "budget": Budget,
    "objective": Objective,
    "loss_estimator": LossEstimator,
    "solver": Solver,
    "guard": Guard,
}
# Field -> smallest value.
_AT_LEAST = {"refresh_every": 1, "first_refresh": 1, "apply_delay": 0, "timing_tokens": 1, "stages": 1, "seed": 0}
_AT_LEAST |= {"probes": 1, "probe_tokens": 128, "probe_batch_tokens": 128, "guard_patience": 1}
# Advice at the end of the error about a wrong type.
_ADVICE = {
    "formats": " For example formats=('mxfp4', 'fp8-delayed').",
    "target_fp4_fraction": " Shares that change are pairs of a step and a share, e.g. ((1, 0.9), (800, 0.5)).",
    "target_linear_speedup": " Only target_fp4_fraction can change during a run.",
    "rates": " Give the name of a table; register your own with `snip_hf.costs.rates.register_rates`.",
    "skip_modules": " For example skip_modules=('*.q_proj',), with the comma, or ['*.q_proj'].",
    "include_modules": " For example include_modules=('model.vision_tower.*',), with the comma, or a list.",
}
_EXAMPLE = "target_fp4_fraction=0.5"
_SHARES_EXAMPLE = "e.g. 0.5, or ((1, 0.9), (800, 0.5)): 0.9 from step 1 on, 0.5 from step 800 on"


@dataclass(frozen=True)
class _ArgumentReader:
    """Reads a field's value from the text of a command-line argument."""

    form: str
    """The expected text, for help and errors."""
    read: Callable[[str], Any]
    takes_none: bool

    def __call__(self, text: str) -> Any:
        text = text.strip()
        if self.takes_none and _is_none(text):
            return None
        try:
            return self.read(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is not valid; expected {self.form}.") from error


def _items(text: str, separator: str = ",") -> list[str]:
    return [item.strip() for item in text.split(separator)] if text else []


def _lists(text: str) -> list[list[str]]:
    return [_items(part) for part in _items(text, ";")]


def _read_shares(text: str) -> float | list[tuple[int, float]]:
    if ":" not in text:
        return float(text)
    pairs = [item.split(":") for item in _items(text)]
    return [(int(step), float(share)) for step, share in pairs]


def _reader(form: str, read: Callable[[str], Any], takes_none: bool = False) -> _ArgumentReader:
    return _ArgumentReader(f"{form}, or none" if takes_none else form, read, takes_none)


_NAMES = _reader("a,b for two names", _items)
_INTEGER = _reader("an integer", int, takes_none=True)
_NUMBER = _reader("a number", float, takes_none=True)
_SHARES = _reader("0.5, or 1:0.9,800:0.5 as STEP:SHARE", _read_shares, takes_none=True)
_STAGES = _reader(
    "a number, or a,b;c,d for two lists",
    lambda text: int(text) if text.lstrip("+-").isdigit() else _lists(text),
    takes_none=True,
)
_TIES = _reader("auto, or a,b;c,d for two lists", lambda text: _lists(text) if "," in text or not text else text)


def _field(default: Any, help: str, reader: _ArgumentReader | None = None) -> Any:
    """Returns a field whose metadata holds the keywords of its command-line argument."""
    if reader is None:
        return field(default=default, metadata={"help": help})
    return field(default=default, metadata={"help": f"{help} Given as {reader.form}.", "type": reader})


class _NamedFields:
    """Refuses unknown fields. In a base class, so that the signature of `SnipConfig` lists the fields."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __new__(cls, *args: object, **values: object) -> Any:
        if args:
            raise TypeError(f"Got {args[0]!r} without the name of its field; write e.g. SnipConfig({_EXAMPLE}).")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                guess = did_you_mean(name, names)
                raise TypeError(f"{cls.__name__} has no field {name!r}.{guess} docs/config.md lists all of them.")
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class SnipConfig(_NamedFields):
    """All settings of how a run chooses and applies its precisions.

    Steps are optimizer steps, counted from 1. All fields are checked when the config is built. docs/config.md explains
    them.

    Raises:
        ValueError: a field's value is out of range; the message names the field, the value and the expectation.
        TypeError: a field's value has the wrong type, or there is no such field.
    """

    # Target

    target_fp4_fraction: float | tuple[Share, ...] | None = _field(
        None,
        "Minimum share (0..1) of the linear FLOPs that runs in formats of at most 4 bits. None means "
        f"{DEFAULT_FP4_FRACTION}, or no share if `target_linear_speedup` is given. Pairs of a step and a share change "
        "it during the run: ((1, 0.9), (800, 0.5)).",
        _SHARES,
    )
    formats: tuple[str, ...] = _field(
        ("mxfp4", "fp8-delayed"),
        "Formats that the plan chooses from for each GEMM, least precise first. `snip_hf.formats` lists them.",
        _NAMES,
    )
    policy: str = _field("snip", 'Method that makes the plan: "snip", or another registered policy (docs/policies.md).')
    fixed_plan: str | None = _field(
        None, "Path of a plan file. The plan is applied before the first step and never changes; `policy` is not used."
    )
    granularity: Granularity | None = _field(
        None,
        'Unit that gets a format: a "gemm", or a "layer" with its three GEMMs (as in the paper). None means '
        '"gemm", or "layer" if the policy only supports layers.',
    )
    ties: str | tuple[tuple[str, ...], ...] = _field(
        AUTO_TIES,
        'Linears of a block that share a format, by the last part of their names: (("q_proj", "k_proj", "v_proj"),). '
        '"auto" ties those that receive the same tensor.',
        _TIES,
    )
    skip_modules: tuple[str, ...] = _field(
        (), "Linears to leave unquantized, by exact name or `fnmatch` glob of the whole name.", _NAMES
    )
    include_modules: tuple[str, ...] = _field(
        (),
        "Linears outside the language model's decoder to quantize too, such as those of a vision tower; written "
        "like `skip_modules`.",
        _NAMES,
    )

    # Schedule

    start_format: str | None = _field(
        None,
        'Format of every GEMM until the first plan is applied: one of `formats`, or "bf16" (not quantized). None '
        "means the most precise of `formats`. Has no effect under a policy without a probe.",
    )
    first_refresh: int | None = _field(
        None,
        "Step of the first probe. None means 100, or a tenth of the run's steps if that is less, but at least 10. A "
        "policy without a probe starts at step 1; for a later start give `target_fp4_fraction` a schedule.",
        _INTEGER,
    )
    refresh_every: int | None = _field(
        500,
        "Steps between two probes. None keeps the first plan; if the first refresh fails, it is retried every "
        "`first_refresh` steps.",
        _INTEGER,
    )
    apply_delay: int = _field(
        10, "Steps between a probe and the application of its plan; the solver runs meanwhile. At most `refresh_every`."
    )

    # Run

    guard: Guard = _field(
        "off",
        'Response to a loss or gradient norm that spikes or is not finite: "off" (not watched), or "raise", which '
        "runs all layers in more precise formats for a while, then refreshes the plan.",
    )
    backend: str = _field(
        "auto", 'Kernels: the name of a backend (docs/kernels.md), or "auto", the fastest one available.'
    )
    seed: int = _field(0, "Seed of stochastic rounding, of the probe's noise and of random policies.")

    # Speed as the target

    target_linear_speedup: float | None = _field(
        None,
        "Minimum speed-up of the linears' GEMMs over BF16, in every stage, instead of `target_fp4_fraction`. Needs "
        '`rates` or `budget="measured"`.',
        _NUMBER,
    )
    rates: str | None = _field(
        None,
        'Table of relative speeds of formats: "h100", "b200", "gb300", "rtx50", "mi355", "ideal", or one that you '
        "registered. Without `target_linear_speedup`, only reports use it.",
    )
    budget: Budget = _field(
        "flops",
        'Unit of the target: "flops", or "measured", the time of the linears\' GEMMs, measured on this machine '
        "(docs/method.md, section 6).",
    )
    timing_file: str | None = _field(
        None, "File that keeps measured times for later runs with the same kind of GPU, torch version and backend."
    )
    timing_tokens: int | None = _field(
        None,
        "Tokens of a micro-batch to measure GEMM times for. None means those of the first probed micro-batch. "
        'Policies without a probe need a number with `budget="measured"`.',
        _INTEGER,
    )

    # Expert settings

    decides: Decides = _field(
        "all",
        'GEMMs that the plan decides on and the target refers to: "all" or "forward". With "forward", all backward '
        'GEMMs run in the least precise of `formats`; it needs granularity "gemm".',
    )
    stages: int | tuple[tuple[str, ...], ...] | None = _field(
        None,
        "Pipeline stages that must each reach the target: their number (consecutive stages of equally many blocks), "
        "or the layer names of each. None means one stage.",
        _STAGES,
    )
    objective: Objective = _field(
        "additive",
        'Quantity that the solver minimizes: "additive" (dL + 0.1 dW^2), "paper" (dL + dW), or "gradients", which is '
        "additive with dW measured on the gradients instead of the optimizer's updates. Divergences are relative to a "
        "model in the least precise format.",
    )
    loss_estimator: LossEstimator = _field(
        "saliency",
        'Estimator of the loss divergence: "saliency" (first order, after ScaleBITS) or "token-fisher" (curvature).',
    )
    probes: int = _field(
        1,
        "Random directions per refresh, each of two forward-backward passes. Estimates of the Hessian's trace need "
        "many.",
    )
    probe_tokens: int | None = _field(
        1024, "Tokens per layer that the probe keeps, over all ranks, in runs of 128. None keeps all.", _INTEGER
    )
    probe_batch_tokens: int | None = _field(
        4096,
        "Tokens that the probe's passes run on, over all ranks: whole sequences, at least one per rank (under context "
        "parallelism, per `cp_size` ranks). None means the whole micro-batch.",
        _INTEGER,
    )
    solver: Solver = _field(
        "auto",
        'Solver of the integer program: "cbc" (python-mip), "highs" (scipy) or "greedy". "auto" uses the first '
        "one that is installed.",
    )
    solver_time_limit: float = _field(60.0, "Seconds after which the solver is stopped.")
    guard_patience: int = _field(
        50, 'Steps for which `guard="raise"` keeps formats raised. A spike that lasts as long becomes the new level.'
    )

    def __post_init__(self) -> None:
        if self.guard is False:  # type: ignore[comparison-overlap]  # YAML's off without quotes
            self._set("guard", "off")
        for name, annotation in _TYPES.items():
            if name not in _CHOICES:
                _check_type(name, getattr(self, name), annotation)
        self._check_choices()
        self._check_granularity()
        self._check_target()
        self._check_numbers()
        self._check_timing()
        self._check_formats()
        POLICIES[self.policy].check(self)
        self._check_attainable()
        for name in ("skip_modules", "include_modules"):
            self._set(name, as_names(name, getattr(self, name)))
        self._set("ties", _as_ties(self.ties))
        if isinstance(self.stages, list | tuple):
            self._set("stages", tuple(as_names("stages", stage) for stage in self.stages))
            if () in self.stages:
                raise ValueError(
                    f"stages: stage {self.stages.index(())} names no layer; expected at least one per stage."
                )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_choices(self) -> None:
        closed = {name: get_args(literal) for name, literal in _CHOICES.items()}
        registered = {"policy": tuple(POLICIES), "backend": ("auto", *BACKENDS)}
        for name, known in (closed | registered).items():
            value = getattr(self, name)
            if value in known or (value is None and name == "granularity"):
                continue
            guess = did_you_mean(str(value), known)
            if name == "policy" and value in _PRESETS:
                guess = f" {value!r} is a preset: SnipConfig.preset({value!r})."
            listing, advice = (POLICIES.listing, _REGISTER_FIRST) if name == "policy" else (None, "")
            raise ValueError(f"{name}={value!r} is not known{choices(known, guess, listing)}{advice}")

    def _check_granularity(self) -> None:
        supported = POLICIES[self.policy].granularities
        if self.granularity is None:
            self._set("granularity", supported[0])
        if self.granularity not in supported and self.fixed_plan is None:
            what = "whole linears" if supported == ("layer",) else "the GEMMs of a linear separately"
            raise ValueError(
                f"granularity={self.granularity!r} with policy={self.policy!r} cannot work: it decides on {what}. Omit "
                "granularity (set it to None in dataclasses.replace and to_dict), or choose another policy."
            )

    def _check_target(self) -> None:
        fraction, speedup = _as_shares(self.target_fp4_fraction), self.target_linear_speedup
        if fraction is not None and speedup is not None:
            raise ValueError(
                f"target_fp4_fraction={fraction!r} and target_linear_speedup={speedup!r} are two targets; expected one "
                "of them. Leave the other one out, or set it to None."
            )
        self._set("target_fp4_fraction", DEFAULT_FP4_FRACTION if fraction is None and speedup is None else fraction)

    def _check_numbers(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name}={value!r} is too small; expected at least {least}.")
        if self.refresh_every is not None and self.apply_delay > self.refresh_every:
            raise ValueError(
                f"apply_delay={self.apply_delay} is larger than refresh_every={self.refresh_every}; a plan must be "
                "applied before the next probe. Lower apply_delay or raise refresh_every."
            )
        seconds = self.solver_time_limit
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"solver_time_limit={seconds!r} is not a number of seconds above 0.")

    def _check_timing(self) -> None:
        policy = POLICIES[self.policy]
        if self.budget == "flops":
            for name in ("timing_file", "timing_tokens"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)!r} is for budget='measured'; set that too.")
        by_rule = self.fixed_plan is None and policy.aims_at_share and not policy.needs_probe
        if self.budget == "measured" and self.timing_tokens is None and by_rule:
            raise ValueError(
                f"budget='measured' with policy={self.policy!r} needs timing_tokens, the size of a micro-batch: its "
                "plan is made before the first one. Set it to batch size times sequence length, e.g. 16384."
            )

    def _check_formats(self) -> None:
        self._set("formats", as_names("formats", self.formats))
        formats = self.formats
        if not formats:
            example = SnipConfig.__dataclass_fields__["formats"].default
            raise ValueError(f"formats=() names no format; expected e.g. {example!r}.")
        for name in formats:
            check_format(name, "formats")
        ordered = tuple(sorted(dict.fromkeys(formats), key=lambda name: FORMATS[name].bits))
        if formats != ordered:
            raise ValueError(f"formats={formats!r} are not distinct, least precise first; expected {ordered!r}.")
        if self.start_format is None:
            self._set("start_format", self.most_precise)
        starts = dict.fromkeys([*formats, UNQUANTIZED.name])
        if self.start_format not in starts:
            raise ValueError(
                f"start_format={check_format(self.start_format, 'start_format')!r} is not among formats={formats!r}; "
                f"expected one of {', '.join(starts)}, or None for the last of formats."
            )

    def _check_attainable(self) -> None:
        """Refuses targets that the policy, its formats or the table of rates cannot reach."""
        policy, measured = POLICIES[self.policy], self.budget == "measured"
        if self.rates is not None:
            _check_rates(self.rates, self.formats, measured)
        if self.fixed_plan is not None:
            return
        if not policy.aims_at_share:
            for name, unset in (("decides", ALL), ("target_linear_speedup", None)):
                if getattr(self, name) != unset:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} with policy={self.policy!r} has no effect: that policy has no "
                        "target. Leave it out, or choose a policy with a target (docs/policies.md)."
                    )
            return
        if self.decides != ALL:
            self._check_decides()
        if not FORMATS[self.least_precise].is_quantized:
            raise ValueError(
                f"policy={self.policy!r} has nothing to decide between the formats {self.formats!r}; expected at least "
                "one that is quantized."
            )
        used = self.formats if policy.needs_probe else (self.least_precise, self.most_precise)
        if self.target_linear_speedup is not None:
            _check_speedup(self.target_linear_speedup, self.rates, used, measured)
            return
        target = self.target_fp4_fraction
        share = max(share for _, share in target) if isinstance(target, tuple) else target
        if share and not any(FORMATS[name].counts_as_fp4 for name in used):
            example = next(name for name, format in FORMATS.items() if format.counts_as_fp4)
            raise ValueError(
                f"target_fp4_fraction={share!r} cannot be met with the formats {used!r}: none of them rounds both "
                f"operands to at most 4 bits. Add one that does, e.g. {example!r}, or set target_linear_speedup with "
                f"rates, or policy='uniform-{self.least_precise}'."
            )

    def _check_decides(self) -> None:
        what = f"decides={self.decides!r}"
        if self.granularity == "layer":
            raise ValueError(
                f"{what} with granularity='layer' cannot work: it decides only on the forward GEMM of a linear. Set "
                "granularity='gemm'."
            )
        if self.target_linear_speedup is not None:
            raise ValueError(
                f"{what} with target_linear_speedup={self.target_linear_speedup!r} cannot work: a speed-up counts all "
                "GEMMs of the linears. Set target_fp4_fraction, a share of the forward GEMMs, instead."
            )

    def first_refresh_in(self, max_steps: int | None) -> int:
        """Returns the step of the first probe in a run of `max_steps` steps; None if unknown."""
        if self.first_refresh is not None:
            return self.first_refresh
        return _LATEST_FIRST_REFRESH if max_steps is None else max(10, min(_LATEST_FIRST_REFRESH, max_steps // 10))

    def target_at(self, step: int) -> float | None:
        """Returns the target FP4 share of a plan made at a step (0: before training); None without one."""
        target = self.target_fp4_fraction
        if not isinstance(target, tuple):
            return target
        return next(share for begins, share in reversed(target) if begins <= max(step, 1))

    def at_step(self, step: int) -> SnipConfig:
        """Returns the config with the target FP4 share of a plan made at a step."""
        share = self.target_at(step)
        return self if share == self.target_fp4_fraction else dataclasses.replace(self, target_fp4_fraction=share)

    @property
    def format_at_start(self) -> str:
        """The format of every GEMM until the first plan is applied."""
        return self.start_format or self.most_precise

    @property
    def quantized_formats(self) -> tuple[str, ...]:
        """The formats that quantize, most precise first. The probe estimates their divergences."""
        return tuple(name for name in reversed(self.formats) if FORMATS[name].is_quantized)

    @property
    def least_precise(self) -> str:
        """The first of `formats`."""
        return self.formats[0]

    @property
    def most_precise(self) -> str:
        """The last of `formats`."""
        return self.formats[-1]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> SnipConfig:
        """Builds a config from a named set of values (docs/config.md explains them).

        Args:
            name: name of the preset.
            changes: fields with other values.

        Raises:
            ValueError: the name is unknown, or a value is invalid.
        """
        if name not in _PRESETS:
            raise ValueError(f"Unknown preset {name!r}{choices(_PRESETS, did_you_mean(name, _PRESETS))}")
        return cls(**(_PRESETS[name] | changes))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> SnipConfig:
        """Builds a config from plain YAML or JSON data, with lists instead of tuples.

        Also converts what YAML misreads: `off` as false, `none` as text, and an empty document as None.

        Raises:
            TypeError, ValueError: as `SnipConfig`.
        """
        if not isinstance(values, Mapping | None):
            raise TypeError(f"SnipConfig.from_dict got a {type(values).__name__}; expected fields and their values.")
        meant = dict(values or {})
        for name, annotation in _TYPES.items():
            if "None" in annotation and _is_none(meant.get(name)):
                meant[name] = None
        return cls(**meant)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for `from_dict` and JSON."""
        return {name: _as_lists(getattr(self, name)) for name in _TYPES}


# `HfArgumentParser` overwrites `Field.type`, and calls annotated types with the text of arguments.
_TYPES: dict[str, str] = {one.name: str(one.type) for one in dataclasses.fields(SnipConfig)}
for _one in dataclasses.fields(SnipConfig):
    SnipConfig.__annotations__[_one.name] = _one.metadata.get("type", _TYPES[_one.name])


@dataclass(frozen=True, kw_only=True)
class SnipArguments(SnipConfig):
    """`SnipConfig` for a parser that also parses `TrainingArguments`, which have their own `seed`.

    The constructor returns a plain `SnipConfig`:

        parser = HfArgumentParser((TrainingArguments, SnipArguments))
        args, config = parser.parse_args_into_dataclasses()
        trainer = Trainer(model, args, callbacks=[SnipCallback(config)])
    """

    seed: int = field(default=0, init=False)
    snip_seed: int = field(default=0, metadata=SnipConfig.__dataclass_fields__["seed"].metadata)

    def __new__(cls, *, snip_seed: int = 0, **values: Any) -> Any:
        return SnipConfig.from_dict(dict(seed=snip_seed, **values))  # converts values from YAML


def check_config(config: object) -> None:
    """Raises TypeError for anything but a `SnipConfig`."""
    if not isinstance(config, SnipConfig):
        raise TypeError(
            f"Got a {type(config).__name__} for config; expected a SnipConfig, e.g. SnipConfig({_EXAMPLE}), or "
            "SnipConfig.from_dict(...) for a dict."
        )


def changed_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config of unknown origin that differ from their defaults."""
    usual = SnipConfig().to_dict()
    return {name: value for name, value in config.items() if name not in usual or value != usual[name]}


def as_names(field: str, names: object) -> tuple[str, ...]:
    """Returns a list of names as a tuple; raises TypeError for anything else."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{field}: got {names!r}; expected a list of names.")
    return tuple(names)


def read_shares(value: Any) -> tuple[Share, ...] | None:
    """Returns the changing shares in a config, also of one read from a file; None for any other value."""
    try:
        shares = _as_shares(value)
    except (TypeError, ValueError):
        return None
    return shares if isinstance(shares, tuple) else None


def shares_text(value: float | tuple[Share, ...], spec: str = "g") -> str:
    """Describes a share, or a schedule of shares such as "0.9 from step 1, 0.5 from step 800".

    Args:
        value: `SnipConfig.target_fp4_fraction`.
        spec: format specification of a share.
    """
    if not isinstance(value, tuple):
        return format(value, spec)
    return ", ".join(f"{format(share, spec)} from step {step}" for step, share in value)


def mean_share(shares: tuple[Share, ...], steps: int) -> float:
    """Returns the mean target share over the steps 1 to `steps` (at least 1)."""
    ends = [min(begins - 1, steps) for begins, _ in shares[1:]] + [steps]
    begins = [min(begins - 1, steps) for begins, _ in shares]
    return sum(share * (end - begin) for (_, share), begin, end in zip(shares, begins, ends, strict=True)) / steps


def _check_type(name: str, value: object, annotation: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = (
        ("None" in annotation and value is None)
        or ("float" in annotation and is_number)
        or ("int" in annotation and is_number and isinstance(value, int))
        or (annotation.startswith("str") and isinstance(value, str))
        or ("tuple" in annotation and isinstance(value, list | tuple))
    )
    if not fits:
        expected = "a number from 0 to 1, or None" if name == "target_fp4_fraction" else annotation
        raise TypeError(
            f"{name}={value!r} has type {type(value).__name__}; expected {expected}.{_ADVICE.get(name, '')}"
        )


def _is_none(value: object) -> bool:
    """True for the text of None on command lines and, without quotes, in YAML."""
    return isinstance(value, str) and value.strip().lower() == "none"


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _as_ties(ties: object) -> str | tuple[tuple[str, ...], ...]:
    if ties == AUTO_TIES:
        return AUTO_TIES
    if not isinstance(ties, list | tuple):
        raise TypeError(f"ties={ties!r} has type {type(ties).__name__}; expected {AUTO_TIES!r} or lists of names.")
    result = tuple(as_names("ties", tie) for tie in ties)
    counts = Counter(name for tie in result for name in dict.fromkeys(tie))
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"ties: {name!r} is in more than one tie; put all names that share a format into one.")
    return result


def _as_shares(value: Any) -> float | tuple[Share, ...] | None:
    """Returns `target_fp4_fraction`, checked, with tuples for lists."""
    if not isinstance(value, list | tuple):
        share: float | None = value
        _check_share(share)
        return share
    for index, pair in enumerate(value):
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2 and not any(isinstance(x, bool) for x in pair)
        if not (is_pair and isinstance(pair[0], int) and isinstance(pair[1], int | float)):
            raise TypeError(
                f"target_fp4_fraction[{index}]={pair!r} is not a step and a share; expected {_SHARES_EXAMPLE}."
            )
        _check_share(pair[1], f"[{index}]")
    shares = tuple((step, share) for step, share in value)
    if not shares or shares[0][0] != 1:
        begins = f"begins at step {shares[0][0]}" if shares else "has no entry"
        raise ValueError(f"target_fp4_fraction={shares!r} {begins}; expected step 1 first, {_SHARES_EXAMPLE}.")
    for (step, _), (later, _) in pairwise(shares):
        if later <= step:
            raise ValueError(
                f"target_fp4_fraction={shares!r} has step {later} after step {step}; expected increasing steps, "
                f"{_SHARES_EXAMPLE}."
            )
    return shares


def _check_share(share: float | None, place: str = "") -> None:
    if share is not None and not 0 <= share <= 1:
        raise ValueError(
            f"target_fp4_fraction{place}={share!r} is outside 0..1; it is the share of the linear FLOPs that run in "
            "FP4, e.g. 0.5."
        )


def _check_rates(rates: str, formats: Sequence[str], measured: bool) -> None:
    table = RATES[RATES.checked(rates, "rates")]
    if measured:
        raise ValueError(
            f"rates={rates!r} and budget='measured' are two sources of speed; expected only one. Set rates=None, or "
            "budget='flops'."
        )
    for name in formats:
        if table.rate(name) is None:
            raise ValueError(
                f"rates={rates!r} has no rate of the format {name!r}, which that hardware does not support; it has "
                f"{', '.join(table.formats)}. Choose other formats or rates, e.g. rates='ideal', which has all formats."
            )


def _check_speedup(speedup: float, rates: str | None, formats: Sequence[str], measured: bool) -> None:
    """Refuses a speed-up below 1, without a source of speeds, or beyond the fastest format."""
    if not (math.isfinite(speedup) and speedup >= 1):
        raise ValueError(
            f"target_linear_speedup={speedup!r} is not a finite number of at least 1 (the speed of BF16); expected "
            "e.g. 1.8."
        )
    if rates is None:
        if measured:
            return
        raise ValueError(
            f"target_linear_speedup={speedup!r} needs the speed of each format. Set rates to one of "
            f"{', '.join(RATES)}, or set budget='measured'."
        )
    largest = max(RATES[rates].rate(name) for name in formats)
    if speedup > largest * (1 + 1e-9):
        raise ValueError(
            f"target_linear_speedup={speedup!r} is out of reach: with every GEMM in the fastest of the formats "
            f"{', '.join(formats)}, the speed-up is {largest:g} by rates={rates!r}. Lower it, or add a faster format."
        )
