"""Where a benchmark's figures come from: commit, machine, versions and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def origin_of(device: str) -> dict[str, Any]:
    """Returns where figures come from: commit, machine, threads, torch and the command."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    cuda = torch.device(device).type == "cuda"
    return {
        "commit": commit or None,
        "machine": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} ({os.cpu_count()} cores)",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": shlex.join(["python", *(os.path.relpath(sys.argv[0]), *sys.argv[1:])]),
    }
