"""The Hub repository and its model card: what they say of how a model was trained.

With `TrainingArguments(push_to_hub=True)` the Trainer uploads its whole output folder except `_*` and `checkpoint-*`,
so everything under `snip/` travels along by itself. The model card does not (transformers 5.23):

- Pushes during training (`hub_strategy` "every_save", "checkpoint", "all_checkpoints"): `on_push_begin`, then the
  upload in a background thread. The Trainer writes no card, so a README.md written at `on_push_begin` arrives. The
  thread reads the files as it comes to them: plan and history may be newer than the weights beside them. A save
  that finds the push before it unfinished is not pushed (unless `hub_always_push`), nor is any with "end".
- `trainer.push_to_hub()` and `trainer.save_model()`: `on_push_begin`, save, then `create_model_card` writes README.md
  anew and keeps only tags, then the upload. No event comes after `create_model_card`, so a callback alone cannot save
  its section. So the tags go through the model, the same text travels as `snip/README.md`, and
  `keep_model_card(trainer)`, one line for the user, puts it into README.md too.
- A checkpoint folder is handed to the background thread before `on_save`. What `on_save` writes at once arrives all
  the same, because the thread uploads the model first; only what `on_push_begin` writes is certain to arrive.

A Hub that cannot be reached: `Trainer.__init__` raises (it creates the repository). Pushes during training fail without
a word in their background thread and training goes on; `trainer.push_to_hub()` afterwards raises, with everything
still in the output folder, so that calling it again is enough.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import yaml
from huggingface_hub import ModelCard
from torch import nn

from ..config import POLICIES
from ..estimation.coverage import Coverage
from ..json_io import open_regular
from ..numerics.formats import FORMATS
from ..planning.forward_shares import forward_shares
from ..planning.plan import PrecisionPlan
from ..records.coverage import Counted
from ..records.events import Event, Refresh
from ..records.history import read_history
from ..records.run_folder import FOLDER
from ..schedule_checks import read_shares, shares_text
from ..text import printable

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import Trainer

_BEGIN = "<!-- snip-hf: this section is written anew at every push -->"
_END = "<!-- snip-hf: end -->"
_SECTION = re.compile(re.escape(_BEGIN) + r".*?" + re.escape(_END), re.DOTALL)
# Characters of a name and of a message, and bytes of a model card.
_NAME, _MESSAGE, _MOST_BYTES = 60, 1000, 2**24
# Kinds of weights that a card names.
_MOST_KINDS = 8
_NOT_CODE = str.maketrans("", "", "`|")


@runtime_checkable
class _WritesSection(Protocol):
    """A SnipCallback, as seen from here."""

    def write_card_section(self) -> list[str]:
        """Writes `snip/README.md` and returns the card's tags; none where there is no run to speak of."""


def prepare_push(output_dir: str | os.PathLike[str], model: nn.Module, *, arithmetic: str) -> None:
    """Makes OUTPUT and the model ready to be pushed: tags, `snip/README.md`, and the section in README.md.

    The callback calls this in `on_push_begin`, on the process that writes (`state.is_world_process_zero`) and after
    `snip/plan.json` and `snip/history.jsonl` are up to date. It may be called any number of times. It never raises for
    a file that is missing or broken: training does not end because of a model card; a warning says what is wrong.

    Args:
        output_dir: `args.output_dir`.
        model: the `model` that the event hands over; the Trainer reads the tags from this object.
        arithmetic: how the products were computed (`Backend.arithmetic`).
    """
    with _warning_instead_of_error():
        tags = write_section(Path(output_dir), model, arithmetic)
        _put_section_into_card(Path(output_dir), tags)


def write_section(output_dir: Path, model: nn.Module, arithmetic: str) -> list[str]:
    """Writes `snip/README.md` from the plan and the history beside it, tags the model, and returns the tags.

    Raises:
        OSError, ValueError: a file is missing or broken.
    """
    plan = PrecisionPlan.load(output_dir / FOLDER / "plan.json")
    tag_model(model, plan)
    history = read_history(output_dir / FOLDER / "history.jsonl")
    _write(output_dir, "snip/README.md", model_card_section(plan, history, arithmetic=arithmetic))
    return model_tags(plan)


def tag_model(model: nn.Module, plan: PrecisionPlan) -> None:
    """Adds `model_tags(plan)` to the tags that a model hands to its model card; tags that it has stay.

    `Trainer.push_to_hub` and `model.push_to_hub` read them. `prepare_push` calls this; the callback also calls it in
    `on_train_end`, for a user who goes on with `model.push_to_hub` (which uploads the model alone, without `snip/`).
    Not earlier: a `model_init` gives the Trainer a new model when training begins.
    """
    present = list(getattr(model, "model_tags", None) or [])
    # A new list: the class may hold one that all its instances share.
    model.model_tags = present + [tag for tag in model_tags(plan) if tag not in present]  # type: ignore[assignment]


def keep_model_card(trainer: Trainer) -> None:
    """Makes `trainer.create_model_card()`, and with it `push_to_hub()` and `save_model()`, keep our section.

    To be called once by whoever holds the Trainer, before the push; no callback event can do it (see above). Wraps
    `create_model_card` of this one trainer: first the Trainer's card, then the section at its end. The Trainer's
    SnipCallback writes it into `snip/README.md` before that.
    """
    create_model_card = trainer.create_model_card

    @functools.wraps(create_model_card)
    def create_and_complete(*args: Any, **kwargs: Any) -> None:
        create_model_card(*args, **kwargs)
        if trainer.is_world_process_zero():
            with _warning_instead_of_error():
                ours = [one for one in trainer.callback_handler.callbacks if isinstance(one, _WritesSection)]
                tags = [tag for one in ours for tag in one.write_card_section()]
                _put_section_into_card(Path(str(trainer.args.output_dir)), tags)

    trainer.create_model_card = create_and_complete  # type: ignore[method-assign]


def model_tags(plan: PrecisionPlan) -> list[str]:
    """Tags for the Hub: "snip-hf", then the low formats of the plan and, if it has any, "mixed-precision-training"."""
    in_plan = {name for formats in plan.assignment.values() for name in formats.values()}
    low = sorted((x for x in in_plan if FORMATS[x].is_quantized), key=lambda name: (FORMATS[name].bits, name))
    return ["snip-hf", *low, *(["mixed-precision-training"] if low else [])]


def model_card_section(plan: PrecisionPlan, history: Iterable[Event], *, arithmetic: str) -> str:
    """Markdown section on how a model was trained, for a reader who has never heard of SNIP.

    Args:
        plan: the plan in force.
        history: the events of the run.
        arithmetic: how the products were computed (`Backend.arithmetic`).
    """
    # Not kept: a history may be long.
    are_applied: list[bool] = []
    covered: Coverage | None = None
    for event in history:
        if isinstance(event, Refresh):
            are_applied.append(event.applied_step is not None)
        elif isinstance(event, Counted):
            covered = event.coverage
    rows = {
        "policy": _as_code(plan.provenance.policy),
        "target": _target(plan),
        "attained by the plan in force": _attained(plan),
        **({} if covered is None else _covered(covered, plan)),
        "refreshes of the plan": f"{sum(are_applied)} applied of {len(are_applied)}",
        "arithmetic": arithmetic,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"{_BEGIN}\n{_HEAD.format(formats=_formats(plan))}\n\n| | |\n|---|---|\n{table}\n\n{_TAIL}\n{_END}\n"


_HEAD = """## How this model was trained

The linear layers inside the transformer blocks were trained in low precision (at the end: {formats}), as a plan says.
The plan was made by snip-hf, a package for SNIP ([arXiv:2602.01410](https://arxiv.org/abs/2602.01410))."""

_TAIL = """This is an ordinary checkpoint: nothing in it is quantized, and it loads with plain `transformers`.
The plan, layer by layer, is in `snip/plan.json`, its history in `snip/history.jsonl`."""


def _formats(plan: PrecisionPlan) -> str:
    """Returns the labels of the formats of a plan, the least precise first."""
    used = {FORMATS[name] for formats in plan.assignment.values() for name in formats.values()}
    return ", ".join(format.label for format in sorted(used, key=lambda format: (format.bits, format.name)))


def _as_code(name: str) -> str:
    """Returns a name in a cell of a table, where nothing of it is Markdown or HTML."""
    # No escape works within backquotes; the two characters that end them, or the cell, are left out.
    return f"`{printable(name, _NAME).translate(_NOT_CODE)}`"


def _as_text(name: str) -> str:
    """Returns a name in a line of text, where nothing of it is Markdown or HTML."""
    return re.sub(r"[\\`*\[\]<>&|!]", r"\\\g<0>", printable(name))


def _target(plan: PrecisionPlan) -> str:
    fraction, config = plan.provenance.target_fp4_fraction, plan.provenance.config or {}
    speedup = config.get("target_linear_speedup")
    policy = POLICIES.get(plan.provenance.policy)
    if policy is not None and not policy.aims_at_share:
        return "none"
    if isinstance(speedup, float | int):
        return f"linears at {speedup:g} times BF16's speed or more"
    if fraction is None:
        return "none"
    of = "the linear FLOPs" if forward_shares(plan) is None else "the forward GEMMs' FLOPs"
    text = shares_text(read_shares(config.get("target_fp4_fraction")) or fraction, ".1%")
    return f"at least {text} of {of} in FP4"


def _covered(found: Coverage, plan: PrecisionPlan) -> dict[str, str]:
    """Returns what the plan covers of the model, and what it does not and why."""
    rest = [f"{_as_text(kind)} {share:.1%} ({_as_text(reason)})" for (kind, reason), share in found.by_kind().items()]
    return {
        "coverage": f"the plan decides on {found.share:.1%} of the model's matmul FLOPs (output head and attention "
        f"products aside), which makes {found.share * plan.fp4_fraction:.1%} of all of them in FP4",
        **({"not covered": "; ".join(rest[:_MOST_KINDS])} if rest else {}),
    }


def _attained(plan: PrecisionPlan) -> str:
    text = f"{plan.fp4_fraction:.1%} of the linear FLOPs in FP4 (not a reduction of FLOPs)"
    forward = forward_shares(plan)
    if forward is not None:
        text = f"{text}, {forward.fp4_fraction:.1%} of the forward GEMMs alone"
    speedup = plan.linear_speedup()
    if speedup is not None:
        text = f"{text}, linears at {speedup:.2f} times BF16's speed"
    if len(plan.stages) == 1:
        return text
    return f"{text}; {min(plan.stage_fp4_fractions):.1%} or more in each of {len(plan.stages)} stages"


def _read_text(path: Path) -> str:
    """Returns the text of a card; raises OSError for what is no file, and ValueError for what is larger than any."""
    with open_regular(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES} bytes, which no model card is.")
    return data.decode("utf-8-sig").replace("\r\n", "\n")


def _put_section_into_card(output_dir: Path, tags: Iterable[str] = ()) -> None:
    """Puts the text of `snip/README.md` into README.md: in place of its earlier version, else at the end."""
    source = output_dir / FOLDER / "README.md"
    if not source.exists():
        raise FileNotFoundError(
            f"{source} does not exist. A run with a SnipCallback writes it, when it pushes or after it has trained."
        )
    section = _read_text(source).strip()
    path = output_dir / "README.md"
    if path.exists():
        card = _read_text(path)
    else:
        card = f"---\nlibrary_name: transformers\n---\n\n# {_as_text(output_dir.absolute().name)}\n"
    # A function, so that a backslash in the section stays one.
    card, replaced = _SECTION.subn(lambda _: section, card, count=1)
    if not replaced:
        card = f"{card.rstrip()}\n\n{section}\n"
    _write(output_dir, "README.md", _with_tags(card, tags))


def _with_tags(card: str, tags: Iterable[str]) -> str:
    try:
        parsed = ModelCard(card)
    except TypeError as error:  # of metadata of another type than it expects, such as `tags: 7`
        raise ValueError(f"the metadata of README.md cannot be read: {error}.") from error
    present = parsed.data.get("tags") or []
    missing = [tag for tag in tags if tag not in present]
    if not missing:
        return card
    parsed.data["tags"] = [*present, *missing]
    return str(parsed.content)


def _write(output_dir: Path, name: str, text: str) -> None:
    """Writes in one stroke: a push that runs in the background finds the old text or the new one."""
    # "_*" in the top folder is what the Trainer never uploads.
    temporary = output_dir / f"_snip_hf.{os.getpid()}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, output_dir / name)


@contextlib.contextmanager
def _warning_instead_of_error() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError) as error:
        logger.warning(
            "The model card does not say, or no longer, how the model was trained: %s", printable(error, _MESSAGE)
        )
