"""The configuration of a run: one frozen, validated `SnipConfig`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from .budget_checks import (
    check_decided,
    check_fraction,
    check_rates,
    check_speedup,
    check_timing,
    fp4_fraction_of,
    refuse_speedup,
)
from .field_arguments import takes_arguments
from .field_names import RENAMED, current_names
from .field_ranges import check_least, check_ranges
from .field_values import (
    FOUND,
    as_meant,
    as_names,
    as_plain,
    as_ties,
    check_bits,
    check_formats,
    check_stages,
    check_start,
    check_type,
)
from .kernels.backend import BACKENDS
from .numerics.formats import FORMATS
from .registry import Registry, choices, did_you_mean
from .schedule_checks import Share, largest_share, share_at

# Who decides. The entries are in `policies`, one file per family; `policies.registry.Policy` says what they are.
POLICIES: Registry[Any] = Registry("policy", "snip_hf.policies", "`list(snip_hf.config.POLICIES)`")


class DoesNotFit(ValueError):
    """A configuration that can work, but not on this model."""


Granularity = Literal["layer", "gemm"]
Decides = Literal["all", "forward"]
Budget = Literal["flops", "measured"]
Objective = Literal["additive", "paper"]
LossEstimator = Literal["saliency", "token-fisher"]
Solver = Literal["auto", "cbc", "highs", "greedy"]
Guard = Literal["off", "raise"]
_CHOICES = {
    "granularity": Granularity,
    "decides": Decides,
    "budget": Budget,
    "objective": Objective,
    "loss_estimator": LossEstimator,
    "solver": Solver,
    "guard": Guard,
}
# What an error of type says beyond the type.
_ADVICE = {
    "target_fp4_fraction": " Shares that change are pairs of a step and a share, e.g. ((1, 0.9), (800, 0.5)).",
    "target_linear_speedup": " Targets that change during a run are for target_fp4_fraction.",
    "rates": " It is a name: register a table of your own with `snip_hf.costs.rates.register_rates`.",
    "skip_modules": " For example skip_modules=('*.q_proj',), with the comma, or ['*.q_proj'].",
    "include_modules": " For example include_modules=('model.vision_tower.*',), with the comma, or a list.",
}
# Fields that no longer exist -> what to use instead.
_REMOVED_FIELDS = {
    "refresh_on_drift": "plans are refreshed every `refresh_every` steps; lower it to refresh more often",
    "drift_every": "plans are refreshed every `refresh_every` steps; lower it to refresh more often",
    "switching_cost": "raise refresh_every to change plans less often",
    "expert_groups": "all experts of a projection share its formats (docs/experts.md)",
    "estimate_memory": "raise refresh_every to change plans less often, or probes to make estimates less noisy",
    "guard_noise": "guard='raise' raises the formats of layers and adds no noise",
    "probe_memory_mib": "a probe stays within the memory of a training step; set probe_tokens to keep less",
    "guard_failures": "a callback can go back to a checkpoint (docs/reliability.md, Rolling back)",
}
# A field and one of its former values -> what to use instead.
_REMOVED_VALUES = {
    ("guard", "watch"): "set guard='raise', which also raises formats, or log loss and gradient norm yourself",
    ("guard", "roll-back"): (
        "set guard='raise'; a callback can go back to a checkpoint (docs/reliability.md, Rolling back)"
    ),
    ("objective", "horizon"): "set objective='additive', whose plans trained as well",
    ("loss_estimator", "taylor"): "set loss_estimator='token-fisher', which is the same without the first-order part",
    ("loss_estimator", "norm"): "set loss_estimator='saliency', or policy='snip-paper' for the paper's norms",
}
# What each sets and why: docs/config.md.
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"granularity": "layer", "objective": "paper"},
    "layer": {"granularity": "layer"},
    "gemm": {"granularity": "gemm"},
    "hopper": {"formats": ("mxfp4", "fp8-tensor"), "granularity": "gemm", "ties": FOUND}
    | {"first_refresh": 200, "apply_delay": 20},
}


class _FieldNames:
    """Base of a dataclass of keyword arguments, which tells who gives it an unknown or an old name what is right."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    field_types: ClassVar[dict[str, str]] = {}
    """The annotations of the fields as the source has them; parsers of arguments write over those of the class."""

    def __init_subclass__(cls) -> None:
        cls.field_types = cls.field_types | inspect.get_annotations(cls)

    def __new__(cls, *args: object, **values: object) -> Any:
        fields = cls.__dataclass_fields__
        for name in values:
            if name in _REMOVED_FIELDS:
                raise TypeError(f"The {cls.__name__} field {name!r} was removed: {_REMOVED_FIELDS[name]}.")
            if name in RENAMED:
                raise TypeError(f"{cls.__name__} has no field {name!r}; it is named {RENAMED[name]!r} now.")
            if name not in fields:
                guess = did_you_mean(name, fields)
                raise TypeError(f"{cls.__name__} has no field {name!r}.{guess} docs/config.md lists all of them.")
        return super().__new__(cls)


@takes_arguments
@dataclass(frozen=True, kw_only=True)
class SnipConfig(_FieldNames):
    """Everything that decides how a run chooses and applies its precisions.

    Steps are optimizer steps, counted from 1. Every field is checked when the config is built.

    Raises:
        ValueError: a field's value is out of range; the message names the field, the value and what is expected.
        TypeError: a field's value has the wrong type.
    """

    # Target: what the plan must reach

    target_fp4_fraction: float | tuple[Share, ...] | None = None
    """Least share of the linear FLOPs that runs in formats of at most 4 bits, 0..1, in every stage.
    With `budget="measured"` it is a share of their time. It is not a reduction of FLOPs. None: 0.75, unless
    `target_linear_speedup` is given. Pairs of a step and a share change it: ((1, 0.9), (800, 0.5)) (ours)."""
    target_linear_speedup: float | None = None
    """Least speed-up of the linears' GEMMs over BF16, in every stage, in place of `target_fp4_fraction` (ours).
    It is their time in BF16 divided by that under the plan: FLOPs by `rates`, or measured with `budget="measured"`."""
    rates: str | None = None
    """Table of how fast each format runs: "h100", "b200", "gb300", "rtx50", "mi355", "ideal", or one that you register.
    Those of hardware are datasheets' peaks; "ideal" is twice the rate for half of the bits (`costs.rates`). Without
    `target_linear_speedup` it only tells reports what speed-up a plan has."""
    formats: tuple[str, ...] = ("fp4", "fp8")
    """Formats that the plan chooses from for each GEMM, the least precise first (`snip_hf.formats`)."""
    granularity: Granularity | None = None
    """Unit that gets a format: "layer" (the paper), "gemm" (ours), or None: "gemm" unless the policy is by layer only.
    By layer the three GEMMs of a linear share one format. By GEMM long trainings lost less (docs/config.md)."""
    decides: Decides = "all"
    """GEMMs that the plan decides on and the target is a share of: "all", or "forward", those alone (ours).
    "forward" needs granularity "gemm". Every plan then runs all other GEMMs in the least precise of `formats`."""
    stages: int | tuple[tuple[str, ...], ...] | None = None
    """Pipeline stages, each of which attains `target_fp4_fraction` by itself.
    None: the whole model is one. A number: so many contiguous, equal runs of blocks. Or the layer names of each."""
    ties: str | tuple[tuple[str, ...], ...] = ()
    """Sibling linears that share a format, by their last name, e.g. (("q_proj", "k_proj", "v_proj"),).
    "auto" finds those that receive the same tensor, when a run begins (`estimation.shared_inputs`)."""
    skip_modules: tuple[str, ...] = ()
    """Exact names or globs (`fnmatch`, whole name) of linears that stay as they are."""
    include_modules: tuple[str, ...] = ()
    """As `skip_modules`: linears outside the language model's decoder that are swapped too, e.g. a vision tower's."""
    budget: Budget = "flops"
    """What `target_fp4_fraction` is a share of: "flops", or "measured", the time of the linears' GEMMs.
    It is measured on this machine, in the most precise quantized one of `formats`. By time, small and inefficient GEMMs
    count more (ours; docs/method.md, section 6)."""
    timing_file: str | None = None
    """File that keeps measured times, for several runs.
    What it has for this GPU, torch and backend is not timed again. None: the run's plan alone keeps them."""
    timing_tokens: int | None = None
    """Tokens of a micro-batch to time the GEMMs for.
    None: those of the first micro-batch that is probed. Policies without a probe that aim at a share of time need the
    number."""

    # Schedule: when the plan is made and applied

    start_format: str | None = None
    """Format of every GEMM until the first plan is applied.
    One of `formats`, or "bf16" (not quantized). None: the most precise of `formats`."""
    first_refresh: int = 100
    """Step of the first probe.
    Adam's very first updates say nothing of how later ones answer to the gradient."""
    refresh_every: int | None = 500
    """Steps between two refreshes, counted from the last probe.
    How fast rankings age: docs/fidelity.md, section 6. None: the first plan stays; a first refresh that failed is
    tried again every `first_refresh` steps."""
    apply_delay: int = 10
    """Steps between a probe and the application of its plan; the solver runs meanwhile. At most `refresh_every`."""

    # Guard: what happens when training goes wrong (docs/reliability.md)

    guard: Guard = "off"
    """The answer to an alarm: "off" (nothing is watched), or "raise": formats are raised, and training goes on (ours).
    "raise" gives the layers concerned one format more precise for `guard_patience` steps, and then a refresh."""
    guard_spike: float = 6.0
    """Standard deviations above the mean of its last healthy steps at which a loss or a gradient norm is a spike.
    The default, and that of `guard_window`, are those of OLMo-core's optimizers that skip steps."""
    guard_window: int = 128
    """Healthy steps that a spike is told from.
    Spikes are looked for from half of them on, or from `guard_patience` on if that is less."""
    guard_patience: int = 50
    """Steps for which raised formats hold: then the plan is refreshed, and spikes are looked for again.
    Spikes that last as many steps are the new level, which later ones are compared with."""

    # Probe: what a refresh measures

    probes: int = 1
    """Random directions per refresh; each costs two forward-backward passes. The policy "hessian-trace" needs many."""
    probe_tokens: int | None = 1024
    """Tokens per layer that the probe keeps, in whole runs of 128, of all ranks together; None keeps all.
    In experts each of them has as many rows as it is sent to experts."""
    probe_batch_tokens: int | None = 4096
    """Tokens that the probe's passes run on, of all ranks together. None: the whole micro-batch.
    They are whole sequences, spread evenly over the micro-batch, at least one per rank, and stand for all of it
    (ours)."""
    loss_estimator: LossEstimator = "saliency"
    """Estimator of the loss divergence: "saliency" or "token-fisher".
    "saliency" (after ScaleBITS): magnitudes of the first-order effects of the weight's elements; its plans ended
    slightly below those of "token-fisher" (docs/results-loss-forms.md), but it is no estimate of the loss's rise.
    "token-fisher" (ours): the rise by curvature, which training does not take away."""

    # Objective: who decides, and what for

    policy: str = "snip"
    """Who decides: "snip", or another registered policy (docs/policies.md)."""
    fixed_plan: str | None = None
    """Path of a plan file to apply before the first step and hold fixed; `policy` and `decides` are then not asked."""
    objective: Objective = "additive"
    """What the program minimises: "additive" or "paper".
    Both divergences are divided by their totals with everything in the least precise format. "additive" (ours):
    dL + 0.1 dW^2, since independent errors add in squares. "paper": Q = dL + dW."""
    loss_divergence_factor: float = 1.0
    """Multiplies the loss divergence's part of the objective."""
    weight_divergence_factor: float = 1.0
    """Multiplies the weight divergence's part of the objective."""

    # Solver

    solver: Solver = "auto"
    """Solver of the integer program: "cbc" (python-mip), "highs" (scipy), "greedy" (ours), or "auto".
    "auto" is the first of them that fits and is installed. A policy may name its own."""
    solver_time_limit: float = 60.0
    """Seconds after which the solver is stopped, at most 7 days."""
    solver_gap: float = 1e-4
    """Relative gap at which the solver may stop."""

    # Run

    backend: str = "auto"
    """Kernels: the name of a backend (docs/hopper.md), or "auto", the fastest that can run.
    The log says which one and why."""
    rank_timeout: float = 600.0
    """Seconds that a process waits for the others at most when they agree on something, at most 7 days.
    They are beyond `solver_time_limit` and another 60. Then training ends with an error."""
    seed: int = 0
    """Seed of stochastic rounding, of the probe's directions and of the `random` policy."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            annotation = self.field_types[field.name]
            if field.name in _CHOICES:
                annotation = "str | None" if "None" in annotation else "str"
            check_type(field.name, getattr(self, field.name), annotation, _ADVICE.get(field.name, ""))
            check_bits(field.name, getattr(self, field.name))
        closed = {name: get_args(literal) for name, literal in _CHOICES.items()}
        registered = {"policy": tuple(POLICIES), "backend": ("auto", *BACKENDS)}
        for name, known in (closed | registered).items():
            if getattr(self, name) not in (*known, None):
                guess = did_you_mean(getattr(self, name), known)
                if name == "policy" and self.policy in _PRESETS:
                    guess = f" {self.policy!r} is a preset: SnipConfig.preset({self.policy!r})."
                if (name, getattr(self, name)) in _REMOVED_VALUES:
                    advice = _REMOVED_VALUES[name, getattr(self, name)]
                    raise ValueError(f"{name}={getattr(self, name)!r} was removed: {advice}.")
                listing = POLICIES.listing if name == "policy" else None
                raise ValueError(f"{name}={getattr(self, name)!r} is not known{choices(known, guess, listing)}")
        self._check_granularity()
        check_least(self)
        is_default = self.target_fp4_fraction is None
        fraction = fp4_fraction_of(self.target_fp4_fraction, self.target_linear_speedup)
        object.__setattr__(self, "target_fp4_fraction", fraction)
        check_ranges(self)
        check_timing(self, POLICIES[self.policy])
        self._check_formats()
        POLICIES[self.policy].check(self)
        self._check_share(is_default)
        for name in ("skip_modules", "include_modules"):
            object.__setattr__(self, name, as_names(name, getattr(self, name)))
        object.__setattr__(self, "ties", as_ties(self.ties))
        if not (self.stages is None or isinstance(self.stages, int)):
            object.__setattr__(self, "stages", tuple(as_names("stages", stage) for stage in self.stages))
        check_stages(self.stages)

    def _check_granularity(self) -> None:
        supported = POLICIES[self.policy].granularities
        if self.granularity is None:
            object.__setattr__(self, "granularity", supported[0])
        if self.granularity not in supported and self.fixed_plan is None:
            what = "for whole linears" if supported == ("layer",) else "the GEMMs of a linear apart"
            raise ValueError(
                f"granularity={self.granularity!r} with policy={self.policy!r} cannot work: it decides {what}. Leave "
                "granularity out, or set it to None where a config is changed (dataclasses.replace, to_dict), or take "
                "another policy."
            )

    def _check_formats(self) -> None:
        object.__setattr__(self, "formats", as_names("formats", self.formats))
        check_formats(self.formats, SnipConfig.__dataclass_fields__["formats"].default)
        if self.start_format is None:
            object.__setattr__(self, "start_format", self.most_precise)
        check_start(str(self.start_format), self.formats)

    def _check_share(self, is_default: bool) -> None:
        policy = POLICIES[self.policy]
        check_rates(self.rates, self.formats, self.budget == "measured")
        if self.fixed_plan is not None:
            return
        check_decided(self, policy.aims_at_share)
        if not policy.aims_at_share:
            refuse_speedup(self.target_linear_speedup, self.policy)
            return
        if not FORMATS[self.least_precise].is_quantized:
            raise ValueError(
                f"policy={self.policy!r} has nothing to decide between the formats {self.formats!r}; expected at least "
                "one that is quantized."
            )
        chosen = self.formats if policy.needs_probe else (self.least_precise, self.most_precise)
        if self.target_linear_speedup is not None:
            check_speedup(self.target_linear_speedup, self.rates, chosen, self.budget == "measured")
        else:
            check_fraction(largest_share(self.target_fp4_fraction), " (the default)" if is_default else "", chosen)

    def target_at(self, step: int) -> float | None:
        """Returns the share of FP4 that a plan made at an optimizer step aims at; None: it aims at a speed-up."""
        return share_at(self.target_fp4_fraction, step)

    def at_step(self, step: int) -> SnipConfig:
        """Returns the config of a plan made at an optimizer step: with the share of that step alone."""
        share = self.target_at(step)
        return self if share == self.target_fp4_fraction else dataclasses.replace(self, target_fp4_fraction=share)

    @property
    def format_at_start(self) -> str:
        """`start_format`, or the most precise of `formats`."""
        return self.start_format or self.most_precise

    @property
    def quantized_formats(self) -> tuple[str, ...]:
        """Those of `formats` that quantize, whose divergences are estimated; the most precise first."""
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
        """Builds a config from a named set of values (docs/config.md says why these).

        "gemm": the default, the three GEMMs of a linear apart. "layer": together. "hopper": as "gemm", for an H100 or
        H200, in MXFP4 and FP8 with one scale per tensor, with ties that let linears of the same input quantize it
        once. "paper": by layer, Q = dL + dW, as far as the paper is known.

        Args:
            name: of the preset.
            changes: fields with other values.

        Raises:
            ValueError: an unknown name, or as the constructor.
        """
        if not isinstance(name, str) or name not in _PRESETS:
            raise ValueError(f"Unknown preset {name!r}{choices(_PRESETS, did_you_mean(str(name), _PRESETS))}")
        return cls(**(_PRESETS[name] | changes))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> SnipConfig:
        """Builds a config from plain YAML or JSON data (lists stand for tuples); takes old names of fields too.

        YAML reads `off` as false, `1e-3` and `none` as text, and an empty document as None: they are taken as meant.

        Raises:
            ValueError: a key that is not a field, or a field under both its names.
        """
        if not isinstance(values, Mapping | None):
            raise TypeError(f"SnipConfig.from_dict got a {type(values).__name__}; expected fields and their values.")
        values = current_names(values or {})
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown and unknown[0] in _REMOVED_FIELDS:
            raise ValueError(f"The SnipConfig field {unknown[0]!r} was removed: {_REMOVED_FIELDS[unknown[0]]}.")
        if unknown:
            guess = did_you_mean(unknown[0], known)
            raise ValueError(f"Unknown SnipConfig field {unknown[0]!r}{choices(known, guess, 'docs/config.md')}")
        return cls(**{name: as_meant(value, cls.field_types[name]) for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data that `from_dict` and `json` take."""
        return {field.name: as_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
