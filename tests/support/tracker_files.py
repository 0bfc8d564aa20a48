"""Reads the files in which TensorBoard, W&B and Trackio store a run on this machine."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_BLOCK, _HEADER = 32768, 7


@dataclass
class Stored:
    """The numbers and settings that a tracker stored."""

    numbers: dict[str, list[float]]
    """Name -> values, in their order."""
    settings: dict[str, Any]
    """SNIP's configuration."""

    @property
    def of_snip(self) -> set[str]:
        """The names of the quantities that SNIP logs, as SNIP calls them."""
        names = (name.removeprefix("train/") for name in self.numbers)
        return {name for name in names if name.startswith(("snip/", "fp4_"))}


def use_wandb_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    wandb.teardown()  # what it has read from the environment before
    for name, value in {"MODE": "offline", "DIR": str(folder), "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def use_trackio_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    for name, module in list(sys.modules.items()):  # read from the environment when it was imported
        for constant, path in {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media"}.items():
            if name.partition(".")[0] == "trackio" and hasattr(module, constant):
                monkeypatch.setattr(module, constant, path)


def of_tensorboard(folder: Path) -> Stored:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="tensorboard")
    found = reading.EventAccumulator(str(folder)).Reload()
    tags = found.Tags()
    text = found.Tensors("snip_config/text_summary")[0].tensor_proto.string_val[0].decode()
    return Stored({name: [event.value for event in found.Scalars(name)] for name in tags["scalars"]}, json.loads(text))


def of_wandb(folder: Path) -> Stored:
    """Reads the only offline run in a folder; its file is a log of records in blocks, as LevelDB has it."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="wandb")
    sys.modules["wandb"].teardown()  # ends the process that writes the file
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = Stored({}, {})
    for data in _records(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        configs = [record.config] if record.HasField("config") else [record.run.config]
        for update in (update for config in configs for update in config.update):
            if (update.key or update.nested_key[0]) == "snip":
                found.settings = json.loads(update.value_json)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            value = json.loads(item.value_json)
            if isinstance(value, int | float):
                found.numbers.setdefault(name, []).append(value)
    return found


def of_trackio(folder: Path) -> Stored:
    """Reads the only run in a folder with one project."""
    (path,) = folder.glob("*.db")
    found = Stored({}, {})
    database = sqlite3.connect(path)
    try:
        for (line,) in database.execute("SELECT metrics FROM metrics ORDER BY id"):
            for name, value in json.loads(line).items():
                if isinstance(value, int | float):
                    found.numbers.setdefault(name, []).append(value)
        ((config,),) = database.execute("SELECT config FROM configs")
        found.settings = json.loads(config)["snip"]
    finally:
        database.close()
    return found


def _records(data: bytes) -> Iterator[bytes]:
    at, whole = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        whole += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # a whole one, or the last part of one
            yield whole
            whole = b""
