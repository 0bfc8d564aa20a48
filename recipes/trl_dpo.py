"""Preferences under TRL with snip-hf: `accelerate launch recipes/trl_dpo.py MODEL DATA OUTPUT`."""

import argparse
import logging
from pathlib import Path

from snip_hf import SnipCallback, SnipConfig  # first: it hides the warnings of torchao's import

# isort: split
import torch
from datasets import load_dataset
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder or name on the Hub")
parser.add_argument("data", help="JSON lines with prompt, chosen and rejected, or a dataset's name on the Hub")
parser.add_argument("output", type=Path, help="goes on from its last checkpoint")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=4, help="pairs per micro-batch and process")
parser.add_argument("--share", type=float, default=0.5, help="of the linear FLOPs in FP4")
parser.add_argument("--reference", default="policy", choices=("policy", "high"), help="arithmetic of the reference")
options = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.getLogger("snip_hf").setLevel(logging.INFO)
set_seed(0)
is_file = Path(options.data).is_file()
rows = load_dataset("json", data_files=options.data) if is_file else load_dataset(options.data)
snip = SnipConfig(
    target_fp4_fraction=options.share,
    # Adam's first steps are not representative: 15% of the run in FP8, then two plans.
    first_refresh=max(2, options.steps * 15 // 100),
    refresh_every=max(2, options.steps // 2),
    apply_delay=1,
)
trainer = DPOTrainer(
    model=options.model,
    args=DPOConfig(
        str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        save_steps=max(1, options.steps // 4),
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=rows["train"],
    callbacks=[SnipCallback(snip, reference=options.reference)],
)
trainer.train(resume_from_checkpoint=any(options.output.glob("checkpoint-*")))
trainer.save_model()
