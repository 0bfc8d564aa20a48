"""Calls functions that launch Triton kernels: on a GPU, or in a process of Triton's interpreter."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from snip_hf.kernels import adam_slopes, bf16_parts, errors, rounding, sums
from snip_hf.numerics.formats import ElementGrid, NumberFormat, Operand

Run = Callable[..., Tensor]

# Function -> its module, and the function there that launches the kernel.
HOMES = {
    "fake_quantize": (rounding, "round_by_kernel"),
    "error_squares": (sums, "error_squares"),
    "scaled_squares": (sums, "scaled_squares"),
    "row_figures": (sums, "row_figures"),
    "token_figures": (sums, "token_figures"),
    "bf16_parts": (bf16_parts, "bf16_parts"),
    "adam_slopes": (adam_slopes, "adam_slopes"),
}


def dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    with torch.serialization.safe_globals([NumberFormat, Operand, ElementGrid]):
        return torch.load(io.BytesIO(data), weights_only=True)


def correct_the_interpreter() -> None:
    """Gives Triton's interpreter BF16 as GPUs have it: its own way to FP32 takes subnormal numbers for others, and its
    way from there cuts digits off instead of rounding to nearest. Its products take the bits of BF16 for whole numbers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    hasten_the_interpreter()
    for module in (bf16_parts, errors, sums):
        module.has_kernels = lambda device: True
    convert = interpreter._convert_float

    def widened(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if (source, target) == (tl.float32, tl.bfloat16):
            whole = np.ascontiguousarray(data).view(np.float32)
            rounded = torch.from_numpy(whole.reshape(-1)).to(torch.bfloat16).view(torch.int16).numpy()
            return rounded.view(np.uint16).reshape(whole.shape)
        return convert(data, source, target, rounding_mode)

    multiply = interpreter.InterpreterBuilder.create_dot

    def multiplied(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        wide = (
            interpreter.TensorHandle(widened(one.data, tl.bfloat16, tl.float32, None), tl.float32)
            if one.dtype == tl.bfloat16
            else one
            for one in (left, right)
        )
        return multiply(builder, *wide, *rest)

    interpreter._convert_float = widened
    interpreter.InterpreterBuilder.create_dot = multiplied


def by_kernel(name: str, *arguments: Any) -> Tensor:
    """Launches the kernel of one of `HOMES`."""
    module, launch = HOMES[name]
    found: Tensor = getattr(module, launch)(*arguments)
    return found


def _interpret(function: Callable[..., Any], arguments: bytes) -> bytes:
    return dump(function(*load(arguments)))


def triton_ir(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """Returns the code of a kernel in Triton's first representation, for a GPU that need not be there.

    Args:
        kernel: compiled, not interpreted.
        kinds: Triton's types by the names of parameters; others are 32-bit integers.
        constants: the values of `tl.constexpr` parameters.
        options: of the compiler.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target, context = GPUTarget("cuda", 90, 32), ir.context()
    backend = make_backend(target)
    parsed = backend.parse_options({"enable_fp_fusion": True} | options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    return str(source.make_ir(target, parsed, functions, modules, context))


@contextmanager
def interpreting(initializer: Callable[[], None] = correct_the_interpreter) -> Iterator[ProcessPoolExecutor]:
    """A pool of one process that interprets: whether Triton does is settled when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # NumPy's word on NaN times a number.
        patch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=initializer)
        pool.submit(os.getpid).result()  # started, with the variables set
    yield pool
    pool.shutdown()


def interpreter(pool: ProcessPoolExecutor, function: Callable[..., Any]) -> Run:
    """A module's function, in the process that has TRITON_INTERPRET=1."""
    return lambda *arguments: load(pool.submit(_interpret, function, dump(arguments)).result())


def on_cuda(name: str, *arguments: Any) -> Tensor:
    """Calls one of `HOMES` with tensors of the CPU; the result comes back to the CPU."""
    assert rounding.has_kernels(torch.device("cuda", 0))
    found: Tensor = on_gpu(getattr(HOMES[name][0], name))(*arguments)
    return found


def on_gpu(function: Callable[..., Any]) -> Run:
    """The function on a GPU: tensors of the CPU go there, and those it returns come back."""
    return lambda *arguments: each_tensor(Tensor.cpu, function(*each_tensor(moved, arguments)))


def either(request: pytest.FixtureRequest, function: Callable[..., Any]) -> Run:
    """A module's function where a fixture's parameter says: in the "interpreter", or on a GPU."""
    if request.param == "interpreter":
        return interpreter(request.getfixturevalue("interpreting"), function)
    return on_gpu(function)


def each_tensor(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Changes the tensors in tuples and lists; others are left."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(each_tensor(change, one) for one in value) if isinstance(value, (tuple, list)) else value


def moved(x: Tensor) -> Tensor:
    """Copies a tensor to the GPU with the same strides; `cuda()` would make it dense."""
    whole = x if x._base is None else x._base
    return whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """NaN equals NaN; -0.0 is not 0.0."""
    assert got.shape == expected.shape and got.dtype == expected.dtype == torch.float32
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0).view(torch.int32), expected.nan_to_num(nan=0.0).view(torch.int32))


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
