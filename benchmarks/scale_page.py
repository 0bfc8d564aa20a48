"""The text of docs/scale.md, with places for what `scale_on_paper.py` computes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

PAGE = """\
# Large models on many GPUs, on paper

**No run of this size was made.** This page reckons what SNIP would cost and gain per step in runs of 7B and 70B models,
from parts that were measured in smaller ones. Losses at these sizes are unknown. `benchmarks/scale_on_paper.py` has the
arithmetic, and writes this page:

```bash
python benchmarks/scale_on_paper.py report --output docs/scale.md
```

## What it starts from

{inputs}

Every GPU trains on 16,384 tokens per step, in sequences of 4,096, so a step's tokens grow with the GPUs: 131,072 on 8,
16.8 million on 1,024. A refresh has the default settings (one probe, 4,096 tokens for passes, 1,024 for sums, two
formats), but for `loss_estimator="token-fisher"`, with which its parts were measured.

One check is possible: with two GPUs under DDP this arithmetic gives {model} s for a refresh of TinyLlama-1.1B, and
{measured} s were measured.

## A refresh, part by part

Seconds per rank. "Exchange" is the samples' way to the rank that owns a layer, "notes" the text that says what every
rank has.

{costs}

- **FSDP2: beyond one host gathering takes as long as the passes.** Sums are shared out among the ranks. Passes are
  not: each rank runs at least one whole sequence, and every weight is gathered in FP32 four times.
- **Notes grow with the number of ranks.** Every rank reads the notes of all ranks on all layers.
- **A pipeline probes whole batches** (`probe_batch_tokens` does not apply to it), so its passes take longer than a
  part of a micro-batch does. It keeps at least 128 tokens of every micro-batch on every rank: with many micro-batches
  that is far more than `probe_tokens`, and sums, exchange and memory grow with it. This has to change before SNIP is
  of use in long pipelines.
- **The solver costs nothing**: it ends within the {delay} steps of `apply_delay`, in all rows.

## What is gained

Speed of training by BF16's, with a refresh every {every} steps. "Waiting" is the part of a BF16 step that waits for
communication, which low precision does not shorten; how large it is depends on the machine. Memory is per GPU:
weights, gradients and moments in FP32, and what a probe holds beyond them without activations, as
`estimation.memory` counts it, but with the whole tiles of 128 tokens that a rank keeps. Activations of a probe stay
within what a step takes ([method.md](method.md), section 3). The last column says whether both fit into an H200's
{capacity} GiB, without activations.

{gains}

- **Under FSDP2 refreshes cost some 1% of the time** at the default interval, by this arithmetic. How long plans last at
  this size is not known.
- **Waiting costs more than refreshes do**: where 20% of a BF16 step waits, a quarter of the gain is gone.
- **A probe's memory hardly falls with the number of GPUs**: the embedding's gradient, and samples of one tile of 128
  tokens of all layers, stay.
- Without SNIP the gain would be nearly the same: on these GPUs it comes from FP8 products, and torchao's tensorwise FP8
  has it too ([hopper.md](hopper.md)). GPUs with FP4 units were not timed.
- **70B does not fit on 8 GPUs**: training takes {host_trained} GiB of {capacity} per GPU and leaves {host_left} for
  activations. A probe takes {host_probe} GiB more, {host_both} in all. The row says what a refresh would cost.
- **Three of the four rows of pipelines do not fit**: training and probe take more than an H200 has. The rows say what
  a refresh would cost. There is no gain to be had today: a pipeline with a probe needs FP32
  weights without autocast ([distributed.md](distributed.md)), and the fast kernels need BF16.

## The program of the 70B model

560 linears by GEMM, 1,680 groups, default gap of 1e-4. Prices are drawn from log-normal distributions. Their
parameters are those of the objective with "token-fisher" in a Llama of 6 blocks and width 128 after 200 steps of AdamW
on Python's own source ([lines](../benchmarks/results/scale_prices.jsonl)): mean ± standard deviation of the natural
logarithm of a price times the number of linears.

{prices}

With two formats (FP4, FP8) 75% of each stage's FLOPs are in FP4. With five (two of 4 bits, two of 8, BF16) every
stage is 2.5 times as fast as in BF16; each GEMM has a time of its own (deviation 0.5 of the logarithm), formats of
equal width differ by 0.3, and rates lie between 0.7 and 1 of 2 and 4 (ours). With 80 stages each block is one. Times
are the solver's own on two x86-64 cores busy with other work, so upper bounds
([lines](../benchmarks/results/scale_program.jsonl)):

{program}

One stage per block costs more of the objective, since no block can lend its share to another.
"""


INPUT_COLUMNS = ("part", "value", "source")
_TRAINER = "[lines](../benchmarks/results/speed_trainer.jsonl)"
INPUTS = (
    (
        "a BF16 step, with AdamW",
        "{teraflops} TFLOP/s",
        f"8B shape of 8 layers, one H200, median of 6 ({_TRAINER})",
    ),
    (
        "a step at 75% in 4 bits, by BF16's speed",
        "{fp4} (FP4 and FP8), {mxfp4} (MXFP4 and `fp8-tensor`)",
        "the same lines, one run each; taken for both models, although hidden 8,192 was not timed. Other runs of "
        "MXFP4 and `fp8-tensor` had {mxfp4_other} (by GEMM at random) and {mxfp4_later} (an earlier version); at 1.1B "
        "the newest had {mxfp4_tiny} ([tensor_scaled.md](tensor_scaled.md))",
    ),
    (
        "a probe, in one process with 4,096 tokens",
        "{linear} ms per linear and {weight} s per 1e9 weights",
        "the two equations of TinyLlama-1.1B and the 8B shape: median refresh of each with FP4 and FP8 in the same "
        "lines, without each process's first, which compiles. Two points give no error",
    ),
    ("of it, passes", "0.47", "0.70 s of passes, 0.80 s of sums at 1.1B ([hopper.md](hopper.md))"),
    (
        "a gather of a weight under FSDP2",
        "{gather} ms, and its FP32 bytes",
        "a refresh under FSDP2 less one under DDP, two GPUs ([lines](../benchmarks/results/multi_gpu_speed.jsonl))",
    ),
    (
        "a note: what a rank tells all others of a layer's sample (numbers of tokens, energies)",
        "{bytes} bytes, {microseconds} µs to read",
        "[line](../benchmarks/results/scale_notes.jsonl), two x86-64 cores busy with other work: an upper bound",
    ),
    ("applying a plan", "0.065 ms per linear", "0.01 s at 1.1B ([hopper.md](hopper.md))"),
    (
        "rates between GPUs",
        "450 GB/s among 8, 50 GB/s among more",
        "datasheets: NVLink of an H200, InfiniBand of 400 Gb/s per GPU",
    ),
)


def filled(page: str, values: Mapping[str, str]) -> str:
    """Returns the page with its places filled, and its lines broken anew."""
    text = re.sub(r"\{(\w+)\}", lambda place: values[place[1]], page)
    return "\n\n".join(_broken(part) for part in text.split("\n\n"))


def _broken(part: str) -> str:
    """Breaks the lines of a paragraph or of a list's items; all else stays."""
    if part.startswith(("#", "|", "```")):
        return part
    items = re.split(r"\n(?=- )", part)
    ends = "\n" * part.endswith("\n")
    filled = (textwrap.fill(" ".join(item.split()), 120, subsequent_indent=indent_of(item)) for item in items)
    return "\n".join(filled) + ends


def indent_of(item: str) -> str:
    return "  " if item.startswith("- ") else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows])
