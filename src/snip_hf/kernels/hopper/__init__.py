"""FP8 tensor cores of NVIDIA's sm_90 GPUs (H100, H200): the backend "hopper"."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("triton") is not None:
    from . import operators as operators

from . import backend as backend
