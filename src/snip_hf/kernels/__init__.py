"""The backends that run the three GEMMs of a layer, behind one interface. One folder or file per backend."""

from .. import lean

# The fastest first: "auto" takes the first that can run.
if not lean.is_lean:
    from . import hopper, blackwell  # noqa: F401, I001
from . import tensor_scaled, emulated  # noqa: F401, I001
