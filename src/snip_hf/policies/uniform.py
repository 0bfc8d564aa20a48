"""The policies that run every GEMM in one format."""

from __future__ import annotations

from ..numerics.formats import FORMATS, NumberFormat
from .registry import Policy, register_policy
from .setting import Setting


def _register(format: NumberFormat) -> None:
    """Registers the policy that runs every GEMM in `format`."""

    def assign(setting: Setting) -> dict[str, dict[str, str]]:
        groups = [group for stage in setting.stages for group in setting.groups(stage)]
        return setting.assignment(dict.fromkeys(groups, format.name))

    name, formats = (f"uniform-{format.name}", (format.name,)) if format.is_quantized else (format.name, ())
    register_policy(Policy(name=name, assign=assign, aims_at_share=False, formats=formats))


FORMATS.for_each(_register)
