"""DDP's users on fast kernels are told which settings spare copies of gradients, and nobody else."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from transformers import TrainingArguments

from snip_hf import SnipConfig
from snip_hf.integrations.buckets import advise_buckets
from snip_hf.kernels.emulated import Emulated


def said(folder: Path, caplog: pytest.LogCaptureFixture, kind: DistributedType, bucket_mb: int | None) -> str:
    caplog.clear()
    caplog.set_level(logging.INFO, "snip_hf")
    args = TrainingArguments(str(folder), use_cpu=True, ddp_bucket_cap_mb=bucket_mb)
    advise_buckets(SnipConfig(backend="emulated"), args, SimpleNamespace(distributed_type=kind))
    return caplog.text


def test_ddp_on_fast_kernels_is_told_of_buckets_and_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Emulated, "is_emulation", False)
    text = said(tmp_path, caplog, DistributedType.MULTI_GPU, None)
    assert "ddp_bucket_cap_mb=200" in text and "ddp_handler.gradient_as_bucket_view = True" in text
    assert said(tmp_path, caplog, DistributedType.MULTI_GPU, 25) == ""
    assert said(tmp_path, caplog, DistributedType.FSDP, None) == ""
    assert said(tmp_path, caplog, DistributedType.NO, None) == ""


def test_emulation_is_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert said(tmp_path, caplog, DistributedType.MULTI_GPU, None) == ""
