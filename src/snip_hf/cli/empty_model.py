"""A model built from its config alone, within bounds on what a foreign config may ask for."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# Of a model's config.json, whose largest have tables of labels; of its layers, of which the deepest models have some
# 200; and of its modules, of which one with 45,032 linears has up to 100,000.
_MOST_CONFIG_BYTES = 16 * 2**20
_MOST_LAYERS, _MOST_MODULES = 2000, 150_000
# Entries of a config that say how many layers there are, or what each of them is.
_LAYERS = re.compile(r"(layers?|blocks?|depths?|types?)$")


def empty_model(name: str) -> nn.Module:
    """The causal LM `name`, built from its config on the meta device: layers without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if Path(name).is_dir():
            _check_config(Path(name) / "config.json")
        with _silent_transformers(), _bounded_modules():
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # Whatever a foreign config makes of it.
        what = f"Cannot build the model {name!r} from its config"
        if not Path(name).is_dir():
            what = f"There is no folder {name!r} here, and no model of the Hub can be built by this name"
        raise ValueError(f"{what}: {error}") from error
    return model


def _check_config(path: Path) -> None:
    """Refuses what would take minutes or gigabytes before anything is built from it."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > _MOST_CONFIG_BYTES:
            raise ValueError(f"{path} is larger than {_MOST_CONFIG_BYTES} bytes.")
        level = [json.loads(file.read(_MOST_CONFIG_BYTES))]
    while level:  # configs of parts of the model lie inside
        below = []
        for key, value in (item for mapping in level if isinstance(mapping, dict) for item in mapping.items()):
            count = len(value) if isinstance(value, list) else value
            if _LAYERS.search(key) and isinstance(count, int | float) and count > _MOST_LAYERS:
                raise ValueError(f"{key} is or has {count:,}, expected at most {_MOST_LAYERS:,}.")
            below += value if isinstance(value, list) else [value]
        level = below


@contextmanager
def _bounded_modules() -> Iterator[None]:
    """Inside, building more than so many modules is an error: configs name numbers of layers in many ways."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise ValueError(f"it has more than {_MOST_MODULES:,} modules.")

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Inside, transformers logs nothing: it quotes configs as they are."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)
