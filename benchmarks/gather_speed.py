"""What gathering a decoder layer's weights costs on several GPUs: in FP32, in BF16, and folded to a byte per element.

    python benchmarks/gather_speed.py --output runs/gather_speed.jsonl

FSDP2 gathers the weights of a layer before its forward pass and again before its backward pass. Each process casts its
shards into one buffer, gathers those of all, and copies the weights out of it; then the weights are folded into E4M3,
their rows for the forward and their columns for the backward pass. A gather in bytes would fold the shards first. This
times the three parts of each way for the linears of one layer, and the layer's forward products alone and beside a
gather. It checks that weights folded before and after a gather are the same bytes. Ends within 45 s on two H200.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared.origin import origin_of
from speed_parts import setting
from speed_parts.measuring import mark, milliseconds_between, replayed, state_of
from torch import Tensor

from snip_hf.kernels.tensor_scaled import operators
from snip_hf.kernels.tensor_scaled.folding import PARAMETERS
from snip_hf.kernels.tensor_scaled.records import Records, follow
from snip_hf.numerics.gemms import OPERANDS

SHAPES = {**setting.MODELS, "small": (256, 512, 2, 4, 2)}
FORMAT = "mxfp4"
ACTIVATION, WEIGHT = OPERANDS.index("activation"), OPERANDS.index("weight")
# Pass -> the GEMM that reads the rows of a weight, and the one that reads its columns.
PASSES = {"forward": (0, -1), "backward": (-1, 1)}
CARRIERS = {"FP32": torch.float32, "BF16": torch.bfloat16, "byte": torch.uint8}
# Of a figure: the calls that follow each other, and how often they are timed.
CALLS, REPEATS = 5, 5


@dataclass(frozen=True)
class Part:
    """Of a gather: what is timed."""

    before: Callable[[], Any]
    """Fills this process's part of the buffer."""
    after: Callable[[], Any]
    """Makes folded weights of what was gathered."""
    own: Tensor
    gathered: Tensor
    layouts: Sequence[Tensor]
    """What the products read, linear by linear, as bytes."""


class Layer:
    """The linears of a decoder layer: whole, the shards of this process, and records that are all processes' own."""

    def __init__(self, shape: str, device: torch.device, rank: int, ranks: int) -> None:
        hidden, inner, _, heads, key_heads = SHAPES[shape]
        keys = hidden // heads * key_heads
        self.sizes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
        self.sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        self.device, self.ranks, self.state = device, ranks, state_of(FORMAT, device)
        generator = torch.Generator(device).manual_seed(0)
        self.wholes = [0.02 * torch.randn(size, device=device, generator=generator) for size in self.sizes]
        self.shards = [whole.chunk(ranks)[rank] for whole in self.wholes]
        self.elements = [shard.numel() for shard in self.shards]
        self.records = [Records.new(device) for _ in self.sizes]
        for whole, records in zip(self.wholes, self.records, strict=True):
            operators.folded(whole, self.state, records, WEIGHT, (0, 1))
        follow(self.records)

    def fold(self, weights: Sequence[Tensor], gemms: tuple[int, int], layouts: Sequence[Tensor]) -> None:
        """Folds weights, or shards of them, into one layout, each in one launch, as training does."""
        for weight, records, out in zip(weights, self.records, layouts, strict=True):
            layout, parameters = out.view(torch.float8_e4m3fn), records.table.new_empty(PARAMETERS)
            none = layout[:0], parameters[:0]
            outputs = (layout, parameters, *none) if gemms[0] >= 0 else (*none, layout, parameters)
            if weight.is_cuda:
                known = records.table, gemms
                operators.launch_fold(weight, self.state, records.record[WEIGHT], WEIGHT, True, outputs, known=known)
            else:
                tensors = records.record, records.table
                operators.fold_into(weight, self.state, tensors, WEIGHT, gemms, True, outputs)

    def part(self, carrier: str, direction: str) -> Part:
        """Returns what a gather for a pass does in this carrier."""
        own = torch.empty(sum(self.elements), dtype=CARRIERS[carrier], device=self.device)
        gathered = own.new_empty(self.ranks * own.numel())
        shapes = self.sizes if direction == "forward" else [size[::-1] for size in self.sizes]
        layouts = [own.new_empty(shape, dtype=torch.uint8) for shape in shapes]
        make = self._folded_before if carrier == "byte" else self._folded_after
        before, after = make(own.split(self.elements), gathered.view(self.ranks, -1), layouts, PASSES[direction])
        return Part(before, after, own, gathered, layouts)

    def _folded_after(
        self, pieces: Sequence[Tensor], gathered: Tensor, layouts: Sequence[Tensor], gemms: tuple[int, int]
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """As FSDP2 does it: shards are cast into the pieces; what is gathered (ranks, *) is copied out and folded."""
        own = [piece.view_as(shard) for piece, shard in zip(pieces, self.shards, strict=True)]
        weights = [gathered.new_empty(size) for size in self.sizes]
        parts, wanted = self._by_rank(gathered, weights)

        def after() -> None:
            torch._foreach_copy_(wanted, parts)
            self.fold(weights, gemms, layouts)

        return partial(torch._foreach_copy_, own, self.shards), after

    def _folded_before(
        self, pieces: Sequence[Tensor], gathered: Tensor, layouts: Sequence[Tensor], gemms: tuple[int, int]
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Rows of a shard are rows of the weight. Its columns are a strip of each of the weight's."""
        by_rows = gemms[0] >= 0
        shapes = [shard.shape if by_rows else shard.shape[::-1] for shard in self.shards]
        own = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        before = partial(self.fold, self.shards, gemms, own)
        if by_rows:
            rows, wanted = self._by_rank(gathered, layouts)
            return before, partial(torch._foreach_copy_, wanted, rows)
        parts = zip(gathered.split(self.elements, 1), shapes, strict=True)
        strips = [part.view(self.ranks, *shape).transpose(0, 1) for part, shape in parts]
        wanted = [layout.view(strip.shape) for layout, strip in zip(layouts, strips, strict=True)]
        # Eight bytes at a time.
        eights = [[one.view(torch.int64) for one in several] for several in (wanted, strips)]
        return before, partial(torch._foreach_copy_, *eights)

    def _by_rank(self, gathered: Tensor, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the parts of what was gathered, linear by linear and process by process, and where they belong."""
        parts = [part for of_linear in gathered.split(self.elements, 1) for part in of_linear.unbind()]
        return parts, [part for weight in weights for part in weight.view(self.ranks, -1).unbind()]

    def products(self, tokens: int) -> Callable[[], Any]:
        """Returns the forward products of so many tokens, with fast sums."""
        inputs: dict[int, Sequence[Tensor]] = {}
        multiply = torch.ops.snip_hf.tensor_scaled_product
        for _, columns in self.sizes:
            if columns not in inputs:
                x = torch.randn(tokens, columns, device=self.device, dtype=torch.bfloat16)
                inputs[columns] = operators.folded(x, self.state, Records.new(self.device), ACTIVATION, (0, -1))[:2]
        weights = [
            operators.folded(whole, self.state, records, WEIGHT, (0, -1))[:2]
            for whole, records in zip(self.wholes, self.records, strict=True)
        ]

        def run() -> None:
            for (rows, columns), weight in zip(self.sizes, weights, strict=True):
                multiply([*inputs[columns], *weight], tokens, rows, True, torch.bfloat16)

        return run


def work(options: argparse.Namespace) -> None:
    """What each process does: everything that is its own is captured before there is a process group."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ready = []
    for shape in options.shapes:
        layer = Layer(shape, device, rank, ranks)
        parts = {(carrier, way): layer.part(carrier, way) for carrier in CARRIERS for way in PASSES}
        calls = {key: (replayed(part.before), replayed(part.after)) for key, part in parts.items()}
        ready.append((shape, parts, calls, replayed(layer.products(options.tokens))))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for shape, parts, calls, products in ready:
        alone = taken(products, device)
        for key, part in parts.items():
            gather = partial(dist.all_gather_into_tensor, part.gathered, part.own)
            before, after = calls[key]
            before()
            gather()
            after()
            reference = parts["FP32", key[1]].layouts
            row = {
                "shape": shape,
                "layers": SHAPES[shape][2],
                "carrier": key[0],
                "pass": key[1],
                "bytes_received": part.own.nbytes * (ranks - 1),
                "before_ms": taken(before, device),
                "gather_ms": taken(gather, device),
                "after_ms": taken(after, device),
                "products_ms": alone,
                "beside_ms": taken(partial(beside, part, products), device),
                "equal": all(torch.equal(one, other) for one, other in zip(part.layouts, reference, strict=True)),
            }
            if rank == 0:
                with options.output.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def beside(part: Part, products: Callable[[], Any]) -> None:
    """Runs the products while the weights of another layer are gathered."""
    under_way = dist.all_gather_into_tensor(part.gathered, part.own, async_op=True)
    products()
    assert under_way is not None
    under_way.wait()


def taken(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the median milliseconds of a call, after which the next one follows: those of the slowest process."""
    marks = []
    for _ in range(1 + REPEATS):
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        begin = mark(device)
        for _ in range(CALLS):
            call()
        marks.append((begin, mark(device)))
    if device.type == "cuda":
        torch.cuda.synchronize()
    median = statistics.median(milliseconds_between(*pair) / CALLS for pair in marks[1:])
    slowest = torch.tensor(median, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    """Starts the processes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(setting.MODELS))
    parser.add_argument("--tokens", type=int, default=16384, help="of the products (default 16384)")
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={options.processes}",
        ]
        given = ["--worker", "--tokens", str(options.tokens), "--output", str(path), "--shapes", *options.shapes]
        subprocess.run([*launcher, __file__, *given], check=True)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    source = origin_of("cuda" if torch.cuda.is_available() else "cpu") | {"processes": options.processes}
    if options.output:
        with options.output.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row | source) + "\n" for row in rows)
    print_rows(rows)
    for shape in options.shapes:
        print(spared([row for row in rows if row["shape"] == shape]))


def print_rows(rows: Sequence[setting.Row]) -> None:
    print("| layer of | pass | in | MB | before, ms | gather, ms | GB/s | after, ms | products beside, ms | equal |")
    print("|" + "---|" * 10)
    for row in rows:
        megabytes = row["bytes_received"] / 1e6
        figures = [f"{row['before_ms']:.3f}", f"{row['gather_ms']:.3f}", f"{megabytes / row['gather_ms']:.0f}"]
        figures += [f"{row['after_ms']:.3f}", f"{row['beside_ms']:.3f} ({row['products_ms']:.3f})", str(row["equal"])]
        print("|", " | ".join([row["shape"], row["pass"], row["carrier"], f"{megabytes:.1f}", *figures]), "|")


def spared(rows: Sequence[setting.Row]) -> str:
    """Returns what a byte in the place of BF16 spares in a step of one model."""
    sums = {
        carrier: {
            figure: sum(row[figure] for row in rows if row["carrier"] == carrier) * rows[0]["layers"]
            for figure in ("before_ms", "after_ms", "gather_ms", "beside_ms")
        }
        for carrier in ("BF16", "byte")
    }
    less = {figure: value - sums["byte"][figure] for figure, value in sums["BF16"].items()}
    return (
        f"{rows[0]['shape']}, {rows[0]['layers']} layers, both passes, a byte in the place of BF16: "
        f"{less['before_ms'] + less['after_ms']:.2f} ms less of casting, copying and folding, gathers "
        f"{less['gather_ms']:.2f} ms shorter, products beside them {less['beside_ms']:.2f} ms."
    )


if __name__ == "__main__":
    main()
