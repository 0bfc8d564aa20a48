"""Gradients averaged in FP8 by real DDP models over gloo, against exact means; blocks against torch's own E4M3 cast.

A `Given` model's gradient is whatever it is handed, so that the true mean is known. All scenarios of a number of ranks
run in one start of the processes; the tests read what each rank wrote down.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_processes import IMPORTED
from torch import Tensor, nn

from snip_hf.parallel import gradient_compression as gradient_compression_module
from snip_hf.parallel.gradient_compression import GradientCompression, compress_gradients, decode, encode

# No size is a multiple of 128; buckets are small and hold several parameters or one.
SHAPES = [(7,), (129,), (40, 33), (1,), (301,), (257, 3)]
SIZE = sum(math.prod(shape) for shape in SHAPES)
BUCKET_MB = 0.004
STEPS = 20
POISONED = 700  # of the flat gradient: inside the (40, 33) parameter
SECONDS = 120

Results = list[dict[str, Any]]
"""The results that each rank wrote."""


class Given(nn.Module):
    """Its loss's gradient is the gradient that forward is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES)

    def forward(self, gradient: Tensor) -> Tensor:
        pieces = gradient.to(self.parts[0].device).split([p.numel() for p in self.parts])
        # In an order of their own, after which DDP lays out its buckets anew.
        terms = [(p.view(-1) * g).sum() for p, g in zip(self.parts, pieces, strict=True)]
        return terms[3] + terms[0] + terms[5] + terms[1] + terms[4] + terms[2]


def given(rank: int, step: int) -> Tensor:
    """A rank's gradient of a step, over many magnitudes."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SIZE, generator=generator) * torch.randn(SIZE, generator=generator).mul(2).exp()


def true_mean(world: int, step: int) -> Tensor:
    return torch.stack([given(rank, step) for rank in range(world)]).double().mean(0)


# In the ranks


def averaged(ddp: nn.Module, gradient: Tensor) -> Tensor:
    """The flat gradient after a backward pass with the given one."""
    ddp.zero_grad()
    ddp(gradient).backward()
    return torch.cat([p.grad.view(-1) for p in ddp.module.parts]).cpu()


def compressed(
    error_feedback: bool = True, bucket_mb: float = BUCKET_MB, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, GradientCompression]:
    device = f"cuda:{dist.get_rank()}" if dist.get_backend() == "nccl" else "cpu"
    ddp = nn.parallel.DistributedDataParallel(Given(dtype).to(device), bucket_cap_mb=bucket_mb)
    return ddp, compress_gradients(ddp, error_feedback)


def several_steps(rank: int, steps: range = range(STEPS), **options: Any) -> Tensor:
    ddp, _ = compressed(**options)
    return torch.stack([averaged(ddp, given(rank, step)) for step in steps])


def counted_bytes(rank: int) -> dict[str, Any]:
    """Five steps: what the hook counted, what the collectives were handed, the buckets of each step."""
    ddp, compression = compressed()
    handed, layouts, world = [], [], compression.world
    exchange, gather, reduce = dist.all_to_all_single, dist.all_gather, compression.reduce

    def spied_exchange(output: Tensor, payload: Tensor, **options: Any) -> Any:
        handed.append(payload.numel() * payload.element_size() * (world - 1) // world)
        return exchange(output, payload, **options)

    def spied_gather(output: list[Tensor], payload: Tensor, **options: Any) -> Any:
        handed.append(payload.numel() * payload.element_size() * (world - 1))
        return gather(output, payload, **options)

    def spied_reduce(bucket: dist.GradBucket) -> Tensor:
        layouts.append([p.numel() for p in bucket.parameters()])
        return reduce(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", spied_exchange)
        patch.setattr(dist, "all_gather", spied_gather)
        patch.setattr(compression, "reduce", spied_reduce)
        for step in range(5):
            layouts.append(f"step {step}")
            averaged(ddp, given(rank, step))
    counted = {"sent": compression.bytes_sent, "uncompressed": compression.bytes_uncompressed}
    return {**counted, "steps": compression.step, "handed": sum(handed), "layouts": layouts}


def poisoned(rank: int, value: float) -> Tensor:
    """Three steps, with one non-finite number on the last rank in the second."""
    ddp, _ = compressed()
    gradients = [given(rank, step) for step in range(3)]
    if rank == dist.get_world_size() - 1:
        gradients[1][POISONED] = value
    return torch.stack([averaged(ddp, gradient) for gradient in gradients])


def accumulated(rank: int) -> dict[str, Any]:
    ddp, compression = compressed()
    with ddp.no_sync():
        ddp(given(rank, 0)).backward()
    before = compression.bytes_sent
    ddp(given(rank, 1)).backward()
    gradient = torch.cat([p.grad.view(-1) for p in ddp.module.parts]).cpu()
    return {"sent without synchronisation": before, "steps": compression.step, "gradient": gradient}


def resumed(rank: int) -> dict[str, Any]:
    """Half of the steps, saved; the others in a new model with and without what was saved."""
    ddp, compression = compressed()
    first = [averaged(ddp, given(rank, step)) for step in range(STEPS // 2)]
    state = compression.state_dict()
    ddp, compression = compressed()
    compression.load_state_dict(state)
    kept = {"saved": compression.state_dict(), "state": state}
    second = [averaged(ddp, given(rank, step)) for step in range(STEPS // 2, STEPS)]
    refused = []
    for change in ({"rank": rank + 1}, {"errors": {"another": torch.zeros(3)}}):
        with pytest.raises(ValueError, match="gradient errors of") as error:
            compression.load_state_dict({**state, **change})
        refused.append(str(error.value))
    return {**kept, "applied": torch.stack(first + second), "refused": refused, "steps": compression.step}


def in_pieces(rank: int) -> Tensor:
    """Does the same as `several_steps`, in buckets longer than one averaged piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_compression_module, "_PIECE", 300)
        return several_steps(rank, bucket_mb=1)


def with_accelerate(rank: int) -> dict[str, Any]:
    from accelerate import Accelerator  # slow to import, and only needed here

    # Accelerate's launcher sets these; the process group exists already.
    world = dist.get_world_size()
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": f"{world}"}
    model = Accelerator(cpu=True).prepare(Given())
    compression = compress_gradients(model)
    return {"gradient": averaged(model, given(rank, 0)), "sent": compression.bytes_sent}


SCENARIOS = {
    "steps": several_steps,
    "no feedback": functools.partial(several_steps, error_feedback=False),
    "in pieces": in_pieces,
    "bfloat16": functools.partial(several_steps, steps=range(2), dtype=torch.bfloat16),
    "bytes": counted_bytes,
    "nan": functools.partial(poisoned, value=math.nan),
    "infinity": functools.partial(poisoned, value=-math.inf),
    "accumulated": accumulated,
    "resumed": resumed,
}


def one_rank(rank: int, world: int, folder: Path, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, f"file://{folder}/store", datetime.timedelta(seconds=SECONDS), rank=rank, world_size=world
    )
    results = {name: scenario(rank) for name, scenario in SCENARIOS.items()}
    if backend == "gloo":
        results["accelerate"] = with_accelerate(rank)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run_ranks(world: int, folder: Path, backend: str = "gloo") -> Results:
    # A process that has forked cannot use a GPU.
    context = IMPORTED if backend == "gloo" else mp.get_context("spawn")
    ranks = [
        context.Process(target=one_rank, args=(rank, world, folder, backend), daemon=True) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * world
    return [torch.load(folder / f"{rank}.pt", map_location="cpu", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks(3, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return run_ranks(2, tmp_path_factory.mktemp("gpus"), "nccl")


@pytest.fixture(
    params=[
        # Three processes; tests/distributed has ranks that fast tests look at.
        pytest.param("three_ranks", marks=pytest.mark.slow),
        pytest.param("two_gpus", marks=pytest.mark.gpu),
    ]
)
def ranks(request: pytest.FixtureRequest) -> Results:
    results: Results = request.getfixturevalue(request.param)
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path_factory.mktemp('alone')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Gradients of the ranks


@pytest.mark.parametrize("scenario", ["steps", "no feedback", "in pieces", "bfloat16", "nan", "accumulated"])
def test_all_ranks_have_the_same_gradients_bit_for_bit(ranks: Results, scenario: str) -> None:
    gradients = [result[scenario] for result in ranks]
    gradients = [g["gradient"] if isinstance(g, dict) else g for g in gradients]
    bits = torch.int16 if gradients[0].dtype == torch.bfloat16 else torch.int32
    for gradient in gradients[1:]:
        assert torch.equal(gradient.view(bits), gradients[0].view(bits))


@pytest.mark.parametrize("scenario", ["steps", "in pieces", "bfloat16"])
def test_the_mean_is_within_the_roundings_of_its_terms_and_itself(ranks: Results, scenario: str) -> None:
    got = ranks[0][scenario][0]
    terms = torch.stack([given(rank, 0) for rank in range(len(ranks))]).to(got.dtype).double()
    # Three bits behind the point: to a sixteenth. Below the normal numbers: 2**-9 of a scale, which is at most
    # 2 amax / 448.
    floor = 2**-9 * 2 * terms.abs().max() / 448
    of_terms = (terms.abs() / 16 + floor).mean(0)
    mean = terms.mean(0)
    bound = of_terms + (mean.abs() + of_terms) / 16 + floor
    assert ((got.double() - mean).abs() <= bound).all()
    assert 0.01 < (got.double() - mean).norm() / mean.norm() < 0.1


def test_averaged_gradients_have_four_significant_bits(ranks: Results) -> None:
    mantissa, _ = torch.frexp(ranks[0]["steps"])
    assert torch.equal(mantissa * 16, (mantissa * 16).round())


def test_with_error_feedback_the_sum_of_steps_errs_by_one_step_only(ranks: Results) -> None:
    truth = torch.stack([true_mean(len(ranks), step) for step in range(STEPS)])
    one_step = (ranks[0]["no feedback"].double() - truth).norm(dim=1).mean()
    with_feedback, in_pieces, without = (
        (ranks[0][scenario].double() - truth).sum(0).norm() for scenario in ("steps", "in pieces", "no feedback")
    )
    assert with_feedback < 1.5 * one_step and in_pieces < 1.5 * one_step
    assert without > 3 * one_step


def test_the_ranks_carry_over_what_the_sum_of_steps_lacks(ranks: Results) -> None:
    states = [result["resumed"]["state"]["errors"] for result in ranks]
    carried = torch.stack([torch.cat([error.view(-1) for error in errors.values()]) for errors in states])
    truth = sum(true_mean(len(ranks), step) for step in range(STEPS // 2))
    lacking = truth - ranks[0]["resumed"]["applied"][: STEPS // 2].double().sum(0)
    torch.testing.assert_close(carried.double().mean(0), lacking, rtol=1e-5, atol=1e-5 * lacking.abs().max().item())


@pytest.mark.parametrize("scenario", ["nan", "infinity"])
def test_a_non_finite_gradient_of_one_rank_makes_its_block_nan_everywhere(ranks: Results, scenario: str) -> None:
    before, during, after = ranks[0][scenario]
    assert before.isfinite().all() and after.isfinite().all()
    assert during[POISONED].isnan()
    assert 1 <= during.isnan().sum() <= 128
    assert not during.isinf().any()
    truth = true_mean(len(ranks), 2)
    assert (after.double() - truth).norm() < 0.1 * truth.norm()


def test_bytes_are_those_handed_to_the_collectives_a_quarter_of_an_all_reduce(ranks: Results) -> None:
    world = len(ranks)
    for result in ranks:
        counted = result["bytes"]
        assert counted["steps"] == 5
        assert counted["sent"] == counted["handed"] > 0
        assert counted["uncompressed"] == pytest.approx(5 * 2 * 4 * SIZE * (world - 1) / world, rel=1e-3)
        # Small buckets pad a lot: at most a chunk of a block each.
        assert counted["sent"] < 0.4 * counted["uncompressed"]


def test_buckets_were_laid_out_anew_on_the_way(ranks: Results) -> None:
    layouts = ranks[0]["bytes"]["layouts"]
    first, second = (layouts[layouts.index(f"step {step}") + 1 : layouts.index(f"step {step + 1}")] for step in (0, 1))
    assert len(first) == 1  # DDP knows no order yet
    assert len(second) > 1
    assert first[0] != [size for bucket in second for size in bucket]


def test_only_synchronised_gradients_are_sent(ranks: Results) -> None:
    result = ranks[0]["accumulated"]
    assert result["sent without synchronisation"] == 0
    assert result["steps"] == 1
    truth = true_mean(len(ranks), 0) + true_mean(len(ranks), 1)
    assert (result["gradient"].double() - truth).norm() < 0.1 * truth.norm()


@pytest.mark.slow
def test_a_model_that_accelerate_prepared_is_compressed(three_ranks: Results) -> None:
    one, *others = (result["accelerate"] for result in three_ranks)
    assert one["sent"] > 0
    assert all(torch.equal(one["gradient"], other["gradient"]) for other in others)
    truth = true_mean(3, 0)
    assert 0.01 < (one["gradient"].double() - truth).norm() / truth.norm() < 0.1


def test_a_saved_state_carries_its_errors_into_the_next_run(ranks: Results) -> None:
    for rank, result in enumerate(ranks):
        state, saved = result["resumed"]["state"], result["resumed"]["saved"]
        assert (state["step"], state["rank"], state["world"]) == (STEPS // 2, rank, len(ranks))
        assert [tuple(error.shape) for error in state["errors"].values()] == SHAPES
        assert all(torch.equal(error, saved["errors"][name]) for name, error in state["errors"].items())
        assert result["resumed"]["steps"] == STEPS
    truth = torch.stack([true_mean(len(ranks), step) for step in range(STEPS)])
    one_step = (ranks[0]["no feedback"].double() - truth).norm(dim=1).mean()
    assert (ranks[0]["resumed"]["applied"].double() - truth).sum(0).norm() < 1.5 * one_step


def test_the_state_of_another_rank_or_model_is_refused(ranks: Results) -> None:
    of_rank, of_model = ranks[0]["resumed"]["refused"]
    world = len(ranks)
    assert of_rank.startswith(f"Got the gradient errors of rank 1 of {world}, expected those of rank 0 of {world}.")
    assert of_model.startswith(f"Got gradient errors of 1 parameters, expected those of this model's {len(SHAPES)}")


# Nothing to compress


def test_a_model_outside_ddp_is_refused() -> None:
    with pytest.raises(TypeError, match="in DistributedDataParallel only; got Linear"):
        compress_gradients(nn.Linear(2, 2))


def test_one_process_sends_nothing_and_has_exact_gradients(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ddp, compression = compressed()
    assert "they are not compressed" in caplog.text
    assert torch.equal(averaged(ddp, given(0, 0)), given(0, 0))
    assert (compression.bytes_sent, compression.step) == (0, 0)


def hooked(dtype: torch.dtype) -> tuple[nn.Module, GradientCompression]:
    """Compresses the gradients of one process, which sends them to itself."""
    ddp = nn.parallel.DistributedDataParallel(Given(dtype), bucket_cap_mb=BUCKET_MB)
    compression = GradientCompression(ddp, error_feedback=True)
    ddp.register_comm_hook(compression, lambda state, bucket: state.start(bucket))
    return ddp, compression


def test_rounding_errors_of_one_process_are_carried_over_also_by_a_saved_state(alone: None) -> None:
    ddp, compression = hooked(torch.float32)
    found = [averaged(ddp, given(0, step)) for step in range(3)]
    assert not torch.equal(found[0], given(0, 0)) and compression.step == 3
    state = compression.state_dict()
    carried = torch.cat([error.view(-1) for error in state["errors"].values()])
    expected = sum(given(0, step) for step in range(3))
    assert torch.allclose(sum(found) + carried, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    _, other = hooked(torch.float32)
    other.load_state_dict(state)
    assert all(torch.equal(error, state["errors"][name]) for name, error in other.state_dict()["errors"].items())
    for changed, message in (({"rank": 1}, "of rank 1 of 1"), ({"errors": {"x": carried}}, "of 1 parameters")):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state | changed)


def test_gradients_in_float16_are_refused(alone: None) -> None:
    ddp, _ = hooked(torch.float16)
    with pytest.raises(TypeError, match=r"Got gradients in torch\.float16; expected"):
        ddp(given(0, 0).half()).backward()


# Blocks


def blocks() -> Tensor:
    """(R, 128): ordinary blocks, outliers, the smallest and largest numbers, zeros, scales at powers of two."""
    ordinary = given(0, 1)[: 19 * 128].view(-1, 128)
    sparse = torch.zeros(2, 128)
    sparse[1, 5] = -3.0
    exact = torch.stack([torch.full((128,), 448 * 2.0**k) for k in (-20, 0, 9)]) * torch.linspace(-1, 1, 128)
    return torch.cat([ordinary, ordinary * 1e-38, ordinary.sign() * 3e38, ordinary * 1e30, sparse, exact])


def powers(x: Tensor) -> Tensor:
    """The scale of each block, by Python's own arithmetic."""
    of_rows = []
    for amax in x.abs().amax(1).tolist():
        power = 2.0 ** max(math.floor(math.log2(amax / 448)) - 1 if amax else -126, -126)
        while amax > 448 * power:
            power *= 2
        of_rows.append(power)
    return torch.tensor(of_rows, dtype=torch.float64)[:, None]


def test_blocks_rounded_to_nearest_match_torchs_cast() -> None:
    x = blocks()
    encoded = encode(x)
    assert encoded.shape == (len(x), 129) and encoded.dtype == torch.uint8
    cast = (x.double() / powers(x)).float().to(torch.float8_e4m3fn)
    assert torch.equal(encoded[:, :128], cast.view(torch.uint8))
    assert torch.equal(decode(encoded).double(), (cast.double() * powers(x)).float().double())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_non_finite_number_is_nan_in_full(value: float) -> None:
    x = torch.ones(3, 128)
    x[1, 17] = value
    got = decode(encode(x))
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], x[[0, 2]])
