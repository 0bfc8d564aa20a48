"""The layers that run in place of a model's own, behind one interface. One file per kind of layer."""

# Importing a kind registers it.
from . import experts, linear  # noqa: F401
