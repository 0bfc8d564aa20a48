"""Regional compilation for a Trainer with `torch_compile=True`."""

from __future__ import annotations

import logging
import os
from typing import Any

from transformers import TrainingArguments

from ..config import SnipConfig
from ..kernels.backend import select_backend
from ..training.plan_in_force import formats_in_use

logger = logging.getLogger(__name__)

# Accelerate's environment variable. If a user sets it, SNIP leaves the choice alone.
REGIONS = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"


def compile_by_regions(config: SnipConfig, args: TrainingArguments, accelerator: Any) -> None:
    """Makes Accelerate compile the decoder layers one by one, unless the user chose otherwise or kernels are emulated.

    All layers then share one graph, which compiles in a fraction of the time and was faster on a GPU (docs/hopper.md).

    Args:
        config: the config of the run.
        args: the arguments of the Trainer.
        accelerator: Accelerate's state, which `prepare` reads later.
    """
    plugin = getattr(accelerator, "dynamo_plugin", None)
    if not args.torch_compile or plugin is None or plugin.use_regional_compilation or REGIONS in os.environ:
        return
    if select_backend(config.backend, args.device, formats_in_use(config)).is_emulation:
        return
    plugin.use_regional_compilation = True
    logger.info("snip-hf: the decoder layers are compiled one by one; %s=false compiles the whole model.", REGIONS)
