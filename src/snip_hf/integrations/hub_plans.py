"""Plans on the Hub: pushed to a repository, and read from one."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from ..planning.plan import PrecisionPlan
from ..records.run_folder import FOLDER
from ..text import printable
from .card_text import new_card, read_card, repository_name, with_metadata, with_section
from .model_card import CITATION, as_table, as_text, model_tags, plan_rows

_FILE = "plan.json"
_IN_REPOSITORY = f"{FOLDER}/{_FILE}"
_MARKS = ("<!-- snip-hf: the plan; this section is written anew by push_plan -->", "<!-- snip-hf: end of the plan -->")


def load_plan(
    repo_or_dir: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    api: HfApi | None = None,
) -> PrecisionPlan:
    """Reads the plan of a run: from its folder, from a plan file, or from a repository of the Hub.

    Args:
        repo_or_dir: the Trainer's output_dir, its folder `snip`, a plan file, or the name of a repository, such as
            "user/model". What is there on disk goes before the Hub.
        revision: branch, tag or commit of the repository.
        token: for the Hub. None: the one that you are logged in with.
        api: a client of another Hub.

    Raises:
        FileNotFoundError: there is no such folder, and the Hub has no plan under this name or cannot be reached.
        ValueError: what is there is not exactly a plan.
    """
    path = Path(repo_or_dir)
    if os.path.lexists(path):
        return PrecisionPlan.load(_plan_file(path))
    name = repository_name(os.fspath(repo_or_dir))
    if name is None:
        raise FileNotFoundError(
            f"{printable(repo_or_dir)} does not exist, and is no name of a repository; expected the folder of a run, a "
            "plan file, or a name such as 'user/model'."
        )
    try:
        file = (api or HfApi()).hf_hub_download(name, _IN_REPOSITORY, revision=revision, token=token)
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"The repository {name!r} has no {_IN_REPOSITORY}, or it cannot be reached: {printable(error, 600)} "
            "Plans are in repositories with the tag 'snip-plan'."
        ) from error
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise FileNotFoundError(
            f"There is no folder {name!r} here, and no repository of this name could be read: {printable(error, 600)}"
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
    """Uploads a plan, with a card and tags to find it by, in one commit; returns the commit's address.

    A repository that is not there is created. In one that is there, the rest of its card stays.

    Args:
        plan: a plan, a plan file, or the folder of a run.
        repo_id: name of the repository, such as "user/plans-for-llama".
        base_model: name on the Hub of the model that the plan is for. None: the one that the plan names, if it is one
            of the Hub's.
        private: whether a repository that is created is private. None: as your account has it.
        revision: branch to commit to. None: the main one.
        token: as in `load_plan`.
        api: as in `load_plan`.

    Raises:
        OSError, ValueError: the plan cannot be read, or the card that is there has no readable metadata.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses or cannot be reached.
    """
    if not isinstance(plan, PrecisionPlan):
        plan = PrecisionPlan.load(_plan_file(Path(plan)))
    base_model = base_model or repository_name(plan.provenance.model_name)
    hub = api or HfApi()
    name = hub.create_repo(repo_id, exist_ok=True, private=private, token=token).repo_id
    try:
        card = read_card(Path(hub.hf_hub_download(name, "README.md", revision=revision, token=token)))
    except EntryNotFoundError:
        card = new_card(name.rpartition("/")[2], "snip-hf")
    card = with_section(card, _section(plan, name, base_model), _MARKS)
    card = with_metadata(card, model_tags(plan), base_model)
    with TemporaryDirectory() as folder:
        file = Path(folder) / _FILE
        plan.save(file)
        content = file.read_bytes()
    operations = [CommitOperationAdd(_IN_REPOSITORY, content), CommitOperationAdd("README.md", card.encode())]
    message = f"Plan of step {plan.provenance.step} by snip-hf"
    commit = hub.create_commit(name, operations, commit_message=message, revision=revision, token=token)
    return str(commit.commit_url)


def _plan_file(path: Path) -> Path:
    """Returns the plan file that a path on disk stands for.

    Raises:
        FileNotFoundError: a folder without one.
    """
    if not path.is_dir():
        return path
    for found in (path / FOLDER / _FILE, path / _FILE):
        if found.exists():
            return found
    raise FileNotFoundError(
        f"{printable(path)} has neither {_IN_REPOSITORY} nor {_FILE}; expected the output folder of a run with "
        "SnipCallback, or its folder snip."
    )


def _section(plan: PrecisionPlan, name: str, base_model: str | None) -> str:
    rows = {
        **({} if base_model is None else {"for the model": as_text(base_model)}),
        "layers": str(len(plan.assignment)),
        **plan_rows(plan),
    }
    usage = f"""```python
from snip_hf import SnipCallback, SnipConfig, load_plan

load_plan("{name}").save("plan.json")
callback = SnipCallback(SnipConfig(fixed_plan="plan.json"))  # trains in these formats from the first step
```"""
    head = f"""## Precision plan

`{_IN_REPOSITORY}` names the number format of each matrix product of the linear layers in training, layer by layer. It
was made by snip-hf, a package for SNIP ([arXiv:2602.01410](https://arxiv.org/abs/2602.01410))."""
    return "\n\n".join([f"{_MARKS[0]}\n{head}", as_table(rows), usage, f"{CITATION}\n{_MARKS[1]}"])
