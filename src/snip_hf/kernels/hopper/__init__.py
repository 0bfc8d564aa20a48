"""FP8 tensor cores of NVIDIA's sm_90 GPUs (H100, H200): the backend "hopper"."""

from . import backend as backend
