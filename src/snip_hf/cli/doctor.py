"""`snip-hf doctor`: what runs here, what is missing and how to install it, and a self-test."""

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
from .commands import Commands
from .messages import fail

if TYPE_CHECKING:
    import torch
    from packaging.specifiers import SpecifierSet

# Packages of the core -> the module whose import shows that they load.
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
# Packages that training works with where they are installed -> for what.
_OTHERS = {
    "triton": "kernels on a GPU",
    "peft": "adapters",
    "trl": "TRL's trainers",
    "deepspeed": "ZeRO",
    "bitsandbytes": "8-bit optimizers",
}
_SOLVERS = ("cbc", "highs")
_MOST_SHOWN = 400

# Lines of a section; what does not work is appended to the list.
Section = Callable[[list[str]], Iterator[str]]


def add(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what runs here, what is missing, and a short test of it all",
        description="Lists packages, extras, devices, backends, formats and solvers, and says what is missing and how "
        "to install it. Then rounds to every format, and trains a tiny model under a plan. Exit code 1 if something "
        "that is installed does not work; a missing extra is no error.",
    )
    doctor.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    python = f"Python {platform.python_version()} ({printable(sys.executable)})"
    print(f"snip-hf {snip_hf.__version__}, {python}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    problems: list[str] = []
    for name, section in _SECTIONS.items():
        print(f"\n{name}")
        for line in _told(section, problems):
            print(f"  {printable(line, _MOST_SHOWN)}", flush=True)
        if problems and section is _packages:
            break  # What follows needs them.
    if problems:
        return fail(RuntimeError(f"{len(problems)} of these do not work: {' '.join(problems)}"), 1)
    print("\nAll that is installed works.")
    return 0


def _told(section: Section, problems: list[str]) -> Iterator[str]:
    try:
        yield from section(problems)
    except Exception as error:  # Whatever is broken here; the sections after it may still run.
        problems.append(f"{type(error).__name__}: {error}")
        yield f"does not work: {problems[-1]}"


def _packages(problems: list[str]) -> Iterator[str]:
    expected = _expected_versions()
    for package, module in _CORE.items():
        try:
            importlib.import_module(module)
            version, versions = metadata.version(package), expected.get(package)
            fits = versions is None or versions.contains(version, prereleases=True)
            yield f"{package} {version}{'' if fits else f', which is untested: expected {versions}'}"
        except Exception as error:  # A package that is broken raises anything.
            problems.append(f"{package} does not load ({type(error).__name__}: {error}).")
            yield problems[-1]


def _expected_versions() -> dict[str, SpecifierSet]:
    """Returns package -> the versions that snip-hf asks for; {} if it is not installed, only imported."""
    from packaging.requirements import Requirement  # which transformers and accelerate need

    try:
        lines = metadata.requires("snip-hf") or []
    except metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {one.name.lower(): one.specifier for one in requirements if one.marker is None}


def _others(problems: list[str]) -> Iterator[str]:
    for package, purpose in _OTHERS.items():
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
        yield "no GPU that torch can use"
    for backend in BACKENDS.values():
        able = [str(device) for device in devices if backend.lacks(device) is None]
        emulation = ", an emulation that is slower than BF16" if backend.is_emulation else ""
        runs = f"runs on {', '.join(able)}{emulation}" if able else f"does not run: {backend.lacks(devices[0])}"
        yield f"{backend.name}: {runs}"


def _devices() -> list[torch.device]:
    """The device that runs go to first, and the CPU."""
    import torch

    return [torch.device("cuda", 0)] * torch.cuda.is_available() + [torch.device("cpu")]


def _formats(problems: list[str]) -> Iterator[str]:
    from ..kernels.backend import BACKENDS
    from ..numerics.formats import FORMATS
    from .self_test import SelfTestFailed, rounding_error

    device = _devices()[0]
    for format in FORMATS.values():
        if not format.is_quantized:
            continue
        try:
            error = rounding_error(format.name)
        except SelfTestFailed as failure:
            problems.append(str(failure))
            yield str(failure)
            continue
        able = [backend for backend in BACKENDS.values() if backend.lacks(device) is None and backend.runs(format)]
        faults = {backend.name: backend.fails(format, device) for backend in able}
        runs = ", ".join(name for name, fault in faults.items() if fault is None)
        yield f"{format.name}: {format.bits} bits, relative error {error:.3f}, by {runs}"
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


def _tiny_model(problems: list[str]) -> Iterator[str]:
    from .self_test import train_tiny_model

    trained = train_tiny_model()
    plan, origin = trained.plan, trained.plan.provenance
    solver = f"{origin.solver} ({origin.solver_version})"
    yield (
        f"two blocks trained under a plan with {plan.fp4_fraction:.4f} of the linear FLOPs in 4 bits, made at step "
        f"{origin.step} by {solver}; loss {trained.loss:.4f}"
    )


_SECTIONS: dict[str, Section] = {
    "Packages": _packages,
    "Extras": _extras,
    "Others that it works with": _others,
    "Devices and backends": _backends,
    "Formats": _formats,
    "Solvers (solver='auto' takes the first that works)": _solvers,
    "Tiny model, on the CPU": _tiny_model,
}
