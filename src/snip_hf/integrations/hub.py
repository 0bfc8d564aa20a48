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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import yaml
from torch import nn

from ..planning.plan import PrecisionPlan
from ..records.history import read_history
from ..records.run_folder import FOLDER
from ..text import printable
from .card_text import base_model_of, new_card, read_card, with_metadata, with_section
from .model_card import MARKS, Training, model_card_section, model_tags, with_figures_from_the_top

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import Trainer

# Characters of a message.
_MESSAGE = 1000


@runtime_checkable
class _WritesSection(Protocol):
    """A SnipCallback, as seen from here."""

    def write_card_section(self) -> list[str]:
        """Writes `snip/README.md` and returns the card's tags; none where there is no run to speak of."""


def prepare_push(output_dir: str | os.PathLike[str], model: nn.Module, training: Training) -> None:
    """Makes OUTPUT and the model ready to be pushed: tags, `snip/README.md`, and the section in README.md.

    The callback calls this in `on_push_begin`, on the process that writes (`state.is_world_process_zero`) and after
    `snip/plan.json` and `snip/history.jsonl` are up to date. It may be called any number of times. It never raises for
    a file that is missing or broken: training does not end because of a model card; a warning says what is wrong.

    Args:
        output_dir: `args.output_dir`.
        model: the `model` that the event hands over; the Trainer reads the tags from this object.
        training: what the record of the run does not hold.
    """
    with _warning_instead_of_error():
        tags = write_section(Path(output_dir), model, training)
        _put_section_into_card(Path(output_dir), tags, base_model_of(model))


def write_section(output_dir: Path, model: nn.Module, training: Training) -> list[str]:
    """Writes `snip/README.md` from the plan and the history beside it, tags the model, and returns the tags.

    Raises:
        OSError, ValueError: a file is missing or broken.
    """
    plan = PrecisionPlan.load(output_dir / FOLDER / "plan.json")
    tag_model(model, plan)
    history = read_history(output_dir / FOLDER / "history.jsonl")
    _write(output_dir, "snip/README.md", model_card_section(plan, history, training))
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
                # The Trainer's card names the base model itself.
                _put_section_into_card(Path(str(trainer.args.output_dir)), tags, None)

    trainer.create_model_card = create_and_complete  # type: ignore[method-assign]


def _put_section_into_card(output_dir: Path, tags: Iterable[str], base_model: str | None) -> None:
    """Puts the text of `snip/README.md` into README.md: in place of its earlier version, else at the end."""
    source = output_dir / FOLDER / "README.md"
    if not source.exists():
        raise FileNotFoundError(
            f"{source} does not exist. A run with a SnipCallback writes it, when it pushes or after it has trained."
        )
    section = with_figures_from_the_top(read_card(source))
    path = output_dir / "README.md"
    card = read_card(path) if path.exists() else new_card(output_dir.absolute().name, "transformers")
    _write(output_dir, "README.md", with_metadata(with_section(card, section, MARKS), tags, base_model))


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
