"""Are Triton's keys of kernels the same whichever kernels a process has looked at before?"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest

from snip_hf.kernels.triton_keys import settle_key

KERNELS = ("scale_tiles.scales_kernel", "tiles.fold_kernel", "gated_tiles.fold_gated_kernel")


class Kernel:
    """As one of Triton's, which computes its key once, when it is first asked for."""

    def __init__(self, name: str, body: str, names: dict[str, object], computed: list[str]) -> None:
        self._source, self._computed = f"def {name}(x):\n    {body}", computed
        self.hash: str | None = None
        code = compile(self._source, name, "exec").co_consts[0]
        self.fn: Callable[..., object] = FunctionType(code, names)

    def parse(self) -> ast.Module:
        return ast.parse(self._source)

    @property
    def cache_key(self) -> str:
        if self.hash is None:
            self.hash = self.fn.__name__
            self._computed.append(self.hash)
        return self.hash


def test_what_a_kernel_calls_has_its_key_before_the_kernel() -> None:
    names, computed = dict[str, object](), list[str]()
    library = names["library"] = ModuleType("library")
    library.__dict__["deep"] = Kernel("deep", "return LIMIT + x", names, computed)
    names["LIMIT"] = 3
    names["middle"] = Kernel("middle", "return library.deep(x) + library.missing(x)", names, computed)
    names["other"] = Kernel("other", "return x + LIMIT", names, computed)
    names["kernel"] = kernel = Kernel("kernel", "return kernel(other(middle(x)))", names, computed)
    settle_key(kernel)
    assert set(computed) == {"deep", "middle", "other", "kernel"} and computed[-1] == "kernel"
    assert computed.index("deep") < computed.index("middle")
    settle_key(kernel)
    assert len(computed) == 4


def test_an_interpreted_kernel_is_left_alone() -> None:
    settle_key(lambda x: x)


@pytest.mark.slow
def test_keys_do_not_depend_on_the_order_of_kernels() -> None:
    """Up to version 3.7 of Triton they do without `settle_key`."""
    pytest.importorskip("triton")
    script = (
        "import sys\n"
        "from snip_hf.kernels.tensor_scaled import gated_tiles, scale_tiles, tiles\n"
        "from snip_hf.kernels.triton_keys import settle_key\n"
        "kernels = [eval(name) for name in sys.argv[1:]]\n"
        "for kernel in kernels: settle_key(kernel)\n"
        "print(sorted(kernel.cache_key for kernel in kernels))"
    )
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    keys = [
        subprocess.run(
            [sys.executable, "-c", script, *order], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for order in (KERNELS, KERNELS[::-1])
    ]
    assert keys[0] == keys[1] and keys[0].count(",") == len(KERNELS) - 1
