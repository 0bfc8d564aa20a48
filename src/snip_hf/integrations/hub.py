"""Pushes and loads plans, completes the model card of a run, and reads runs from repositories of the Hub.

With `TrainingArguments(push_to_hub=True)`, the Trainer uploads its output folder except `_*` and `checkpoint-*`, so it
includes `snip/`. The model card (README.md) needs two additions:

- A push during training calls `on_push_begin` and uploads in a background thread. The Trainer writes no card, so
  `complete_card` adds our section to README.md at that event.
- `trainer.push_to_hub()` and `trainer.save_model()` call `on_push_begin`, then `create_model_card`, which rewrites
  README.md and keeps only the tags, then upload. No event follows `create_model_card`. So we add the tags to the model,
  and the user calls `keep_model_card(trainer)` once to add the section to the new card.

If the Hub cannot be reached, `Trainer.__init__` raises an error, because it creates the repository. Pushes during
training fail silently in their thread, and training continues. A later `trainer.push_to_hub()` raises an error, but
everything is still in the output folder, so it can be called again.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from torch import nn

from ..json_io import json_bytes
from ..kernels.backend import BACKENDS
from ..parallel.sharding import compute_device
from ..planning.plan import PrecisionPlan
from ..python_state import Wrapped
from ..records.run_folder import FOLDER
from ..text import printable
from .model_card import PLAN_FILE, completed, model_tags, new_card, plan_section, repository_name, trained_section

if TYPE_CHECKING:
    from transformers import Trainer

    from ..training.controller import SnipController

logger = logging.getLogger(__name__)

# A repository, optionally with a revision.
_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
# The files of a repository that record the run, without weights.
_RECORD = (f"{FOLDER}/*.json", f"{FOLDER}/history.jsonl", "*trainer_state.json", "README.md")


def tag_model(model: nn.Module, plan: PrecisionPlan) -> None:
    """Adds `model_tags(plan)` to the tags that `Trainer.push_to_hub` and `model.push_to_hub` write.

    The callback calls it when training ends, because with `model_init` the Trainer gets a new model when it begins.
    """
    present = list(getattr(model, "model_tags", None) or [])
    # A new list, because all instances of the class may share the old one.
    model.model_tags = present + [tag for tag in model_tags(plan) if tag not in present]  # type: ignore[assignment]


def keep_model_card(trainer: Trainer) -> None:
    """Makes `create_model_card()`, which `push_to_hub()` and `save_model()` call, keep SNIP's section.

    Call it once, before the push. It wraps `create_model_card` of this trainer only.
    """
    from .trainer import SnipCallback

    def create_and_complete(create_model_card: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        create_model_card(*args, **kwargs)
        for one in trainer.callback_handler.callbacks if trainer.is_world_process_zero() else ():
            if isinstance(one, SnipCallback) and one.controller is not None:
                complete_card(Path(str(trainer.args.output_dir)), one.controller)

    Wrapped(trainer, "create_model_card", create_and_complete)


def complete_card(output_dir: Path, controller: SnipController) -> None:
    """Adds section and tags to README.md of the output folder. Call it only on the process that writes.

    A missing or broken file causes a warning, because a model card must not end training.
    """
    model = controller.model
    base_model = repository_name(getattr(getattr(model, "config", None), "_name_or_path", None))
    device = next(map(compute_device, model.parameters()), torch.device("cpu"))
    section = trained_section(
        controller.plan,
        controller.coverage,
        BACKENDS[controller.backend].arithmetic,
        torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    )
    path = output_dir / "README.md"
    # Files named "_*" in the top folder are never uploaded.
    temporary = output_dir / f"_snip_hf.{os.getpid()}.tmp"
    try:
        card = path.read_text("utf-8") if path.exists() else new_card(output_dir.absolute().name, "transformers")
        temporary.write_text(completed(card, section, model_tags(controller.plan), base_model), encoding="utf-8")
        # Atomic, because an upload may be running in the background.
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        logger.warning("snip-hf: could not add its section to the model card: %s", printable(error))


def load_plan(
    repo_or_dir: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    api: HfApi | None = None,
) -> PrecisionPlan:
    """Reads a plan from the folder of a run, from a plan file, or from a repository of the Hub.

    Args:
        repo_or_dir: the Trainer's output_dir, its folder `snip`, a plan file, or the name of a repository, such as
            "user/model". An existing path takes precedence over the Hub.
        revision: branch, tag or commit of the repository.
        token: token for the Hub. None: the token you are logged in with.
        api: client of another Hub.

    Raises:
        FileNotFoundError: there is no such path, and the Hub has no such plan or cannot be reached.
        ValueError: the file is not a valid plan.
    """
    path = Path(repo_or_dir)
    if os.path.lexists(path):
        return PrecisionPlan.load(_plan_file(path))
    name = repository_name(os.fspath(repo_or_dir))
    if name is None or path.suffix == ".json":
        raise FileNotFoundError(
            f"{printable(repo_or_dir)} does not exist and cannot be the name of a repository; expected the folder of a "
            "run, a plan file, or a name such as 'user/model'."
        )
    try:
        file = (api or HfApi()).hf_hub_download(name, PLAN_FILE, revision=revision, token=token)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise FileNotFoundError(
            f"There is no folder {name!r} here, and {PLAN_FILE} of a repository of this name could not be read: "
            f"{printable(error)} Repositories with plans have the tag 'snip-plan'."
        ) from error
    return PrecisionPlan.load(file)


def push_plan(
    plan: PrecisionPlan | str | os.PathLike[str],
    repo_id: str,
    *,
    base_model: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    api: HfApi | None = None,
) -> str:
    """Uploads a plan with a model card and tags in one commit, and returns the URL of the commit.

    Creates the repository if needed. The rest of an existing card stays.

    Args:
        plan: a plan, a plan file, or the folder of a run.
        repo_id: name of the repository, such as "user/plans-for-llama".
        base_model: name on the Hub of the model that the plan is for. None: the model that the plan names.
        private: whether a new repository is private. None: the default of your account.
        revision: branch to commit to. None: the main branch.
        token: as in `load_plan`.
        api: as in `load_plan`.

    Raises:
        OSError, ValueError: the plan, or the metadata of the existing card, cannot be read.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses or cannot be reached.
    """
    if not isinstance(plan, PrecisionPlan):
        plan = PrecisionPlan.load(_plan_file(Path(plan)))
    base_model = base_model or repository_name(plan.provenance.model_name)
    hub = api or HfApi()
    name = hub.create_repo(repo_id, exist_ok=True, private=private, token=token).repo_id
    try:
        card = Path(hub.hf_hub_download(name, "README.md", revision=revision, token=token)).read_text("utf-8")
    except EntryNotFoundError:
        card = new_card(name.rpartition("/")[2], "snip-hf")
    card = completed(card, plan_section(plan, name, base_model), model_tags(plan), base_model)
    files = {PLAN_FILE: json_bytes(plan.to_dict()), "README.md": card.encode()}
    operations = [CommitOperationAdd(path, data) for path, data in files.items()]
    message = f"Plan of step {plan.provenance.step} by snip-hf"
    commit = hub.create_commit(name, operations, commit_message=message, revision=revision, token=token)
    return str(commit.commit_url)


def _plan_file(path: Path) -> Path:
    """Returns the plan file in a folder; returns any other path unchanged.

    Raises:
        FileNotFoundError: the folder has no plan.
    """
    if not path.is_dir():
        return path
    for found in (path / PLAN_FILE, path / "plan.json"):
        if found.exists():
            return found
    raise FileNotFoundError(
        f"{printable(path)} has neither {PLAN_FILE} nor plan.json; expected the output folder of a run with "
        "SnipCallback, or its folder snip."
    )


def run_folder(name: str) -> Path:
    """Returns the folder of a run, given as a folder or as `USER/REPOSITORY[@REVISION]` on the Hub.

    Downloads the records of a run on the Hub, without weights, to the Hub's cache. An existing path takes precedence.

    Raises:
        FileNotFoundError: neither exists, or the Hub cannot be reached.
    """
    match = _REPOSITORY.fullmatch(name)
    if os.path.lexists(name) or match is None:
        return Path(name)
    try:
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=list(_RECORD)))
    except Exception as error:  # the Hub's client may raise anything
        raise FileNotFoundError(
            f"There is no folder {printable(name)} here, and no run can be read from a Hub repository of this name: "
            f"{printable(error)}"
        ) from error
