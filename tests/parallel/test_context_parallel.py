"""Do ranks that share sequences attend to them, choose among them and weigh their losses as one process does?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import text
from thread_ranks import ThreadRank, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

from snip_hf.estimation import batch as batches
from snip_hf.estimation.batch import Batch
from snip_hf.parallel import context_parallel
from snip_hf.parallel.context_parallel import SharedSequences, context_mesh, in_context


def mesh(rank: int, size: int, group: Any = None) -> Any:
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank, get_group=lambda: group)


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets groups be ranks that are threads."""

    def all_gather(parts: list[Tensor], own: Tensor, group: ThreadRank) -> None:
        for part, given in zip(parts, group._exchange(own), strict=True):
            part.copy_(given)

    def all_reduce(own: Tensor, group: ThreadRank) -> None:
        own.copy_(torch.stack(group._exchange(own.clone())).sum(0))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_and_its_gradients_are_those_of_one_process(
    collectives: None, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Three sequences of eight tokens: with two ranks the second one is cut, with four all of them."""
    monkeypatch.setattr(context_parallel, "QUERIES", 3)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(3, heads, 8, 4, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(3, 4, 8, 4, generator=generator)
    expected = nn.functional.scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad((expected * weights).sum(), whole)

    def in_a_row(tensor: Tensor) -> Tensor:
        return tensor.detach().transpose(0, 1).flatten(1, 2)[None]

    def work(group: Any) -> list[Tensor]:
        sequences = SharedSequences(mesh(group.rank, ranks, group), 8, 24)
        own = [in_a_row(tensor).chunk(ranks, 2)[group.rank].requires_grad_() for tensor in (*whole, weights)]
        found = context_parallel._Attention.apply(*own[:3], sequences, 0.3)
        return [found.detach(), *torch.autograd.grad((found * own[3]).sum(), own[:3])]

    by_rank = on_ranks(ranks, work)
    for of_ranks, of_one in zip(zip(*by_rank, strict=True), (expected, *gradients), strict=True):
        torch.testing.assert_close(torch.cat(of_ranks, 2), in_a_row(of_one))


@pytest.mark.parametrize("given", [{}, {"is_causal": True, "dropout_p": 0.1}, {"attn_mask": torch.ones(2, 2)}])
def test_attention_that_is_not_merely_causal_is_refused(given: dict[str, Any]) -> None:
    q = torch.ones(1, 1, 2, 2)
    with (
        SharedSequences(mesh(0, 2), 4, 4).attention(),
        pytest.raises(ValueError, match=r"computes causal attention without other masks"),
    ):
        nn.functional.scaled_dot_product_attention(q, q, q, **given)


def shared(monkeypatch: pytest.MonkeyPatch, tokens: int | None, ranks: int) -> list[Batch]:
    """Returns rank -> its tokens of a batch of four rows of 16, of which the first row has no label."""
    rows: dict[str, Any] = text(4, 16)
    rows["labels"] = rows["labels"].clone()
    rows["labels"][0] = -100
    shifted = nn.functional.pad(rows["labels"], (0, 1), value=-100)[:, 1:]
    rows |= {"shift_labels": shifted, "position_ids": torch.arange(16).expand(4, -1), "use_cache": False}
    monkeypatch.setattr(batches, "whole_inputs", lambda inputs, mesh: rows)
    monkeypatch.setattr(batches, "in_context", lambda: True)
    part = {name: value[:, : 16 // ranks] if isinstance(value, Tensor) else value for name, value in rows.items()}
    return [Batch.of(part).shared(tokens, mesh(rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize(("tokens", "chosen"), [(None, [0, 1, 2, 3]), (24, [0, 1, 2]), (8, [0, 1, 2, 3])])
def test_the_ranks_together_have_the_tokens_that_one_process_chooses_in_its_order(
    monkeypatch: pytest.MonkeyPatch, tokens: int | None, chosen: list[int]
) -> None:
    """A single row has no label, so that all are taken."""
    by_rank = shared(monkeypatch, tokens, 2)
    together = torch.cat([one.kwargs["input_ids"] for one in by_rank], 1)
    assert torch.equal(together, text(4, 16)["input_ids"][chosen].view(1, -1))
    assert all(one.tokens == 8 * len(chosen) and one.micro_batch.tokens == 32 for one in by_rank)
    assert by_rank[0].kwargs["use_cache"] is False


def test_the_mean_of_the_ranks_losses_is_that_over_all_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 15 labels: the first rank has half a row of 8 of them."""
    first, second = shared(monkeypatch, 24, 2)
    assert first.labelled == second.labelled == 15
    assert (first.share * 15, second.share * 15) == (8, 22)


def test_torchs_context_parallelism_is_seen(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        ids = torch.zeros(1, 4)
        with torch_context_parallel(init_device_mesh("cpu", (1,)), buffers=[ids], buffer_seq_dims=[1]):
            assert in_context()
    finally:
        dist.destroy_process_group()
    assert not in_context()


def test_processes_without_context_parallelism_share_nothing() -> None:
    assert context_mesh(None) is None
    assert context_mesh(SimpleNamespace(parallelism_config=SimpleNamespace(cp_size=1))) is None
