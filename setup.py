"""What setup.cfg cannot say: the links of the long description, and the recipes inside the built package."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = runpy.run_path(str(ROOT / "src" / "snip_hf" / "shipped_files.py"))


class BuildWithRecipes(build_py):
    """Copies the recipes into the package. In an editable install they are read where they are."""

    def _copies(self) -> dict[Path, Path]:
        folder = Path(self.build_lib) / "snip_hf" / SHIPPED["FOLDER"]
        return {} if self.editable_mode else {folder / file: ROOT / file for file in SHIPPED["shipped_files"](ROOT)}

    def run(self) -> None:
        super().run()
        for target, source in self._copies().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self._copies())]


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=SHIPPED["absolute_links"]((ROOT / "README.md").read_text(encoding="utf-8")),
)
