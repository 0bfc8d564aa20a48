"""A training loop with snip-hf: `accelerate launch --config_file FILE recipes/accelerate_loop.py DIR`."""

import argparse
import asyncio
from pathlib import Path

from snip_hf import SnipConfig, SnipController, convert_model  # first: it hides the warnings of torchao's import
from snip_hf.json_io import read_json, write_json_atomic

# isort: split
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from parts.data import collate, load_documents, load_tokenizer, pack
from parts.recipe import DataSection, TokenizerSection
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup, set_seed

STEPS, SAVE_EVERY = 40, 10
SNIP = SnipConfig(target_fp4_fraction=0.75, first_refresh=5, refresh_every=10, apply_delay=2)
TEXT = DataSection(source="files", files=(f"{asyncio.__path__[0]}/*.py",), validation_fraction=0.1, sequence_length=128)
MODEL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", type=Path, help="folder that all processes see; continues from its last checkpoint")
parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch and process")
options = parser.parse_args()
set_seed(0)  # all processes build the same model and shuffle alike
order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2, dataloader_config=order)
with accelerator.local_main_process_first():  # the machine's other processes read the first one's cache
    documents = load_documents(TEXT)
    tokenizer = load_tokenizer(TokenizerSection(vocab_size=512), None, documents[0])
    rows, _ = pack(*documents, tokenizer, TEXT)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=len(tokenizer), **MODEL))
convert_model(model, SNIP)  # before anything is wrapped, sharded or compiled
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=STEPS)
loader = torch.utils.data.DataLoader(rows, options.batch, shuffle=True, collate_fn=collate, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(schedule)  # not prepared: it would step once per process
controller = SnipController(model, optimizer, SNIP, accelerator, options.output)
at = {"step": 0, "epoch": 0, "rows": 0}  # rows: seen in this epoch, by all processes together
if complete := sorted(options.output.glob("checkpoint-*/snip_state.json"), key=lambda at: int(at.parent.name[11:])):
    saved = read_json(complete[-1])
    at = saved["at"]
    accelerator.load_state(str(complete[-1].parent))
    controller.load_state_dict(saved["snip"], at["step"])
while at["step"] < STEPS:
    loader.set_epoch(at["epoch"])
    for batch in accelerator.skip_first_batches(loader, at["rows"] // (options.batch * accelerator.num_processes)):
        with accelerator.accumulate(model):
            controller.capture(batch)
            loss = model(**batch, use_cache=False).loss  # with a cache torch compiles each layer for its own index
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                controller.before_optimizer_step(at["step"] + 1)
            optimizer.step()
            optimizer.zero_grad()
        at["rows"] += options.batch * accelerator.num_processes
        if accelerator.sync_gradients:
            at["step"] += 1
            schedule.step()
            controller.after_step(at["step"])
            accelerator.print(f"step {at['step']} loss {accelerator.gather(loss.detach()).mean():.6f}")
            if at["step"] % SAVE_EVERY == 0:
                folder = options.output / f"checkpoint-{at['step']}"
                accelerator.save_state(str(folder))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:  # last and atomically: this file makes a checkpoint complete
                    write_json_atomic(folder / "snip_state.json", {"at": at, "snip": controller.state_dict()})
            if at["step"] == STEPS:
                break
    else:
        at |= {"epoch": at["epoch"] + 1, "rows": 0}
controller.close()
trained, model = model, accelerator.unwrap_model(model, keep_torch_compile=False)  # compiled layers have other names
weights = accelerator.get_state_dict(trained if hasattr(trained, "zero_optimization") else model)  # gathered
if accelerator.is_main_process:
    model.save_pretrained(options.output, state_dict=weights)
    tokenizer.save_pretrained(options.output)
accelerator.end_training()
