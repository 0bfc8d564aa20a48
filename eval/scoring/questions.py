"""Which documents of a task a model got right, so that two models can be compared question by question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Task -> metric -> a digit per four documents, in their order: the first document is the highest bit.
Answers = dict[str, dict[str, str]]


def answers_of(results: Mapping[str, Any]) -> Answers:
    """Returns the answers of each task, for metrics that are 0 or 1.

    Args:
        results: what `simple_evaluate(log_samples=True)` returned.
    """
    found: Answers = {}
    for task, samples in results["samples"].items():
        ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
        for metric in ordered[0]["metrics"] if ordered else ():
            values = [sample[metric] for sample in ordered]
            if all(isinstance(value, int | float) and value in (0, 1) for value in values):
                found.setdefault(task, {})[metric] = packed([bool(value) for value in values])
    return found


def packed(right: Sequence[bool]) -> str:
    """Returns the number of answers, a colon and the answers in hexadecimal digits."""
    return f"{len(right)}:{np.packbits(np.array(right, bool)).tobytes().hex()}"


def unpacked(text: str) -> np.ndarray[Any, Any]:
    """Returns what `packed` took: 1 for what is right, 0 for what is wrong."""
    count, digits = text.split(":")
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8))[: int(count)]
