"""Draws the pictures of the documentation: `python docs/tools/pictures.py` writes docs/pictures/*.svg.

With a history.jsonl of the quickstart as its argument, it first replaces the plans that `plan` draws.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
# Colours that colour-blind readers can tell apart. FP4 and FP8 have those of reports.
FP4, FP8, INK, PALE, MARK = "#d55e00", "#56b4e9", "#222222", "#eeeeee", "#882255"
BLUE, GREEN, YELLOW, VIOLET, GREY = "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#8c8c8c"
# Letters on FP8's light blue, on light and dark pages.
INK_ON_FP8 = "#001122"
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
PLANS = FOLDER / "quickstart-plans.json"
CRISP = 'shape-rendering="crispEdges"'
# Element, attribute and colour -> its colour if the reader's system is dark.
DARK = {
    ("rect", "fill", "#ffffff"): "#161b22",
    ("rect", "fill", PALE): "#3d444d",
    ("line", "stroke", PALE): "#3d444d",
    ("text", "fill", INK): "#e6edf3",
    ("line", "stroke", INK): "#e6edf3",
    ("polygon", "fill", INK): "#e6edf3",
    ("circle", "fill", INK): "#e6edf3",
    ("text", "fill", BLUE): FP8,
    ("circle", "fill", BLUE): "#3d85e0",
    ("circle", "fill", MARK): "#cc79a7",
    ("line", "stroke", BLUE): "#3d85e0",
    ("polyline", "stroke", BLUE): "#3d85e0",
    ("text", "fill", MARK): "#cc79a7",
    ("line", "stroke", MARK): "#cc79a7",
}
NIGHT = "".join(f'{element}[{name}="{old}"]{{{name}:{new}}}' for (element, name, old), new in DARK.items())


def picture(width: int, height: int, parts: Iterable[str]) -> str:
    """Returns a drawing with its own background, light or dark like the reader's system."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    style = f"<style>@media (prefers-color-scheme: dark){{{NIGHT}}}</style>"
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, style, ground, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, size: int = 14, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, words: str = "", ink: str = "#ffffff") -> str:
    rectangle = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}"/>'
    return rectangle + (text(x + width / 2, y + height / 2 + 5, words, colour=ink) if words else "")


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 2, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"{dashes}/>'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = INK) -> str:
    """Returns a horizontal or vertical arrow."""
    head = 7 if x2 > x1 or y2 > y1 else -7
    across = ((x2 - head, y2 - 5), (x2 - head, y2 + 5)) if y1 == y2 else ((x2 - 5, y2 - head), (x2 + 5, y2 - head))
    points = " ".join(f"{x:g},{y:g}" for x, y in ((x2, y2), *across))
    return line(x1, y1, x2, y2, colour) + f'<polygon points="{points}" fill="{colour}"/>'


def grids() -> str:
    """Draws the values between 0 and 6 that FP4 and FP8 represent in a block whose largest value is 6."""
    # E4M3: subnormals, then 15 binades of 8 numbers, of which the last one stands for NaN.
    e4m3 = [2.0**-9 * mantissa for mantissa in range(8)]
    e4m3 += [2.0**exponent * (1 + mantissa / 8) for exponent in range(-6, 9) for mantissa in range(8)][:-1]
    e4m3 = [value / max(e4m3) * 6 for value in e4m3]
    rows = []
    for y, label, colour, values in ((60, "FP4", FP4, E2M1), (130, "FP8", FP8, e4m3)):
        rows += [text(50, y + 5, label, 16, BLUE if colour == FP8 else colour), line(90, y, 690, y, PALE, 3)]
        rows += [line(90 + 100 * value, y - 12, 90 + 100 * value, y + 12, colour, 1.5) for value in values]
    numbers = [text(90 + 100 * value, 170, str(value)) for value in range(7)]
    return picture(720, 190, [text(360, 28, "Numbers that a block can hold whose largest is 6", 15), *rows, *numbers])


def three_gemms() -> str:
    """Draws the three products of a linear layer in a training step."""
    rows = (
        ("forward", "input", "weight", "output", "the next layer"),
        ("grad_input", "output's gradient", "weight", "input's gradient", "the layer before"),
        ("grad_weight", "output's gradient", "input", "weight's gradient", "the optimizer"),
    )
    parts = [text(360, 28, "One linear layer, three matrix products (GEMMs)", 15)]
    for index, (name, left, right, result, reader) in enumerate(rows):
        y = 50 + 60 * index
        parts += [
            text(60, y + 25, name, 14),
            box(120, y, 140, 40, BLUE, left),
            text(273, y + 25, "×", 18),
            box(286, y, 90, 40, BLUE, right),
            arrow(382, y + 20, 410, y + 20),
            box(416, y, 140, 40, PALE, result, INK),
            text(566, y + 24, f"for {reader}", 12, anchor="start"),
        ]
    return picture(740, 240, parts)


def refresh() -> str:
    """Draws one refresh as a timeline: the probe holds training up, the solver runs beside it."""
    parts = [text(430, 28, "One refresh: training waits for the probe, not for the solver", 15)]
    left, width, probe = 100, 36, 108  # a probe takes about as long as three steps
    x = float(left)
    for step in range(98, 114):
        colour, ink = (FP4, "#ffffff") if step > 110 else (FP8, INK_ON_FP8)
        parts.append(box(x, 70, width - 2, 36, colour, str(step), ink))
        x += width
        if step == 100:
            begin, end = x, x + probe
            parts.append(box(begin, 70, probe - 2, 36, MARK, "probe"))
            x = end
        if step == 110:
            applied = x - 1
    parts += [
        text(50, 93, "training"),
        text(50, 163, "solver"),
        text(begin + probe / 2, 60, "step 100 waits", 13, MARK),
        arrow(end - 1, 108, end - 1, 142),
        box(end - 20, 144, 130, 32, PALE, "integer program", INK),
        line(end + 112, 160, applied, 160, INK, 2, "4 4"),
        arrow(applied, 160, applied, 110),
        text(applied, 60, "new plan", 13, FP4),
        text(left, 128, "the plan in force", 13, BLUE, "start"),
        text(end - 20, 196, "runs beside the next steps", 13, anchor="start"),
        text(applied - 6, 182, "Applied after step 110 (apply_delay), also if", 12),
        text(applied - 6, 198, "the solver was done before; if it was not,", 12),
        text(applied - 6, 214, "training waits for it here.", 12),
    ]
    return picture(860, 230, parts)


def program() -> str:
    """Draws the choice of the program: the cheapest layers per FLOP, until the target is met."""
    layers = (("up", 2, 0.10), ("gate", 2, 0.12), ("q", 1, 0.20), ("k", 1, 0.25), ("o", 1, 0.90), ("down", 2, 1.0))
    layers = (*layers, ("v", 1, 1.7))
    parts = [text(360, 28, "Layers sorted by price: what FP4 costs per share of the FLOPs", 15)]
    x, unit, taken, share = 70.0, 58.0, 0.0, 0.6
    for name, flops, price in layers:
        colour = FP4 if taken < 10 * share else FP8
        taken += flops
        height = 20 + 80 * price
        ink = "#ffffff" if colour == FP4 else INK_ON_FP8
        parts += [box(x, 210 - height, unit * flops - 4, height, colour, name, ink)]
        x += unit * flops
    border = 70 + unit * 10 * share - 2
    parts += [
        line(60, 211, 660, 211),
        line(border, 50, border, 235, MARK, 2, "6 4"),
        text(border + 8, 62, "target: 60% of the FLOPs", 13, MARK, "start"),
        text((70 + border) / 2, 235, "in FP4", 14, FP4),
        text((border + 650) / 2, 235, "in FP8", 14, BLUE),
        text(30, 130, "price", 13),
        text(360, 260, "width: the layer's share of the FLOPs", 12),
    ]
    return picture(720, 275, parts)


def full_runs() -> str:
    """Draws gaps to BF16 over the steps of a full training run, as docs/results-loss.md has them in its table."""
    shown = {
        "all FP4": ("all FP4", FP4),
        "75% by layer, {fp4, fp8}, saliency, refresh every 250": ("75%, by layer", GREEN),
        "75%, {fp4, fp8}, saliency, refresh every 500": ("75%, {fp4, fp8}", YELLOW),
        "75%, {mxfp4, fp8-tensor}, saliency, refresh every 500": ("75%, {mxfp4, fp8-tensor}", BLUE),
        "FP8": ("FP8", FP8),
    }
    table = section("results-loss.md", "Full training runs")
    steps = (700, 1400, 2100, 2700)
    parts = [text(360, 28, "Loss above BF16 over a full training run of a 30M Llama, with 95% intervals", 15)]
    for gap in (0, 0.5, 1, 1.5):
        parts += [line(70, level(gap), 520, level(gap), INK if gap == 0 else PALE, 1)]
        parts += [text(60, level(gap) + 5, f"{gap:g}%", anchor="end")]
    parts += [text(along(step), 335, f"{step:,}") for step in steps] + [text(295, 360, "steps")]
    for index, (row, (name, colour)) in enumerate(shown.items()):
        figures = numbers(table, row)
        gaps = list(zip(figures[0:8:2], figures[1:8:2], strict=True))
        places = [along(step) + 4 * (index - 2) for step in steps]
        for x, (gap, half) in zip(places, gaps, strict=True):
            parts += [line(x, level(gap - half), x, level(gap + half), colour, 1.5)]
            parts += [f'<circle cx="{x:g}" cy="{level(gap):g}" r="4" fill="{colour}"/>']
        curve = " ".join(f"{x:g},{level(gap):g}" for x, (gap, _) in zip(places, gaps, strict=True))
        parts += [f'<polyline points="{curve}" fill="none" stroke="{colour}" stroke-width="2"/>']
        parts += [line(545, 70 + 26 * index, 565, 70 + 26 * index, colour, 3)]
        parts += [text(572, 75 + 26 * index, name, 13, anchor="start")]
    return picture(740, 375, parts)


def section(page: str, heading: str) -> str:
    text = (FOLDER.parent / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def numbers(table: str, row: str) -> list[float]:
    """Returns the numbers in the row of a table, in their order."""
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)$", table, re.MULTILINE)
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", cells.replace(" to ", " "))]


def at_speed(speed: float) -> float:
    return round(70 + 780 * (speed - 0.98), 1)


def along(step: int) -> float:
    return 70 + step / 6


def level(gap: float) -> float:
    return round(290 - 120 * gap, 1)


def plan() -> str:
    """Draws the formats of all GEMMs over the steps of the quickstart."""
    kept = json.loads(PLANS.read_text(encoding="utf-8"))
    begins = [0, *kept["applied"], kept["steps"]]
    width, height, top = 190, 11, 62
    parts = [text(370, 28, "The quickstart's plan: one row per linear layer, from its first block to its last", 15)]
    for panel, gemm in enumerate(("forward", "grad_input", "grad_weight")):
        left = 112 + 210 * panel
        bottom = top + height * len(kept["plans"])
        parts += [text(left + width / 2, 52, gemm), box(left, top, width, bottom - top, FP8)]
        for step, anchor in ((begins[0], "start"), (begins[-1], "end")):
            parts.append(text(left + width * step / begins[-1], bottom + 18, str(step), 12, anchor=anchor))
        parts.append(text(left + width / 2, bottom + 18, "step", 12))
        for row, gemms in enumerate(kept["plans"].values()):
            for begin, end, bits in stretches(begins, gemms[gemm]):
                if bits == "4":
                    x, right = (left + width * step / begins[-1] for step in (begin, end))
                    wide = f'width="{right - x:g}" height="{height}"'
                    parts.append(f'<rect x="{x:g}" y="{top + height * row}" {wide} fill="{FP4}" {CRISP}/>')
    for row, layer in enumerate(kept["plans"]):
        block, name = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.(\w+)_proj", layer).groups()
        parts.append(text(104, top + height * row + 9, name, 10, anchor="end"))
        if name == "q":
            parts.append(text(14, top + height * (row + 3.5) + 5, f"block {block}", 13, anchor="start"))
        if name == "q" and row:
            parts.append(line(14, top + height * row, 112 + 210 * 2 + width, top + height * row, "#ffffff", 1.5))
    legend = bottom + 32
    parts += [box(290, legend, 18, 14, FP4), text(314, legend + 12, "FP4", anchor="start")]
    parts += [box(390, legend, 18, 14, FP8), text(414, legend + 12, "FP8", anchor="start")]
    return picture(740, legend + 28, parts)


def stretches(begins: list[int], bits: str) -> Iterable[tuple[int, int, str]]:
    """Yields (first step, last step, bits) of each stretch without a change."""
    begin = 0
    for index in range(1, len(bits) + 1):
        if index == len(bits) or bits[index] != bits[begin]:
            yield begins[begin], begins[index], bits[begin]
            begin = index


def keep_plans(history: Path) -> None:
    """Writes what `plan` draws: the bits of each GEMM before the first plan and under each one."""
    start, *events = map(json.loads, history.read_text(encoding="utf-8").splitlines())
    formats = {layer: dict(gemms) for layer, gemms in start["plan"].items()}
    plans = {layer: dict.fromkeys(gemms, "") for layer, gemms in formats.items()}
    applied = [event for event in events if event["event"] == "refresh" and event["status"] == "applied"]
    for changes in ({}, *(event["changes"] for event in applied)):
        for place, (_, new) in changes.items():
            layer, _, gemm = place.rpartition(":")
            formats[layer][gemm] = new
        for layer, gemms in formats.items():
            for gemm, name in gemms.items():
                plans[layer][gemm] += name.removeprefix("fp")
    kept = {"applied": [event["applied_step"] for event in applied], "steps": 300, "plans": plans}
    PLANS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def frontier() -> str:
    """Draws loss against speed, as docs/results-loss.md and docs/results-speed.md have them in their tables."""
    shown = {
        "all in `fp8-delayed`": ("all FP8, delayed scales", "0%, all `fp8-delayed`", FP8),
        "50%, {mxfp4, fp8-delayed}, the default": ("50% in MXFP4, the default", "1. SNIP minus BF16", VIOLET),
        "67%, {mxfp4, fp8-delayed}": ("67% in MXFP4", "67%", GREEN),
        "75%, {mxfp4, fp8-delayed}": ("75% in MXFP4", "75%", BLUE),
        "all MXFP4": ("all MXFP4", "100%, all MXFP4", MARK),
        "75%, {fp4, fp8}, saliency, refresh every 500": ("75%, {fp4, fp8}", None, YELLOW),
        "all FP4": ("all FP4", None, FP4),
    }
    speeds = section("results-speed.md", "At equal loss")
    losses = section("results-loss.md", "By share, in the default formats")
    losses += section("results-policies.md", "At the default share")
    losses += section("results-loss.md", "Full training runs")
    parts = [text(400, 28, "Loss above BF16 (30M Llama, 2,700 steps) against speed (8B shape, one H200)", 15)]
    for gap in (0, 0.5, 1, 1.5):
        parts += [line(70, level(gap), 520, level(gap), INK if gap == 0 else PALE, 1)]
        parts += [text(60, level(gap) + 5, f"{gap:g}%", anchor="end")]
    parts += [text(at_speed(speed), 335, f"{speed:g}") for speed in (1, 1.1, 1.2, 1.3, 1.4, 1.5)]
    parts += [text(295, 360, "speed against BF16, refreshes included")]
    trainer = section("results-speed.md", "Through the Trainer, H200")
    torchao = at_speed(numbers(trainer, "torchao tensorwise FP8")[1])
    parts += [line(torchao, 50, torchao, level(0), GREY, 1.5, "4 4")]
    parts += [text(torchao - 6, 56, "torchao's FP8, whose loss was not measured", 12, anchor="end")]
    points = {"BF16": ("BF16", INK, 1.0, 0.0, 0.0)}
    for row, (name, share, colour) in shown.items():
        gap, half = numbers(losses, share or row)[6:8]
        speed = numbers(speeds, row)[3]
        points[row] = (name, colour, speed, gap, half)
    for index, (name, colour, speed, gap, half) in enumerate(points.values()):
        x = at_speed(speed)
        parts += [line(x, level(gap - half), x, level(gap + half), colour, 1.5)] if half else []
        parts += [f'<circle cx="{x:g}" cy="{level(gap):g}" r="5" fill="{colour}"/>']
        parts += [f'<circle cx="555" cy="{100 + 26 * index}" r="5" fill="{colour}"/>']
        parts += [text(568, 105 + 26 * index, name, 13, anchor="start")]
    return picture(800, 375, parts)


PICTURES = {
    "grids": grids,
    "three-gemms": three_gemms,
    "refresh": refresh,
    "program": program,
    "full-runs": full_runs,
    "plan": plan,
    "frontier": frontier,
}


if __name__ == "__main__":
    for history in sys.argv[1:]:
        keep_plans(Path(history))
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
