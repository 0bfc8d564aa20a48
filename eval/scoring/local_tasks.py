"""Documents for lm-eval's stock tasks, from the Hub or from files in a local folder.

Prompts, targets, metrics and aggregation are always lm-eval's own. For a local folder each stock task is included in a
small generated YAML file that replaces only the source of the documents (`custom_dataset`, here `load`). The files'
rows are mapped to the columns that the stock task expects.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.tasks import TaskManager

Row = dict[str, Any]

# Folders of the tasks offered here. lm-eval's whole index has 14,000 names and takes about 10 s to read.
_STOCK_FOLDERS = (
    "arc", "hellaswag", "lambada", "mmlu/default", "openbookqa", "piqa", "super_glue/boolq", "wikitext", "winogrande",
)  # fmt: skip
_SPLIT_FIELDS = ("training_split", "validation_split", "test_split", "fewshot_split")
_LETTERS = ["A", "B", "C", "D"]


class EvaluationError(RuntimeError):
    """An error that the user can fix; the message says how."""


@dataclass(frozen=True)
class LocalFiles:
    """The files that replace one stock dataset."""

    paths: dict[str, str]
    """Name of the split in the stock dataset -> path below the data folder."""
    read: Callable[[Path], Iterator[Row]]
    """Yields the rows of one file in the stock dataset's columns."""
    version_suffix: str = ""
    """Appended to the task version if the documents are not word for word those of the stock dataset."""


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def _mmlu(path: Path) -> Iterator[Row]:
    # newline="": the reader of the Hub's dataset keeps carriage returns inside quoted fields as well.
    with path.open(encoding="utf-8", newline="") as file:
        for question, *choices, answer in csv.reader(file):
            yield {"question": question, "choices": choices, "answer": _LETTERS.index(answer)}


def _hellaswag(path: Path) -> Iterator[Row]:
    """`query` is `activity_label: ctx_a ctx_b`; ctx_b is the beginning of a sentence in lower case, or empty.

    The stock task capitalises ctx_b, so it is found again: what follows the last end of a sentence, if it starts with a
    lower-case letter (what starts with a digit or a quotation mark comes out the same either way).
    """
    for row in _jsonl(path):
        label, context = row["query"].split(": ", 1)
        start = max(context.rfind(mark) for mark in (". ", "? ", "! ")) + 2 if re.search("[.?!] ", context) else 0
        if not context[start : start + 1].islower():
            start = len(context)
        parts = {"activity_label": label, "ctx_a": context[:start].rstrip(" "), "ctx_b": context[start:]}
        yield parts | {"endings": row["choices"], "label": str(row["gold"])}


def _piqa(path: Path) -> Iterator[Row]:
    for row in _jsonl(path):
        goal = row["query"].removeprefix("Question: ").removesuffix("\n")
        yield {"goal": goal, "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["gold"]}


def _boolq(path: Path) -> Iterator[Row]:
    for row in _jsonl(path):
        passage, question = row["query"].removeprefix("Passage: ").rsplit("\nQuestion: ", 1)
        # The stock template adds the question mark itself.
        yield {"passage": passage, "question": question.removesuffix("?"), "label": row["gold"]}


def _winogrande(path: Path) -> Iterator[Row]:
    """The stock task scores `sentence` before "_" + option, followed by the rest: here the options hold it all."""
    for row in _jsonl(path):
        first, second = row["context_options"]
        sentence = "_ " + row["continuation"]
        yield {"sentence": sentence, "option1": first, "option2": second, "answer": str(row["gold"] + 1)}


def _openbookqa(path: Path) -> Iterator[Row]:
    for row in _jsonl(path):
        choices = {"text": row["choices"], "label": _LETTERS}
        yield {"question_stem": row["query"], "choices": choices, "answerKey": _LETTERS[row["gold"]]}


def _lambada(path: Path) -> Iterator[Row]:
    yield from ({"text": f"{row['context']} {row['continuation']}"} for row in _jsonl(path))


def _wikitext(path: Path) -> Iterator[Row]:
    """Pages as the Hub's document-level dataset cuts them: a page starts at a line ` = Title = `."""
    page: list[str] = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "".join(page).strip():
                yield {"page": "\n".join(page)}
            page = []
        page.append(line)
    yield {"page": "\n".join(page)}


def _arc(name: str) -> LocalFiles:
    return LocalFiles({split: f"arc/{name}-{split}.jsonl" for split in ("train", "validation", "test")}, _jsonl)


LOCAL_FILES = {
    "arc_easy": _arc("ARC-Easy"),
    "arc_challenge": _arc("ARC-Challenge"),
    "hellaswag": LocalFiles({"validation": "hellaswag/hellaswag_val.jsonl"}, _hellaswag, "+local"),
    "piqa": LocalFiles({"validation": "piqa/piqa_validation.jsonl"}, _piqa),
    "boolq": LocalFiles({"validation": "boolq/boolq_validation.jsonl"}, _boolq),
    "winogrande": LocalFiles({"validation": "winogrande/winogrande_xl_validation.jsonl"}, _winogrande),
    "openbookqa": LocalFiles({"test": "openbookqa/openbookqa_test.jsonl"}, _openbookqa),
    "lambada_openai": LocalFiles({"test": "lambada/lambada_openai_test.jsonl"}, _lambada),
    "wikitext": LocalFiles({"test": "wikitext-2-raw/wiki.test.raw"}, _wikitext),
}


def _files_of(task: str) -> LocalFiles:
    if task in LOCAL_FILES:
        return LOCAL_FILES[task]
    subject = task.removeprefix("mmlu_")
    # "dev" holds the five few-shot examples; the stock task never reads the Hub's "validation" split.
    return LocalFiles({split: f"mmlu/{split}/{subject}_{split}.csv" for split in ("dev", "test")}, _mmlu)


def load(*, task: str, data_dir: str, needed: Sequence[str], **_metadata: Any) -> DatasetDict:
    """Returns the documents of a stock task in the stock columns. Splits without a file are left out.

    lm-eval calls this with the `dataset_kwargs` that `local_tasks` wrote, and with the task's metadata.

    Raises:
        EvaluationError: a split in `needed` has no file, or a file does not have the expected layout.
    """
    from datasets import Dataset, DatasetDict

    files = _files_of(task)
    paths = {split: Path(data_dir, relative) for split, relative in files.paths.items()}
    for split in needed:
        if split not in paths:
            raise EvaluationError(
                f"{task}: few-shot examples come from the split {split!r}, for which the local layout has no file. "
                "Use --num-fewshot 0, or leave --data-dir out to use the Hub's data."
            )
        if not paths[split].is_file():
            raise EvaluationError(
                f"{task}: {paths[split]} does not exist. Expected the layout described in eval/README.md; put the file "
                "there, leave the task out of --tasks, or leave --data-dir out to use the Hub's data."
            )
    return DatasetDict({s: Dataset.from_list(_rows(path, files.read)) for s, path in paths.items() if path.is_file()})


def _rows(path: Path, read: Callable[[Path], Iterator[Row]]) -> list[Row]:
    rows: list[Row] = []
    try:
        for row in read(path):
            rows.append(row)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EvaluationError(
            f"{path}, row {len(rows) + 1}: {error!r}. Expected the layout described in eval/README.md."
        ) from error
    if not rows:
        raise EvaluationError(f"{path} holds no rows. Expected the layout described in eval/README.md.")
    return rows


def stock_tasks() -> TaskManager:
    """Returns lm-eval's own tasks that are offered here, with documents from the Hub."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=[root / name for name in _STOCK_FOLDERS])


def known_tasks(stock: TaskManager) -> list[str]:
    """Returns the known names: those of `LOCAL_FILES`, the group mmlu, its four subgroups and its 57 subjects."""
    return [*LOCAL_FILES, *(x for x in (*stock.all_groups, *stock.all_subtasks) if x.split("_")[0] == "mmlu")]


def local_tasks(stock: TaskManager, data_dir: Path, num_fewshot: int | None, yaml_folder: Path) -> TaskManager:
    """Returns the same tasks with documents from `data_dir`. Writes their YAML files into `yaml_folder`."""
    from lm_eval.tasks import TaskManager

    for name in known_tasks(stock):
        entry = stock.task_index[name]
        text = yaml.safe_dump({"include": str(entry.yaml_path)})
        if name not in stock.all_groups:
            text += f"custom_dataset: !function {load.__module__}.load\n"
            text += yaml.safe_dump(_local_fields(name, entry.cfg or {}, data_dir, num_fewshot))
        (yaml_folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return TaskManager(include_defaults=False, include_path=yaml_folder)


def _local_fields(name: str, stock: Row, data_dir: Path, num_fewshot: int | None) -> Row:
    """Returns the fields that replace the stock task's: the source of documents, and the missing splits."""
    files = _files_of(name)
    available = [split for split, relative in files.paths.items() if (data_dir / relative).is_file()]
    needed = [stock.get("test_split") or stock["validation_split"]]
    if num_fewshot:
        needed.append(stock.get("fewshot_split") or stock.get("training_split") or "train")
    fields: Row = {field: None for field in _SPLIT_FIELDS if stock.get(field) not in available}
    fields["dataset_kwargs"] = {"task": name, "data_dir": str(data_dir), "needed": needed}
    if files.version_suffix:
        fields["metadata"] = {"version": f"{stock['metadata']['version']}{files.version_suffix}"}
    return fields
