"""What a recipe of forks asks for: a base, the points at which it forks, and the contenders that train on from there.

The keys are described in eval/README.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recipes.parts.recipe import DataSection, ModelSection, TokenizerSection, build, read_values
from snip_hf.numerics.formats import UNQUANTIZED, check_format

from .fork_cells import Cell, Contender, Fork, as_lengths, cells_of, impossible_cells
from .fork_lines import LOSSES
from .fork_shifts import Shift

_KEYS = ("data", "tokenizer", "train_sequences", "model", "training", "forks", "snip", "cells")
_OPTIONAL_KEYS = ("impossible", "comparisons", "readme", "outcome", "benchmarks", "other_data", "other_sequences")
_FORK_KEYS = ("base_seeds", "points", "data_seeds", "steps")
_OPTIONAL_FORK_KEYS = ("shifts", "cooldown", "cuda_graph")


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
    compile: bool = False
    """Whether torch.compile compiles the decoder layers, one by one, and the loss."""

    def to_dict(self) -> dict[str, Any]:
        """Returns what tells trainings apart, as before any was compiled where this one is not."""
        return {name: value for name, value in asdict(self).items() if name != "compile" or value}


@dataclass(frozen=True)
class ForkRun:
    """One contender in one fork."""

    contender: Contender
    fork: Fork
    ids: Mapping[int, str]
    """Steps after which it is measured, in rising order -> id of that line."""
    benchmarked: bool = False
    """Whether it answers the recipe's benchmarks then."""

    @property
    def name(self) -> str:
        return f"{self.contender.name}, {self.fork.name}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps after which it is measured; it trains to the last of them."""
        return tuple(self.ids)

    def without(self, done: Collection[str]) -> ForkRun:
        """Returns the run of the lines that are not done."""
        return replace(self, ids={steps: name for steps, name in self.ids.items() if name not in done})


@dataclass(frozen=True)
class ForkRecipe:
    """A checked recipe."""

    data: DataSection
    tokenizer: TokenizerSection
    train_sequences: int
    """Training sequences that the text holds."""
    model: ModelSection
    base: BaseSection
    backend: str
    """Of every contender and of the base."""
    cools_down: bool
    """Whether the learning rate falls to zero over the steps of each fork."""
    cuda_graph: bool
    """Whether the passes of steps are CUDA graphs, of bases too."""
    blocks: tuple[tuple[Fork, ...], ...]
    """All cells run in the forks of the first block, then in those of the second, ..."""
    cells: tuple[Cell, ...]
    """The most important first."""
    impossible: Mapping[str, str]
    """What cannot be a cell -> why."""
    comparisons: Mapping[str, tuple[tuple[str, str], ...]]
    """Family -> pairs of contenders' names; the report corrects for the number of tests within a family."""
    readme: tuple[str, ...]
    """Names of the contenders of the short table, in its order."""
    outcome: str
    """The loss that the report tests."""
    other: DataSection | None
    """Text of shifts to another one; None: there is none."""
    other_sequences: int
    """Sequences of it; the held-out ones come from their end."""
    benchmarks: tuple[str, ...]
    """Tasks of eval/run.py for cells that are benchmarked."""

    @property
    def forks(self) -> tuple[Fork, ...]:
        """Those of all blocks."""
        return tuple(fork for block in self.blocks for fork in block)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Those of all cells, each once."""
        return tuple({cell.contender.name: cell.contender for cell in self.cells}.values())

    def comparisons_after(self, steps: int) -> dict[str, tuple[tuple[str, str], ...]]:
        """Returns the comparisons of forks of so many steps: both contenders have them, and differ by then."""
        cells = {cell.contender.name: cell.contender for cell in self.cells if steps in cell.lengths}
        found = {
            family: tuple(
                (one, other)
                for one, other in pairs
                if one in cells and other in cells and cells[one].within(steps) != cells[other].within(steps)
            )
            for family, pairs in self.comparisons.items()
        }
        return {family: pairs for family, pairs in found.items() if pairs}

    def setting(self, text: str, steps: int, fork: Fork) -> str:
        """Returns what tells forks from those of another text, model, base, length, shift or learning rate."""
        own = [] if fork.shift is None else [fork.shift.to_dict()]
        own += ["cooldown"] * self.cools_down
        return _hash([text, _model_parts(self.model), self.base.to_dict(), steps, self.backend, *own])

    def base_id(self, text: str, seed: int) -> str:
        """Returns what tells a base from others."""
        own = ["cuda_graph"] * self.cuda_graph
        return _hash([text, _model_parts(self.model), self.base.to_dict(), self.backend, seed, *own])

    def fits(self, fork: Fork, steps: int) -> bool:
        """Returns True if so many steps follow a fork's point within the schedule."""
        return fork.point + steps <= self.base.steps

    def runs(self, text: str) -> list[ForkRun]:
        """Returns who trains on where, in this order: within a block all forks of the first cell, then of the second.

        A length that an earlier cell has for the same contender, or that does not fit into the schedule after a point,
        is left out. Lengths are one run, measured on the way, unless forks cool down.

        Args:
            text: `ForkText.digest`.
        """
        seen: set[str] = set()
        found = []
        for block in self.blocks:
            for cell in self.cells:
                for fork in block:
                    ids = self._ids(text, cell, fork)
                    run = ForkRun(cell.contender, fork, ids, cell.benchmarked).without(seen)
                    seen |= set(run.ids.values())
                    alone = [replace(run, ids={steps: name}) for steps, name in run.ids.items()]
                    found += alone if self.cools_down else [run] * bool(run.ids)
        return found

    def _ids(self, text: str, cell: Cell, fork: Fork) -> dict[int, str]:
        """Returns number of steps -> id of the line."""
        what = [cell.contender.to_dict(), fork.to_dict(), *([self.benchmarks] if cell.benchmarked else [])]
        what += ["cuda_graph"] * self.cuda_graph
        return {n: _hash([self.setting(text, n, fork), *what]) for n in cell.lengths if self.fits(fork, n)}


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
    forks, common = values["forks"], values["snip"]
    _check_keys("forks", forks, _FORK_KEYS, _OPTIONAL_FORK_KEYS)
    lengths = as_lengths(forks["steps"], "forks.steps")
    cells = tuple(cell for entry in values["cells"] for cell in cells_of(entry, common, lengths))
    _check_points(forks["points"], {steps for cell in cells for steps in cell.lengths} or set(lengths), base.steps)
    names = list(dict.fromkeys(cell.contender.name for cell in cells))
    readme = tuple(values.get("readme") or ())
    _check_names("readme", readme, names)
    outcome = values.get("outcome", "held_out_plan")
    if outcome not in LOSSES:
        raise ValueError(f"outcome: got {outcome!r}; expected one of {', '.join(LOSSES)}.")
    return ForkRecipe(
        data=build(DataSection, "data", values["data"]),
        tokenizer=build(TokenizerSection, "tokenizer", values["tokenizer"]),
        train_sequences=values["train_sequences"],
        model=build(ModelSection, "model", values["model"]),
        base=base,
        backend=common.get("backend", "auto"),
        cools_down=_switch(forks, "cooldown"),
        cuda_graph=_switch(forks, "cuda_graph"),
        blocks=tuple(_blocks(forks)),
        cells=cells,
        impossible=impossible_cells(values.get("impossible") or [], common),
        comparisons=_comparisons(values.get("comparisons") or {}, names),
        readme=readme,
        outcome=outcome,
        other=_other(values),
        other_sequences=values.get("other_sequences", 0),
        benchmarks=_benchmarks(values, cells),
    )


def _benchmarks(values: Mapping[str, Any], cells: Sequence[Cell]) -> tuple[str, ...]:
    tasks = tuple(values.get("benchmarks") or ())
    if any(cell.benchmarked for cell in cells) and not tasks:
        raise ValueError("benchmarks: a cell is benchmarked, but the recipe names no task; expected e.g. [arc_easy].")
    return tasks


def _other(values: Mapping[str, Any]) -> DataSection | None:
    """Returns the other text; raises ValueError for a shift to one that is not there."""
    given = values.get("other_data")
    shifted = [entry["name"] for entry in values["forks"].get("shifts", ()) if entry and entry.get("other_text")]
    if shifted and (given is None or values.get("other_sequences", 0) <= values["data"]["validation_sequences"]):
        raise ValueError(
            f"forks.shifts: {shifted[0]}: other_text needs other_data, as data, and other_sequences above "
            "data.validation_sequences, as many of which are held out."
        )
    return None if given is None else build(DataSection, "other_data", given)


def _check_points(points: Sequence[int], lengths: Collection[int], steps: int) -> None:
    """Raises ValueError unless every point has a length that ends within the schedule, and every length a point."""
    first, shortest, longest = min(points, default=0), min(lengths), max(lengths)
    if first < 1 or max(points) + shortest > steps or first + longest > steps:
        raise ValueError(
            f"forks.points={points} with forks of {', '.join(map(str, sorted(lengths)))} steps; expected points from 1 "
            f"to {steps - shortest}, the first one at most {steps - longest}, so that forks end within the schedule "
            f"(training.steps={steps})."
        )


def _switch(forks: Mapping[str, Any], name: str) -> bool:
    given = forks.get(name, False)
    if not isinstance(given, bool):
        raise ValueError(f"forks.{name}={given!r}; expected true or false.")
    return given


def _blocks(forks: Mapping[str, Any]) -> Iterator[tuple[Fork, ...]]:
    """Yields the forks of each list of base seeds; seeds that are not in lists of their own are one block."""
    seeds = forks["base_seeds"]
    nested = [isinstance(entry, list) for entry in seeds]
    flat = [seed for entry in seeds for seed in (entry if isinstance(entry, list) else [entry])]
    if not flat or any(nested) != all(nested) or len(set(flat)) < len(flat):
        raise ValueError(
            f"forks.base_seeds={seeds}; expected different seeds, [0, 1, 2, 3], or blocks of them, [[0, 1], [2, 3]]."
        )
    shifts = [None if entry is None else build(Shift, "forks.shifts", entry) for entry in forks.get("shifts", [None])]
    for block in seeds if all(nested) else [seeds]:
        yield tuple(
            Fork(base_seed=seed, point=point, data_seed=data, shift=shift)
            for shift in shifts
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
        _check_names(f"comparisons: {family}", [name for pair in pairs for name in pair], names)
        _refuse_repeated(family, pairs)
        found[family] = tuple(pairs)
    return found


def _check_names(where: str, given: Sequence[str], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ValueError(f"{where}: {name!r} is no contender of the cells; these are {'; '.join(names)}.")


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
