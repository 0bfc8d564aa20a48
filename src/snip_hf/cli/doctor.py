"""`snip-hf doctor`: checks what works here, what is missing, and how to install it."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING

import snip_hf

from ..extras import EXTRAS
from ..text import printable
from . import fail

if TYPE_CHECKING:
    import torch
    from packaging.specifiers import SpecifierSet

# Required packages -> the module to import.
_CORE = {
    "torch": "torch",
    "torchao": "torchao",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "scipy": "scipy",
    "pyyaml": "yaml",
}
# Optional packages that training supports -> their use.
_SUPPORTED = {
    "triton": "kernels on a GPU",
    "peft": "adapters",
    "trl": "TRL's trainers",
    "deepspeed": "ZeRO",
    "bitsandbytes": "8-bit optimizers",
}
_SOLVERS = ("cbc", "highs")
_MAX_LINE = 400

# Yields the lines of a section and appends problems to the list.
Section = Callable[[list[str]], Iterator[str]]


def doctor(arguments: argparse.Namespace) -> int:
    python = f"Python {platform.python_version()} ({printable(sys.executable)})"
    print(f"snip-hf {snip_hf.__version__}, {python}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    problems: list[str] = []
    for name, section in _SECTIONS.items():
        print(f"\n{name}")
        for line in _lines(section, problems):
            print(f"  {printable(line, _MAX_LINE)}", flush=True)
        if problems and section is _packages:
            break  # The other sections need the packages.
    if problems:
        return fail(RuntimeError(f"{len(problems)} of these do not work: {' '.join(problems)}"), 1)
    print("\nAll that is installed works.")
    return 0


def _lines(section: Section, problems: list[str]) -> Iterator[str]:
    try:
        yield from section(problems)
    except Exception as error:  # Later sections may still run.
        problems.append(f"{type(error).__name__}: {error}")
        yield f"does not work: {problems[-1]}"


def _packages(problems: list[str]) -> Iterator[str]:
    expected = _expected_versions()
    for package, module in _CORE.items():
        try:
            importlib.import_module(module)
            version, versions = metadata.version(package), expected.get(package)
            fits = versions is None or versions.contains(version, prereleases=True)
            yield f"{package} {version}{'' if fits else f', untested; expected {versions}'}"
        except Exception as error:  # A broken package may raise anything.
            problems.append(f"{package} does not load ({type(error).__name__}: {error}).")
            yield problems[-1]


def _expected_versions() -> dict[str, SpecifierSet]:
    """Returns package -> required versions; {} if snip-hf is not installed."""
    from packaging.requirements import Requirement  # installed with transformers

    try:
        lines = metadata.requires("snip-hf") or []
    except metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {one.name.lower(): one.specifier for one in requirements if one.marker is None}


def _supported(problems: list[str]) -> Iterator[str]:
    for package, purpose in _SUPPORTED.items():
        try:
            yield f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            yield f"{package}: not installed, for {purpose}"


def _extras(problems: list[str]) -> Iterator[str]:
    for name, extra in EXTRAS.items():
        missing = extra.missing
        if missing:
            yield f"{name}: {', '.join(missing)} not installed, for {extra.purpose}. {extra.command}"
        else:
            versions = (f"{package} {metadata.version(package)}" for package in extra.packages.values())
            yield f"{name}: {', '.join(versions)}"


def _backends(problems: list[str]) -> Iterator[str]:
    import torch

    from ..kernels.backend import BACKENDS

    devices = _devices()
    for device in devices:
        if device.type == "cuda":
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            yield f"{device}: {torch.cuda.get_device_name(device)}, compute capability {capability}"
    if len(devices) == 1:
        yield "torch finds no GPU"
    for backend in BACKENDS.values():
        able = [str(device) for device in devices if backend.lacks(device) is None]
        emulation = ", an emulation that is slower than BF16" if backend.is_emulation else ""
        runs = f"runs on {', '.join(able)}{emulation}" if able else f"does not run: {backend.lacks(devices[0])}"
        yield f"{backend.name}: {runs}"


def _devices() -> list[torch.device]:
    """Returns the first GPU, if there is one, and the CPU."""
    import torch

    return [torch.device("cuda", 0)] * torch.cuda.is_available() + [torch.device("cpu")]


def _formats(problems: list[str]) -> Iterator[str]:
    from ..kernels.backend import BACKENDS
    from ..numerics.formats import FORMATS

    device = _devices()[0]
    for format in FORMATS.values():
        if not format.is_quantized:
            continue
        able = [backend for backend in BACKENDS.values() if backend.lacks(device) is None and backend.runs(format)]
        faults = {backend.name: backend.fails(format, device) for backend in able}
        runs = ", ".join(name for name, fault in faults.items() if fault is None)
        yield f"{format.name}: {format.bits} bits, by {runs}"
        for name, fault in faults.items():
            if fault is not None:
                problems.append(f"{name}: {fault}.")
                yield problems[-1]


def _solvers(problems: list[str]) -> Iterator[str]:
    from ..planning.solver.process import SolverError, try_out

    for name in _SOLVERS:
        try:
            yield f"{name}: {try_out(name)}"
        except SolverError as error:
            if error.reason != "missing":
                problems.append(str(error))
            yield f"{name}: {error}"


_SECTIONS: dict[str, Section] = {
    "Packages": _packages,
    "Extras": _extras,
    "Supported packages": _supported,
    "Devices and backends": _backends,
    "Formats": _formats,
    "Solvers (solver='auto' uses the first that works)": _solvers,
}
