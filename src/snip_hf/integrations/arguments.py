"""`SnipConfig` as command-line arguments in the same parser as a Trainer's arguments."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from ..config import REMOVED_FIELDS, SnipConfig

# Hidden options, so that a parser hands removed fields to `SnipConfig`, which says what to use instead. A script may
# have a "cost" or a "plan" of its own.
_REMOVED = REMOVED_FIELDS.keys() - {"cost", "plan"}
_Removed = make_dataclass(
    "_Removed",
    [(name, str | None, field(default=None, metadata={"help": SUPPRESS})) for name in sorted(_REMOVED)],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class SnipArguments(SnipConfig, _Removed):  # type: ignore[misc, valid-type]
    """`SnipConfig` for a parser that also parses `TrainingArguments`, which have their own `seed`.

    The constructor returns a plain `SnipConfig`:

        parser = HfArgumentParser((TrainingArguments, SnipArguments))
        args, config = parser.parse_args_into_dataclasses()
        trainer = Trainer(model, args, callbacks=[SnipCallback(config)])
    """

    seed: int = field(default=0, init=False)
    snip_seed: int = field(default=0, metadata=SnipConfig.__dataclass_fields__["seed"].metadata)

    def __new__(cls, *, snip_seed: int = 0, **values: Any) -> Any:
        given = {name: value for name, value in values.items() if name not in _REMOVED or value is not None}
        return SnipConfig.from_dict(dict(seed=snip_seed, **given))  # converts values from YAML
