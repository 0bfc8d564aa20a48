"""Trains a tiny model with the callback where no extra is installed, and checks what is said of that.

`.ci/run` runs it in an environment that has the core alone: `python tests/support/core_only.py`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import snip_hf
from snip_hf.extras import EXTRAS, MissingExtra

# Packages of extras that torch, transformers and accelerate may bring along.
BROUGHT = {"jinja2", "psutil", "pyyaml", "rich"}


def train(folder: Path) -> list[dict[str, object]]:
    """Trains for eight steps with refreshes at steps 2 and 6; returns the lines of the history."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    args = TrainingArguments(folder, max_steps=8, per_device_train_batch_size=4, use_cpu=True, report_to="none")
    snip = snip_hf.SnipConfig(formats=("fp4", "fp8"), ties=(), first_refresh=2, refresh_every=4, apply_delay=2)
    Trainer(LlamaForCausalLM(config), args, train_dataset=data, callbacks=[snip_hf.SnipCallback(snip)]).train()
    return [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]


def check_commands(folder: Path) -> None:
    """Features that need an extra end with a sentence that names the command to install it; the rest works."""
    run = [sys.executable, "-m", "snip_hf"]
    done = subprocess.run([*run, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"snip-hf {snip_hf.__version__}\n", done
    done = subprocess.run([*run, "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done
    assert 'pip install "snip-hf[cbc]"' in done.stdout and "highs: scipy " in done.stdout, done
    done = subprocess.run([*run, "report", str(folder)], capture_output=True, text=True)
    sentence = 'which is not installed. Install it: pip install "snip-hf[report]"\n'
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert done.stderr.startswith("snip-hf: The command 'report' needs ") and done.stderr.endswith(sentence), done
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-m", "eval.compare", "-h"], capture_output=True, text=True, cwd=root)
    sentence = 'eval.compare needs datasets, which is not installed. Install it: pip install "snip-hf[recipes]"\n'
    assert done.stderr.endswith(sentence), done
    try:
        snip_hf.run_report(folder)
    except MissingExtra as error:
        assert str(error).startswith("snip_hf.run_report needs "), error
    else:
        raise AssertionError("run_report was imported without its extra")


def main() -> None:
    for extra in EXTRAS.values():
        found = set(extra.packages.values()) - set(extra.missing) - BROUGHT
        assert not found, f"expected an environment with the core alone, found {found}"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("snip_hf").addHandler(handler)
    logging.getLogger("snip_hf").setLevel("INFO")
    with tempfile.TemporaryDirectory() as folder:
        history = train(Path(folder))
        refreshes = [(line["status"], line["solver"]) for line in history if line["event"] == "refresh"]
        assert refreshes == [("applied", "highs"), ("applied", "highs")], refreshes
        [line] = [text for text in said if "solver='auto' uses 'highs', because: " in text]
        assert "No module named 'mip'" in line and 'pip install "snip-hf[cbc]"' in line, line
        check_commands(Path(folder))
    print(f"Trained without extras. The log says: {line}")


if __name__ == "__main__":
    main()
