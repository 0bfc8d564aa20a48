"""Compares policies and formats by training each from equal starts, and prints paired differences of the loss.

    python -m eval.compare run eval/compare.yaml --output runs/compare.jsonl --workers 2
    python -m eval.compare report eval/compare.yaml runs/compare.jsonl
    python -m eval.compare text eval/compare.yaml --cache runs/text    # only prepares the tokens

A cell is one contender with one seed. All contenders of a seed start from the same weights and optimizer state, and see
the same sequences in the same order. The start is a checkpoint or a new model, trained for `base_steps` unquantized
steps; a seed decides the weights of a new model, the order of the data and all random rounding.

`run` trains the cells that have no line in the output yet and appends one JSON line per cell, so repeat the command
after an interruption; a cell that was cut off continues from its last state in the cache. Any number of processes
may share an output: each takes the next free cell, under a lock that ends with its process. `report` prints two
Markdown tables: each contender against the reference, and the planned comparisons of the config, with a test of
equivalence if they have a margin. Each table has p values without and with Holm's correction over its rows.

The config has the sections `model`, `tokenizer` and `data` of a recipe (recipes/README.md), and:

    training     fields of `TrainingSection` below
    seeds        a list
    snip         fields of SnipConfig that all contenders share
    contenders   name -> fields of SnipConfig that are its own; null: unquantized (BF16 autocast on a GPU)
    reference    the contender that all others are compared with
    comparisons  optional list of {contender, against, margin}; margin in percent of the loss

If the column `data.text_column` has chats (lists of messages with role and content), a sequence is one chat in the
tokenizer's chat template, padded, and only its last message has a loss.

$NAME in a path is an environment variable.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

# Before transformers, because it hides the warnings of torchao's import.
import snip_hf  # noqa: F401

# isort: split
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from snip_hf import SnipConfig, SnipController, restore_model
from snip_hf.cli import add_import, import_modules
from snip_hf.extras import needed_by
from snip_hf.policies.registry import policy_of
from snip_hf.records.events import Refresh

from .paired import Paired, holm
from .scoring.rows import git_commit

with needed_by("eval.compare"):
    from recipes.parts.data import Documents, load_documents, load_tokenizer, pack
    from recipes.parts.model import build_model
    from recipes.parts.recipe import DataSection, ModelSection, TokenizerSection, build, read_values

Line = dict[str, Any]
Section = TypeVar("Section", ModelSection, TokenizerSection, DataSection)
DECAYS = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Training settings of all contenders: AdamW, linear warmup, one schedule over `base_steps` + `steps`."""

    steps: int
    """Steps of a cell."""
    base_steps: int = 0
    """Unquantized steps before them, once per seed."""
    measure_at: list[int] = field(default_factory=list)
    """Further steps of a cell after which the held-out loss is measured."""
    sequences: int = 8
    """Sequences per step."""
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay: str = "cosine"
    """"cosine" (to a tenth), "linear" (to 0) or "constant"."""
    weight_decay: float = 0.1
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    compile: bool = False
    """Compile decoder layers one by one."""

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ValueError(f"training.decay={self.decay!r} is not known; expected one of {', '.join(DECAYS)}.")
        if self.steps < 1 or self.base_steps < 0 or self.sequences < 1:
            raise ValueError(
                f"training: got steps={self.steps}, base_steps={self.base_steps}, sequences={self.sequences}; expected "
                "at least 1, 0 and 1."
            )
        if wrong := [step for step in self.measure_at if not 0 < step < self.steps]:
            raise ValueError(f"training.measure_at: step {wrong[0]} is outside 1 to {self.steps - 1}.")

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 1, relative to the highest."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        done = (step - 1 - self.warmup_steps) / max(1, self.base_steps + self.steps - self.warmup_steps)
        if self.decay == "cosine":
            return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        return 1 - done if self.decay == "linear" else 1.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A planned comparison of two contenders."""

    contender: str
    against: str
    margin: float | None = None
    """Percent of the loss within which the two count as equal; None: no test of equivalence."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A comparison: the setting, the contenders and the planned tests."""

    model: ModelSection
    tokenizer: TokenizerSection
    data: DataSection
    training: TrainingSection
    seeds: list[int]
    contenders: dict[str, Any]
    reference: str
    snip: dict[str, Any] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = [self.reference, *(name for pair in self.comparisons for name in (pair.contender, pair.against))]
        for name in named:
            if name not in self.contenders:
                raise ValueError(f"{name!r} is not a contender; known are {', '.join(self.contenders)}.")
        for name in self.contenders:
            snip, steps = self.snip_config(name, 0), self.training.steps
            if snip is None or not policy_of(snip).needs_probe:
                continue
            if (applied := snip.first_refresh_in(steps) + snip.apply_delay) >= steps:
                raise ValueError(
                    f"contenders.{name}: the first plan would be applied after step {applied} of {steps} "
                    "(first_refresh + apply_delay). Raise training.steps, or lower first_refresh or apply_delay."
                )

    def snip_config(self, contender: str, seed: int) -> SnipConfig | None:
        """Returns a contender's configuration; None for an unquantized one."""
        own = self.contenders[contender]
        if own is None:
            return None
        try:
            return SnipConfig.from_dict({**self.snip, **own, "seed": seed})
        except (TypeError, ValueError) as error:
            raise type(error)(f"contenders.{contender}: {error}") from error

    def start_key(self, seed: int) -> str:
        """Returns the name of everything that decides a seed's start and data."""
        sections = [asdict(self.model), asdict(self.tokenizer), asdict(self.data)]
        course = {name: value for name, value in asdict(self.training).items() if name != "measure_at"}
        return _hashed([*sections, course, seed])

    def cell_key(self, contender: str, seed: int) -> str:
        """Returns the name of everything that decides a cell's course."""
        snip = self.snip_config(contender, seed)
        return _hashed([self.start_key(seed), None if snip is None else snip.to_dict()])


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a config.

    Raises:
        ValueError, TypeError: an unknown key, or a value that does not fit, by its name.
    """
    values = read_values(path, overrides)
    sections = {"model": ModelSection, "tokenizer": TokenizerSection, "data": DataSection, "training": TrainingSection}
    for name, section in sections.items():
        values[name] = build(section, name, values.get(name) or {})
    values["comparisons"] = [build(Comparison, "comparisons", one) for one in values.get("comparisons") or []]
    return build(Config, "config", values)


def _expanded(section: Section) -> Section:
    """Replaces $NAME in all texts by the environment's value. Keys are made of the texts as they are in the config."""
    return replace(section, **{name: _expand(value) for name, value in vars(section).items()})


def _expand(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_expand, value))
    return os.path.expandvars(value) if isinstance(value, str) else value


def _hashed(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ text and starts


@dataclass(frozen=True)
class Text:
    """Training and held-out sequences, (count, length). A token without a loss is stored as -1 less its number."""

    train: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]
    tokenizer: PreTrainedTokenizerBase

    def describe(self) -> str:
        length = self.train.shape[1]
        return f"{len(self.train)} sequences of {length} tokens for training, {len(self.held_out)} held out"

    def batch(self, step: int, sequences: int, seed: int) -> Tensor:
        """Returns the sequences of a step, counted from 1: (sequences, length). Each epoch has its own order."""
        places = []
        for place in range((step - 1) * sequences, step * sequences):
            epoch, index = divmod(place, len(self.train))
            places.append(_order(len(self.train), seed, epoch)[index])
        return torch.from_numpy(self.train[places].astype(np.int64))


@functools.cache
def _order(count: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def inputs(rows: Tensor) -> dict[str, Tensor]:
    """Returns what a model takes for rows of a text."""
    has_loss = rows >= 0
    return {"input_ids": torch.where(has_loss, rows, -1 - rows), "labels": torch.where(has_loss, rows, -100)}


def chat_rows(chats: Documents, name: str, tokenizer: PreTrainedTokenizerBase, length: int) -> np.ndarray[Any, Any]:
    """Returns one row per chat, padded with eos. Longer chats are left out; a line with their number is printed.

    Raises:
        ValueError: the tokenizer has no chat template, a chat has other keys or no answer, or no chat is short enough.
    """
    rows, padding, count = [], -1 - tokenizer.eos_token_id, 0
    for count, chat in enumerate((row["text"] for row in chats), 1):
        _check_chat(chat, f"data.text_column: row {count} of the {name} chats")
        prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        if len(whole) <= length:
            masked = [-1 - token for token in prompt]
            rows.append(masked + whole[len(prompt) :] + [padding] * (length - len(whole)))
    if not rows:
        raise ValueError(
            f"None of the {count} {name} chats has at most {length} tokens. Raise data.sequence_length, give more "
            "chats or hold out another share of them."
        )
    if len(rows) < count:
        print(
            f"{count - len(rows)} of {count} {name} chats have more than {length} tokens and are left out.", flush=True
        )
    return np.array(rows, np.int32)


def _check_chat(chat: list[dict[str, Any]], where: str) -> None:
    """Raises ValueError unless all messages have a role and content, and the last one is the assistant's."""
    for message in chat:
        keys = [key for key, value in message.items() if value is not None]  # `datasets` fills missing keys with None.
        if "role" not in keys or "content" not in message:
            raise ValueError(f"{where} has a message with the keys {', '.join(keys)}; expected role and content.")
    if (role := chat[-1]["role"]) != "assistant":
        raise ValueError(
            f"{where} ends with a message of the role {role!r}; expected an answer of the role 'assistant' at the end, "
            "the only message with a loss."
        )


def load_text(config: Config, cache: Path) -> Text:
    """Returns the packed text, prepared once per cache."""
    key = _hashed([asdict(config.data), asdict(config.tokenizer), config.model.name_or_path])
    folder = cache / f"text-{key}"
    with FileLock(cache / f"text-{key}.lock"):
        if not (folder / "tokenizer").exists():
            folder.mkdir(parents=True, exist_ok=True)
            data, model = _expanded(config.data), _expanded(config.model)
            documents = load_documents(data)
            tokenizer = load_tokenizer(_expanded(config.tokenizer), model.name_or_path, documents[0])
            if isinstance(next(iter(documents[0]), {"text": ""})["text"], str):
                dtype = np.uint16 if len(tokenizer) <= 2**16 else np.int32
                packed = pack(*documents, tokenizer, data)
                rows = [np.array(part.with_format("numpy")["input_ids"][:], dtype) for part in packed]
            else:
                chats = zip(documents, ("training", "held-out"), strict=True)
                rows = [chat_rows(part, name, tokenizer, data.sequence_length) for part, name in chats]
                rows[1] = rows[1][: data.validation_sequences]
            for name, array in zip(("train", "held_out"), rows, strict=True):
                if not (array[:, 1:] >= 0).any():  # The first token is never predicted.
                    raise ValueError(
                        f"data: no token of {name!r} has a loss; raise data.sequence_length or give answers."
                    )
                np.save(folder / f"{name}.npy", array)
            tokenizer.save_pretrained(folder / "tokenizer")
    train, held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out"))
    return Text(train, held_out, AutoTokenizer.from_pretrained(folder / "tokenizer"))


class Trainee:
    """A model in training: new, or as the checkpoint has it.

    Args:
        config: what is compared.
        text: its sequences.
        seed: decides weights and the order of the data.
        device: where it trains.
    """

    def __init__(self, config: Config, text: Text, seed: int, device: torch.device) -> None:
        self._training, self._text, self._seed, self._device = config.training, text, seed, device
        set_seed(seed)
        self.model = build_model(_expanded(config.model), text.tokenizer).to(device).train()
        # With a cache, each block is compiled for its own index: eight blocks are the limit, what follows runs eagerly.
        self.model.config.use_cache = False
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": self._training.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        betas = (0.9, self._training.adam_beta2)
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, fused=device.type == "cuda"
        )
        self._compiled = False

    def load(self, path: Path) -> dict[str, Any]:
        """Loads a state and returns what `save` got beside it."""
        state = torch.load(path, map_location=self._device, weights_only=True)
        self.model.load_state_dict(state.pop("model"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        return state

    def save(self, path: Path, **more: Any) -> None:
        """Saves the state and what else is given. One process at a time, under the lock of the start or the cell."""
        unfinished = path.with_suffix(".new")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, **more}, unfinished)
        unfinished.replace(path)

    def step(self, number: int, controller: SnipController | None = None) -> Tensor:
        """Takes a step, counted from 1 over base and cell, and returns its loss."""
        if self._training.compile and not self._compiled:
            compile_blocks(self.model)
            self._compiled = True
        for group in self.optimizer.param_groups:
            group["lr"] = self._training.learning_rate * self._training.rate(number)
        batch = inputs(self._text.batch(number, self._training.sequences, self._seed).to(self._device))
        own = number - self._training.base_steps
        if controller is not None:
            controller.capture(batch)
        with self._autocast():
            loss = self.model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._training.max_grad_norm)
        if controller is not None:
            controller.before_optimizer_step(own)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if controller is not None:
            controller.after_step(own)
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Returns the mean loss over the tokens of the held-out sequences, under the formats in force."""
        self.model.eval()
        total, tokens, count = 0.0, 0, self._training.sequences
        for first in range(0, len(self._text.held_out), count):
            rows = self._text.held_out[first : first + count].astype(np.int64)
            own = int((rows[:, 1:] >= 0).sum())
            with self._autocast():
                total += own * float(self.model(**inputs(torch.from_numpy(rows).to(self._device))).loss)
            tokens += own
        self.model.train()
        return total / tokens

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda")


def start_path(config: Config, seed: int, cache: Path) -> Path:
    return cache / f"start-{config.start_key(seed)}.pt"


def started(config: Config, text: Text, seed: int, options: argparse.Namespace) -> Trainee:
    """Returns a trainee after `base_steps`, which one process trains and all others load."""
    if config.training.base_steps:
        path = start_path(config, seed, options.cache)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                trainee = Trainee(config, text, seed, options.device)
                for step in range(1, config.training.base_steps + 1):
                    trainee.step(step)
                trainee.save(path)
    # A new one in this process too: all contenders start alike, and blocks are compiled after their conversion.
    trainee = Trainee(config, text, seed, options.device)
    if config.training.base_steps:
        trainee.load(path)
    return trainee


def compile_blocks(model: nn.Module) -> None:
    """Compiles the decoder layers one by one."""
    layers = getattr(model.config, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            for block in module:
                block.compile()


def fingerprint(model: nn.Module) -> str:
    """Returns a hash of the weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ cells


def state_path(config: Config, contender: str, seed: int, cache: Path) -> Path:
    return cache / f"cell-{config.cell_key(contender, seed)}.pt"


def train_cell(config: Config, contender: str, seed: int, text: Text, options: argparse.Namespace) -> Line | None:
    """Trains one cell, from its last state if it was cut off, and returns its line; None: the time was over.

    Raises:
        RuntimeError: the contender decides by a probe, and no refresh gave a plan.
    """
    snip, training = config.snip_config(contender, seed), config.training
    kept = state_path(config, contender, seed, options.cache)
    if kept.exists():
        trainee = Trainee(config, text, seed, options.device)
        done = trainee.load(kept)
    else:
        trainee = started(config, text, seed, options)
        done = {"step": 0, "start": fingerprint(trainee.model), "losses": {}, "shares": [], "reasons": [], "seconds": 0}
    began = time.monotonic()
    controller, events = None, []
    if snip is not None:
        controller = SnipController(trainee.model, trainee.optimizer, snip, max_steps=training.steps)
        controller.add_tracker(events.append)
    losses, shares, trained = done["losses"], done["shares"], list(done.get("training_losses", ()))
    try:
        if done["step"]:
            set_random_states(done["random"], options.device)
            if controller is not None:
                controller.load_state_dict(done["controller"])
        for number in range(done["step"] + 1, training.steps + 1):
            trained.append(trainee.step(training.base_steps + number, controller))
            shares.append(0.0 if controller is None else controller.plan.fp4_fraction)
            if number in (*training.measure_at, training.steps):
                losses[str(number)] = _finite(trainee.held_out_loss())
            is_over = time.monotonic() > options.deadline
            if number < training.steps and (is_over or number % options.keep_every == 0):
                trainee.save(
                    kept,
                    step=number,
                    start=done["start"],
                    losses=losses,
                    shares=shares,
                    training_losses=torch.stack(trained[-25:]),
                    reasons=done["reasons"] + _reasons(events),
                    seconds=done["seconds"] + time.monotonic() - began,
                    controller=None if controller is None else controller.state_dict(),
                    random=random_states(options.device),
                )
                if is_over:
                    return None
        backend = None if controller is None else controller.backend
        reasons = done["reasons"] + _reasons(events)
        if controller is not None and controller.needs_probe and controller.plan.provenance.step == 0:
            once = dict.fromkeys(reason.rstrip(".") for reason in reasons)
            raise RuntimeError(f"No refresh gave a plan: {'; '.join(once)}.")
    finally:
        if controller is not None:
            controller.close()
            restore_model(trainee.model)
    if options.save:
        folder = options.save / f"{contender}-{seed}"
        trainee.model.config.use_cache = True  # as generation expects
        trainee.model.save_pretrained(folder)
        trainee.model.config.use_cache = False
        text.tokenizer.save_pretrained(folder)
        if controller is not None:
            (folder / "snip").mkdir(exist_ok=True)
            controller.plan.save(folder / "snip" / "plan.json")
    return {
        "key": config.cell_key(contender, seed),
        "contender": contender,
        "seed": seed,
        "start": done["start"],
        "losses": losses,
        "loss_unquantized": _finite(trainee.held_out_loss()),
        "training_loss": _finite(float(torch.stack(trained[-25:]).mean())),
        "share": round(float(np.mean(shares)), 6),
        "failed_refreshes": reasons,
        "backend": backend,
        "snip": None if snip is None else snip.to_dict(),
        "seconds": round(done["seconds"] + time.monotonic() - began, 1),
        **_origin(options.device),
    }


def _reasons(events: Sequence[Any]) -> list[str]:
    return [event.reason for event in events if isinstance(event, Refresh) and event.reason]


def random_states(device: torch.device) -> list[Tensor]:
    """Returns the states of torch's generators, which dropout draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1].cpu(), device)


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _origin(device: torch.device) -> Line:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": git_commit(),
        "command": shlex.join(["python", "-m", "eval.compare", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def read_lines(path: Path) -> list[Line]:
    """Returns the complete lines of an output; [] if there is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def append(path: Path, line: Line) -> None:
    """Appends a line, after cutting off an unfinished line of a killed process."""
    with FileLock(f"{path}.lock"), path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")


@contextlib.contextmanager
def claimed(folder: Path, key: str) -> Iterator[bool]:
    """Yields whether this process has the cell; another one may be training it."""
    try:
        lock = FileLock(folder / f"cell-{key}.lock").acquire(timeout=0)
    except Timeout:
        yield False
        return
    with lock:
        yield True


def run_cells(config: Config, options: argparse.Namespace) -> int:
    """Trains the cells without a line that no other process has; returns how many failed."""
    options.cache.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    contenders, seeds = options.only or config.contenders, options.seeds or config.seeds
    cells = [(contender, seed) for seed in seeds for contender in contenders]
    text, failed = load_text(config, options.cache), 0
    print(text.describe(), flush=True)
    # In this order, also while another process trains the start, so that a cut leaves whole seeds.
    for contender, seed in cells:
        key = config.cell_key(contender, seed)
        if time.monotonic() > options.deadline:
            return _time_is_over(failed)
        with claimed(options.cache, key) as mine:
            if not mine or any(line["key"] == key for line in read_lines(options.output)):
                continue
            print(f"{contender}, seed {seed}: begins", flush=True)
            try:
                line = train_cell(config, contender, seed, text, options)
            except Exception as error:  # The other cells can still be trained.
                print(f"{contender}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                failed += 1
            else:
                if line is None:
                    return _time_is_over(failed)
                append(options.output, line)
                state_path(config, contender, seed, options.cache).unlink(missing_ok=True)
                print(f"{contender}, seed {seed}: {line['losses']}, {line['seconds']:.0f} s", flush=True)
        release(options.device)
    return failed


def _time_is_over(failed: int) -> int:
    print("Time is up; repeat the command to continue.", flush=True)
    return failed


def release(device: torch.device) -> None:
    """Frees memory and compiled code of the last cell."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ report


def differences(config: Config, lines: Sequence[Line], contender: str, against: str, step: int) -> list[float]:
    """Returns the paired differences of the held-out loss, in percent, of the seeds that both have.

    Only cells of the same start and device are paired: the last such pair of a seed. A pair in which one of the two
    diverged has no difference.
    """
    found = []
    for seed in config.seeds:
        keys = [config.cell_key(name, seed) for name in (contender, against)]
        one, other = ({(line["start"], line["device"]): line for line in lines if line["key"] == key} for key in keys)
        if both := [origin for origin in one if origin in other]:
            losses = [cells[both[-1]]["losses"].get(str(step)) for cells in (one, other)]
            if None not in losses:
                found.append(100 * (losses[0] / losses[1] - 1))
    return found


def report(config: Config, lines: Sequence[Line], step: int | None = None) -> str:
    """Returns the tables after a step of the cells, by default the last.

    Raises:
        ValueError: no cell has a line, or none was measured at this step.
    """
    step, measured = step or config.training.steps, [*config.training.measure_at, config.training.steps]
    if step not in measured:
        raise ValueError(f"--step {step}: the loss was measured after {', '.join(map(str, measured))} steps.")
    keys = {name: {config.cell_key(name, seed) for seed in config.seeds} for name in config.contenders}
    if set().union(*keys.values()).isdisjoint(line["key"] for line in lines):
        raise ValueError(f"None of the {len(lines)} lines is of this config. Repeat the --override options of the run.")
    names = [name for name in config.contenders if name != config.reference]
    found = {name: differences(config, lines, name, config.reference, step) for name in names}
    tests = {name: Paired.of(values) for name, values in found.items() if values}
    corrected = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    rows = []
    for name in names:
        cells = [line for line in lines if line["key"] in keys[name]]
        share = f"{np.mean([line['share'] for line in cells]):.1%}" if cells else "-"
        diverged = sum(line["losses"].get(str(step)) is None for line in cells)
        test = tests.get(name)
        shown = [str(test), _p(test.p), _p(corrected[name]), _number(test.detectable)] if test else ["-"] * 4
        rows.append([name, share, str(test.count if test else 0), *shown, str(diverged)])
    difference = f"loss minus {config.reference}, %"
    heads = ["contender", "in 4 bits", "pairs", difference, "p", "p, Holm", "detectable", "diverged"]
    parts = [
        f"Held-out loss under the plan after {step} steps, paired by seed: mean ± half of the 95% interval (Student's "
        "t). In 4 bits: mean over the steps. Detectable: the true difference that the test finds with power 0.8.",
        _table(heads, rows),
    ]
    if config.comparisons:
        parts.append("Planned comparisons. Equivalence: p of two one-sided tests, uncorrected.")
        parts.append(_planned(config, lines, step))
    return "\n\n".join(parts)


def _planned(config: Config, lines: Sequence[Line], step: int) -> str:
    found = [differences(config, lines, pair.contender, pair.against, step) for pair in config.comparisons]
    tests = [Paired.of(values) if values else None for values in found]
    corrected = holm([test.p if test else None for test in tests])
    rows = []
    for pair, test, p in zip(config.comparisons, tests, corrected, strict=True):
        name = f"{pair.contender} minus {pair.against}"
        if test is None:
            rows.append([name, "0", *["-"] * 6])
            continue
        equivalence = None if pair.margin is None else test.equivalence_p(pair.margin)
        margin = "-" if pair.margin is None else f"± {pair.margin:g}"
        shown = [str(test), _p(test.p), _p(p), _number(test.detectable), margin, _p(equivalence)]
        rows.append([name, str(test.count), *shown])
    heads = ["comparison", "pairs", "difference, %", "p", "p, Holm", "detectable", "margin", "p of equivalence"]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ------------------------------------------------------------------------------------------------ command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 after an error or a failed cell."""
    options = parse(arguments)
    try:
        import_modules(options.modules)
        config = load_config(options.config, options.override)
        if options.command == "report":
            if not (lines := read_lines(options.lines)):
                problem = "has no lines" if options.lines.exists() else "does not exist"
                raise ValueError(f"{options.lines} {problem}. Give the --output of `run` after its first cell.")
            print(report(config, lines, options.step))
            return 0
        if options.command == "text":
            options.cache.mkdir(parents=True, exist_ok=True)
            text = load_text(config, options.cache)
            print(f"{text.describe()}, {text.train.nbytes / 2**20:.1f} MiB: {options.cache}")
            return 0
        if unknown := [name for name in options.only or () if name not in config.contenders]:
            raise ValueError(f"--only: {unknown[0]!r} is not a contender; known are {', '.join(config.contenders)}.")
        if others := [seed for seed in options.seeds or () if seed not in config.seeds]:
            known = ", ".join(map(str, config.seeds))
            raise ValueError(f"--seeds: {others[0]} is not a seed of the config, which `report` reads: {known}.")
        return start_workers(options) if options.workers > 1 else int(run_cells(config, options) > 0)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train the cells without a line")
    run.add_argument("config", type=Path)
    run.add_argument("--output", type=Path, required=True, help="JSONL file; a line per cell is added")
    run.add_argument("--cache", type=Path, help="folder of text, starts and locks (default: OUTPUT.cache)")
    run.add_argument("--only", nargs="+", metavar="CONTENDER", help="train these (default all)")
    run.add_argument("--seeds", nargs="+", type=int, help="train these (default all)")
    run.add_argument("--workers", type=int, default=1, help="processes, spread over the GPUs (default 1)")
    run.add_argument("--minutes", type=float, default=math.inf, help="stop after this; cells keep their states")
    run.add_argument("--keep-every", type=int, default=500, metavar="N", help="keep a state of a cell every N steps")
    run.add_argument("--save", type=Path, help="folder that gets the trained models, to be scored by eval/run.py")
    run.add_argument("--device", help="default: the first GPU if there is one, else cpu")
    show = commands.add_parser("report", help="print the tables")
    show.add_argument("config", type=Path)
    show.add_argument("lines", type=Path)
    show.add_argument("--step", type=int, help="a step of training.measure_at (default: the last step)")
    prepare = commands.add_parser("text", help="prepare only the tokens, for runs with this cache")
    prepare.add_argument("config", type=Path)
    prepare.add_argument("--cache", type=Path, required=True)
    for command in (run, show, prepare):
        add_import(command)
        command.add_argument(
            "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change the config"
        )
    options = parser.parse_args(arguments)
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    if options.command == "run":
        options.deadline = time.monotonic() + 60 * options.minutes
        options.cache = options.cache or Path(f"{options.output}.cache")
        options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return options


def start_workers(options: argparse.Namespace) -> int:
    """Runs the same command in several processes; returns 1 if one of them failed."""
    gpus = torch.cuda.device_count() if options.device.type == "cuda" else 0
    processes = []
    for index in range(options.workers):
        device = f"cuda:{index % gpus}" if gpus else "cpu"
        command = [sys.executable, "-m", "eval.compare", *options.given, "--workers", "1", "--device", device]
        processes.append(subprocess.Popen(command))
    try:
        codes = [process.wait() for process in processes]
        return int(any(codes))
    finally:
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
