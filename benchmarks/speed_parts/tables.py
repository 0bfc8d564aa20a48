"""How the rows of each part are printed."""

from __future__ import annotations

from collections.abc import Sequence

import probe_cost

from .setting import Row

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
    "folding": {
        "operand": ("operand", "{}"),
        "format": ("format", "{}"),
        "rows": ("rows", "{:,}"),
        "columns": ("columns", "{:,}"),
        "tile": ("tile", "{}"),
        "tb_per_s": ("TB/s", "{:.2f}"),
        "both_us": ("both layouts, µs", "{:.1f}"),
        "both_ratio": ("/ bound", "{:.2f}"),
        "rows_us": ("rows alone, µs", "{:.1f}"),
        "rows_ratio": ("/ bound", "{:.2f}"),
        "columns_us": ("columns alone, µs", "{:.1f}"),
        "columns_ratio": ("/ bound", "{:.2f}"),
        "out_features": ("out", "{}"),
        "in_features": ("in", "{}"),
        "data": ("data", "{}"),
        "gemm": ("GEMM", "{}"),
        "fast": ("fast sums", "{}"),
        "us": ("product, µs", "{:.0f}"),
        "tflops": ("TFLOP/s", "{:.0f}"),
        "bf16_tflops": ("BF16", "{:.0f}"),
        "speedup": ("speed / BF16", "{:.2f}"),
        "largest_error": ("largest error / sum of magnitudes", "{:.1e}"),
        "error_norm": ("error in norm", "{:.1e}"),
    },
    "rounding": {
        "format": ("format", "{}"),
        "operand": ("operand", "{}"),
        "contracts": ("contracts", "{}"),
        "rows": ("rows", "{:,}"),
        "tb_per_s": ("TB/s", "{:.2f}"),
        "us": ("kernel, µs", "{:.0f}"),
        "ratio": ("/ bound", "{:.2f}"),
        "torch_us": ("torch, µs", "{:.0f}"),
        "speedup": ("torch / kernel", "{:.1f}"),
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
        "backend": ("kernels", "{}"),
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
    "bf16_mix": {
        "model": ("model", "{}"),
        "plan": ("plan", "{}"),
        "bf16_gemms": ("GEMMs in BF16", "{:.3f}"),
        "bf16_flops": ("their FLOPs", "{:.3f}"),
        "step_ms": ("step, ms", "{:.1f}"),
        "speedup": ("speed / BF16", "{:.3f}"),
        "first_s": ("first step under it, s", "{:.1f}"),
        "graphs": ("new graphs", "{}"),
        "loss": ("loss", "{:.4f}"),
    },
    "linears": {
        "out_features": ("out", "{}"),
        "in_features": ("in", "{}"),
        "recipe": ("recipe", "{}"),
        "ms": ("forward and backward, ms", "{:.3f}"),
        "speedup": ("speed / BF16", "{:.3f}"),
        "first_s": ("first, s", "{:.1f}"),
    },
    "trainer": {
        "model": ("model", "{}"),
        "recipe": ("recipe", "{}"),
        "step_ms": ("step, ms", "{:.1f}"),
        "speedup": ("speed / BF16", "{:.3f}"),
        "against_torchao": ("/ torchao", "{:.3f}"),
        "peak_gib": ("peak of steps, GiB", "{:.2f}"),
        "peak_ratio": ("/ BF16", "{:.3f}"),
        "refresh_peak_gib": ("of a refresh, GiB", "{:.2f}"),
        "refresh_peak_ratio": ("/ BF16", "{:.3f}"),
        "first_refresh_steps": ("first refresh, BF16 steps", "{:.1f}"),
        "refresh_steps": ("second", "{:.1f}"),
        "first_s": ("first step, s", "{:.1f}"),
        "first_ratio": ("/ BF16", "{:.2f}"),
        "graphs": ("graphs", "{}"),
        "breaks": ("breaks", "{}"),
        "recompilations": ("recompilations", "{}"),
        "share": ("in 4 bits", "{:.2f}"),
        "loss": ("mean loss", "{:.4f}"),
    },
    "crossing": {
        "hidden": ("hidden", "{}"),
        "tokens": ("tokens", "{:,}"),
        "recipe": ("recipe", "{}"),
        "ms": ("step of one layer, ms", "{:.2f}"),
        "speedup": ("speed / BF16", "{:.3f}"),
        "first_s": ("first, s", "{:.1f}"),
    },
    "first": {
        "model": ("model", "{}"),
        "recipe": ("recipe", "{}"),
        "start_s": ("before it, s", "{:.1f}"),
        "first_s": ("first step, s", "{:.1f}"),
        "first_ratio": ("/ BF16", "{:.2f}"),
        "first_refresh_ms": ("first refresh, ms", "{:.0f}"),
        "first_two_ratio": ("both / BF16's first step", "{:.2f}"),
        "refresh_ms": ("second refresh, ms", "{:.0f}"),
        "slowest_ms": ("slowest other step, ms", "{:.0f}"),
        "step_ms": ("median step, ms", "{:.1f}"),
    },
    "gates": {
        "operand": ("operand", "{}"),
        "gate": ("gate", "{}"),
        "rows": ("rows", "{:,}"),
        "columns": ("columns", "{:,}"),
        "tile": ("tile", "{}"),
        "tb_per_s": ("TB/s", "{:.2f}"),
        "both_us": ("one launch, µs", "{:.1f}"),
        "both_ratio": ("/ bound", "{:.2f}"),
    },
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
