"""The backends that run the three GEMMs of a layer, behind one interface. One folder or file per backend."""

# The fastest first: "auto" takes the first that can run.
from . import hopper, blackwell, tensor_scaled, emulated  # noqa: F401, I001
