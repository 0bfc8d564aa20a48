"""The runs of a bake-off: a YAML grid of models, policies, shares and seeds, as a list of specs.

The keys are described in eval/README.md. Every list in an entry of an experiment is a dimension: the entry stands for
all combinations. Of a setting that is a list itself, a list of such lists is a dimension. A run that is in several
experiments is one run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from recipes.parts.recipe import DataSection, ModelSection, TokenizerSection, build, read_values
from snip_hf.config import POLICIES, SnipConfig
from snip_hf.field_names import RENAMED
from snip_hf.policies.registry import aims_at_share, needs_probe
from snip_hf.schedule_checks import mean_share, shares_text

# Not settings of SnipConfig but of the run itself.
_OWN_KEYS = ("model", "seed", "steps", "learning_rate_factor", "start_step", "benchmarks")
# Fields of SnipConfig that a line names, where they bear on the policy.
_SHARE_KEYS = ("target_fp4_fraction", "granularity")
_REFRESH_KEYS = ("refresh_every", "switching_cost", "first_refresh", "apply_delay", "probes")
_OBJECTIVE_KEYS = ("objective", "loss_divergence_factor", "weight_divergence_factor")
_OPTION_KEYS = ("formats", "target_linear_speedup", "rates", "decides", "estimate_memory", "loss_estimator")
_BUDGET_KEYS = ("budget", "target_linear_speedup", "rates", "timing_file", "timing_tokens")
_NAMES = {"target_fp4_fraction": "share"}
# What decides the ids and fills what has no bearing: the defaults of the first lines, whatever they are now.
_PLAIN = SnipConfig(granularity="layer", loss_estimator="token-fisher")
# Fields of SnipConfig whose value is a list, and how deep it is nested.
_LIST_FIELDS = {"formats": 1, "skip_modules": 1, "ties": 2, "stages": 2, "share": 2, "target_fp4_fraction": 2}


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model of the grid and its learning rate."""

    model: ModelSection
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """How every run trains: AdamW, linear warmup, cosine decay to a tenth; FP32 weights."""

    steps: int
    """Optimizer steps of a whole run."""
    sequences: int
    """Sequences in a step's one micro-batch."""
    warmup_steps: int = 100
    weight_decay: float = 0.1
    """Of matrices; vectors have none."""
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    log_every: int = 25
    """Steps that one point of the training curve is the mean of."""
    evaluate_every: int = 250
    compile: bool = True
    """Compile the decoder layers, on CUDA."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One training run."""

    model: str
    seed: int
    steps: int
    learning_rate: float
    start_step: int
    """Steps that are trained unquantized first; the learning rate's schedule and the data are the whole run's."""
    snip: SnipConfig

    def to_dict(self) -> dict[str, Any]:
        """Returns what distinguishes runs; None stands where a setting has no bearing on the policy.

        Formats, a target speed and what plans decide on are named only where they are not the defaults, as in lines of
        before there was a choice. A share that changes is named beside its mean over the run.
        """
        config = self.snip
        known = [*_SHARE_KEYS] if aims_at_share(config) else []
        known += _REFRESH_KEYS if needs_probe(config) else []
        known += _OBJECTIVE_KEYS if config.policy == "snip" else []
        every = (*_SHARE_KEYS, *_REFRESH_KEYS, *_OBJECTIVE_KEYS)
        own = {name: getattr(self, name) for name in ("model", "seed", "steps", "learning_rate", "start_step")}
        settings = {_NAMES.get(name, name): getattr(config, name) if name in known else None for name in every}
        if self._changes_share:
            settings["share"] = round(mean_share(config.target_fp4_fraction, self.steps), 6)
        return own | {"policy": config.policy} | settings | self._options()

    @property
    def _changes_share(self) -> bool:
        return aims_at_share(self.snip) and isinstance(self.snip.target_fp4_fraction, tuple)

    def _options(self) -> dict[str, Any]:
        """Returns what bears on the policy and is not the default: formats, target speed, shares that change, ..."""
        config = self.snip
        if not aims_at_share(config):
            return {}
        found = {name: getattr(config, name) for name in _OPTION_KEYS}
        chosen = {name: value for name, value in found.items() if value != getattr(_PLAIN, name)}
        if self._changes_share:
            chosen["target_fp4_fraction"] = config.to_dict()["target_fp4_fraction"]
        return chosen | ({"formats": list(config.formats)} if "formats" in chosen else {})

    def describe(self) -> str:
        """Returns the run in words, for the log."""
        plain = self.to_dict()
        share = "" if plain["share"] is None else f" at {plain['share']:.0%}"
        hidden = ("model", "policy", "granularity", "share", "seed", "steps", "target_fp4_fraction", *_OPTION_KEYS)
        other = ", ".join(f"{name} {value}" for name, value in plain.items() if name not in hidden and value)
        return f"{self.model}, {self.label}{share}, seed {self.seed} ({other})"

    @property
    def label(self) -> str:
        """Short name of the contender, without share, seed and model; with the formats if not the default ones."""
        if not aims_at_share(self.snip):
            return self.snip.policy
        config, options = self.snip, self._options()
        static = "static " if needs_probe(config) and config.refresh_every is None else ""
        speed = config.target_linear_speedup
        parts = [f"{{{', '.join(config.formats)}}}"] * ("formats" in options)
        parts += [] if speed is None else [f"{speed:g} times BF16 ({config.rates or 'measured'})"]
        parts += ["forward GEMMs alone"] if "decides" in options else []
        parts += [f"loss_estimator {config.loss_estimator}"] if "loss_estimator" in options else []
        parts += [shares_text(config.target_fp4_fraction, ".0%")] if self._changes_share else []
        return ", ".join([f"{static}{config.policy}", config.granularity, *parts])


@dataclass(frozen=True)
class Grid:
    """All runs, and what they have in common."""

    data: DataSection
    tokenizer: TokenizerSection
    models: dict[str, ModelEntry]
    training: TrainingSection
    experiments: dict[str, list[Spec]]
    """Name -> runs; a run may be in several."""
    benchmarks: tuple[str, ...] = ()
    """Tasks of eval/run.py for the runs that ask for them."""
    benchmarked: frozenset[str] = field(default_factory=frozenset)
    """Ids of those runs."""

    def __post_init__(self) -> None:
        if self.data.streaming:
            raise ValueError("data.streaming=true has no use here: all runs of a grid read the same prepared text.")
        if self.tokenizer.name_or_path is None and self.tokenizer.vocab_size is None:
            raise ValueError("tokenizer: give name_or_path (a trained one) or vocab_size (train one) for all models.")

    def id_of(self, spec: Spec) -> str:
        """Returns the name of a run: a hash of everything that decides its course and is not a default.

        So a setting that a later version adds does not rename the runs of an earlier one.
        """
        return _hash([self.state_of(spec), _chosen_settings(spec.snip)])

    def state_of(self, spec: Spec) -> str:
        """Returns the name of the state that unquantized training of this seed has at the spec's first step."""
        parts = (self.data, self.tokenizer, self.models[spec.model].model, self.training)
        return _hash([*map(_chosen, parts), spec.seed, spec.steps, spec.learning_rate, spec.start_step])

    def runs(self) -> dict[str, Spec]:
        """Returns id -> spec of all experiments, in their order, each run once."""
        return {self.id_of(spec): spec for specs in self.experiments.values() for spec in specs}

    def ids(self) -> dict[str, list[str]]:
        """Returns experiment -> ids of its runs."""
        return {name: [self.id_of(spec) for spec in specs] for name, specs in self.experiments.items()}


def load_grid(path: Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Grid:
    """Reads and checks a grid.

    Args:
        path: YAML file; `base` and overrides work as in recipes.
        overrides: `dotted.key=YAML value`; an experiment that is null has no runs.
        only: the experiments to read, in this order; none named: all of them.

    Raises:
        ValueError, TypeError: an unknown key, a missing section or a value out of range; the message names it.
        KeyError: an experiment that the grid does not have.
    """
    values = read_values(path, overrides)
    known = ("data", "tokenizer", "models", "training", "snip", "experiments", "benchmarks")
    unknown = [key for key in values if key not in known]
    missing = [key for key in known[:6] if key not in values]
    if unknown or missing:
        raise ValueError(
            f"{path}: {'unknown' if unknown else 'missing'} key {(unknown or missing)[0]!r}; the keys are "
            f"{', '.join(known)}."
        )
    models = {name: _model(name, entry) for name, entry in values["models"].items()}
    training = build(TrainingSection, "training", values["training"])
    grid = Grid(
        build(DataSection, "data", values["data"]),
        build(TokenizerSection, "tokenizer", values["tokenizer"]),
        models,
        training,
        {},
        tuple(values.get("benchmarks", ())),
    )
    experiments = values["experiments"]
    for name in only:
        if name not in experiments:
            raise KeyError(f"No experiment {name!r} in the grid; it has {', '.join(experiments)}.")
    benchmarked = set()
    for name in only or experiments:
        grid.experiments[name] = []
        for entry in experiments[name] or ():
            for point in _points(name, entry):
                spec = _spec(name, point, models, training, values["snip"])
                grid.experiments[name].append(spec)
                if point.get("benchmarks"):
                    benchmarked.add(grid.id_of(spec))
    return replace(grid, benchmarked=frozenset(benchmarked))


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _chosen(section: Any) -> dict[str, Any]:
    """Returns the fields of a section that are not at their defaults."""
    defaults = {item.name: item.default for item in fields(section)}
    return {name: value for name, value in asdict(section).items() if value != defaults[name]}


def _chosen_settings(config: SnipConfig) -> dict[str, Any]:
    """Returns the settings that are not at their defaults, by their first names: renaming one renames no run."""
    first_names, plain = {new: old for old, new in RENAMED.items()}, asdict(_PLAIN)
    return {first_names.get(name, name): value for name, value in asdict(config).items() if value != plain[name]}


def _model(name: str, entry: Mapping[str, Any]) -> ModelEntry:
    section = build(ModelSection, f"models.{name}.model", entry.get("model"))
    return build(ModelEntry, f"models.{name}", dict(entry) | {"model": section})


def _points(experiment: str, entry: Any) -> Iterator[dict[str, Any]]:
    """Yields the combinations of an entry's lists."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"experiments.{experiment}: got {entry!r}; expected entries with keys, e.g. {{policy: snip}}.")
    yield from combinations(entry)


def combinations(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields all combinations of an entry's lists.

    A list that is one value of its field, as `formats: [fp4, fp8]`, is no dimension; a list of those is.
    """
    lists = {
        key: value if isinstance(value, list) and not _is_one_value(key, value) else [value]
        for key, value in entry.items()
    }
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def _is_one_value(key: str, value: list[Any]) -> bool:
    return key in _LIST_FIELDS and (not value or _depth(value) == _LIST_FIELDS[key])


def _depth(value: Any) -> int:
    """Returns how deep lists are nested in a value."""
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _spec(
    experiment: str,
    point: Mapping[str, Any],
    models: Mapping[str, ModelEntry],
    training: TrainingSection,
    common: Mapping[str, Any],
) -> Spec:
    where = f"experiments.{experiment}"
    model = point.get("model")
    if model not in models:
        raise ValueError(f"{where}: model={model!r} is not in the grid; its models are {', '.join(models)}.")
    seed, start = int(point.get("seed", 0)), int(point.get("start_step", 0))
    steps = int(point.get("steps", training.steps))
    if not 0 <= start < steps:
        raise ValueError(f"{where}: start_step={start} is outside 0..{steps - 1}, the steps of a run.")
    settings = {key: value for key, value in point.items() if key not in _OWN_KEYS}
    settings = dict(common) | {"seed": seed} | {_CONFIG_NAMES.get(key, key): value for key, value in settings.items()}
    if start:  # what is known of the optimizer by then is enough to probe at once
        settings["first_refresh"] = start + 1
    # Where a policy has no use for a setting, runs that differ in nothing else are the same run.
    policy = POLICIES.get(settings.get("policy", ""))
    if policy is not None and not policy.aims_at_share:
        for name in ("target_linear_speedup", "decides"):
            settings.pop(name, None)
    config = SnipConfig.from_dict(settings)
    if not aims_at_share(config):
        unused = (*_SHARE_KEYS, *_BUDGET_KEYS, "decides", "ties", "stages", "formats", "start_format")
        config = replace(config, **{name: getattr(_PLAIN, name) for name in unused})
    if config.policy != "snip":
        config = replace(config, loss_estimator=_PLAIN.loss_estimator)
    if not needs_probe(config):
        kept = ("policy", "seed", "formats", "ties", "stages", "skip_modules", "backend", "decides", "loss_estimator")
        config = SnipConfig(**{name: getattr(config, name) for name in (*kept, *_SHARE_KEYS, *_BUDGET_KEYS)})
    rate = models[model].learning_rate * float(point.get("learning_rate_factor", 1.0))
    if config.policy == "bf16":
        start = 0
    return Spec(model=model, seed=seed, steps=steps, learning_rate=rate, start_step=start, snip=config)


_CONFIG_NAMES = {short: name for name, short in _NAMES.items()}
