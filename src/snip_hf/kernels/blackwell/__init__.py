"""Not run on Blackwell: the backend "blackwell", for the block-scaled tensor cores of sm_100 and sm_120.

NVFP4, MXFP4 and MXFP8 through `torch.nn.functional.scaled_mm`. docs/kernels.md lists the
evidence without the hardware; benchmarks/first_run.py checks and times it on a Blackwell GPU.
"""

from . import backend as backend
