"""Not run on Blackwell: the backend "blackwell", for the block-scaled tensor cores of sm_100 and sm_120.

NVFP4, MXFP4 and MXFP8 through `torch.nn.functional.scaled_mm`. docs/blackwell.md says what has been shown without the
hardware and what has not; benchmarks/first_run.py checks and times it on a machine that has one.
"""

from . import backend as backend
