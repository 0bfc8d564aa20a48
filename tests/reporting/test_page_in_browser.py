"""Does a Chromium draw a page soon, in light and dark, on a phone, with the names and formats of its files?"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from long_run import write_long_run
from written_runs import random_assignments, write_divergence, write_losses, write_run

from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.records.load import load_run
from snip_hf.reporting.page import write_page

pytestmark = pytest.mark.slow
LIGHT, DARK = (0xFD, 0xFD, 0xFC), (0x14, 0x17, 0x1A)  # --back in report.css
LAYER = "model.layers.1.mlp.down_proj"

# Points at a row and a column of the plan, and notes what the page says of them.
POINT = """
const box = document.querySelector("[data-plan] .scroll");
const search = document.querySelector("[data-plan] input");
search.value = "layers.1.";
search.dispatchEvent(new Event("input"));
const canvas = box.querySelector("canvas");
const said = [[0.99, 10], [0.2, 10], [0.99, 40], [0.01, 40]].map(([part, down]) => {
  const { left, top, right } = canvas.getBoundingClientRect();
  const at = { clientX: left + (right - left) * part, clientY: top + down, bubbles: true };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  return document.getElementById("tip").textContent;
});
document.documentElement.dataset.said = JSON.stringify(said);
"""
# Zooms in until every row has a name, and notes how high the plan has become.
ZOOM = """
const named = (node) => [...document.querySelectorAll("[data-plan] button")].find((one) => one.textContent === node);
const space = document.querySelector("[data-plan] .scroll > div");
const before = parseFloat(space.style.height);
for (let count = 0; count < 30; count += 1) named("Rows +").click();
const after = parseFloat(space.style.height);
named("Fit").click();
document.documentElement.dataset.heights = JSON.stringify([before, after, parseFloat(space.style.height)]);
"""
# A phone: a window itself is never so narrow.
PHONE = """<!doctype html><html><body><iframe width="390" height="800" frameborder="0" srcdoc="{page}"></iframe><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {{
  const inside = frame.contentDocument.documentElement.scrollWidth;
  document.documentElement.dataset.widths = JSON.stringify([inside, frame.contentWindow.innerWidth]);
}});
</script></body></html>"""


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Of a run whose layers are in FP8 at first and all but one of them in FP4 from step 110 on, of 400."""
    layers = list(random_assignments(1)[0])
    plans = [dict.fromkeys(layers, "fp8"), {layer: "fp8" if layer == LAYER else "fp4" for layer in layers}]
    write_run(tmp_path / "run", [{x: dict.fromkeys(GEMMS, name) for x, name in plan.items()} for plan in plans])
    write_losses(tmp_path / "run" / "trainer_state.json", 400)
    write_divergence(tmp_path / "run", 100, {(layer, "layer"): (0.1, 0.2) for layer in layers})
    return write_page(tmp_path / "report.html", {"a run with a long name, on a phone": load_run(tmp_path / "run")})


def noted(dom: str, name: str) -> list:
    match = re.search(rf'<html[^>]* data-{name}="([^"]*)"', dom)
    assert match is not None
    return json.loads(match[1].replace("&quot;", '"'))


def pixels(image: np.ndarray, name: str) -> int:
    colour = [int(FORMATS[name].colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((image == colour).all(axis=-1).sum())


def test_the_page_of_a_long_run_of_a_deep_model_opens_below_two_seconds(tmp_path: Path, browser: Browser) -> None:
    write_long_run(tmp_path / "run")
    path = write_page(tmp_path / "report.html", {"long": load_run(tmp_path / "run")})
    dom = browser.dom(path)
    assert noted(dom, "drawn") < 2000
    assert dom.count("<canvas") == 10  # two common curves, plan, divergences with their scale, five curves of the run
    before, after, fit = noted(browser.dom(path, script=ZOOM), "heights")
    assert after >= 560 * 3 * 12 and fit == before < 700


@pytest.mark.parametrize(
    ("flags", "query", "back"),
    [
        (("--blink-settings=preferredColorScheme=1",), "", LIGHT),
        (("--blink-settings=preferredColorScheme=0",), "", DARK),
        (("--blink-settings=preferredColorScheme=0",), "?theme=light", LIGHT),
        (("--blink-settings=preferredColorScheme=1",), "?theme=dark", DARK),
    ],
)
def test_the_theme_is_the_systems_or_the_chosen_one_and_the_plan_has_its_colours(
    flags: tuple[str, ...], query: str, back: tuple[int, ...], page: Path, browser: Browser
) -> None:
    image = browser.screenshot(page, 1200, 3000, *flags, query=query)
    assert tuple(image[5, 5]) == back
    # Of 6 layers and 400 steps, 5 layers are in FP4 from step 110 on.
    share = pixels(image, "fp4") / (pixels(image, "fp4") + pixels(image, "fp8"))
    assert share == pytest.approx(5 / 6 * 290 / 400, abs=0.02)


def test_a_phone_shows_all_without_scrolling_sideways(page: Path, browser: Browser, tmp_path: Path) -> None:
    image = browser.screenshot(page, 390, 3000)
    assert image.shape[:2] == (3000, 390)
    assert pixels(image, "fp4") > 10_000
    frame = tmp_path / "phone.html"
    # With every table open.
    text = page.read_text(encoding="utf-8").replace("<details>", "<details open>")
    frame.write_text(PHONE.format(page=html.escape(text)), encoding="utf-8")
    inside, window = noted(browser.dom(frame), "widths")
    assert inside == window == 390


def test_the_page_tells_name_and_format_of_what_is_pointed_at(page: Path, browser: Browser) -> None:
    assert noted(browser.dom(page, script=POINT), "said") == [
        "model.layers.1.self_attn.q_proj\nFP4\nfrom step 110 to 400",
        "model.layers.1.self_attn.q_proj\nFP8\nfrom step 0 to 110",
        f"{LAYER}\nFP8\nfrom step 110 to 400",
        LAYER,
    ]
