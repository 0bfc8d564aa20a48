"""snip-hf trains Hugging Face causal language models in a mix of FP4 and FP8 (SNIP, arXiv:2602.01410).

A linear layer runs three matrix products (GEMMs) in training: `forward`, Y = X W^T; `grad_input`, dX = dY W; and
`grad_weight`, dW = dY^T X. The fewer bits their operands have, the faster they run, and the more their rounding errors
disturb training. Some layers bear four bits without harm, others do not, and which ones do changes during training.
SNIP decides it for each layer, or for each GEMM, and decides again every few hundred steps:

1. **Probe.** On one micro-batch of the running step, snip-hf records what goes into each layer and which gradient comes
   back, and how both answer to a small change of all weights (`estimation`).
2. **Estimate.** From these it computes two prices for each GEMM and format. The loss divergence says how far rounding
   can move the loss now. The weight divergence says how far it moves the optimizer's next update away from the one that
   would have been made in high precision (`estimate_divergence`). `measure_divergence` measures the latter, and how
   far the loss does rise, slowly.
3. **Decide.** An integer program picks one format for each GEMM. The prices add up to as little as possible, while at
   least a given share of the FLOPs runs in FP4 (`planning`). Other policies decide by other rules (`policies`).
4. **Apply.** The solver works in a process of its own while training goes on. Some steps later every process puts the
   new plan in force, at the same step (`training`).

What does not fit in low precision stays as it is: weights, optimizer, attention, norms, embeddings and the output head.
Without a GPU that snip-hf has kernels for, the numerics are emulated, slower than BF16.

With a `Trainer`, one callback does all of it:

    from snip_hf import SnipCallback, SnipConfig

    config = SnipConfig(target_fp4_fraction=0.75)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[SnipCallback(config)])
    trainer.train()

Any other loop calls a `SnipController` at three places of a step: `capture` before a forward pass,
`before_optimizer_step`, and `after_step`. `convert_model` alone swaps the layers, which compute as before until a
controller or a plan gives them formats, and `restore_model` swaps them back; parameters and the keys of checkpoints
stay what they were. A `PrecisionPlan` is the decision as data: it can be saved, read and applied again. `push_plan` and
`load_plan` share it over the Hub. `run_report` shows what a run did; `log_to` logs it to trackers as it happens, where
no Trainer does.

Number formats are data too. `formats` maps their names to entries, `register_format` adds one of your own, and
`quantize` rounds a tensor as a GEMM in a format sees it. `SnipConfig.formats` names what a run chooses from.

Layers are `nn.Linear` and GPT-2's `Conv1D` at first. `register_linear_class` adds a subclass of `nn.Linear` that
multiplies as it does; `register_layer_kind` adds other modules that multiply with a weight.

`coverage` tells which share of a model's matrix products a plan can decide on, and what is left and why.

Each folder of the package is one step of this story; its modules say more. Names are loaded when they are first asked
for, so that `import snip_hf` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .extras import needed_by

if TYPE_CHECKING:
    from .config import SnipConfig as SnipConfig
    from .estimation.coverage import coverage as coverage
    from .estimation.divergence import estimate_divergence as estimate_divergence
    from .estimation.ground_truth import measure_divergence as measure_divergence
    from .estimation.passes import is_probing as is_probing
    from .integrations.arguments import SnipArguments as SnipArguments
    from .integrations.hub import keep_model_card as keep_model_card
    from .integrations.hub import load_plan as load_plan
    from .integrations.hub import push_plan as push_plan
    from .integrations.trackers import log_to as log_to
    from .integrations.trainer import SnipCallback as SnipCallback
    from .layers.convert import SnipLinearConfig as SnipLinearConfig
    from .layers.convert import convert_model as convert_model
    from .layers.convert import restore_model as restore_model
    from .layers.kinds import register_layer_kind as register_layer_kind
    from .layers.linear import SnipLinear as SnipLinear
    from .layers.linear import register_linear_class as register_linear_class
    from .numerics.formats import FORMATS as formats
    from .numerics.formats import register_format as register_format
    from .numerics.rounding import quantize as quantize
    from .parallel.pipeline import Pipeline as Pipeline
    from .planning.plan import PrecisionPlan as PrecisionPlan
    from .reporting.run_report import run_report as run_report
    from .training.controller import SnipController as SnipController

__version__ = "0.2.0"

# Name -> the module that has it, and its name there.
_HOMES = {
    "Pipeline": ("parallel.pipeline", "Pipeline"),
    "PrecisionPlan": ("planning.plan", "PrecisionPlan"),
    "SnipArguments": ("integrations.arguments", "SnipArguments"),
    "SnipCallback": ("integrations.trainer", "SnipCallback"),
    "SnipConfig": ("config", "SnipConfig"),
    "SnipController": ("training.controller", "SnipController"),
    "SnipLinear": ("layers.linear", "SnipLinear"),
    "SnipLinearConfig": ("layers.convert", "SnipLinearConfig"),
    "convert_model": ("layers.convert", "convert_model"),
    "coverage": ("estimation.coverage", "coverage"),
    "estimate_divergence": ("estimation.divergence", "estimate_divergence"),
    "formats": ("numerics.formats", "FORMATS"),
    "is_probing": ("estimation.passes", "is_probing"),
    "keep_model_card": ("integrations.hub", "keep_model_card"),
    "load_plan": ("integrations.hub", "load_plan"),
    "log_to": ("integrations.trackers", "log_to"),
    "measure_divergence": ("estimation.ground_truth", "measure_divergence"),
    "push_plan": ("integrations.hub", "push_plan"),
    "quantize": ("numerics.rounding", "quantize"),
    "register_format": ("numerics.formats", "register_format"),
    "register_layer_kind": ("layers.kinds", "register_layer_kind"),
    "register_linear_class": ("layers.linear", "register_linear_class"),
    "restore_model": ("layers.convert", "restore_model"),
    "run_report": ("reporting.run_report", "run_report"),
}

__all__ = [
    "Pipeline",
    "PrecisionPlan",
    "SnipArguments",
    "SnipCallback",
    "SnipConfig",
    "SnipController",
    "SnipLinear",
    "SnipLinearConfig",
    "convert_model",
    "coverage",
    "estimate_divergence",
    "formats",
    "is_probing",
    "keep_model_card",
    "load_plan",
    "log_to",
    "measure_divergence",
    "push_plan",
    "quantize",
    "register_format",
    "register_layer_kind",
    "register_linear_class",
    "restore_model",
    "run_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    with needed_by(f"{__name__}.{name}"):
        value = getattr(importlib.import_module(f".{module}", __name__), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
