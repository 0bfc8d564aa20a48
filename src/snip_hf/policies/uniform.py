"""The policies that run every GEMM in one format."""

from __future__ import annotations

from ..numerics.formats import FORMATS
from .registry import Policy, register_policy
from .setting import Setting


def uniform(name: str, format: str) -> Policy:
    """Returns the policy that runs every GEMM in `format`."""

    def assign(setting: Setting) -> dict[str, dict[str, str]]:
        groups = [group for stage in setting.stages for group in setting.groups(stage)]
        return setting.assignment(dict.fromkeys(groups, format))

    return Policy(name=name, assign=assign, aims_at_share=False)


for _name, _format in FORMATS.items():
    register_policy(uniform(f"uniform-{_name}" if _format.is_quantized else _name, _name))
