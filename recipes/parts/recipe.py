"""A recipe: one training run as YAML with a base and overrides, merged and checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import TrainingArguments

from snip_hf import SnipConfig

SOURCES = ("python-stdlib", "files", "hub")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a new one (`model_type` and `config`) or a trained one (`name_or_path`)."""

    name_or_path: str | None = None
    """Hub name or folder of a trained causal LM to continue from."""
    model_type: str | None = None
    """Architecture of a new model as transformers names it, e.g. "llama"."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the architecture's config; vocabulary size and special tokens follow the tokenizer."""
    dtype: str = "float32"
    """Dtype of the parameters (master weights); `training.bf16` makes computations BF16."""
    attn_implementation: str | None = None
    """Name as in transformers, e.g. "sdpa"; None: its default."""
    lora: dict[str, Any] | None = None
    """Fields of PEFT's LoraConfig: trains adapters on the frozen model; None trains the model."""

    def __post_init__(self) -> None:
        if (self.name_or_path is None) == (self.model_type is None):
            raise ValueError(
                f"model: got name_or_path={self.name_or_path!r} and model_type={self.model_type!r}; expected exactly "
                "one of them. Set the other to null."
            )


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """The tokenizer: a given one, one trained on the training text, or (by default) the trained model's."""

    name_or_path: str | None = None
    """Hub name or folder of a tokenizer."""
    vocab_size: int | None = None
    """Train a byte-level BPE of at most this many tokens on the training text."""
    train_documents: int | None = None
    """Train on this many documents from the start; None: all (a stream needs a number)."""
    eos_token: str = "<|endoftext|>"
    """End-of-document token of a trained tokenizer."""

    def __post_init__(self) -> None:
        if self.name_or_path is not None and self.vocab_size is not None:
            raise ValueError(
                f"tokenizer: got both name_or_path={self.name_or_path!r} and vocab_size={self.vocab_size}; the first "
                "takes a tokenizer, the second trains one. Set one of them to null."
            )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The text, its held-out part, and the sequence length."""

    source: str
    """"python-stdlib" (the standard library of the running Python), "files" or "hub"."""
    files: tuple[str, ...] = ()
    """source=files: paths or globs (`**` too) of text, .jsonl/.json or .parquet files, all of one kind."""
    dataset: str | None = None
    """source=hub: name of the dataset."""
    dataset_config: str | None = None
    """source=hub: its configuration, e.g. "wikitext-2-raw-v1"."""
    split: str = "train"
    """source=hub: split to train on."""
    validation_files: tuple[str, ...] = ()
    """Held-out files; excluded from `files` if a glob there matches them too."""
    validation_split: str | None = None
    """source=hub: held-out split."""
    validation_fraction: float | None = None
    """Share of documents to hold out, chosen by a hash of the text, so that equal documents stay on one side."""
    validation_sequences: int = 256
    """Evaluate on at most this many sequences from the start of the held-out text."""
    text_column: str = "text"
    """Column of the text in .jsonl, .parquet and Hub data (text files have the one column "text")."""
    sample_by: str = "document"
    """Text files: "document" (a file is one), "paragraph" (ended by a blank line) or "line"."""
    document_separator: str | None = None
    """Cut text into documents at lines that consist of this, e.g. "<|endoftext|>"."""
    streaming: bool = False
    """Read during training, in the source's order, instead of preparing (and shuffling) all data first."""
    sequence_length: int = 1024
    """Tokens in a packed sequence."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source!r} is not known; expected one of {', '.join(SOURCES)}.")
        self._check_source()
        held_out = {name: getattr(self, name) for name in _HELD_OUT if getattr(self, name)}
        if len(held_out) != 1:
            raise ValueError(
                f"data: got {held_out or 'no held-out data'}; expected exactly one of {', '.join(_HELD_OUT)}."
            )
        if self.validation_fraction is not None and not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} is not between 0 and 1; e.g. 0.01 holds out 1%."
            )
        if self.sample_by not in ("document", "paragraph", "line"):
            raise ValueError(f"data.sample_by={self.sample_by!r} is not known; expected document, paragraph or line.")
        for name in ("validation_sequences", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} is too small; expected at least 1.")

    def _check_source(self) -> None:
        """Raises ValueError unless exactly the keys of the chosen source are given."""
        needs = {"files": ("files",), "hub": ("dataset",)}.get(self.source, ())
        owner = {"files": "files", "validation_files": "files", "dataset": "hub", "dataset_config": "hub",
                 "validation_split": "hub"}  # fmt: skip
        for name in needs:
            if not getattr(self, name):
                raise ValueError(f"data.source={self.source!r} needs data.{name}, which is not given.")
        for name, source in owner.items():
            if getattr(self, name) and source != self.source:
                raise ValueError(f"data.{name} belongs to data.source={source!r}, but the source is {self.source!r}.")


_HELD_OUT = ("validation_files", "validation_split", "validation_fraction")


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Benchmarks to run on the trained model through `eval/run.py`."""

    tasks: tuple[str, ...] = ("arc_easy", "arc_challenge", "mmlu")
    """Tasks as `eval/run.py` names them."""
    data_dir: str | None = None
    """Folder of local benchmark files; None: the Hub's; benchmarks are skipped if it cannot be reached."""
    limit: int | None = None
    """Questions per task (per subject for MMLU); None: all."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. `training` holds keywords of `transformers.TrainingArguments`; `snip` is None in a plain run."""

    model: ModelSection
    tokenizer: TokenizerSection
    data: DataSection
    training: dict[str, Any]
    snip: SnipConfig | None = None
    eval: EvalSection | None = None
    cpu_threads: int | None = None
    """Threads on a machine without GPU; None: its physical cores, divided among its processes."""

    def __post_init__(self) -> None:
        if self.tokenizer.name_or_path is None and self.tokenizer.vocab_size is None and self.model.model_type:
            raise ValueError(
                "tokenizer: a new model needs a tokenizer; give name_or_path (a trained one) or vocab_size (train one)."
            )
        if self.tokenizer.vocab_size is not None and self.model.name_or_path:
            raise ValueError(
                f"tokenizer.vocab_size={self.tokenizer.vocab_size} trains a new tokenizer, but model.name_or_path="
                f"{self.model.name_or_path!r} was trained with its own. Set tokenizer.vocab_size to null."
            )
        if self.data.streaming and self.tokenizer.vocab_size is not None and self.tokenizer.train_documents is None:
            raise ValueError(
                "tokenizer.train_documents is null: training a tokenizer on a stream needs a number of documents."
            )
        if self.data.streaming and self.training.get("max_steps", -1) < 1:
            raise ValueError("data.streaming has no length: set training.max_steps to the number of optimizer steps.")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, merges it over its `base` files and the overrides over all, and checks the result.

    Args:
        path: YAML file with the keys of `Recipe` and, optionally, `base`: another recipe, relative to this file.
        overrides: `dotted.key=YAML value`, e.g. `training.max_steps=10`; later ones win.

    Raises:
        ValueError: an unknown key (the message lists the known ones), a missing section, or a value out of range.
        TypeError: a value of the wrong type.
    """
    values = read_values(path, overrides)
    values.setdefault("training", {})
    _check_keys("training", values["training"], [f.name for f in dataclasses.fields(TrainingArguments) if f.init])
    values["training"] = {"output_dir": f"runs/{path.stem}"} | values["training"]
    builders = {"model": ModelSection, "tokenizer": TokenizerSection, "data": DataSection, "eval": EvalSection}
    for name, section in builders.items():
        if values.get(name) is not None:
            values[name] = build(section, name, values[name])
    if values.get("snip") is not None:
        values["snip"] = SnipConfig.from_dict(_mapping("snip", values["snip"]))
    return build(Recipe, "recipe", values)


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe as data for JSON, with every default written out."""
    values = dataclasses.asdict(recipe)
    values["snip"] = recipe.snip.to_dict() if recipe.snip else None
    return values


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a YAML file's keys, merged over its `base` and under the overrides, unchecked."""
    values = _read(path)
    for override in overrides:
        values = _merged(values, _parse_override(override))
    return values


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: PyYAML alone reads `1e-3` as a string, and `no` (a value of `eval_strategy`) as false."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the merged keys of a recipe file and its bases; `above` are the recipes based on it, outermost first."""
    chain = (*above, path)
    if path.resolve() in [recipe.resolve() for recipe in above]:
        raise ValueError(f"base: the recipe is its own base ({' -> '.join(map(str, chain))}). Take one `base:` out.")
    values = _mapping(str(path), _parsed(str(path), path.read_text(encoding="utf-8")))
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise TypeError(f"base: got {base!r} in {path}; expected the path of another recipe, relative to this one.")
    return _merged(_read(path.parent / base, chain), values)


def _parsed(where: str, text: str) -> Any:
    """Returns a parsed YAML text; `where` names it in errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        tabs = " Indent with spaces, not tabs." if "\t" in text else ""
        raise ValueError(f"{where}{line}: this is no YAML ({error.problem}).{tabs}") from error


def _parse_override(text: str) -> dict[str, Any]:
    """`a.b=1` -> {"a": {"b": 1}}."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(
            f"--override {text!r} is not understood; expected dotted.key=value, e.g. training.max_steps=10."
        )
    parsed = _parsed(f"--override {key}", value)
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` overridden by `over`: mappings are merged, all other values replaced."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: got {value!r}; expected keys with values (a YAML mapping).")
    return dict(value)


def _check_keys(name: str, values: object, known: Sequence[str]) -> None:
    unknown = [key for key in _mapping(name, values) if key not in known]
    if unknown:
        raise ValueError(f"{name}: the key {unknown[0]!r} is not known; known keys are {', '.join(known)}.")


Section = TypeVar("Section")


def build(section: type[Section], name: str, values: object) -> Section:
    """Builds a section's dataclass from YAML data: known keys only, each of its annotated type."""
    fields = {f.name: f for f in dataclasses.fields(section)}  # type: ignore[arg-type]
    _check_keys(name, values, list(fields))
    values = _mapping(name, values)
    for key, f in fields.items():
        if key not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name}: the key {key!r} is missing; known keys are {', '.join(fields)}.")
    return section(**{key: _typed(f"{name}.{key}", value, str(fields[key].type)) for key, value in values.items()})


_TYPES = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict, "None": type(None)}


def _typed(name: str, value: Any, annotation: str) -> Any:
    """Returns the value if it fits the annotation (lists become tuples). Sections that are already built pass."""
    if dataclasses.is_dataclass(value):
        return value
    if annotation.startswith("tuple") and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return tuple(value)
    for part in annotation.split(" | "):
        accepted = _TYPES.get(part.partition("[")[0], ())
        if isinstance(value, accepted) and (not isinstance(value, bool) or part == "bool"):
            return value
    raise TypeError(f"{name}={value!r} has type {type(value).__name__}; expected {annotation}.")
