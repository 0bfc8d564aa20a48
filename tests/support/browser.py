"""A headless Chromium, where there is one: its name in SNIP_CHROMIUM, or one of the usual names on the PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


class Browser:
    """Opens pages of files; its profile lies in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        found = os.environ.get("SNIP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            names = ", ".join(NAMES)
            pytest.skip(f"There is no Chromium: none of {names} is on the PATH, and SNIP_CHROMIUM is not set.")
        self._command = [
            found,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
        ]

    def dom(self, page: Path, script: str = "") -> str:
        """Returns the page's HTML after its scripts have run, which must not complain.

        Args:
            page: the file.
            script: runs after the page's own; the page's policy, which would forbid it, is taken out then.
        """
        if script:
            text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
            page = page.with_suffix(".scripted.html")
            page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        return self._run("--dump-dom", "--window-size=1200,800", page.as_uri())

    def screenshot(self, page: Path, width: int, height: int, *flags: str, query: str = "") -> np.ndarray:
        """Returns the pixels, (height, width, 3) from 0 to 255."""
        image = page.with_suffix(".png")
        size = f"--window-size={width},{height}"
        # Until all figures have been drawn at their sizes.
        self._run(*flags, size, "--virtual-time-budget=5000", f"--screenshot={image}", f"{page.as_uri()}{query}")
        return np.round(imread(image)[..., :3] * 255).astype(int)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, timeout=120, check=True)
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert complaints == []
        return done.stdout
