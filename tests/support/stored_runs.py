"""The runs that the files in tests/data come from: `python tests/support/stored_runs.py FOLDER` writes them.

Run once, with PYTHONPATH=src:tests/support and the code of the commit that names the folder; never written anew.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from small import tiny_llama
from tiny_runs import SCHEDULE, train
from transformers import LlamaForCausalLM

from snip_hf import SnipConfig

# Optimizer steps of a saved state between two refreshes, and of one whose solver still runs.
IDLE, PENDING = 5, 6
# The default form of the loss divergence was another one when they were stored.
COMMON = SCHEDULE | {"loss_estimator": "token-fisher"}
RUNS = {
    "layer": SnipConfig(
        **COMMON, granularity="layer", stages=2, refresh_on_drift=0.5, drift_every=3, target_fp4_fraction=0.5
    ),
    "gemm": SnipConfig(**COMMON, granularity="gemm", budget="measured", timing_file="times.json"),
}


def stored_model() -> LlamaForCausalLM:
    return tiny_llama(hidden=32)


def write(folder: Path) -> None:
    for name, config in RUNS.items():
        with tempfile.TemporaryDirectory() as output:
            settings = {"max_steps": 8, "gradient_accumulation_steps": 2, "save_steps": 1, "save_strategy": "steps"}
            train(Path(output), config, model=stored_model(), **settings)
            shutil.copytree(Path(output, "snip"), folder / name / "snip")
            for step in (IDLE, PENDING):
                (folder / name / f"checkpoint-{step}").mkdir()
                shutil.copy(Path(output, f"checkpoint-{step}", "snip_state.json"), folder / name / f"checkpoint-{step}")
            shutil.copy(Path(output, "checkpoint-8", "trainer_state.json"), folder / name)
    shutil.move("times.json", folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
