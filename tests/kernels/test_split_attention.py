"""Is attention from BF16 parts that of FP64, to 16 bits? On a GPU, under Triton's interpreter, and compiled for one."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from kernel_runs import dump, load, moved
from torch import Tensor, nn

pytest.importorskip("triton")

from snip_hf.kernels import split_attention_kernel
from snip_hf.kernels.split_attention import _TILES, Attention, attend, attention_gradients, fits

Run = Callable[..., tuple[Tensor, ...]]
# Of a BF16 product alone: 2e-3.
TOLERANCE = 3e-5


def by_kernels(grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *task: Any) -> tuple[Tensor, ...]:
    """Output, and gradients of query, key and value."""
    out, logs = attend(query, key, value, Attention(*task))
    return out, *attention_gradients(grad_output, (query, key, value), out, logs, Attention(*task))


def interpret(tensors: bytes, *task: Any) -> bytes:
    """Launches the kernels in the process that has TRITON_INTERPRET=1."""
    return dump(by_kernels(*load(tensors), *task))


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "cuda":
        return lambda *given: tuple(one.cpu() for one in by_kernels(*map(moved, given[:4]), *given[4:]))
    pool: ProcessPoolExecutor = request.getfixturevalue("interpreting")
    return lambda *given: load(pool.submit(interpret, dump(given[:4]), *given[4:]).result())


def drawn(batch: int, heads: tuple[int, int], lengths: tuple[int, int], channels: int) -> tuple[Tensor, ...]:
    """The gradient of the output, queries, keys and values, as models lay them out: heads behind tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = (*zip(heads, lengths, strict=True),)
    shapes = [(batch, length, count, channels) for count, length in (sizes[0], sizes[0], sizes[1], sizes[1])]
    grad_output, query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    # With much that is common to all keys and to all values, as trained models have it.
    return tuple(one.transpose(1, 2) for one in (grad_output, 1.5 * query, key + 5, value + 5))


def by_torch(grad_output: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *tensors, scale, is_causal = given
    leaves = [one.double().requires_grad_() for one in tensors]
    attention = nn.functional.scaled_dot_product_attention
    out = attention(*leaves, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_output.double())


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == torch.float32, name
        assert (one.double() - other).norm() <= TOLERANCE * other.norm(), name


@pytest.mark.parametrize(
    ("heads", "lengths", "channels", "is_causal"),
    [((2, 1), (200, 200), 64, True), ((1, 1), (70, 90), 64, False), ((1, 1), (140, 140), 128, True)],
    ids=["shared keys", "more keys than queries", "wide heads"],
)
def test_output_and_gradients_are_those_of_torch_s_attention(
    heads: tuple[int, int], lengths: tuple[int, int], channels: int, is_causal: bool, run: Run
) -> None:
    given = (*drawn(1, heads, lengths, channels), channels**-0.5, is_causal)
    check(run(*given), by_torch(*given))


def test_tensors_may_lie_in_memory_in_any_way_and_scales_be_of_any_size(run: Run) -> None:
    grad_output, query, key, value = drawn(2, (1, 1), (40, 40), 64)
    every_other = torch.stack([key, key], -1)[..., 0]
    given = grad_output[:, :, :1].expand_as(query), query.contiguous(), every_other, value, 0.3, True
    check(run(*given), by_torch(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", sorted(_TILES))
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_long_texts_give_the_same_bits_again(channels: int, is_causal: bool) -> None:
    given = [one.cuda() for one in drawn(2, (8, 2), (1000, 1000), channels)]
    task = channels**-0.5, is_causal
    found = by_kernels(*given, *task)
    check(tuple(one.cpu() for one in found), tuple(one.cpu() for one in by_torch(*given, *task)))
    assert all(map(torch.equal, found, by_kernels(*given, *task)))


@pytest.mark.gpu
def test_weights_of_one_key_alone_and_large_scores_are_finite() -> None:
    given = [one.cuda() for one in drawn(1, (2, 2), (300, 300), 64)]
    given[1] = given[1] * 200
    found, expected = by_kernels(*given, 0.125, True), by_torch(*given, 0.125, True)
    assert all(one.isfinite().all() for one in found)
    # Scores of hundreds have errors of 2^-17 of them, in exponents.
    assert (found[0] - expected[0]).norm() <= 1e-3 * expected[0].norm()


@pytest.mark.parametrize(
    ("shapes", "is_causal", "expected"),
    [
        (((2, 4, 9, 64), (2, 2, 9, 64)), True, True),
        (((2, 4, 9, 128), (2, 4, 30, 128)), False, True),
        (((2, 4, 9, 64), (2, 4, 30, 64)), True, False),
        (((2, 4, 9, 80), (2, 4, 9, 80)), True, False),
        (((2, 4, 9, 64), (2, 3, 9, 64)), True, False),
        (((2, 4, 9, 64), (1, 4, 9, 64)), True, False),
        (((4, 9, 64), (4, 9, 64)), True, False),
        (((2, 4, 0, 64), (2, 4, 0, 64)), True, False),
    ],
    ids=["shared", "all keys", "places differ", "80 channels", "3 for 4", "one batch", "3 dimensions", "none"],
)
def test_there_are_kernels_for_these_shapes(
    shapes: tuple[tuple[int, ...], ...], is_causal: bool, expected: bool
) -> None:
    query, key = (torch.empty(shape) for shape in shapes)
    assert fits(query, key, key, is_causal) == expected
    assert not fits(query, key, key[..., :1], is_causal)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("channels", sorted(_TILES))
@pytest.mark.parametrize("name", ["forward", "keys", "queries"])
def test_compiled_for_hopper_they_multiply_on_its_tensor_cores_and_fit_its_shared_memory(
    name: str, channels: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    tile = getattr(_TILES[channels], name)
    kernel = getattr(split_attention_kernel, {"forward": "attend"}.get(name, name) + "_kernel")
    constants = {"CAUSAL": True, "D": channels, "ROWS": tile.rows, "COLUMNS": tile.columns}
    kinds = {"queries": "*bf16", "keys": "*bf16", "values": "*bf16", "grad_outputs": "*bf16"}
    kinds |= dict.fromkeys(("means", "out", "logs", "sums", "grad_queries", "grad_keys", "grad_values"), "*fp32")
    kinds |= dict.fromkeys(("scale", "factor"), "fp32") | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    aligned = {(place,): [["tt.divisibility", 16]] for place, of in enumerate(names) if kinds.get(of, "i32")[0] in "*i"}
    source = triton.compiler.ASTSource(
        kernel,
        signature={of: kinds.get(of, "i32") for of in names},
        constexprs={(names.index(of),): value for of, value in constants.items()},
        attrs=aligned,
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=tile.options())
    assert "wgmma.mma_async" in code.asm["ptx"] and "mma.sync" not in code.asm["ptx"].replace("wgmma", "")
    assert code.metadata.shared <= 227 * 1024
