r"""How close the estimated weight divergence of every format is to the measured one: the measurements.

    python benchmarks/format_fidelity.py --cases small --device cpu --output runs/format_fidelity.jsonl
    python benchmarks/format_fidelity_report.py runs/format_fidelity.jsonl

A case is a small model at some step of its training, e.g. gemma3:muon:300, or llama:adamw:300:bytes on single bytes in
place of tokens. On several micro-batches that training has not seen, every layer is quantized by itself, in one format
after another: the truth. The estimate is that of the default settings, from the same micro-batches. A JSON line of kind
"format" has a format's figures in a case by layer: the truth of each micro-batch, the estimate from the first one and
the root mean square of the estimates from all. The line of kind "case" after them says where they come from. A run that
was stopped goes on where it was: what the output holds of a case is left out.

What else there is to compare (other estimators, the loss divergence) is in `estimate_fidelity.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from estimate_fidelity import Clock, unquantized
from shared import small_models, texts
from shared.agreement import Record
from shared.grouped_truth import Cell, GroupedTruth
from shared.json_lines import drop_unfinished_line, read_lines
from shared.origin import origin_of
from shared.workers import share_out

from snip_hf import SnipConfig, estimate_divergence
from snip_hf.estimation.pending import LAYER, ROWS
from snip_hf.numerics.formats import FORMATS, UNQUANTIZED

SMALL = ("llama:adamw:60", "phi:muon:60")
SMALL_FORMATS = ["fp4", "nvfp4", "mxfp8"]
BYTES = ("llama:adamw:300:bytes", "phi:adamw:300:bytes", "gemma3:adamw:300:bytes")
# First those that matter most and take longest.
ALL = (
    *BYTES,
    *(f"{family}:{optimizer}:300" for optimizer in ("muon", "adamw") for family in small_models.FAMILIES),
)
NAMED = {"small": SMALL, "all": ALL, "bytes": BYTES}
# So many formats are estimated at once, before their truth: a run that ends early has both of what it began with.
TOGETHER = 4
# Option -> its default for small cases, and for all others.
DEFAULTS: dict[str, tuple[Any, Any]] = {"rows": (2, 4), "batches": (4, 8), "blocks": (2, 6)}


def main() -> None:
    options = parse()
    done = {(record["case"], record["format"]) for record in read_lines(options.output) if record["kind"] == "format"}
    left = [(case, [fmt for fmt in options.formats if (case, fmt) not in done]) for case in options.cases]
    todo = [(case, formats) for case, formats in left if formats]
    print(f"{len(todo)} of {len(options.cases)} cases to do", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        if any(not on_bytes(case) for case, _ in todo):
            np.save(options.folder / "tokens.npy", texts.token_ids(options.text))
        np.save(options.folder / "bytes.npy", texts.byte_ids(options.text))
        share_out(work, options, todo)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_text_arguments(parser)
    parser.add_argument(
        "--cases", nargs="+", default=["small"], help=f"{', '.join(NAMED)}, or family:optimizer:steps[:bytes]"
    )
    parser.add_argument("--formats", nargs="+", help="registered formats (default: all that quantize; small three)")
    parser.add_argument("--gemms", nargs="+", choices=ROWS, default=[LAYER], help="rows to measure (default: layer)")
    parser.add_argument("--output", type=Path, default=Path("runs/format_fidelity.jsonl"))
    parser.add_argument("--rows", type=int, help="sequences of 256 tokens in a micro-batch (default 4; small 2)")
    parser.add_argument("--batches", type=int, help="micro-batches (default 8; small 4)")
    parser.add_argument("--blocks", type=int, help="blocks of the models (default 6; small 2)")
    parser.add_argument("--probe-tokens", type=int, help="as in SnipConfig; 0 for all (default as there)")
    parser.add_argument("--workers", type=int, default=1, help="processes; the i-th takes the i-th GPU, in turn")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no format of a case after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    is_small = options.cases == ["small"]
    for name, (small, other) in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, small if is_small else other)
    if options.batches < 2:
        parser.error(f"--batches is {options.batches}; expected at least 2, for two halves of the truth")
    quantized = [name for name, fmt in FORMATS.items() if fmt.is_quantized]
    options.formats = options.formats or (SMALL_FORMATS if is_small else quantized)
    for name in options.formats:
        if name not in quantized:
            parser.error(f"--formats: {name!r} is not known; expected some of {', '.join(quantized)}")
    options.formats = sorted(options.formats, key=lambda name: FORMATS[name].bits)
    options.cases = list(dict.fromkeys(case for name in options.cases for case in NAMED.get(name, (name,))))
    for case in options.cases:
        family, optimizer, *rest = case.split(":")
        is_known = family in small_models.FAMILIES and optimizer in small_models.OPTIMIZERS
        if not is_known or not rest or not rest[0].isdigit() or rest[1:] not in ([], ["bytes"]):
            parser.error(
                f"--cases: {case!r} is not known; expected {', '.join(NAMED)} or family:optimizer:steps[:bytes], "
                f"with a family of {', '.join(small_models.FAMILIES)} "
                f"and an optimizer of {', '.join(small_models.OPTIMIZERS)}"
            )
    options.deadline = time.time() + 60 * options.minutes
    return options


def on_bytes(case: str) -> bool:
    return case.endswith(":bytes")


# ------------------------------------------------------------------------------------------------ one worker


def work(index: int, options: argparse.Namespace, cases: list[tuple[str, list[str]]], taken: Any, lock: Any) -> None:
    """Does the cases that no other worker took, each in its formats; one that fails is reported and left."""
    torch.set_num_threads(1)
    device = options.device
    if device == "cuda":
        device = f"cuda:{index % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    while time.time() < options.deadline:
        with taken.get_lock():
            position, taken.value = taken.value, taken.value + 1
        if position >= len(cases):
            return
        case, formats = cases[position]
        try:
            records = measure(case, formats, options, device)
        except Exception:
            print(f"{case}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            lines = "".join(json.dumps({"case": case, **record}, separators=(",", ":")) + "\n" for record in records)
            with lock, options.output.open("a", encoding="utf-8") as stream:
                stream.write(lines)


def measure(case: str, formats: Sequence[str], options: argparse.Namespace, device: str) -> list[Record]:
    """Trains a case's model and returns its records, of as many formats as there is time for."""
    family, optimizer, steps, *_ = case.split(":")
    clock = Clock(case)
    file, vocabulary = ("bytes.npy", texts.BYTES) if on_bytes(case) else ("tokens.npy", texts.VOCABULARY)
    text = texts.load_text(options.folder / file, device)
    state = small_models.new_state(
        family, optimizer, device, seed=options.seed, blocks=options.blocks, vocabulary=vocabulary
    )
    state.train(text, int(steps))
    clock.lap("training")
    seen = -(-state.step * state.rows // options.rows)  # micro-batches of ours that training has touched, rounded up
    batches = [text.batch(seen + index, options.rows) for index in range(options.batches)]
    records: list[Record] = []
    with unquantized(state.model, config_of(options, formats)) as layers:
        truth = GroupedTruth(state.model, batches, state.optimizer, 1000 + options.seed)
        for start in range(0, len(formats), TOGETHER):
            if time.time() > options.deadline:
                break
            part = formats[start : start + TOGETHER]
            estimates = estimates_of(state, batches, options, part)
            clock.lap("estimates")
            for fmt in part:
                record: Record = {"kind": "format", "format": fmt}
                for row in options.gemms:
                    cells = [(layer, row, fmt) for layer in layers]
                    record[row] = {
                        "truth": rounded(truth.squares(cells).sqrt().numpy().T),
                        "estimate": rounded(means([[table[cell] for cell in cells] for table in estimates])),
                    }
                records.append(record)
            clock.lap("truth")
    origin = {
        "layers": layers,
        "loss": round(float(state.model(**batches[0]).loss.detach()), 4),
        "tokens": batches[0]["input_ids"].numel(),
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "seconds": clock.seconds,
        **{name: getattr(options, name) for name in ("rows", "batches", "blocks", "probe_tokens", "seed", "workers")},
        **origin_of(device),
    }
    return [*records, {"kind": "case", **origin}] if records else []


def estimates_of(
    state: small_models.State,
    batches: Sequence[dict[str, torch.Tensor]],
    options: argparse.Namespace,
    formats: Sequence[str],
) -> list[dict[Cell, float]]:
    """Returns the estimated weight divergences of each micro-batch."""
    config = config_of(options, formats)
    found = []
    for index, batch in enumerate(batches):
        table = estimate_divergence(state.model, batch, state.optimizer, replace(config, seed=options.seed + index))
        found.append({(row.layer, row.gemm, row.format): row.weight_divergence for row in table.rows})
    return found


def config_of(options: argparse.Namespace, formats: Sequence[str]) -> SnipConfig:
    """Returns the default settings, with the formats and the probe's tokens as asked for."""
    tokens = {} if options.probe_tokens is None else {"probe_tokens": options.probe_tokens or None}
    # A share that FP8 alone can meet too.
    share = {"target_fp4_fraction": 0.0}
    chosen = (*formats, UNQUANTIZED.name)
    return SnipConfig(start_format=UNQUANTIZED.name, formats=chosen, seed=options.seed, **share, **tokens)


def means(tables: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the figures from the first micro-batch and their root mean squares over all, (2, layers)."""
    values = np.array(tables)
    return np.stack([values[0], np.sqrt((values**2).mean(0))])


def rounded(table: np.ndarray[Any, np.dtype[np.float64]]) -> list[list[float]]:
    """Returns the numbers to five figures."""
    return [[float(f"{value:.5g}") for value in values] for values in table.tolist()]


if __name__ == "__main__":
    main()
