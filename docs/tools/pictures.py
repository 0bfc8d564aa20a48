"""Draws the pictures of the documentation: `python docs/tools/pictures.py` writes docs/pictures/*.svg."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
# Colours that colour-blind readers can tell apart.
FP4, FP8, INK, PALE, WARM = "#0072b2", "#e69f00", "#222222", "#eeeeee", "#d55e00"
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def picture(width: int, height: int, parts: Iterable[str]) -> str:
    """Returns a drawing on a white ground, legible on light and dark pages."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


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
        rows += [text(50, y + 5, label, 16, colour), line(90, y, 690, y, PALE, 3)]
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
            box(120, y, 140, 40, FP4, left),
            text(273, y + 25, "×", 18),
            box(286, y, 90, 40, FP4, right),
            arrow(382, y + 20, 410, y + 20),
            box(416, y, 140, 40, PALE, result, INK),
            text(566, y + 24, f"for {reader}", 12, anchor="start"),
        ]
    return picture(740, 240, parts)


def refresh() -> str:
    """Draws the steps at which a plan is made and applied."""
    parts = [text(360, 28, "One refresh: training does not wait for the solver", 15)]
    left, width = 110, 44
    for step in range(13):
        colour = WARM if step == 3 else FP4 if step >= 8 else FP8
        parts.append(box(left + width * step, 60, width - 3, 36, colour, str(100 + step - 3)))
    probe, applied = left + width * 3.5, left + width * 8
    parts += [
        text(55, 83, "training", 14),
        text(55, 153, "solver", 14),
        arrow(probe, 98, probe, 132),
        box(probe - 20, 134, 150, 32, PALE, "integer program", INK),
        line(probe + 130, 150, applied, 150, INK, 2, "4 4"),
        arrow(applied, 150, applied, 100),
        text(probe, 52, "probe", 13, WARM),
        text(applied, 52, "new plan", 13, FP4),
        text(probe + 10, 190, "step 100 (first_refresh)", 12),
        text(applied + 70, 190, "apply_delay steps later", 12),
    ]
    return picture(720, 210, parts)


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
        parts += [box(x, 210 - height, unit * flops - 4, height, colour, name)]
        x += unit * flops
    border = 70 + unit * 10 * share - 2
    parts += [
        line(60, 211, 660, 211),
        line(border, 50, border, 235, WARM, 2, "6 4"),
        text(border + 8, 62, "target: 60% of the FLOPs", 13, WARM, "start"),
        text((70 + border) / 2, 235, "in FP4", 14, FP4),
        text((border + 650) / 2, 235, "in FP8", 14, "#9a6a00"),
        text(30, 130, "price", 13),
        text(360, 260, "width: the layer's share of the FLOPs", 12),
    ]
    return picture(720, 275, parts)


def whole_trainings() -> str:
    """Draws gaps to BF16 over the steps of a whole training, as docs/results-loss.md has them in its table."""
    shown = {
        "all FP4": ("all FP4", WARM),
        "75% by layer, {fp4, fp8}, saliency, refresh every 250": ("75%, by layer", "#009e73"),
        "75%, {fp4, fp8}, saliency, refresh every 500": ("75%, {fp4, fp8}", FP4),
        "75%, {mxfp4, fp8-tensor}, saliency, refresh every 500": ("75%, the default formats", "#56b4e9"),
        "FP8": ("FP8", FP8),
    }
    page = (FOLDER.parent / "results-loss.md").read_text(encoding="utf-8")
    section = page.partition("## Whole trainings")[2].partition("\n## ")[0]
    steps = (700, 1400, 2100, 2700)
    parts = [text(360, 28, "Loss above BF16 over a whole training of a 30M Llama, with 95% intervals", 15)]
    for gap in (0, 0.5, 1, 1.5):
        parts += [line(70, level(gap), 520, level(gap), INK if gap == 0 else PALE, 1)]
        parts += [text(60, level(gap) + 5, f"{gap:g}%", anchor="end")]
    parts += [text(along(step), 335, f"{step:,}") for step in steps] + [text(295, 360, "steps")]
    for index, (row, (name, colour)) in enumerate(shown.items()):
        (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)$", section, re.MULTILINE)
        gaps = [tuple(map(float, re.findall(r"[-+\d.]+", cell))) for cell in cells.split("|")[: len(steps)]]
        places = [along(step) + 4 * (index - 2) for step in steps]
        for x, (gap, half) in zip(places, gaps, strict=True):
            parts += [line(x, level(gap - half), x, level(gap + half), colour, 1.5)]
            parts += [f'<circle cx="{x:g}" cy="{level(gap):g}" r="4" fill="{colour}"/>']
        curve = " ".join(f"{x:g},{level(gap):g}" for x, (gap, _) in zip(places, gaps, strict=True))
        parts += [f'<polyline points="{curve}" fill="none" stroke="{colour}" stroke-width="2"/>']
        parts += [line(545, 70 + 26 * index, 565, 70 + 26 * index, colour, 3)]
        parts += [text(572, 75 + 26 * index, name, 13, anchor="start")]
    return picture(740, 375, parts)


def along(step: int) -> float:
    return 70 + step / 6


def level(gap: float) -> float:
    return round(290 - 130 * gap, 1)


PICTURES = {
    "grids": grids,
    "three-gemms": three_gemms,
    "refresh": refresh,
    "program": program,
    "whole-trainings": whole_trainings,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
