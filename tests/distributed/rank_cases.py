"""The trainings that are compared with each other."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from trainings import SCHEDULE, Training

from snip_hf.config import AUTO_TIES

_SGD = {"optimizer": "sgd", "steps": 6, "micro_batches": 2, "clip": 0.5}
_NEVER = {"start_format": "bf16", "first_refresh": 1, "refresh_every": 1, "apply_delay": 0, "probe_tokens": 256}

# All ranks share each micro-batch.
SHARED = {
    "adamw": Training(SCHEDULE | {"target_fp4_fraction": 0.6}, "warm", 1e-5, steps=10, keeps_states=True),
    "sgd-gemm-accumulated-clipped": Training(SCHEDULE | {"granularity": "gemm", "target_fp4_fraction": 0.6}, **_SGD),
    "cut-sampled": Training(
        SCHEDULE | {"refresh_every": 6, "probe_batch_tokens": 2 * 128, "probe_tokens": 128},
        "warm",
        1e-5,
        rows=4,
        steps=6,
    ),
    "uneven-labels": Training(SCHEDULE, "warm", labels="uneven", steps=3),
    "ragged": Training(SCHEDULE | {"start_format": "bf16"}, "warm", labels="ragged", steps=1),
    "fp4": Training({"policy": "uniform-fp4"}, "sgd", steps=1),
    "fp4-seed-1": Training({"policy": "uniform-fp4", "seed": 1}, "sgd", steps=1),
}
_LATER = SCHEDULE | {"first_refresh": 3, "refresh_every": 2, "start_format": "bf16"}
_CONV1D = _LATER | {"granularity": "gemm", "target_fp4_fraction": 0.75}
_OF_EXPERTS = _LATER | {"granularity": "gemm", "target_fp4_fraction": 0.5}
_OF_GRADIENTS = _LATER | {"granularity": "gemm", "objective": "gradients"}
SHARDED = {
    "fsdp2-adamw": Training(_LATER, "adamw", wrapper="fsdp2", steps=6),
    "ddp-adamw": Training(_LATER, "adamw", steps=6),
    "ddp-views-adamw": Training(_LATER, "adamw", wrapper="ddp-views", steps=6),
    "fsdp2-conv1d": Training(_CONV1D, "sgd", wrapper="fsdp2", steps=6, is_conv1d=True),
    "ddp-conv1d": Training(_CONV1D, "sgd", steps=6, is_conv1d=True),
    "fsdp2-experts": Training(_OF_EXPERTS, "sgd", wrapper="fsdp2", steps=6, family="qwen3-moe"),
    "ddp-experts": Training(_OF_EXPERTS, "sgd", steps=6, family="qwen3-moe"),
    "fsdp2-mamba": Training(_LATER, "adamw", wrapper="fsdp2", steps=6, family="mamba"),
    "ddp-mamba": Training(_LATER, "adamw", steps=6, family="mamba"),
    "fsdp2-gradients": Training(_OF_GRADIENTS, "adamw", wrapper="fsdp2", steps=6),
    "ddp-gradients": Training(_OF_GRADIENTS, "adamw", steps=6),
    "fsdp2-sgd-gemm-accumulated-clipped": replace(SHARED["sgd-gemm-accumulated-clipped"], wrapper="fsdp2"),
}
if find_spec("peft"):
    SHARDED |= {
        f"{wrapper}-lora": Training(_LATER, "adamw", wrapper=wrapper, steps=6, has_adapters=True)
        for wrapper in ("fsdp2", "ddp")
    }
TRACELESS = {
    f"{wrapper}-{name}": Training(config, wrapper=wrapper, steps=3, micro_batches=2, dropout=0.1, solves=False)
    for wrapper in ("ddp", "fsdp2")
    for name, config in (("with", _NEVER), ("without", None))
}
JUDGES = [
    *[("ddp", "fisher"), ("fsdp2", "hessian-trace"), ("ddp", "greedy"), ("fsdp2", "kl")],
    *[("ddp", "snip-paper"), ("fsdp2", "snip-paper")],
]
# All tokens of one probe, and one before which nothing was rounded.
JUDGED = {
    f"{wrapper}-{policy}": Training(
        SCHEDULE | {"policy": policy, "start_format": "bf16"}, "sgd", wrapper=wrapper, steps=2
    )
    for wrapper, policy in JUDGES
}
# On GPUs. In FP32 emulated, in BF16 by the backend that "auto" takes for the default formats.
_EMULATED = replace(
    SHARED["sgd-gemm-accumulated-clipped"],
    config=SCHEDULE | {"granularity": "gemm", "target_fp4_fraction": 0.5, "backend": "emulated"},
)
_HOPPER = Training(
    SCHEDULE | {"formats": ("mxfp4", "fp8-delayed"), "granularity": "gemm", "ties": AUTO_TIES},
    "sgd",
    hidden=128,
    mixed_precision="bf16",
)
ON_GPUS = {
    f"{wrapper}-{name}": replace(training, wrapper=wrapper)
    for wrapper in ("ddp", "fsdp2")
    for name, training in (("emulated", _EMULATED), ("hopper", _HOPPER))
}
# Begin every step with the weights and moments with which one process began it.
FOLLOWING = {name: SHARED[name] for name in ("adamw",)}
_OF_TWO = SHARED | SHARDED | TRACELESS | JUDGED
# One of each kind; the others are looked at by slow tests.
_QUICK = ("sgd-gemm-accumulated-clipped", "uneven-labels", "fp4", "fsdp2-sgd-gemm-accumulated-clipped")
CASES = {
    "two": {name: _OF_TWO[name] for name in _QUICK},
    "more": {name: training for name, training in _OF_TWO.items() if name not in _QUICK},
    "following": FOLLOWING,
    "gpus": ON_GPUS,
    "gpu": {name: training for name, training in ON_GPUS.items() if training.wrapper == "ddp"},
}
