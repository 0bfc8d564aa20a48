"""Samples of each layer's input X and output gradient G, recorded during the passes of a probe.

Legend: T tokens that a layer saw, n sampled rows, E matrices, I in_features, O out_features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.launching import on_device
from ..kernels.rounding import has_kernels
from ..kernels.sums import row_figures, row_squares, token_figures
from ..layers.layer import Dispatch, ForwardRecorder, SnipLayer
from ..numerics.gemms import TILE
from ..numerics.random_streams import stream_key
from ..parallel.sharding import whole
from .noise import Noise
from .nonsmooth import in_backward
from .products import is_split, product
from .ties import SharedInputs


@dataclass(frozen=True)
class Rows:
    """Which matrix and which token each row of a sample belongs to, in a layer of several matrices."""

    ends: Tensor
    """Matrix -> end of its rows, (E,), int64."""
    token: Tensor
    """Row -> which of the sampled tokens it is, (n,), int64; ascending within a matrix."""
    tokens: int
    """Number of sampled tokens; each is kept with all its rows."""

    def matrix(self) -> Tensor:
        """Returns row -> its matrix, (n,)."""
        return Dispatch(self.ends, self.token, self.tokens).matrix()

    def is_same(self, other: Rows) -> bool:
        return torch.equal(self.ends, other.ends) and torch.equal(self.token, other.token)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> tuple[Rows, Tensor]:
        """Returns the rows of all parts, sorted by matrix, and the permutation that sorts them, (n,)."""
        matrices = torch.cat([part.matrix() for part in parts])
        before = [0, *accumulate(part.tokens for part in parts)]
        tokens = torch.cat([part.token + first for part, first in zip(parts, before, strict=False)])
        order = matrices.argsort(stable=True)
        ends = torch.stack([part.ends for part in parts]).sum(0)
        return cls(ends, tokens[order], before[-1]), order


@dataclass
class LayerSample:
    """X, G and their derivatives in one layer on the sampled tokens, FP32, for the mean loss of the micro-batch."""

    tokens: int
    """T: tokens that the layer saw; for several matrices, rows of all of them."""
    x: Tensor
    """(n, I)"""
    grad_output: Tensor
    """(n, O)"""
    x_dot: list[Tensor] = field(default_factory=list)
    """(n, I) per probe"""
    grad_output_dot: list[Tensor] = field(default_factory=list)
    """(n, O) per probe"""
    energies: tuple[float, float] = (0.0, 0.0)
    """sum_t |X_t|^2 |G_t|^2 of all tokens and of the sampled ones."""
    amaxes: tuple[Tensor, Tensor] | None = None
    """Largest magnitudes of X and of G over all tokens, of one element each, or (E,); None if not measured."""
    rows: Rows | None = None
    """Matrix and token of each row; None: the layer has one matrix, and each row is a token."""

    def without_dots(self) -> LayerSample:
        """Returns the sample without derivatives."""
        return replace(self, x_dot=[], grad_output_dot=[])

    @property
    def is_part(self) -> bool:
        """True if the layer saw more tokens than were sampled."""
        return self.x.shape[0] < self.tokens

    @property
    def scale(self) -> float:
        """Factor from a sum of squares over the sample to all tokens.

        It is the ratio of the energies, not of the tokens: a few tokens hold most of such sums, in the sample or not.
        """
        every, sampled = self.energies
        return every / sampled if sampled > 0 else self.tokens / max(1, self.x.shape[0])


def read(scalars: Sequence[Tensor]) -> list[float]:
    """Reads tensors of one element as numbers; waits for the device once."""
    if not scalars:
        return []
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist()


class _Recorded(torch.autograd.Function):
    """Y = X W^T + b in high precision; backward hands (X, G) to the recorder and returns the input's gradient only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: SnipLayer, dispatch: Dispatch | None, name: str, recorder: Recorder
    ) -> Tensor:
        # Not X itself: what the backward pass needs of it is a sample, and often nothing else keeps it.
        ctx.save_for_backward(weight, *recorder.inputs_of(x, dispatch))
        ctx.layer, ctx.dispatch, ctx.name, ctx.recorder = layer, dispatch, name, recorder
        matrices, bias = layer.matrices(whole(weight).to(x.dtype)), layer.bias
        if dispatch is None and not is_split(x, matrices[0]):
            return torch.nn.functional.linear(x, matrices[0], bias)
        y = _by_matrix(x, [matrix.t() for matrix in matrices], dispatch)  # (T, I) x (I, O)
        if bias is None:
            return y
        return y.add_(bias if dispatch is None else nn.functional.pad(bias, (0, 0, 0, 1))[dispatch.matrix()])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, *of_x = ctx.saved_tensors
        if not torch.is_grad_enabled():  # with create_graph=True the backward pass of the loss follows
            ctx.recorder.keep(ctx.name, Inputs(*of_x), grad_output, ctx.dispatch)
        grad_input = None
        if ctx.needs_input_grad[0]:
            matrices = ctx.layer.matrices(whole(weight).to(grad_output.dtype))
            grad_input = _by_matrix(grad_output, matrices, ctx.dispatch)  # (T, O) x (O, I)
        return grad_input, None, None, None, None, None


def _by_matrix(rows: Tensor, matrices: Sequence[Tensor], dispatch: Dispatch | None) -> Tensor:
    """Returns the product of rows (T, C) with their matrices (C, D), as (T, D); zeros after the last end."""
    if dispatch is None:
        return product(rows, matrices[0])
    *parts, behind = rows.tensor_split(dispatch.ends.cpu())
    products = [product(part, matrix) for part, matrix in zip(parts, matrices, strict=True)]
    return torch.cat([*products, behind.new_zeros(len(behind), matrices[0].shape[1])])


class Inputs(NamedTuple):
    """The parts of a layer's input X that a record needs."""

    kept: Tensor
    """Rows of the sampled tokens, FP32, (n, C)."""
    figures: Tensor
    """Sum of squares and largest magnitude of each row, (T, 2); the latter only if any format needs it."""


class Record(NamedTuple):
    """One pass's sample of one layer: as `LayerSample`, with the energies (all tokens, sampled) on the device."""

    tokens: int
    x: Tensor
    grad_output: Tensor
    energies: Tensor
    amaxes: Tensor
    """Largest magnitudes of X and G over all tokens, (2,) or (2, E), on the device; empty if no format needs them."""
    rows: Rows | None

    def after(self, before: Record) -> Record:
        """Returns this record joined to an earlier one of the same pass: a layer may be called twice."""
        x, grad_output = torch.cat([before.x, self.x]), torch.cat([before.grad_output, self.grad_output])
        rows = None
        if before.rows is not None and self.rows is not None:
            rows, order = Rows.joined([before.rows, self.rows])
            x, grad_output = x[order], grad_output[order]
        return Record(
            before.tokens + self.tokens,
            x,
            grad_output,
            before.energies + self.energies,
            torch.maximum(before.amaxes, self.amaxes),
            rows,
        )


class SamplePlan(NamedTuple):
    """Chooses the tokens of a layer that ranks keep: all, or runs of 128 consecutive ones, spread over all tokens."""

    probe_tokens: int | None
    seed: int
    step: int
    rank: int
    tokens_by_rank: tuple[int, ...]
    """Rank -> tokens of its batch."""
    whole_amax: bool = False
    """True to measure the largest magnitudes of all tokens."""

    def positions(self, tokens: int) -> Tensor:
        """Returns the positions that this rank keeps of a layer's tokens.

        If every rank has whole runs of 128 tokens, the ranks together keep the tokens that one process would keep of
        all of them.
        """
        every, rank, most = self.tokens_by_rank, self.rank, self.probe_tokens
        if tokens != every[rank]:
            # A router decides which tokens the layer gets, and those of other ranks are unknown; or a pipeline cuts the
            # batch into chunks.
            chunks = every[rank] // tokens if tokens > 0 and every[rank] % tokens == 0 else 1
            every, rank, most = (tokens,), 0, None if most is None else max(TILE, most // (len(every) * chunks))
        tiles = [count // TILE for count in every]
        if most is None or sum(every) <= most or sum(tiles) == 0:
            return torch.arange(tokens)
        generator = torch.Generator().manual_seed(stream_key(self.seed, self.step, 0, 0, 1) >> 1)
        # One tile along T from each of as many equal parts of the tokens, so that no stretch of the text is left out.
        count = min(most // TILE, sum(tiles))
        starts = torch.arange(count) * sum(tiles) // count
        ends = torch.arange(1, count + 1) * sum(tiles) // count
        places = torch.rand(count, generator=generator, dtype=torch.float32) * (ends - starts)
        runs = starts + places.long() - sum(tiles[:rank])
        runs = runs[(runs >= 0) & (runs < tiles[rank])]
        return (runs[:, None] * TILE + torch.arange(TILE)).flatten()


class Recorder:
    """Keeps a sample of (X, G) per layer."""

    def __init__(self, plan: SamplePlan) -> None:
        self.records: dict[str, Record] = {}
        self.inputs = SharedInputs()
        """Which layers received the same tensor."""
        self._plan = plan
        # (tokens, device) -> which of them are kept, as positions and as a mask; moved there once.
        self._kept: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def energies(self) -> dict[str, tuple[float, float]]:
        """Returns layer -> energy of all tokens, and of the sampled ones."""
        figures = read([energy for record in self.records.values() for energy in record.energies])
        return dict(zip(self.records, zip(figures[::2], figures[1::2], strict=True), strict=True))

    def inputs_of(self, x: Tensor, dispatch: Dispatch | None = None) -> Inputs:
        """Returns what a record takes from X."""
        x, kept, _, _ = self._parts(x.detach(), dispatch)
        return Inputs(x[kept].to(torch.float32), self._figures(x))

    def keep(self, name: str, of_x: Inputs, grad_output: Tensor, dispatch: Dispatch | None = None) -> None:
        """Records a layer's X, of which `inputs_of` took something, and G."""
        grad_output, kept, is_kept, rows = self._parts(grad_output.detach(), dispatch)
        whole_amax, none = self._plan.whole_amax, grad_output.new_empty(0)
        if dispatch is None and _in_one_launch(grad_output):
            figures = token_figures(of_x.figures, grad_output, is_kept)
            energies, amaxes = figures[:, :2].sum(0), figures[:, 2:].amax(0) if whole_amax else none
        else:
            of_g = self._figures(grad_output)
            energy = of_x.figures[:, 0] * of_g[:, 0]
            energies = torch.stack([energy.sum(), energy[kept].sum()])
            amaxes = torch.stack([_amax(one[:, 1], dispatch) for one in (of_x.figures, of_g)]) if whole_amax else none
        record = Record(len(grad_output), of_x.kept, grad_output[kept].to(torch.float32), energies, amaxes, rows)
        self.records[name] = record.after(self.records[name]) if name in self.records else record

    def _parts(self, x: Tensor, dispatch: Dispatch | None) -> tuple[Tensor, Tensor, Tensor, Rows | None]:
        """Returns the rows of a layer's X or G that belong to a token, which ones are kept, and whose these are."""
        kept, is_kept = self._kept_of(x.shape[0] if dispatch is None else dispatch.tokens, x.device)
        if dispatch is None:
            return x, kept, is_kept, None
        return x[: int(dispatch.ends[-1])], *_rows_of(kept, dispatch)

    def _figures(self, x: Tensor) -> Tensor:
        if _in_one_launch(x):
            return row_figures(x)
        squares = row_squares(x)
        largest = torch.linalg.vector_norm(x, torch.inf, 1).to(torch.float32) if self._plan.whole_amax else squares
        return torch.stack([squares, largest], 1)

    def _kept_of(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        at = tokens, device
        if at not in self._kept:
            kept = self._plan.positions(tokens)
            is_kept = torch.zeros(tokens, dtype=torch.bool)
            is_kept[kept] = True
            self._kept[at] = on_device(kept, device), on_device(is_kept, device)
        return self._kept[at]


def _in_one_launch(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.numel() > 0 and has_kernels(x.device)


def _rows_of(tokens: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor, Rows]:
    """Returns the rows of these tokens, which ones they are, and the matrix and token of each of them."""
    places = dispatch.token.new_full((dispatch.tokens,), -1)
    places[tokens] = torch.arange(len(tokens), device=tokens.device)
    of_rows = places[dispatch.token[: int(dispatch.ends[-1])]]
    is_kept = of_rows >= 0
    counts = nn.functional.pad(is_kept.cumsum(0), (1, 0))
    return is_kept.nonzero()[:, 0], is_kept, Rows(counts[dispatch.ends], of_rows[is_kept], len(tokens))


def _amax(of_rows: Tensor, dispatch: Dispatch | None) -> Tensor:
    """Returns the largest of the rows' magnitudes, (); of each matrix's rows, (E,)."""
    if dispatch is not None:
        zeros = of_rows.new_zeros(len(dispatch.ends))
        return zeros.scatter_reduce(0, dispatch.matrix()[: len(of_rows)], of_rows, "amax")
    return of_rows.amax() if len(of_rows) else of_rows.new_zeros(())


@contextmanager
def recording(layers: Mapping[str, SnipLayer], recorder: Recorder, noise: Noise | None = None) -> Iterator[None]:
    """Makes every layer compute through `_Recorded` within the context.

    Noise is added to the tensors that the layers read, which have one matrix each; samples contain it.
    """

    def recorded(name: str) -> ForwardRecorder:
        def forward(layer: SnipLayer, input: Tensor, dispatch: Dispatch | None) -> Tensor:
            if torch.is_autocast_enabled(input.device.type):
                raise ValueError("The probe's passes run in FP32; leave autocast out of what Pipeline.run does.")
            if not in_backward():
                recorder.inputs.add(name, input)
            if torch.is_grad_enabled() and not input.requires_grad:
                # No layer before it needs a gradient, but the layer's own output gradient is needed.
                input = input.detach().requires_grad_()
            x = input.reshape(-1, input.shape[-1])
            x = x if noise is None else noise.on_input(name, x)
            y: Tensor = _Recorded.apply(x, layer.weight, layer, dispatch, name, recorder)
            y = y if noise is None else noise.on_output(name, y)
            return y.view(*input.shape[:-1], layer.out_features)

        return forward

    try:
        for name, layer in layers.items():
            layer.snip_recorder = recorded(name)
        yield
    finally:
        for layer in layers.values():
            layer.snip_recorder = None
