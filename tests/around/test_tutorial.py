"""The commands of docs/tutorial.md, on a smaller model, with a Hub on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import TOKEN, USER, Hub

from snip_hf.planning.plan import PrecisionPlan

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
COMMANDS = 20
# Sections that need a network, or that tests/around/test_recipes.py and test_eval.py run.
LEFT_OUT = ("1. Install", "4. Compare with BF16", "5. Score it on benchmarks")
SMALLER = (
    "training.max_steps=12 training.logging_steps=4 training.eval_strategy=no training.eval_on_start=false "
    "snip.first_refresh=4 snip.refresh_every=5 snip.apply_delay=1 tokenizer.vocab_size=512 cpu_threads=1 eval=null "
    "model.config.hidden_size=64 model.config.intermediate_size=176 model.config.num_hidden_layers=2 "
    f"data.source=files 'data.files=[{Path(os.__file__).parent / 'asyncio' / '*.py'}]' data.validation_sequences=8"
)


def sections() -> dict[str, str]:
    """Heading -> the commands below it, as one text."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = {name: re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for name, text in pairs(parts)}
    return {name: "".join(found) for name, found in blocks.items() if found}


def pairs(parts: list[str]) -> list[tuple[str, str]]:
    return list(zip(parts[1::2], parts[2::2], strict=True))


def test_the_tutorial_takes_few_commands() -> None:
    script = "".join(sections().values())
    without_files = re.sub(r"<<'EOF'.*?^EOF$", "", script, flags=re.DOTALL | re.MULTILINE)
    assert 10 < len(without_files.strip().splitlines()) <= COMMANDS


@pytest.mark.slow
def test_the_tutorial_ends_in_a_published_model_and_its_plan(tmp_path: Path) -> None:
    script = "".join(text for name, text in sections().items() if name not in LEFT_OUT)
    for old, new in (
        ("recipes/quickstart.yaml\n", f"recipes/quickstart.yaml --override {SMALLER}\n"),
        ('pip install "trl>=1.16,<2"\n', ""),
        ("hf auth login\n", ""),
        ("--steps 20\n", "--steps 2 --batch 2\n"),
    ):
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    script = script.replace("YOU/", f"{USER}/")
    if importlib.util.find_spec("trl") is None:
        script = re.sub(r"^(python recipes/trl_dpo|snip-hf report runs/dpo).*\n", "", script, flags=re.MULTILINE)
    for name in ("recipes", "eval", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    with Hub.running() as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        published = hub.repositories[f"{USER}/quickstart"].files
    assert {"config.json", "model.safetensors", "tokenizer.json", "snip/plan.json", "snip/plan.png"} <= set(published)
    assert PrecisionPlan.from_dict(json.loads(published["snip/plan.json"])).fp4_fraction >= 0.75
    assert (tmp_path / "snip-report" / "report.html").is_file()
