"""Spares Triton's interpreter what it does again for each number. It gives the same bits in less than half the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def hasten_the_interpreter() -> None:
    """Changes the interpreter of this process; `kernel_runs` and tests call it where one starts.

    Other versions of Triton than the one that was looked into stay as they are.
    """
    if version("triton").startswith("3.9."):
        drop_unused_checks()
        remember_types()
        patch_once_a_launch()


def drop_unused_checks() -> None:
    """Leaves out the sums in 64 bits that a debug mode, which the interpreter has not, would compare with 32 bits."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """Makes each block's type, each tensor's shape and each NumPy dtype once, instead of at every operation."""
    from triton.language import core
    from triton.runtime import interpreter

    make_block, make_tensor, numpy_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def remembered(known: dict[Any, dict[str, Any]], key: Any, made: Any, make: Callable[[], None]) -> None:
        if key not in known:
            make()
            known[key] = dict(made.__dict__)
        made.__dict__.update(known[key])

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        remembered(blocks, (element_ty.name, sizes), self, lambda: make_block(self, element_ty, shape))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        remembered(tensors, type.name, self, lambda: make_tensor(self, handle, type))
        self.handle = handle

    def dtype(triton_type: Any) -> Any:
        if triton_type.name not in dtypes:
            dtypes[triton_type.name] = numpy_dtype(triton_type)
        return dtypes[triton_type.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, dtype


def patch_once_a_launch() -> None:
    """Lets Triton's interpreter replace the functions of its language where a launch begins in a module.

    Its own way is to look through all of them at each call of a device function, which is half of a launch's time.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_a_new_module(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # since each launch ends with the functions put back
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_a_new_module, launch_anew
