"""The cells of a recipe of forks: which contenders train on from each checkpoint, and for how many steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_hf.config import POLICIES, SnipConfig
from snip_hf.numerics.formats import FORMATS, check_format
from snip_hf.numerics.gemms import GEMMS
from snip_hf.policies.registry import needs_probe, register_policy
from snip_hf.policies.uniform import uniform
from snip_hf.schedule_checks import shares_text

from .fork_shifts import Shift
from .grid import combinations
from .trial_policies import register_trial

# Which GEMMs run in a cell's format; the others run in BF16.
GEMM_SETS = {"all": GEMMS, "forward": ("forward",), "backward": ("grad_input", "grad_weight")}
_FORK_DECIDES = ("seed", "fixed_plan", "first_refresh", "start_format")
# What a contender has where its cell does not say otherwise: its plan is held, and the loss divergence is that of the
# first lines, so that a name means the same in all of them.
_HELD: dict[str, Any] = {"refresh_every": None, "apply_delay": 0, "loss_estimator": "token-fisher"}


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Where a contender starts: the unit of the comparison."""

    base_seed: int
    point: int
    """Steps that the base has done."""
    data_seed: int
    shift: Shift | None = None
    """What changes in the middle of the fork."""

    @property
    def name(self) -> str:
        return self._start + ("" if self.shift is None else f"-{self.shift.name}")

    @property
    def seed(self) -> int:
        """Seed of all random numbers of the fork: the same for every contender, and whatever shifts."""
        return zlib.crc32(self._start.encode())

    @property
    def _start(self) -> str:
        return f"s{self.base_seed}-p{self.point}-d{self.data_seed}"

    def to_dict(self) -> dict[str, Any]:
        """Returns what tells forks apart, for JSON; `of_dict` reads it."""
        found: dict[str, Any] = {"base_seed": self.base_seed, "point": self.point, "data_seed": self.data_seed}
        return found | ({} if self.shift is None else {"shift": self.shift.to_dict()})

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Fork:
        shift = values.get("shift")
        return cls(**(dict(values) | {"shift": None if shift is None else Shift(**shift)}))


@dataclass(frozen=True)
class Contender:
    """What runs in a fork: one format for some of the GEMMs, or the plans of a policy."""

    format: str | None
    gemms: str
    """Key of `GEMM_SETS`."""
    settings: Mapping[str, Any]
    """Fields of SnipConfig for a policy; {} with a format."""

    @property
    def name(self) -> str:
        if self.format is not None:
            return self.format if self.gemms == "all" else f"{self.format}, {self.gemms} GEMMs"
        config = held(self.settings)
        known = ("policy", "formats", "granularity", "backend", "solver")
        known += ("target_fp4_fraction", "target_linear_speedup", "rates")
        parts = [f"{key} {value}" for key, value in self.settings.items() if key not in known]
        first = f"{config.policy} {{{', '.join(config.formats)}}}"
        target = shares_text(config.target_fp4_fraction, ".0%")
        if config.target_linear_speedup is not None:
            target = f"{config.target_linear_speedup:g} times BF16 ({config.rates or 'measured'})"
        return ", ".join([first, f"{target} by {config.granularity}", *parts])

    @property
    def refreshes(self) -> bool:
        """Whether plans follow the first one."""
        is_changing = isinstance(self.settings.get("target_fp4_fraction"), list)
        return is_changing or any(self.settings.get(key) is not None for key in ("refresh_every", "refresh_on_drift"))

    def within(self, steps: int) -> dict[str, Any]:
        """Returns what tells contenders apart in forks of so many steps: a refresh that comes later does not."""
        found, every = self.to_dict(), self.settings.get("refresh_every")
        is_changing = isinstance(self.settings.get("target_fp4_fraction"), list)
        has_other = is_changing or self.settings.get("refresh_on_drift") is not None
        if every is not None and every >= steps and not has_other:
            found = {name: value for name, value in found.items() if name not in ("refresh_every", "apply_delay")}
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns what tells contenders apart, for JSON."""
        if self.format is not None:
            return {"format": self.format, "gemms": self.gemms}
        return dict(self.settings)

    def config(self, fork: Fork, backend: str) -> SnipConfig:
        """Returns the configuration that makes the contender's plans, the first at the first step of a fork."""
        own = dict(self.settings)
        if self.format is not None:
            own = uniform_config(self.format, backend)
        return held(own | {"first_refresh": fork.point + 1, "seed": fork.seed})


@dataclass(frozen=True)
class Cell:
    """A contender, and how long it trains in each fork."""

    contender: Contender
    lengths: tuple[int, ...]
    """Steps after which it is measured, in rising order; it trains to the last of them."""
    benchmarked: bool
    """Whether it answers the recipe's benchmarks then."""


def cells_of(entry: Mapping[str, Any], common: Mapping[str, Any], lengths: Sequence[int]) -> Iterator[Cell]:
    """Yields the cells of an entry, which stands for all combinations of its lists.

    Args:
        entry: of `cells`.
        common: fields of SnipConfig that all contenders have in common.
        lengths: where the entry names none.
    """
    rest = {key: value for key, value in entry.items() if key not in ("steps", "benchmarks")}
    own, benchmarked = as_lengths(entry.get("steps", lengths), "cells: steps"), entry.get("benchmarks", False)
    if not isinstance(benchmarked, bool):
        raise ValueError(f"cells: benchmarks={benchmarked!r}; expected true or false. The tasks are the recipe's.")
    for point in combinations(rest):
        yield Cell(contender_of(point, common), own, benchmarked)


def as_lengths(given: Any, where: str) -> tuple[int, ...]:
    """Returns numbers of steps in rising order; one number stands for a list of it.

    Raises:
        ValueError: none, one that is not a number of at least 1, or one twice.
    """
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found or len(set(found)) < len(found) or not all(type(steps) is int and steps > 0 for steps in found):
        raise ValueError(f"{where}={given!r}; expected a number of steps from 1, or a list of different ones.")
    return tuple(sorted(found))


def contender_of(point: Mapping[str, Any], common: Mapping[str, Any]) -> Contender:
    """Returns the contender of one combination."""
    if "format" not in point:
        return _of_policy(point, common)
    rest = {key: value for key, value in point.items() if key not in ("format", "gemms")}
    gemms, name = point.get("gemms", "all"), check_format(point["format"], "cells: format")
    if rest or gemms not in GEMM_SETS:
        raise ValueError(f"cells: got {dict(point)}; beside format, expected gemms as one of {', '.join(GEMM_SETS)}.")
    return Contender(name, gemms, {})


def impossible_cells(entries: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> dict[str, str]:
    """Returns what cannot be a cell -> why, as SnipConfig says it, for entries of `impossible`.

    Raises:
        ValueError: one of them can be a cell.
    """
    found = {}
    for entry in entries:
        for point in combinations(entry):
            text = ", ".join(f"{key} {value}" for key, value in point.items())
            try:
                contender_of(point, common)
            except ValueError as error:
                found[text] = str(error)
                continue
            raise ValueError(f"impossible: {text} is possible; make it one of the cells.")
    return found


def uniform_policy(format: str) -> str:
    """Returns the name of the policy that puts every GEMM into a format, after registering it for one's own format."""
    name = f"uniform-{format}" if FORMATS[format].is_quantized else format
    if name not in POLICIES:
        register_policy(uniform(name, format))
    return name


def uniform_config(format: str, backend: str) -> dict[str, Any]:
    """Returns the fields of SnipConfig that put every GEMM into a format."""
    return {"policy": uniform_policy(format), "formats": [format], "backend": backend}


def held(settings: Mapping[str, Any]) -> SnipConfig:
    """Returns the configuration of a contender, which keeps its plan where its settings do not say otherwise."""
    register_trial(settings.get("policy", ""))
    return SnipConfig.from_dict(_HELD | dict(settings))


def _of_policy(point: Mapping[str, Any], common: Mapping[str, Any]) -> Contender:
    for name in _FORK_DECIDES:
        if name in point or name in common:
            raise ValueError(f"cells: {name} is given, but the fork decides it: its first plan is made at its start.")
    if "policy" not in point:
        raise ValueError(f"cells: got {dict(point)}; expected format, or policy and other fields of SnipConfig.")
    config = held(dict(common) | dict(point))
    values, plain = config.to_dict(), held({}).to_dict()
    always = ("policy", "formats", "granularity", "target_fp4_fraction")
    settings = {name: value for name, value in values.items() if name in always or value != plain[name]}
    settings.pop("start_format", None)  # follows from the formats
    contender = Contender(None, "all", settings)
    if config.apply_delay and not contender.refreshes:
        raise ValueError(f"cells: apply_delay={config.apply_delay} without refresh_every: the first plan has none.")
    if contender.refreshes and not needs_probe(config):
        raise ValueError(
            f"cells: policy={config.policy!r} needs no probe, so its plan is never made again; take refresh_every and "
            "refresh_on_drift out."
        )
    return contender
