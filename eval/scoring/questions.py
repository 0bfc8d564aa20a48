"""Records which documents of a task a model answered rightly, so that models can be compared by question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Task -> metric -> packed answers.
Answers = dict[str, dict[str, str]]


def answers_of(results: Mapping[str, Any]) -> Answers:
    """Returns the answers of each task, for metrics that are 0 or 1.

    Args:
        results: from `simple_evaluate(log_samples=True)`.
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
    """Returns "count:hex": a bit per answer, 1 for a right one; the first answer is the highest bit."""
    return f"{len(right)}:{np.packbits(np.array(right, bool)).tobytes().hex()}"


def unpacked(text: str) -> np.ndarray[Any, Any]:
    """Inverts `packed`: 1 for a right answer, 0 for a wrong one."""
    count, digits = text.split(":")
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8))[: int(count)]
