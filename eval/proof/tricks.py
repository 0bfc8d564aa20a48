"""Formats and policies of less-loss.yaml and blocks.yaml: variants of MXFP4, one kind of GEMM in 4 bits, and backward
GEMMs of the first blocks in 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from snip_hf import formats, register_format
from snip_hf.numerics.formats import Operand
from snip_hf.numerics.gemms import GEMMS, Assignment
from snip_hf.numerics.grids import scale_grid
from snip_hf.policies.registry import Policy, register_policy
from snip_hf.policies.rules import rule
from snip_hf.policies.setting import Setting

_variant = partial(replace, formats["mxfp4"])
register_format(_variant(name="mxfp4-nearest", label="MXFP4, no SR", colour="#332288", gradient=Operand((1, 32))))
register_format(
    _variant(name="mxfp4-rht-wgrad", label="MXFP4 RHT wgrad", colour="#117733", rotation=128, rotated=("grad_weight",))
)
# UE5M3 alone ends at 2^-17, which is too large for the scales of output gradients (1e-6 and less): in a 30M Llama
# stochastic rounding changed them by 2.5 times their norm (median over linears). With a scale per tensor it is 0.15.
_LARGEST = scale_grid("e5m3").max
register_format(
    _variant(name="mxfp4-ue5m3-tensor", label="MXFP4 UE5M3", colour="#882255", scale="e5m3", tensor_scale=_LARGEST)
)


def _only(low: str, setting: Setting) -> Assignment:
    """Puts the GEMMs `low` into the least precise format and all others into the most precise one."""
    config = setting.config
    return {
        layer: {gemm: config.least_precise if gemm == low else config.most_precise for gemm in row}
        for layer, row in setting.flops.items()
    }


for _gemm in GEMMS:
    register_policy(Policy(name=f"only-{_gemm.replace('_', '-')}", assign=partial(_only, _gemm), aims_at_share=False))


def _front(setting: Setting, stage: Sequence[str]) -> list[str]:
    """Backward GEMMs first, then forward GEMMs, both from the first block on."""
    return sorted(setting.groups(stage), key=lambda group: setting.members(group)[0][1] == "forward")


register_policy(rule("backward-front", _front, granularities=("gemm",)))
