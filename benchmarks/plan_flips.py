r"""How much of what changes from plan to plan is noise of the probe, and what damping it costs: the measurements.

    python benchmarks/plan_flips.py probes --output runs/plan_flips.jsonl --seeds 0 1
    python benchmarks/plan_flips.py forks --output runs/plan_flips.jsonl --seeds 0 1 --hidden 64 --rows 2
    python benchmarks/plan_flips_report.py runs/plan_flips.jsonl

`probes` trains a small Llama, unquantized, and at each refresh step probes the one state several times, each time with
another micro-batch and other random numbers. A line holds what FP4 costs more than FP8 by one probe, for every layer
in the model's order; the report makes plans of it.
`forks` goes on from one checkpoint with every way of damping, in each fork with the same micro-batches for all. A line
holds the held-out loss at the end and what changed at each refresh. Lines that are there are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shared import small_models, texts
from shared.json_lines import drop_unfinished_line, read_lines
from shared.origin import origin_of
from transformers import AutoModelForCausalLM, LlamaConfig

from snip_hf import SnipConfig, SnipController, estimate_divergence
from snip_hf.estimation.pending import ROWS
from snip_hf.policies.registry import cost_of
from snip_hf.records.events import Event, Refresh

# Name -> probes of one state: how many, random directions, and micro-batches' worth of tokens.
PROBES = {"plain": (8, 1, 1), "4 directions": (2, 4, 1), "4 times the tokens": (2, 1, 4)}
# Name -> what differs from the default, in a fork.
ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "memory 0.5": {"estimate_memory": 0.5},
    "memory 0.8": {"estimate_memory": 0.8},
    "switching cost 0.1": {"switching_cost": 0.1},
    "static": {"refresh_every": None},
}
# Micro-batches of probes and forks lie behind those of the base.
_FIRST_BATCH = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("probes", "forks"))
    texts.add_text_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("runs/plan_flips.jsonl"), help="lines are added")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the model")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a micro-batch (default 4)")
    parser.add_argument("--steps", type=int, nargs="+", default=list(range(40, 401, 40)), help="refresh steps (probes)")
    parser.add_argument("--point", type=int, default=200, help="steps of the base before it forks (forks)")
    parser.add_argument("--forks", type=int, default=4, help="data orders from each base (forks)")
    parser.add_argument("--variants", nargs="+", choices=ARMS, default=list(ARMS), help="arms (forks)")
    parser.add_argument("--length", type=int, default=100, help="steps of a fork (forks)")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no measurement after so many (default 600)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    done = {_key(line) for line in read_lines(options.output)}
    text = texts.load_text(options.text, options.device)
    end = time.monotonic() + 60 * options.minutes
    measure = {"probes": probed, "forks": forked}[options.part]
    for seed in options.seeds:
        for line in measure(options, text, seed, done):
            line |= origin_of(options.device)
            with options.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print({name: line[name] for name in ("seed", "variant", "step", "loss")}, flush=True)
            if time.monotonic() > end:
                return


def probed(options: argparse.Namespace, text: texts.Text, seed: int, done: set[Any]) -> Iterator[dict[str, Any]]:
    """Yields a line per probe."""
    state = new_base(options, seed)
    for step in sorted(options.steps):
        state.train(text, step - state.step)
        for variant, (count, directions, share) in PROBES.items():
            for repeat in range(count):
                line = {"part": "probes", "seed": seed, "hidden": options.hidden, "step": step}
                line |= {"variant": variant, "repeat": repeat}
                if _key(line) in done:
                    continue
                began = time.perf_counter()
                config = SnipConfig(
                    loss_estimator="token-fisher", probes=directions, probe_batch_tokens=None, seed=repeat
                )
                number = _FIRST_BATCH + 100 * step + 8 * repeat
                batch = text.batch(number * 8 // share, options.rows * share)
                table = estimate_divergence(state.model, batch, state.optimizer, config)
                cost = cost_of(config, table)
                costs = {(row.layer, row.gemm, row.format): cost(row) for row in table.rows}
                layers = dict.fromkeys(row.layer for row in table.rows)
                extra = {
                    gemm: [float(f"{costs[x, gemm, 'fp4'] - costs[x, gemm, 'fp8']:.6g}") for x in layers]
                    for gemm in ROWS
                }
                yield line | {"loss": table.loss, "extra": extra, "seconds": time.perf_counter() - began}


def forked(options: argparse.Namespace, text: texts.Text, seed: int, done: set[Any]) -> Iterator[dict[str, Any]]:
    """Yields a line per fork and arm."""
    base = new_base(options, seed)
    base.train(text, options.point)
    saved = copy.deepcopy((base.model.state_dict(), base.optimizer.state_dict()))
    for fork in range(options.forks):
        for variant in options.variants:
            line = {"part": "forks", "seed": seed, "hidden": options.hidden, "step": options.point}
            line |= {"variant": variant, "repeat": fork}
            if _key(line) in done:
                continue
            began = time.perf_counter()
            state = new_base(options, seed)
            state.model.load_state_dict(saved[0])
            state.optimizer.load_state_dict(copy.deepcopy(saved[1]))
            yield line | one_fork(options, text, state, fork, variant) | {"seconds": time.perf_counter() - began}


def one_fork(
    options: argparse.Namespace, text: texts.Text, state: small_models.State, fork: int, variant: str
) -> dict[str, Any]:
    """Trains one arm from a base's state; returns its held-out loss, and what its refreshes changed."""
    first, refreshes = options.point + 1, []
    values: dict[str, Any] = {"granularity": "layer", "stages": 2, "first_refresh": first, "refresh_every": 10}
    values |= {
        "apply_delay": 0,
        "seed": fork,
        "solver": "highs",
        "probe_batch_tokens": None,
        "loss_estimator": "token-fisher",
    }
    config = SnipConfig(**values | ARMS[variant])

    def note(event: Event) -> None:
        if isinstance(event, Refresh):
            refreshes.append(event.layers_changed)

    controller = SnipController(state.model, state.optimizer, config)
    controller.add_tracker(note)
    controller.step = options.point
    torch.manual_seed(fork)
    for index in range(options.length):
        batch = text.batch(_FIRST_BATCH + 10_000 * fork + index, options.rows)
        controller.capture(batch)
        loss = state.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        controller.before_optimizer_step(options.point + index + 1)
        state.optimizer.step()
        state.optimizer.zero_grad()
        controller.after_step(options.point + index + 1)
    held_out = small_models.held_out_loss(state.model, text, 16, 8).mean()
    controller.close()
    return {"loss": float(held_out), "layers_changed": refreshes, "length": options.length}


def new_base(options: argparse.Namespace, seed: int) -> small_models.State:
    """Returns an untrained model of the quickstart's proportions."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=texts.VOCABULARY,
        hidden_size=options.hidden,
        # Not three times the hidden size: all MLPs together would be exactly 75%, and every plan the same.
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=texts.LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(shape).to(options.device).train()
    return small_models.State("llama", "adamw", model, small_models.optimizers("adamw", model), options.rows)


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("part", "seed", "hidden", "step", "variant", "repeat"))


if __name__ == "__main__":
    main()
