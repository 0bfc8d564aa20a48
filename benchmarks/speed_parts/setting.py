"""Which models, sizes and recipes are timed."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

COMPILER = "inductor"
VOCABULARY = 32000
# Hidden size, inner size, layers, heads, heads of keys.
MODELS = {"8B, 8 layers": (4096, 14336, 8, 32, 8), "TinyLlama-1.1B": (2048, 5632, 22, 32, 4)}
SMALL = (2048, 5632, 4, 32, 4)
SMALL_BATCH = (4, 1024)
# (O, I) of their distinct linears: q and o, k and v, gate and up, down.
LINEARS = tuple(
    size
    for hidden, inner, _, heads, key_heads in MODELS.values()
    for size in ((hidden, hidden), (hidden // heads * key_heads, hidden), (inner, hidden), (hidden, inner))
)
# Those whose GEMMs weigh most, for part linears.
LARGEST = ((14336, 4096), (5632, 2048), (4096, 4096), (2048, 2048))
CHANNELS = (2048, 4096, 5632, 14336)
TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
BF16 = "BF16"
FOLDED = ("mxfp4", "fp8-tensor")
# Recipe -> fields of its SnipConfig. With ties, tied layers share one quantized input. Of "75%", any three quarters of
# the FLOPs are in 4 bits, by GEMM.
OURS: dict[str, dict[str, Any]] = {
    "snip-hf FP4, ties": {"policy": "uniform-fp4", "ties": TIES},
    "snip-hf FP4, no ties": {"policy": "uniform-fp4"},
    "snip-hf FP8, ties": {"policy": "uniform-fp8", "ties": TIES},
    "snip-hf MXFP4, ties": {"policy": "uniform-mxfp4", "ties": TIES, "formats": FOLDED},
    "snip-hf MXFP4 75%, ties": {
        "policy": "random",
        "target_fp4_fraction": 0.75,
        "granularity": "gemm",
        "ties": TIES,
        "formats": FOLDED,
    },
    "snip-hf MXFP4, ties, fast sums": {"policy": "uniform-mxfp4", "ties": TIES, "formats": FOLDED},
    "snip-hf FP8 tensor, ties": {"policy": "uniform-fp8-tensor", "ties": TIES, "formats": FOLDED},
}
# Recipe -> which changes of the backend "tensor-scaled" it has (`switches.CHANGES`); those that are not named have all.
WITH_CHANGES: dict[str, tuple[str, ...]] = {
    "snip-hf MXFP4, ties, before": (),
    "snip-hf MXFP4, ties, + launches": ("spared launches",),
    "snip-hf MXFP4, ties, + sums": ("spared launches", "fast sums"),
    "snip-hf MXFP4, ties, + late": ("spared launches", "fast sums", "late columns"),
    "snip-hf MXFP4, ties, + weights": ("spared launches", "fast sums", "late columns", "fast weight gradients"),
    "snip-hf MXFP4 75%, ties, + weights": ("spared launches", "fast sums", "late columns", "fast weight gradients"),
}
OURS |= {name: OURS[name.rpartition(", ")[0]] for name in WITH_CHANGES}
# Timed only if --recipes names them.
ON_REQUEST = (
    "snip-hf FP4, no ties",
    "snip-hf FP8, ties",
    "snip-hf MXFP4, ties, fast sums",
    "snip-hf FP8 tensor, ties",
)
# Those in which the tensor cores keep partial sums in 14 bits, in every GEMM.
FAST_SUMS = ("snip-hf MXFP4, ties, fast sums",)
OURS_ALONE = {"snip-hf FP4": "fp4", "snip-hf FP8": "fp8"}
# Recipe -> least share in formats of at most 4 bits, of runs in the Trainer.
IN_TRAINER = {"snip-hf 75%": 0.75, "snip-hf 100%": 1.0}
TORCHAO_IN_TRAINER = ("torchao tensorwise",)
# Measured with two micro-batches per step too, over half as many steps.
ACCUMULATING = (BF16, "snip-hf FP4, ties", "snip-hf MXFP4, ties")
# (Hidden size, tokens per step) of part crossing; all sizes at one number of tokens come first.
CROSSING = (
    *((hidden, 8192) for hidden in (512, 1024, 2048, 4096, 8192)),
    *((hidden, tokens) for hidden in (1024, 2048, 4096) for tokens in (2048, 32768)),
)
WARM_UP = 3
CHANGES = 20
# Bytes that a timing of weights goes through, so that none comes from the cache: ten times an H200's.
BEYOND_CACHE = 2**29
# Of a decoder layer's GEMMs, for part bf16_mix, and its steps to time.
BF16_SHARES = (0.0, 0.1, 0.25, 0.5)
MIX_STEPS = 5
