"""Makes instruction text of ARC's questions: a chat per question, whose answer is the text of the right choice.

    python -m eval.arc_chats $SNIP_HF_DATA runs/arc-chats

Writes train.jsonl and validation.jsonl from these splits of ARC-Easy and ARC-Challenge, with the column `messages`.
Questions that a later split has too are left out. The choices are not shown, as in lm-eval's prompts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPLITS = ("train", "validation", "test")


def read(data: Path, split: str) -> list[dict[str, Any]]:
    names = (f"ARC-{level}-{split}.jsonl" for level in ("Easy", "Challenge"))
    return [json.loads(line) for name in names for line in (data / "arc" / name).read_text("utf-8").splitlines()]


def chat(row: dict[str, Any]) -> dict[str, Any]:
    answer = row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])]
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]}


def plain(question: str) -> str:
    """Returns a question's words, which tell whether two are the same."""
    return " ".join(re.findall(r"\w+", question.lower()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with arc/, laid out as eval/README.md says")
    parser.add_argument("folder", type=Path, help="gets the two files")
    options = parser.parse_args(arguments)
    try:
        rows = {split: read(options.data, split) for split in SPLITS}
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    later = {plain(row["question"]) for row in rows["test"]}
    for split in ("validation", "train"):
        own = [row for row in rows[split] if plain(row["question"]) not in later]
        later |= {plain(row["question"]) for row in own}
        lines = [json.dumps(chat(row), ensure_ascii=False) + "\n" for row in own]
        (options.folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(own)} chats, {len(rows[split]) - len(own)} questions of a later split left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
