"""Collectives of code that is not snip-hf's own, before which the ranks ask whether all of them come.

A loss that gathers over the ranks, as TRL's of DPO and KTO do, waits for a rank that failed before it got there until
training's process group gives up, which ends the run. Inside `meeting` the ranks meet before each collective of all of
them, over snip-hf's own group. A rank that failed comes to `Ranks.agree` instead, and the others hear of it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .ranks import FailedElsewhere, Ranks

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Between two ranks.
_NO_COLLECTIVES = ("send", "recv_", "recv_any_source_")


@contextmanager
def meeting(ranks: Ranks) -> Iterator[None]:
    """Lets the ranks meet before each collective of all of them.

    Who fails inside must come to `ranks.agree` next.

    Args:
        ranks: all processes that run what is inside; one that is alone meets nobody.

    Raises:
        FailedElsewhere: on all ranks but the one that failed.
        RankError: another rank did not answer.
    """
    if ranks.size == 1:
        yield
        return
    mode = _Meeting(ranks)
    with mode:
        yield
    mode.check()


class _Meeting(TorchDispatchMode):
    # Operators that take functions, such as flex attention, pass as others do.
    supports_higher_order_operators = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._failure: FailedElsewhere | None = None

    def check(self) -> None:
        """Raises what was heard before, if the code inside has caught it."""
        if self._failure is not None:
            raise self._failure

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operators on parts, collectives among them
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _COLLECTIVES:
            group = None if func._opname in _NO_COLLECTIVES else _group_of(args)
            if group is not None and group.size() == self._ranks.size:
                self._meet()
        return func(*args, **(kwargs or {}))

    def _meet(self) -> None:
        self.check()
        try:
            self._ranks.meet()
        except FailedElsewhere as failure:
            self._failure = failure
            raise


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Returns the process group of a collective: an object, or the last text among its arguments, which names it."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: dist.ProcessGroup | None = resolve(names[-1]) if names else None
    return found
