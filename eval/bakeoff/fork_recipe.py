"""What a recipe of forks asks for: a base, the points at which it forks, and the contenders that train on from there.

The keys are described in eval/README.md.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.parts.recipe import DataSection, ModelSection, TokenizerSection, build, read_values
from snip_hf.config import POLICIES, SnipConfig
from snip_hf.numerics.formats import FORMATS, UNQUANTIZED, check_format
from snip_hf.numerics.gemms import GEMMS
from snip_hf.policies.registry import register_policy
from snip_hf.policies.uniform import uniform
from snip_hf.schedule_checks import shares_text

from .grid import combinations

_KEYS = ("data", "tokenizer", "train_sequences", "model", "training", "forks", "snip", "cells")
_OPTIONAL_KEYS = ("comparisons",)
_FORK_KEYS = ("base_seeds", "points", "data_seeds", "steps")
# Which GEMMs run in a cell's format; the others run in BF16.
GEMM_SETS = {"all": GEMMS, "forward": ("forward",), "backward": ("grad_input", "grad_weight")}
_FORK_DECIDES = ("seed", "fixed_plan", "first_refresh", "refresh_every", "apply_delay", "start_format")


@dataclass(frozen=True, kw_only=True)
class BaseSection:
    """How the base trains: AdamW, linear warmup, cosine decay to a tenth, FP32 weights. Forks go on the same way."""

    learning_rate: float
    steps: int
    """Steps of the schedule. The base stops at its last point."""
    sequences: int
    """Sequences of a step."""
    warmup_steps: int = 100
    weight_decay: float = 0.1
    """Of matrices; vectors have none."""
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    format: str = UNQUANTIZED.name
    """Of all GEMMs."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Where a contender starts: the unit of the comparison."""

    base_seed: int
    point: int
    """Steps that the base has done."""
    data_seed: int

    @property
    def name(self) -> str:
        return f"s{self.base_seed}-p{self.point}-d{self.data_seed}"

    @property
    def seed(self) -> int:
        """Seed of all random numbers of the fork: the same for every contender."""
        return zlib.crc32(self.name.encode())


@dataclass(frozen=True)
class Contender:
    """What runs in a fork: one format for some of the GEMMs, or the plan of a policy."""

    format: str | None
    gemms: str
    """Key of `GEMM_SETS`."""
    settings: Mapping[str, Any]
    """Fields of SnipConfig for a policy; {} with a format."""

    @property
    def name(self) -> str:
        if self.format is not None:
            return self.format if self.gemms == "all" else f"{self.format}, {self.gemms} GEMMs"
        config = SnipConfig.from_dict(self.settings)
        known = ("policy", "formats", "granularity", "backend", "solver")
        known += ("target_fp4_fraction", "target_linear_speedup", "rates")
        parts = [f"{key} {value}" for key, value in self.settings.items() if key not in known]
        first = f"{config.policy} {{{', '.join(config.formats)}}}"
        target = shares_text(config.target_fp4_fraction, ".0%")
        if config.target_linear_speedup is not None:
            target = f"{config.target_linear_speedup:g} times BF16 ({config.rates or 'measured'})"
        return ", ".join([first, f"{target} by {config.granularity}", *parts])

    def to_dict(self) -> dict[str, Any]:
        """Returns what tells contenders apart, for JSON."""
        if self.format is not None:
            return {"format": self.format, "gemms": self.gemms}
        return dict(self.settings)

    def config(self, fork: Fork, backend: str) -> SnipConfig:
        """Returns the configuration that makes the contender's plan at the first step of a fork."""
        own = dict(self.settings)
        if self.format is not None:
            own = {"policy": uniform_policy(self.format), "backend": backend}
        when = {"first_refresh": fork.point + 1, "refresh_every": None, "apply_delay": 0}
        return SnipConfig.from_dict(own | when | {"seed": fork.seed})


@dataclass(frozen=True)
class ForkRecipe:
    """A checked recipe."""

    data: DataSection
    tokenizer: TokenizerSection
    train_sequences: int
    """Training sequences that the text holds."""
    model: ModelSection
    base: BaseSection
    steps: int
    """Of a fork."""
    backend: str
    """Of every contender and of the base."""
    blocks: tuple[tuple[Fork, ...], ...]
    """All contenders run in the forks of the first block, then in those of the second, ..."""
    contenders: tuple[Contender, ...]
    """The most important first."""
    comparisons: Mapping[str, tuple[tuple[str, str], ...]]
    """Family -> pairs of contenders' names; the report corrects for the number of tests within a family."""

    @property
    def forks(self) -> tuple[Fork, ...]:
        """Those of all blocks."""
        return tuple(fork for block in self.blocks for fork in block)

    def setting(self, text: str) -> str:
        """Returns what tells forks from those of another text, model, base or length."""
        return _hash([text, _model_parts(self.model), asdict(self.base), self.steps, self.backend])

    def base_id(self, text: str, seed: int) -> str:
        """Returns what tells a base from others."""
        return _hash([text, _model_parts(self.model), asdict(self.base), self.backend, seed])

    def runs(self, text: str) -> dict[str, tuple[Contender, Fork]]:
        """Returns id -> contender and fork, in the order in which they run.

        Within a block these are all forks of the first contender, then of the second, ...

        Args:
            text: `ForkText.digest`.
        """
        setting = self.setting(text)
        return {
            _hash([setting, contender.to_dict(), asdict(fork)]): (contender, fork)
            for block in self.blocks
            for contender in self.contenders
            for fork in block
        }


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> ForkRecipe:
    """Reads and checks a recipe.

    Args:
        path: YAML file; `base` and overrides work as in recipes.
        overrides: `dotted.key=YAML value`.

    Raises:
        ValueError, TypeError: an unknown or missing key, or a value out of range; the message names it.
    """
    values = read_values(path, overrides)
    _check_keys(str(path), values, _KEYS, _OPTIONAL_KEYS)
    base = build(BaseSection, "training", values["training"])
    check_format(base.format, "training.format")
    forks = values["forks"]
    _check_keys("forks", forks, _FORK_KEYS)
    steps, points = forks["steps"], forks["points"]
    if not points or min(points) < 1 or max(points) + steps > base.steps:
        raise ValueError(
            f"forks.points={points} with forks.steps={steps}; expected points from 1 to {base.steps - steps}, so that "
            f"forks end within the schedule (training.steps={base.steps})."
        )
    cells = [contender for cell in values["cells"] for contender in _contenders(cell, values["snip"])]
    contenders = tuple({json.dumps(one.to_dict(), sort_keys=True): one for one in cells}.values())
    return ForkRecipe(
        data=build(DataSection, "data", values["data"]),
        tokenizer=build(TokenizerSection, "tokenizer", values["tokenizer"]),
        train_sequences=values["train_sequences"],
        model=build(ModelSection, "model", values["model"]),
        base=base,
        steps=steps,
        backend=values["snip"].get("backend", "auto"),
        blocks=tuple(_blocks(forks)),
        contenders=contenders,
        comparisons=_comparisons(values.get("comparisons") or {}, [one.name for one in contenders]),
    )


def uniform_policy(format: str) -> str:
    """Returns the name of the policy that puts every GEMM into a format, after registering it for one's own format."""
    name = f"uniform-{format}" if FORMATS[format].is_quantized else format
    if name not in POLICIES:
        register_policy(uniform(name, format))
    return name


def _blocks(forks: Mapping[str, Any]) -> Iterator[tuple[Fork, ...]]:
    """Yields the forks of each list of base seeds; seeds that are not in lists of their own are one block."""
    seeds = forks["base_seeds"]
    nested = [isinstance(entry, list) for entry in seeds]
    flat = [seed for entry in seeds for seed in (entry if isinstance(entry, list) else [entry])]
    if not flat or any(nested) != all(nested) or len(set(flat)) < len(flat):
        raise ValueError(
            f"forks.base_seeds={seeds}; expected different seeds, [0, 1, 2, 3], or blocks of them, [[0, 1], [2, 3]]."
        )
    for block in seeds if all(nested) else [seeds]:
        yield tuple(
            Fork(base_seed=seed, point=point, data_seed=data)
            for seed in block
            for point in forks["points"]
            for data in forks["data_seeds"]
        )


def _comparisons(families: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Returns family -> pairs of names; [[a, b], c] stands for a against c and b against c."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for family, entries in families.items():
        pairs: list[tuple[str, str]] = []
        for entry in entries:
            if not isinstance(entry, list) or len(entry) != 2:
                raise ValueError(f"comparisons: {family}: got {entry!r}; expected a pair, [one, other].")
            ones, other = entry
            pairs += [(one, other) for one in (ones if isinstance(ones, list) else [ones])]
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            if name not in names:
                raise ValueError(
                    f"comparisons: {family}: {name!r} is no contender of the cells; these are {'; '.join(names)}."
                )
        _refuse_repeated(family, pairs)
        found[family] = tuple(pairs)
    return found


def _refuse_repeated(family: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError for a test that is there twice, since Holm's correction would count it twice."""
    seen: set[frozenset[str]] = set()
    for one, other in pairs:
        pair = frozenset((one, other))
        if len(pair) < 2:
            raise ValueError(f"comparisons: {family}: {one!r} is compared with itself; expected two contenders.")
        if pair in seen:
            raise ValueError(
                f"comparisons: {family}: {one!r} against {other!r} is there twice, and would be corrected for twice; "
                "expected each pair once, in one order. Remove one."
            )
        seen.add(pair)


def _contenders(cell: Mapping[str, Any], common: Mapping[str, Any]) -> Iterator[Contender]:
    """Yields the contenders of a cell, which stands for all combinations of its lists."""
    for point in combinations(cell):
        if "format" not in point:
            yield _of_policy(point, common)
            continue
        gemms = point.pop("gemms", "all")
        name = check_format(point.pop("format"), "cells: format")
        if point or gemms not in GEMM_SETS:
            raise ValueError(f"cells: got {cell}; beside format, expected gemms as one of {', '.join(GEMM_SETS)}.")
        yield Contender(name, gemms, {})


def _of_policy(point: Mapping[str, Any], common: Mapping[str, Any]) -> Contender:
    for name in _FORK_DECIDES:
        if name in point or name in common:
            raise ValueError(f"cells: {name} is given, but the fork decides it: plans are made once, at its start.")
    if "policy" not in point:
        raise ValueError(f"cells: got {dict(point)}; expected format, or policy and other fields of SnipConfig.")
    config = SnipConfig.from_dict(dict(common) | dict(point)).to_dict()
    plain = SnipConfig().to_dict()
    always = ("policy", "formats", "granularity", "target_fp4_fraction")
    settings = {name: value for name, value in config.items() if name in always or value != plain[name]}
    settings.pop("start_format", None)  # follows from the formats
    return Contender(None, "all", settings)


def _check_keys(where: str, values: Mapping[str, Any], known: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raises ValueError unless the known keys are there, and no others but optional ones."""
    unknown = [key for key in values if key not in (*known, *optional)]
    missing = [key for key in known if key not in values]
    if unknown or missing:
        raise ValueError(
            f"{where}: {'unknown' if unknown else 'missing'} key {(unknown or missing)[0]!r}; the keys are "
            f"{', '.join((*known, *optional))}."
        )


def _model_parts(model: ModelSection) -> dict[str, Any]:
    """Returns what tells a model from others, as before there were adapters where it has none."""
    parts = asdict(model)
    return parts if model.lora is not None else {name: value for name, value in parts.items() if name != "lora"}


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
