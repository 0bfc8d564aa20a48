"""Trains on one rank or on many, for the tests and for the processes that they start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from comparing import read_run
from configs import fp4_config
from conv1d_twins import as_conv1d
from devices import accelerator as accelerator_of
from devices import device
from expert_models import build
from models import built
from small import adamw_after, text, tiny_llama
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import MambaConfig

from snip_hf import SnipController
from snip_hf.layers.convert import convert_model
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.training.gradients import Clipping

_BLOCKS = {"llama": "LlamaDecoderLayer", "qwen3-moe": "Qwen3MoeDecoderLayer", "mamba": "MambaBlock"}
LENGTH = 128  # one tile, so that whole tiles are of one rank
States = dict[str, dict[str, Tensor]]
"""Parameter -> its weight and the optimizer's state of it, by name."""
SCHEDULE: dict[str, Any] = {"first_refresh": 1, "refresh_every": 4, "apply_delay": 1, "probe_tokens": None}


@dataclass(frozen=True)
class Training:
    """Settings of a run of a tiny Llama by a plain Accelerate loop."""

    config: dict[str, Any] | None
    """None: without snip-hf."""
    optimizer: str = "adamw"
    """Also "warm": AdamW that has done two steps, alike on all ranks, before anything is wrapped; and "sgd"."""
    eps: float = 1e-8
    """AdamW's. Gradients that are summed in another order differ by about 1e-8 here, of which Adam makes whole steps
    where they are no larger themselves: later steps can be compared closely with a larger number only."""
    wrapper: str = "ddp"
    """Or "fsdp2"."""
    steps: int = 6
    rows: int = 6
    """Sequences per micro-batch, of all ranks together."""
    micro_batches: int = 1
    clip: float | None = None
    labels: str = "all"
    """"uneven": the ranks have unequal numbers of labels. "ragged": the second half of the rows is shorter, too."""
    dropout: float = 0.0
    is_conv1d: bool = False
    """The MLPs are of `Conv1D`, which stores its weight as (I, O)."""
    family: str = "llama"
    """Or "qwen3-moe" or "mamba", another model in the place of the Llama."""
    has_adapters: bool = False
    """LoRA on all linears of the blocks; the rest is frozen."""
    hidden: int = 32
    mixed_precision: str = "no"
    solves: bool = True
    """False: the solver cannot be started, so that nothing is ever applied."""
    keeps_states: bool = False
    """True fills `Found.states`; not for sharded weights."""


@dataclass
class Found:
    """Results of a run; the same on all ranks but for `sharding` and what only the first one wrote."""

    losses: list[float] = field(default_factory=list)
    plans: list[dict[str, dict[str, str]]] = field(default_factory=list)
    clip_factors: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Norms of all gradients before clipping."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the last step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    own_weights: dict[str, Tensor] = field(default_factory=dict)
    """The rank's own part."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """The optimizer's state."""
    states: dict[int, States] = field(default_factory=dict)
    """Step -> states before it."""
    tables: dict[int, Any] = field(default_factory=dict)
    """Step -> "layer gemm format" -> loss divergence, weight divergence."""
    probe_losses: dict[int, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    backend: str | None = None
    """Backend of the layers at the end."""
    coverage: dict[str, Any] | None = None
    """Coverage of the micro-batches of all ranks."""
    sharding: list[dict[str, Any]] = field(default_factory=list)
    """Step -> how the parameters are sharded after the probe."""


def train(training: Training, folder: Path, states: Mapping[int, States] | None = None) -> Found:
    """Trains on all ranks of the run, or on this process if it is alone.

    Args:
        training: what.
        folder: gets the `snip/` folder.
        states: `Found.states` of another run, with which every step begins; None: each begins where the one before
            ended.
    """
    accelerator = accelerator_of(training.wrapper, _BLOCKS[training.family], training.mixed_precision)
    model, optimizer, controller = _prepared(training, accelerator, folder)
    found = Found()
    torch.manual_seed(7 + accelerator.process_index)
    with _clip_factors_noted(found):
        for step in range(1, training.steps + 1):
            if states is not None:
                _set_states(states[step], model, optimizer)
            if training.keeps_states:
                found.states[step] = {
                    name: {key: tensor.clone() for key, tensor in own.items()}
                    for name, own in _states(model, optimizer).items()
                }
            found.losses.append(_backward(training, step, model, controller, accelerator))
            if training.clip is not None:
                norm = accelerator.clip_grad_norm_(model.parameters(), training.clip)
                found.norms.append(float(_whole(norm)))
            hooks = _hooks(model)
            if controller is not None:
                controller.before_optimizer_step(step)
            if training.wrapper == "fsdp2" and accelerator.num_processes > 1:
                found.sharding.append({**_sharding(model), "hooks_kept": hooks == _hooks(model)})
            if step == training.steps:
                found.gradients = {name: _whole(p.grad).clone() for name, p in _named(model) if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            if controller is not None:
                controller.after_step(step)
                found.plans.append({name: dict(row) for name, row in controller.plan.assignment.items()})
    if controller is not None:
        controller.close()
        found.backend = controller.backend
        found.coverage = controller.coverage and controller.coverage.to_dict()
        if accelerator.is_main_process:
            found.history, found.probe_losses, found.tables = read_run(folder / "snip")
    _note_weights(found, model, optimizer)
    return found


def _prepared(training: Training, accelerator: Accelerator, folder: Path) -> tuple[nn.Module, Any, Any]:
    """Returns model, optimizer and controller, which is None without snip-hf."""
    model: nn.Module = tiny_llama(hidden=training.hidden, layers=2, attention_dropout=training.dropout)
    if training.family == "qwen3-moe":
        model = build("qwen3-moe")
    if training.family == "mamba":
        model = built(MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8, time_step_rank=8))
    if training.is_conv1d:
        as_conv1d(model, [name for name, _ in model.named_modules() if name.endswith("_proj") and ".mlp." in name])
    if training.has_adapters:
        model = with_lora(model)
    if training.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = adamw_after(model, 2 if training.optimizer == "warm" else 0, rows=2, length=LENGTH)
        optimizer.param_groups[0]["eps"] = training.eps
    model.train().to(device())
    if training.config is None:
        return *accelerator.prepare(model, optimizer), None
    config = fp4_config(**training.config)
    convert_model(model, config)
    model, optimizer = accelerator.prepare(model, optimizer)
    SolverProcess.start = _START if training.solves else _no_solver  # type: ignore[method-assign, assignment]
    return model, optimizer, SnipController(model, optimizer, config, accelerator, folder)


def with_lora(model: nn.Module) -> nn.Module:
    """Returns the model with adapters whose both matrices are random, so that all of them have gradients at once."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted: nn.Module = get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
    return adapted


def _backward(
    training: Training, step: int, model: nn.Module, controller: SnipController | None, accelerator: Accelerator
) -> float:
    """Runs the micro-batches of a step, forward and backward; returns the loss of all ranks."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    batches = [_batch(training, index, 0, 1) for index in _indices(training, step)]
    labelled = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = torch.zeros((), device=device())
    for number, index in enumerate(_indices(training, step)):
        inputs = {**_batch(training, index, rank, ranks), "num_items_in_batch": labelled}
        if controller is not None:
            controller.capture(inputs)
        is_last = number == training.micro_batches - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            # The sum over the rank's tokens by the number of all ranks'; DDP and FSDP2 average over the ranks.
            loss = model(**inputs).loss
            accelerator.backward(loss * ranks)
        total += loss.detach()
    if ranks > 1:
        dist.all_reduce(total)
    return float(total)


def _note_weights(found: Found, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in _named(model):
        own = parameter.detach()
        found.weights[name] = _whole(own).clone()
        found.own_weights[name] = (own.to_local() if isinstance(own, DTensor) else own).clone()
        for key, value in optimizer.state[parameter].items():
            found.state[f"{name} {key}"] = _whole(torch.as_tensor(value).detach()).clone()


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    """Returns the tensors themselves."""
    return {name: {"weight": own.detach(), **optimizer.state[own]} for name, own in _named(model)}


def _set_states(states: States, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, own in _states(model, optimizer).items():
        for key, tensor in own.items():
            tensor.copy_(states[name][key])


def _indices(training: Training, step: int) -> range:
    """The indices of a step's micro-batches."""
    return range((step - 1) * training.micro_batches, step * training.micro_batches)


def _batch(training: Training, index: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """Returns a rank's rows of a micro-batch of different text for every index."""
    tokens = text(training.rows, LENGTH, index)["input_ids"]
    labels = tokens.clone()
    rows = slice(rank * training.rows // ranks, (rank + 1) * training.rows // ranks)
    if training.labels != "all":
        labels[0, :100] = -100
        labels[1, :] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if training.labels == "ragged":
        half, length = training.rows // 2, 96
        attention = torch.ones_like(tokens)
        tokens[half:, length:], labels[half:, length:], attention[half:, length:] = 0, -100, 0
        batch["attention_mask"] = attention
        if rank * 2 >= ranks > 1:
            batch = {name: tensor[:, :length] for name, tensor in batch.items()}
    return {name: tensor[rows].contiguous().to(device()) for name, tensor in batch.items()}


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def _hooks(model: nn.Module) -> dict[str, list[int]]:
    """Module -> the keys of its hooks."""
    return {
        name: [*module._forward_pre_hooks, *module._forward_hooks, *module._backward_hooks]
        for name, module in model.named_modules()
    }


def fsdp_groups(model: nn.Module) -> list[Any]:
    """Returns what FSDP2 knows of the parameters that it gathers together."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    return [group for group in groups if group is not None]


def _sharding(model: nn.Module) -> dict[str, Any]:
    """Returns in which state FSDP2 is, by its own account, and how much memory gathered parameters hold."""
    groups = fsdp_groups(model)
    gathered = [
        tensor.untyped_storage().size()
        for group in groups
        for parameter in group.fsdp_params
        for tensor in [*parameter.all_gather_outputs, *getattr(parameter, "_unsharded_inner_tensors", [])]
    ]
    return {
        "groups": len(groups),
        "states": {group._sharded_state.name for group in groups},
        "kinds": {type(parameter).__name__ for parameter in model.parameters()},
        "gathered_bytes": sum(gathered),
    }


@contextlib.contextmanager
def _clip_factors_noted(found: Found) -> Iterator[None]:
    original = Clipping.factor

    def noted(clipping: Clipping, *args: Any) -> float:
        found.clip_factors.append(original(clipping, *args))
        return found.clip_factors[-1]

    Clipping.factor = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Clipping.factor = original  # type: ignore[method-assign]


_START = SolverProcess.start


def _no_solver(program: dict[str, Any]) -> SolverProcess:
    raise OSError("no solver in this test")
