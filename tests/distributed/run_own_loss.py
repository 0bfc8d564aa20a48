"""Trains on several processes by the model's loss, and again by the same loss from a function of the user's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from configs import fp4_config
from tiny_runs import SCHEDULE, data, train
from torch import Tensor
from torch.nn.functional import cross_entropy


def by_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The model's own loss, as the Trainer wants it of a `compute_loss_func`: it is always given a count."""
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def main(folder: Path) -> None:
    for name, more in (("own", {}), ("function", {"compute_loss_func": by_items})):
        for together in (True, False):
            train(
                folder / f"{name}-{together}",
                fp4_config(**SCHEDULE),
                trainer={"train_dataset": data(24, 40), **more},
                max_steps=4,
                average_tokens_across_devices=together,
                ddp_backend="gloo",
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
