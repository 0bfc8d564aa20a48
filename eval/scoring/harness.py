"""lm-eval without repeated work per question; requests and tokens stay the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from lm_eval import utils
from lm_eval.models.huggingface import HFLM

# The choices of a question are consecutive, so a small cache suffices.
_STRINGS = 16


class ContextsOnceHFLM(HFLM):
    """Tokenizes the context of a question once, instead of once per choice."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.tok_encode = lru_cache(maxsize=_STRINGS)(self.tok_encode)


@contextlib.contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Compiles each template of a task once, instead of once per document (lm-eval 0.4.13)."""
    compile_template = utils.env.from_string
    utils.env.from_string = lru_cache(maxsize=None)(compile_template)
    try:
        yield
    finally:
        utils.env.from_string = compile_template
