"""Registries are as they were when a block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from snip_hf.config import POLICIES
from snip_hf.costs.rates import RATES
from snip_hf.kernels.backend import BACKENDS
from snip_hf.layers.kinds import LAYER_KINDS
from snip_hf.layers.linear import LINEAR_CLASSES
from snip_hf.numerics.formats import FORMATS
from snip_hf.registry import Registry


@contextmanager
def restored(registry: Registry[Any]) -> Iterator[None]:
    """Undoes all registrations of the context when it ends, and those of the policies that a format brings."""
    registries = (registry, POLICIES) if registry is FORMATS else (registry,)
    before = [dict(one) for one in registries]
    try:
        yield
    finally:
        for one, entries in zip(registries, before, strict=True):
            one._entries.clear()
            one._entries.update(entries)


@contextmanager
def nothing_stays_registered() -> Iterator[None]:
    with ExitStack() as stack:
        for registry in (FORMATS, BACKENDS, LAYER_KINDS, POLICIES, RATES):
            stack.enter_context(restored(registry))
        classes = list(LINEAR_CLASSES)
        yield
        LINEAR_CLASSES[:] = classes
