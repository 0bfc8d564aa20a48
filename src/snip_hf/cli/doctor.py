"""`snip-hf doctor`: checks what works here, what is missing, and how to install it."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import snip_hf

from ..extras import EXTRAS
from ..text import printable
from . import fail

if TYPE_CHECKING:
    import torch

    from ..kernels.backend import Backend

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
    "liger-kernel": "use_liger_kernel=True",
}
_SOLVERS = ("cbc", "highs")
_PARALLELISM = {
    "works": "one process, DDP, FSDP2, transformers' tp_size and, from transformers 5.23 on, fsdp_size, "
    "dp_replicate_size and ep_size, Accelerate's cp_size, ZeRO, pipelines",
    "refused with a probe": "FSDP 1, Megatron-LM: use FSDP2; sp_size: use cp_size; FP16 under FSDP2 or DeepSpeed: use "
    "BF16; or use a policy without a probe",
    "refused": "pp_size: use fsdp_size, tp_size or torch.distributed.pipelining; nn.DataParallel: use DDP",
}
_MAX_LINE = 500

# Yields the lines of a section and appends problems to the list.
Section = Callable[[list[str]], Iterator[str]]


def doctor(arguments: argparse.Namespace) -> int:
    python = f"Python {platform.python_version()} ({printable(sys.executable)})"
    print(f"snip-hf {snip_hf.__version__}, {python}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    problems: list[str] = []
    sections = dict(_SECTIONS)
    if arguments.model is not None:
        fields, lora = dict(arguments.snip), None if arguments.lora is None else dict(arguments.lora)
        given = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        title = f"Model {arguments.model} with SnipConfig({given}){'' if lora is None else ' and LoRA'}"
        sections[printable(title)] = partial(_model, arguments.model, fields, lora)
    elif arguments.snip or arguments.lora is not None:
        raise ValueError("--snip and --lora say how to train a model; give the model too: snip-hf doctor MODEL.")
    for name, section in sections.items():
        print(f"\n{name}")
        for line in _lines(section, problems):
            print(f"  {printable(line, _MAX_LINE)}", flush=True)
        if problems and section is _packages:
            break  # The other sections need the packages.
    if problems:
        return fail(RuntimeError(" ".join(problems)), 1)
    print("\nEverything that is installed works.")
    return 0


def _lines(section: Section, problems: list[str]) -> Iterator[str]:
    try:
        yield from section(problems)
    except Exception as error:  # Later sections may still run.
        problems.append(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        yield f"does not work: {problems[-1]}"


def _packages(problems: list[str]) -> Iterator[str]:
    for package, module in _CORE.items():
        try:
            importlib.import_module(module)
            yield f"{package} {metadata.version(package)}"
        except Exception as error:  # A broken package may raise anything.
            problems.append(f"{package} does not load ({type(error).__name__}: {error}).")
            yield problems[-1]


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


def _model(name: str, fields: dict[str, Any], lora: dict[str, Any] | None, problems: list[str]) -> Iterator[str]:
    """Yields the lines on how training of a model would run on this machine.

    Args:
        name: folder or name on the Hub.
        fields: of `SnipConfig`, those that differ from their defaults.
        lora: fields of PEFT's `LoraConfig`; None: all weights are trained.
        problems: gets none here.
    """
    from ..config import SnipConfig
    from ..kernels.backend import select_backend, why_emulated
    from ..layers.convert import convert_model
    from ..layers.selection import describe_unswapped, skip_reasons, weight_matrices
    from ..parallel.ranks import Ranks
    from ..policies.registry import policy_of
    from ..policies.target import describe_target
    from ..training.plan_in_force import first_plan, formats_in_use
    from ..training.setup import find_setting
    from .plans import empty_model

    config, model, device = SnipConfig.from_dict(fields), empty_model(name), _devices()[0]
    architecture, size = type(model).__name__, sum(parameter.numel() for parameter in model.parameters())
    yield f"{architecture}, {size / 1e6:,.1f}M parameters"
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        options: Any = {"target_modules": "all-linear", **lora}
        model = get_peft_model(model, LoraConfig(**options))  # type: ignore[arg-type]
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        yield (
            f"adapters: {trained / 1e6:,.1f}M parameters; the frozen weights have two GEMMs, forward and grad_input "
            "(docs/adapters.md)"
        )
    yield f"target: {describe_target(config.to_dict()) or 'none'}"
    probes = policy_of(config).needs_probe
    if not probes:
        yield "probes: none, and no solver"
    convert_model(model, config)
    setting = find_setting(model, config, Ranks())  # refuses stages and ties that do not fit
    if config.fixed_plan is not None:
        first_plan(setting, name)
    head = " and output head" if "output head" in skip_reasons(model, config).values() else ""
    matrices = [one for one in weight_matrices(model, config) if not one.is_aside and one.parameter.dim() > 1]
    decided = sum(one.size for one in matrices if one.reason is None)
    yield (
        f"covered: {decided / max(1, sum(one.size for one in matrices)):.1%} of the weights in the decoder's products; "
        f"other weights: {describe_unswapped(matrices) or 'none'}; embeddings{head} stay as they are"
    )
    formats = formats_in_use(config)
    backend = select_backend(config.backend, device, formats)
    why = why_emulated(device, formats) if backend.is_emulation else None
    yield f"formats: {', '.join(formats)} by {backend.name}{f': {why}' if why else ''}"
    yield f"speed: {_speed(model, backend, lora is not None)}"
    yield f"attention: {_attention(model, probes)}"
    for verdict, kinds in _PARALLELISM.items():
        yield f"parallelism, {verdict}: {kinds}"


def _attention(model: Any, probes: bool) -> str:
    """Returns the model's attention, and what a probe does under others.

    The model, which never runs, may get another.
    """
    from ..estimation.attention import check_attention, switched_attention

    own, supported = model.config._attn_implementation, []
    if model._supports_flash_attn:
        supported.append("FlashAttention")
    if model._supports_flex_attn:
        supported.append("flex attention")
    if not (probes and supported):
        return str(own)
    others = " and ".join(supported)
    model.config._attn_implementation = "flash_attention_2"
    try:
        check_attention(model)
    except ValueError:
        return f"{own}; with a probe refused under {others}: use sdpa or eager"
    _, _, plain = switched_attention(model)[0]
    return f"{own}; probes use {plain} if the model trains under {others}"


def _speed(model: Any, backend: Backend, has_adapters: bool) -> str:
    """Returns the speed that the backend had for the nearest hidden size that was measured, and its conditions."""
    from ..kernels.backend import BACKENDS
    from ..training.messages import describe_slowdown, least_tokens, nearest_speeds

    hidden = getattr(model.config.get_text_config(), "hidden_size", None)
    measured = backend.adapter_speeds if has_adapters else backend.measured_speeds
    if backend.is_emulation:
        least = min(size for other in BACKENDS.values() for size in other.measured_speeds)
        small = hidden is not None and hidden < least
        there = f"; there BF16 is likely to be faster below a hidden size of {least} (yours: {hidden})" if small else ""
        return f"slower than BF16, because the formats are emulated here; the fast kernels need an H100 or H200{there}"
    if not measured or hidden is None:
        return "not measured"
    if hidden < min(measured):
        slower = describe_slowdown(backend, hidden)
        return f"not measured below a hidden size of {min(measured)} (yours: {hidden}); {slower}"
    (nearest, speeds), cards = nearest_speeds(measured, hidden), "an H200" if has_adapters else "H100s and H200s"
    graphs = (
        ". The host may limit it, especially on an H100: try torch_compile_mode='reduce-overhead' if all micro-batches "
        "have one shape (docs/troubleshooting.md)"
    )
    # As measured, docs/results-speed.md; with adapters 50% and 0% were not.
    others = "" if has_adapters else " (in the default formats on an H200 50% was up to 3% slower, 0% 2 to 4%)"
    return (
        f"{speeds} times compiled BF16, as measured at 75% in 4 bits{others} and hidden size {nearest} (yours: "
        f"{hidden}) on {cards}. Set bf16=True and torch_compile=True, with at least {least_tokens(hidden):,} tokens "
        f"per micro-batch{graphs if hidden < max(measured) else ''}"
    )


_SECTIONS: dict[str, Section] = {
    "Packages": _packages,
    "Extras": _extras,
    "Supported packages": _supported,
    "Devices and backends": _backends,
    "Formats": _formats,
    "Solvers (solver='auto' uses the first that works)": _solvers,
}
