"""FP8 products with one scale per tensor: the backend "tensor-scaled", for formats that fold into E4M3 (`folding`)."""

from . import backend as backend
