"""How fast is training on FP8 tensor cores against BF16 and torchao's FP8, from one kernel up to whole models?

    python benchmarks/speed.py --output runs/speed.jsonl
    python benchmarks/speed.py --quick --parts kernels models

Needs one Hopper GPU. Parts, in the order in which they run unless `--parts` says otherwise:

kernels  the quantization kernels, against the time that their bytes take at the copy rate measured just before
gemms    the three GEMMs of every linear of the two models, without quantization, against BF16's
models   whole training steps: AdamW fused, BF16 autocast over FP32 masters, decoder layers compiled one by one; every
         recipe quantizes the linears of the decoder layers and no other
refresh  what a refresh costs at 1.1B, in steps of compiled BF16 (`probe_cost.py`)
compile  graphs and recompilations while plans change; the losses under CUDA graphs
linears  one linear, forward and backward, with the quantization of its weight

BF16 is measured first and last, and the others are compared with the median of both, since clocks drift. What fails is
printed with its error, and the rest goes on. JSON lines go to --output, with the machine, versions and the command.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import probe_cost
import torch
from shared.origin import origin_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, SnipController, convert_model
from snip_hf.kernels import hopper
from snip_hf.kernels.backend import select_backend
from snip_hf.kernels.hopper.backend import HOPPER
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

Row = dict[str, Any]

COMPILER = "inductor"
VOCABULARY = 32000
# Hidden size, inner size, layers, heads, heads of keys.
MODELS = {"8B, 8 layers": (4096, 14336, 8, 32, 8), "TinyLlama-1.1B": (2048, 5632, 22, 32, 4)}
SMALL = (2048, 5632, 4, 32, 4)
SMALL_BATCH = (4, 1024)
# (O, I) of their distinct linears: q and o, k and v, gate and up, down.
LINEARS = tuple(
    size
    for hidden, inner, _, heads, key_heads in MODELS.values()
    for size in ((hidden, hidden), (hidden // heads * key_heads, hidden), (inner, hidden), (hidden, inner))
)
# Those whose GEMMs weigh most, for part linears.
LARGEST = ((14336, 4096), (5632, 2048), (4096, 4096), (2048, 2048))
CHANNELS = (2048, 4096, 5632, 14336)
TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
BF16 = "BF16"
# Recipe -> format, and whether tied layers share one quantized input.
OURS = {"snip-hf FP4, ties": ("fp4", True), "snip-hf FP4, no ties": ("fp4", False), "snip-hf FP8, ties": ("fp8", True)}
OURS_ALONE = {"snip-hf FP4": "fp4", "snip-hf FP8": "fp8"}
# Measured with two micro-batches per step too, over half as many steps.
ACCUMULATING = (BF16, "snip-hf FP4, ties")
WARM_UP = 3
CHANGES = 20
# Bytes that a timing of weights goes through, so that none comes from the cache: ten times an H200's.
BEYOND_CACHE = 2**29


def main() -> None:
    """Print where the figures come from; per part a line of JSON for each measurement, and a table."""
    options = parse()
    source = origin(options)
    print(", ".join(f"{name} {value}" for name, value in source.items()), flush=True)
    found: list[Row] = []
    # With the default of 8, what compiles anew for every layer would end up uncompiled and slow.
    with torch._dynamo.config.patch(recompile_limit=64):
        for part in options.parts:
            rows, began = [], time.monotonic()
            for row in run_part(part, options, found):
                rows.append(row)
                if options.output:
                    with options.output.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps({**row, **source}) + "\n")
            found += rows
            print(f"\n{report(part, rows)}\n\n({time.monotonic() - began:.0f} s)\n", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options, with what --quick makes of those that are not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and recipes: under 4 minutes instead of 9")
    parser.add_argument("--minutes", type=float, help="begin no measurement later than this (default 8.5; quick 3.5)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--recipes", nargs="+", help="of models and linears, between BF16 and BF16 (default all)")
    parser.add_argument(
        "--linears", type=linear_size, nargs="+", metavar="OxI", help="of part linears (default four, quick two)"
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences per micro-batch (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default 2048)")
    parser.add_argument("--steps", type=int, default=10, help=f"steps to time, after {WARM_UP} more (default 10)")
    parser.add_argument("--mode", choices=("default", "reduce-overhead"), default="default", help="of models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.device = torch.device(options.device)
    options.deadline = time.monotonic() + 60 * (options.minutes or (3.5 if quick else 8.5))
    options.linears = options.linears or (LARGEST[:2] if quick else LARGEST)
    options.channels = CHANNELS[:2] if quick else CHANNELS
    known = (*OURS, *OURS_ALONE, *TORCHAO)
    quickly = ("snip-hf FP4, ties", "snip-hf FP4", "torchao tensorwise")
    options.recipes = options.recipes or (quickly if quick else known)
    for recipe in options.recipes:
        if recipe not in known:
            parser.error(f"--recipes: {recipe!r} is not known; expected some of {', '.join(known)}")
    options.tokens = options.rows * options.length
    return options


def linear_size(text: str) -> tuple[int, int]:
    """Returns (O, I) of "OxI"."""
    out_features, in_features = map(int, text.split("x"))
    return out_features, in_features


def origin(options: argparse.Namespace) -> Row:
    """Returns where the figures come from: machine, versions, commit, command and seed."""
    versions = {}
    for package in ("triton", "torchao", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {**origin_of(str(options.device)), "cuda": torch.version.cuda, **versions, "seed": options.seed}


def run_part(part: str, options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    """Yields a part's rows; what fails outside its measurements is a row too."""
    try:
        for row in PARTS[part](options, found):
            yield {"part": part, **row}
    except Exception as error:
        yield {"part": part, "error": described(error)}


def guarded(identity: Row, measure: Callable[[], Iterable[Row]], options: argparse.Namespace) -> list[Row]:
    """Returns what `measure` yields, each with what it is of, and the error at which it ended; prints them at once."""
    rows = []
    try:
        if time.monotonic() > options.deadline:
            raise TimeoutError("not begun: --minutes are over")
        for figures in measure():
            rows.append(identity | figures)
            print(json.dumps(rows[-1]), flush=True)
    except Exception as error:
        rows.append(identity | {"error": described(error)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


# --- what is timed, and how


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the median time of a call: on a GPU its own, its cache emptied before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=10, rep=60, return_mode="median"))
    call()
    return statistics.median(1e3 * probe_cost.clocked(device, call) for _ in range(3))


def mark(device: torch.device) -> Any:
    """Returns a point in the GPU's time, or the time on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start: Any, end: Any) -> float:
    """Returns the time between two marks, which the GPU must have passed."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def replayed(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns the call as a CUDA graph, which is launched faster than its kernels run."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def release(device: torch.device) -> None:
    """Frees what earlier measurements left, and forgets what was compiled."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def compiler(mode: str) -> dict[str, Any]:
    return {"backend": COMPILER} if mode == "default" else {"backend": COMPILER, "mode": mode}


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def state_of(fmt: str, device: torch.device) -> Tensor:
    """Returns a layer's state with all GEMMs in one format and any key."""
    return torch.tensor([*[FORMATS[fmt].code] * len(GEMMS), 1234567891234], device=device)


def require_hopper(device: torch.device) -> None:
    lacks = HOPPER.lacks(device)
    if lacks is not None:
        raise RuntimeError(lacks)


def compared(rows: Sequence[Row], timed: str) -> list[Row]:
    """Returns the rows of one size with their speed, and peak memory if they have one, in those of BF16."""
    result = []
    for row in rows:
        baseline = [
            other
            for other in rows
            if other["recipe"] == BF16 and timed in other and other.get("accumulation") == row.get("accumulation")
        ]
        if baseline and timed in row:
            row = row | {"speedup": statistics.median(other[timed] for other in baseline) / row[timed]}
            if row.get("peak_gib"):
                row["peak_ratio"] = row["peak_gib"] / statistics.median(other["peak_gib"] for other in baseline)
        result.append(row)
    return result


# --- recipes of torchao


def in_block(module: nn.Module, name: str) -> bool:
    """The linears that snip-hf swaps: those in numbered blocks."""
    return isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))


def float8(recipe: str, model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=in_block, config=Float8LinearConfig.from_recipe_name(recipe))


def blockwise(model: nn.Module) -> None:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear, Float8BlockwiseLinearConfig
    from torchao.quantization import quantize_

    class UnderAutocast(Float8BlockwiseLinear):
        """As torchao's, which does not heed autocast: it would quantize, and keep, activations in FP32."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(torch.bfloat16))

    quantize_(model, Float8BlockwiseLinearConfig(), filter_fn=in_block)
    for module in model.modules():
        if type(module) is Float8BlockwiseLinear:
            module.__class__ = UnderAutocast


TORCHAO: dict[str, Callable[[nn.Module], None]] = {
    "torchao blockwise": blockwise,
    "torchao tensorwise": partial(float8, "tensorwise"),
    "torchao rowwise": partial(float8, "rowwise"),
}


# --- kernels


def kernels_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    require_hopper(options.device)
    rate = copy_rate(options.device)
    yield {"operand": "copy", "tb_per_s": rate * 1e-9}
    for operand in ("activation", "gradient"):
        for fmt in ("fp4", "fp8"):
            for channels in options.channels:
                identity = {"operand": operand, "format": fmt, "rows": options.tokens, "columns": channels}
                yield from guarded(identity, partial(token_kernel, rate, operand, fmt, channels, options), options)
    sizes = [size for size in LINEARS if size[0] in options.channels and size[1] in options.channels]
    for fmt in ("fp4", "fp8"):
        for size in sizes:
            identity = {"operand": "weight", "format": fmt, "rows": size[0], "columns": size[1]}
            yield from guarded(identity, partial(weight_kernel, rate, fmt, size, options.device), options)


def copy_rate(device: torch.device) -> float:
    """Returns the bytes read and written per millisecond of a large copy."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), device)


def token_kernel(rate: float, operand: str, fmt: str, channels: int, options: argparse.Namespace) -> Iterator[Row]:
    """Times both layouts in one pass, and each alone; gradients are rounded to FP4 stochastically.

    rate: bytes per millisecond.
    """
    device, is_gradient = options.device, operand == "gradient"
    x = torch.randn(options.tokens, channels, device=device, dtype=torch.bfloat16)
    gemm = GEMMS.index("grad_input" if is_gradient else "forward")
    figures = {}
    for layouts, gemms in {"both": (gemm, 2), "rows": (gemm, -1), "columns": (-1, 2)}.items():
        call = partial(hopper.operators.quantize_tokens, x, state_of(fmt, device), *gemms, is_gradient)
        bound = (x.nbytes + sum(output.nbytes for output in call())) / rate
        figures |= timed_against(bound, milliseconds(call, device), layouts)
    yield figures


def weight_kernel(rate: float, fmt: str, size: tuple[int, int], device: torch.device) -> Iterator[Row]:
    """Times many weights one after another, as after an optimizer step, without Python between them."""
    state, sizes = state_of(fmt, device), 6 * math.prod(size)
    weights = [torch.randn(size, device=device) for _ in range(math.ceil(BEYOND_CACHE / sizes))]
    outputs = [hopper.operators.quantize_weight(weight, state, True, True) for weight in weights]

    def quantize_all() -> None:
        for weight, output in zip(weights, outputs, strict=True):
            hopper.operators.quantize_weight_into(weight, state, output)

    bound = (weights[0].nbytes + sum(output.nbytes for output in outputs[0])) / rate
    yield timed_against(bound, milliseconds(replayed(quantize_all), device) / len(weights), "both")


def timed_against(bound: float, taken: float, layouts: str) -> Row:
    return {f"{layouts}_us": 1e3 * taken, f"{layouts}_bound_us": 1e3 * bound, f"{layouts}_ratio": taken / bound}


# --- GEMMs


def gemms_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    require_hopper(options.device)
    for size in LINEARS:
        identity = {"out_features": size[0], "in_features": size[1], "tokens": options.tokens}
        yield from guarded(identity, partial(gemms, size, options), options)


def gemms(size: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    """Times the products alone. "128x128": the right operand with square tiles, as the other two GEMMs have it."""
    (out_features, in_features), tokens, device = size, options.tokens, options.device
    quantize_tokens, multiply = hopper.operators.quantize_tokens, hopper.operators.multiply
    x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16)
    g = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    weight = torch.randn(size, device=device, dtype=torch.bfloat16)
    state = state_of("fp4", device)
    x_rows, x_row_scales, x_columns, x_column_scales = quantize_tokens(x, state, 0, 2, False)
    g_rows, g_row_scales, g_columns, g_column_scales = quantize_tokens(g, state, 1, 2, True)
    by_output, output_scales, by_input, input_scales = hopper.operators.quantize_weight(weight, state, True, True)
    x_squares, x_square_scales = hopper.operators.quantize_weight(x, state, False, True)[2:]

    y, grad_x, grad_weight = (tokens, out_features), (tokens, in_features), size
    forward = partial(multiply, x_rows, x_row_scales, by_output, output_scales, True, *y)
    grad_input = partial(multiply, g_rows, g_row_scales, by_input, input_scales, True, *grad_x)
    of_weight = partial(multiply, g_columns, g_column_scales, x_columns, x_column_scales, False, *grad_weight)
    squares = partial(multiply, g_columns, g_column_scales, x_squares, x_square_scales, True, *grad_weight)
    high = milliseconds(lambda: g.t() @ x, device)
    calls: dict[str, tuple[Callable[[], Tensor], float]] = {
        "forward": (forward, milliseconds(lambda: x @ weight.t(), device)),
        "grad_input": (grad_input, milliseconds(lambda: g @ weight, device)),
        "grad_weight, into FP32": (partial(of_weight, torch.float32), high),  # as with FP32 masters
        "grad_weight, into BF16": (of_weight, high),
        "grad_weight, 128x128, into BF16": (squares, high),
    }
    tera = 2 * tokens * math.prod(size) * 1e-9
    for gemm, (call, bf16) in calls.items():
        taken = milliseconds(call, device)
        rates = {"tflops": tera / taken, "bf16_tflops": tera / bf16, "speedup": bf16 / taken}
        yield {"gemm": gemm, "us": 1e3 * taken, "bf16_us": 1e3 * bf16, **rates}


# --- linears


def linears_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    recipes = [recipe for recipe in (*OURS_ALONE, *TORCHAO) if recipe in options.recipes]
    for size in options.linears:
        rows = []
        for recipe in (BF16, *recipes, BF16):
            identity = {"recipe": recipe, "out_features": size[0], "in_features": size[1], "tokens": options.tokens}
            rows += guarded(identity, partial(linear, recipe, size, options), options)
        yield from compared(rows, "ms")


def linear(recipe: str, size: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    """Times forward and backward of one compiled linear; the weight is quantized once per pass in every recipe."""
    device = options.device
    release(device)
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(size[1], size[0], bias=False, device=device))
    if recipe in TORCHAO:
        TORCHAO[recipe](model)
    if recipe in OURS_ALONE:
        convert_model(model, SnipConfig())
    layers = snip_linears(model)
    for layer in layers.values():
        layer.set_formats(dict.fromkeys(GEMMS, OURS_ALONE[recipe]))
    kernels = select_backend("auto", device)
    kernels.before_pass(layers, everything=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(options.tokens, size[1], device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(options.tokens, size[0], device=device, dtype=dtype)
    run, inputs = torch.compile(model, **compiler("default")), [x, *model.parameters()]

    def call() -> None:
        with autocast(device):
            y = run(x)
        torch.autograd.grad(y, inputs, g)
        kernels.before_pass(layers, everything=True)

    began = time.perf_counter()
    call()
    probe_cost.wait(device)
    first = time.perf_counter() - began
    yield {"ms": milliseconds(call, device), "first_s": first}


# --- models


class Training:
    """A Llama in training under a recipe, as a plain loop would do it: always on the same one or two micro-batches."""

    def __init__(
        self,
        shape: Sequence[int],
        batch: tuple[int, int],
        recipe: str,
        seed: int,
        device: torch.device,
        whole: bool = False,
        **compiling: Any,
    ) -> None:
        hidden, inner, layers, heads, key_heads = shape
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        attention = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "attn_implementation": "sdpa"}
        length = {"max_position_embeddings": batch[1], "use_cache": False}
        torch.manual_seed(seed)
        with device:
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **attention, **length)).train()
        if recipe in TORCHAO:
            TORCHAO[recipe](self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.controller = None
        if recipe in OURS:
            fmt, tied = OURS[recipe]
            config = SnipConfig(policy=f"uniform-{fmt}", ties=TIES if tied else (), seed=seed)
            self.controller = SnipController(self.model, self.optimizer, config)
        self.call = torch.compile(self.model, **compiling) if whole else self.model
        for layer in () if whole else self.model.model.layers:
            layer.compile(**compiling)
        tokens = torch.randint(VOCABULARY, (2, *batch), device=device)
        self.batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
        self.device, self.number = device, 0

    def step(self, accumulation: int = 1) -> Tensor:
        """Does one optimizer step, and returns the loss of its last micro-batch."""
        self.number += 1
        for batch in self.batches[:accumulation]:
            torch.compiler.cudagraph_mark_step_begin()
            if self.controller is not None:
                self.controller.capture(batch)
            with autocast(self.device):
                loss = self.call(**batch).loss
            (loss / accumulation).backward()
        if self.controller is not None:
            self.controller.before_optimizer_step(self.number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.controller is not None:
            self.controller.after_step(self.number)
        return loss.detach().clone()  # CUDA graphs write over theirs.


def models_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    recipes = [recipe for recipe in (*OURS, *TORCHAO) if recipe in options.recipes]
    for name in options.models:
        rows = []
        for recipe in (BF16, *recipes, BF16):
            rows += guarded({"model": name, "recipe": recipe}, partial(train, name, recipe, options), options)
        yield from compared(rows, "step_ms")


def train(name: str, recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Times steps without waiting for any; memory and losses are those of the timed steps."""
    device = options.device
    release(device)
    before = allocated(device)
    batch = (options.rows, options.length)
    training = Training(MODELS[name], batch, recipe, options.seed, device, **compiler(options.mode))
    accumulating = recipe in ACCUMULATING and not options.quick
    for accumulation, steps in ((1, options.steps), (2, options.steps // 2))[: 1 + accumulating]:
        first = probe_cost.clocked(device, partial(training.step, accumulation))
        for _ in range(WARM_UP - 1):
            training.step(accumulation)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        marks = [mark(device)]
        for _ in range(steps):
            loss = training.step(accumulation)
            marks.append(mark(device))
        probe_cost.wait(device)
        taken = statistics.median(map(milliseconds_between, marks, marks[1:]))
        yield {
            "accumulation": accumulation,
            "step_ms": taken,
            "tokens_per_s": 1e3 * accumulation * options.tokens / taken,
            "peak_gib": (peak(device) - before) / 2**30,
            "loss": float(loss),
            "first_s": first,
            **graph_counts(),
        }


def graph_counts() -> Row:
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


# --- refresh


def refresh_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    yield from guarded({}, partial(refresh, options, found), options)


def refresh(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    """Times `probe_cost`'s refresh, without compiling its 22 layers as one: the step is that of part models."""
    one = {"model": "TinyLlama-1.1B", "recipe": BF16, "accumulation": 1}
    steps = [row["step_ms"] for row in found if row.items() >= one.items() and "step_ms" in row]
    if not steps:
        steps = [next(train(one["model"], BF16, options))["step_ms"]]
    release(options.device)
    fields = ("rows", "length", "probe_batch_tokens", "probe_tokens")
    given = argparse.Namespace(**dict.fromkeys(fields), device=str(options.device), compile=False, delay=10)
    given.steps, given.refreshes = 3, 1 if options.quick else 2
    figures = probe_cost.measure("1B", given)
    step = statistics.median(steps) / 1e3
    yield {**figures, "eager_step": figures["step"], "step": step, "refresh_steps": figures["refresh"] / step}


# --- compile


def compile_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    runs = [("layers", "default"), ("layers", "reduce-overhead"), ("whole", "default"), ("whole", "reduce-overhead")]
    # The first once more: how far two equal runs come apart, since attention's backward sums in any order.
    runs = runs[:3] if options.quick else [runs[0], *runs]
    expected: list[float] | None = None
    for compiled, mode in runs:
        for row in guarded({"compiled": compiled, "mode": mode}, partial(changing, compiled, mode, options), options):
            if "losses" in row:
                expected = expected or row["losses"]
                difference = max(abs(a - b) for a, b in zip(row["losses"], expected, strict=True))
                row = row | {"loss": row["losses"][-1], "difference": difference}
            yield row


def changing(compiled: str, mode: str, options: argparse.Namespace) -> Iterator[Row]:
    """Trains under another random plan in every step, and counts what is compiled after the first two."""
    device = options.device
    release(device)
    whole = compiled == "whole"
    arguments = (SMALL, SMALL_BATCH, "snip-hf FP4, no ties", options.seed, device, whole)
    training = Training(*arguments, fullgraph=True, **compiler(mode))
    assert training.controller is not None
    layers, draws = snip_linears(training.model), random.Random(options.seed)
    losses = [training.step(), training.step()]
    before = graph_counts()
    for _ in range(CHANGES):
        draw_plan(layers, draws)
        losses.append(training.step())
    after = graph_counts()
    yield {
        "backend": training.controller.backend,
        "graphs": before["graphs"],
        "breaks": after["breaks"],
        "changes": CHANGES,
        "recompilations": after["graphs"] - before["graphs"],
        "losses": [float(loss) for loss in losses],
    }


def draw_plan(layers: dict[str, Any], draws: random.Random) -> None:
    """Gives every GEMM FP8 or FP4; tied layers get the same."""
    drawn: dict[tuple[str, Any], dict[str, str]] = {}
    for name, layer in layers.items():
        module, _, last = name.rpartition(".")
        tie = next((tie for tie in TIES if last in tie), last)
        formats = drawn.setdefault((module, tie), {gemm: draws.choice(("fp8", "fp4")) for gemm in GEMMS})
        layer.set_formats(formats)


# --- tables

# Part -> JSON field -> head of its column and format of its figures.
TABLES: dict[str, dict[str, tuple[str, str]]] = {
    "kernels": {
        "operand": ("operand", "{}"),
        "format": ("format", "{}"),
        "rows": ("rows", "{:,}"),
        "columns": ("columns", "{:,}"),
        "tb_per_s": ("TB/s", "{:.2f}"),
        "both_us": ("both layouts, µs", "{:.1f}"),
        "both_ratio": ("/ bound", "{:.2f}"),
        "rows_us": ("rows alone, µs", "{:.1f}"),
        "rows_ratio": ("/ bound", "{:.2f}"),
        "columns_us": ("columns alone, µs", "{:.1f}"),
        "columns_ratio": ("/ bound", "{:.2f}"),
    },
    "gemms": {
        "out_features": ("out", "{}"),
        "in_features": ("in", "{}"),
        "gemm": ("GEMM", "{}"),
        "us": ("FP8, µs", "{:.0f}"),
        "tflops": ("TFLOP/s", "{:.0f}"),
        "bf16_us": ("BF16, µs", "{:.0f}"),
        "bf16_tflops": ("TFLOP/s", "{:.0f}"),
        "speedup": ("speed / BF16", "{:.2f}"),
    },
    "models": {
        "model": ("model", "{}"),
        "recipe": ("recipe", "{}"),
        "accumulation": ("micro-batches", "{}"),
        "step_ms": ("step, ms", "{:.1f}"),
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "speedup": ("speed / BF16", "{:.3f}"),
        "peak_gib": ("peak, GiB", "{:.2f}"),
        "peak_ratio": ("/ BF16", "{:.3f}"),
        "loss": ("loss", "{:.4f}"),
        "first_s": ("first step, s", "{:.1f}"),
        "graphs": ("graphs", "{}"),
        "breaks": ("breaks", "{}"),
    },
    "refresh": {
        **probe_cost.COLUMNS,
        "step": ("step of compiled BF16, s", "{:.3g}"),
        "eager_step": ("of eager BF16, s", "{:.3g}"),
    },
    "compile": {
        "compiled": ("compiled", "{}"),
        "mode": ("mode", "{}"),
        "backend": ("kernels", "{}"),
        "graphs": ("graphs", "{}"),
        "breaks": ("breaks", "{}"),
        "changes": ("plans", "{}"),
        "recompilations": ("recompilations", "{}"),
        "loss": ("last loss", "{:.4f}"),
        "difference": ("largest difference to the first run", "{:.1e}"),
    },
    "linears": {
        "out_features": ("out", "{}"),
        "in_features": ("in", "{}"),
        "recipe": ("recipe", "{}"),
        "ms": ("forward and backward, ms", "{:.3f}"),
        "speedup": ("speed / BF16", "{:.3f}"),
        "first_s": ("first, s", "{:.1f}"),
    },
}

PARTS: dict[str, Callable[[argparse.Namespace, Sequence[Row]], Iterator[Row]]] = {
    "kernels": kernels_part,
    "gemms": gemms_part,
    "models": models_part,
    "refresh": refresh_part,
    "compile": compile_part,
    "linears": linears_part,
}


def report(part: str, rows: Sequence[Row]) -> str:
    """Returns a part's rows as a Markdown table, and below what failed."""
    columns = TABLES[part]
    lines = [f"## {part}", "", f"| {' | '.join(head for head, _ in columns.values())} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        if "error" not in row:
            cells = [probe_cost.cell(row.get(field), form) for field, (_, form) in columns.items()]
            lines.append(f"| {' | '.join(cells)} |")
    failed = [row for row in rows if "error" in row]
    for row in failed:
        what = ", ".join(str(value) for field, value in row.items() if field not in ("part", "error"))
        lines += ["", f"Failed: {what or part}: {row['error']}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
