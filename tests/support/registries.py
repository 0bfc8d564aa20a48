"""Registries are as they were when a block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from snip_hf.config import POLICIES
from snip_hf.costs.rates import RATES
from snip_hf.kernels.backend import BACKENDS
from snip_hf.layers.kinds import LAYER_KINDS
from snip_hf.layers.linear import LINEAR_CLASSES
from snip_hf.numerics.formats import FORMATS


@contextmanager
def nothing_stays_registered() -> Iterator[None]:
    with ExitStack() as stack:
        for registry in (FORMATS, BACKENDS, LAYER_KINDS, LINEAR_CLASSES, POLICIES, RATES):
            stack.enter_context(registry.restored())
        yield
