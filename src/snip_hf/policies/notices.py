"""Notices about a configuration that can work, but not as its author may think."""

from __future__ import annotations

from ..config import ALL, DEFAULT_FP4_FRACTION, SnipConfig
from ..numerics.formats import FORMATS, UNQUANTIZED
from .registry import policy_of


def notices(config: SnipConfig, recompiles_for_bf16: bool) -> list[str]:
    """Returns what to warn of when a run starts.

    Args:
        config: of the run.
        recompiles_for_bf16: of the backend in use (`Backend.recompiles_for_bf16`).
    """
    policy = policy_of(config)
    if policy is None:
        return _notices_of_file(config)
    said: list[str] = []
    if not policy.aims_at_share and config.target_fp4_fraction not in (None, DEFAULT_FP4_FRACTION):
        said.append(
            f"target_fp4_fraction={config.target_fp4_fraction!r} has no effect with policy={config.policy!r}, which "
            "meets no target."
        )
    if policy.aims_at_share and not policy.needs_probe and len(config.formats) > 2:
        said.append(
            f"policy={config.policy!r} chooses between the first and the last of formats; "
            f"{_listed(config.formats[1:-1])} will not run."
        )
    idle = [name for name in config.formats if FORMATS[name].is_quantized and not FORMATS[name].counts_as_fp4]
    has_bf16 = UNQUANTIZED.name in config.formats
    if policy.needs_probe and has_bf16 and idle and config.target_linear_speedup is None:
        said.append(
            f"target_fp4_fraction does not say how fast the rest must be. {_listed(idle)} will hardly run anywhere: "
            f"{UNQUANTIZED.label} does no damage and counts as much. Set target_linear_speedup in its place, or leave "
            f"{UNQUANTIZED.name!r} out of formats."
        )
    if recompiles_for_bf16 and has_bf16 and policy.needs_probe:
        said.append(
            f"under torch.compile, a layer whose GEMMs change to or from {UNQUANTIZED.label} is compiled again, and "
            "each pattern in a compiled module takes one of torch._dynamo.config.recompile_limit graphs (8 by "
            f"default); beyond that it runs uncompiled. Raise the limit, or leave {UNQUANTIZED.name!r} out of formats "
            "(docs/hopper.md)."
        )
    return said


def _notices_of_file(config: SnipConfig) -> list[str]:
    if config.decides == ALL:
        return []
    return [
        f"decides={config.decides!r} has no effect with fixed_plan={config.fixed_plan!r}: no policy is asked, and the "
        "plan in the file is held as it is, in all GEMMs. Shares are those of the file's plan."
    ]


def _listed(formats: list[str] | tuple[str, ...]) -> str:
    return ", ".join(FORMATS[name].label for name in formats)
