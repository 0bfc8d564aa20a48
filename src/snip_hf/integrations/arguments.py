"""`SnipConfig` as command-line arguments in the same parser as a Trainer's arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..config import SnipConfig


@dataclass(frozen=True, kw_only=True)
class SnipArguments(SnipConfig):
    """`SnipConfig` for a parser that also parses `TrainingArguments`, which have their own `seed`.

    The constructor returns a plain `SnipConfig`:

        parser = HfArgumentParser((TrainingArguments, SnipArguments))
        args, config = parser.parse_args_into_dataclasses()
        trainer = Trainer(model, args, callbacks=[SnipCallback(config)])
    """

    seed: int = field(default=0, init=False)
    snip_seed: int = field(default=0, metadata=SnipConfig.__dataclass_fields__["seed"].metadata)

    def __new__(cls, *, snip_seed: int = 0, **values: Any) -> Any:
        return SnipConfig.from_dict(dict(seed=snip_seed, **values))  # converts values from YAML
