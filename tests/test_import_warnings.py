"""snip_hf.import_warnings."""

from __future__ import annotations

import enum
import logging
import subprocess
import sys

import pytest
from torchao.quantization.quantize_.common import KernelPreference

import snip_hf

PYTREE = "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value type."


class Own(enum.Enum):
    A = 1


def test_the_door_opens_silently() -> None:
    code = "from snip_hf import SnipCallback, convert_model"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == ""


@pytest.mark.parametrize(
    ("logger", "message", "args", "shown"),
    [
        ("torchao", "Failed to load /torchao/_C_mxfp8.so: no such library", (), False),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version.", (), False),
        ("torchao", "Another warning", (), True),
        ("torch.utils._pytree", PYTREE, (KernelPreference,), False),
        ("torch.utils._pytree", PYTREE, (Own,), True),
        ("torch.utils._pytree", "Another warning", (), True),
        ("torch.utils._pytree", "Another %s", ("warning",), True),
    ],
)
def test_only_the_known_warnings_are_hidden(logger: str, message: str, args: tuple[object, ...], shown: bool) -> None:
    assert snip_hf.__version__
    one = logging.getLogger(logger)
    record = one.makeRecord(logger, logging.WARNING, __file__, 1, message, args, None)
    assert bool(one.filter(record)) == shown
