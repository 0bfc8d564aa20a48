"""snip-hf trains Hugging Face causal language models in a mix of FP4 and FP8 (SNIP, arXiv:2602.01410).

A linear layer runs three matrix products (GEMMs) in training: `forward`, Y = X W^T; `grad_input`, dX = dY W; and
`grad_weight`, dW = dY^T X. With fewer bits per operand they run faster, but their rounding errors disturb training
more. Some layers tolerate four bits and others do not, and this changes during training. SNIP decides for each layer,
or for each GEMM, and decides again every few hundred steps:

1. **Probe.** On one micro-batch, snip-hf records the input of each layer, the gradient of its output, and how both
   respond to a small change of all weights (`estimation`).
2. **Estimate.** From these it computes two divergences for each GEMM and format. The loss divergence estimates how far
   rounding can move the loss now. The weight divergence estimates how far it moves the optimizer's next update.
   `estimate_divergence` returns both. `measure_divergence` measures the weight divergence and the rise of the loss
   directly, which is slow.
3. **Decide.** An integer program picks one format for each GEMM. It minimizes the sum of the divergences while at least
   a given share of the FLOPs runs in FP4 (`planning`). Other policies use other rules (`policies`).
4. **Apply.** The solver runs in a separate process while training continues. Some steps later, all processes apply the
   new plan at the same step (`training`).

Weights, optimizer, attention, norms, embeddings and the output head keep their precision. The default formats, MXFP4
and FP8 with one scale per tensor, run on FP8 tensor cores of an H100 or H200. Elsewhere snip-hf emulates them, which is
slower than BF16.

With a `Trainer`, use one callback:

    from snip_hf import SnipCallback, SnipConfig

    trainer = Trainer(model, args, train_dataset=data, callbacks=[SnipCallback(SnipConfig())])
    trainer.train()

In any other loop, call a `SnipController` at three points of each step: `capture` before a forward pass,
`before_optimizer_step`, and `after_step`. `convert_model` swaps the layers, which compute as before until a controller
or a plan sets their formats, and `restore_model` swaps them back. Parameters and checkpoint keys do not change. A
`PrecisionPlan` is the decision as data: save it, load it and apply it again, or share it over the Hub with `push_plan`
and `load_plan`. `run_report` shows what a run did, and `log_to` sends it to trackers in loops without a Trainer.

Number formats are data, too. `formats` maps their names to entries, `register_format` adds your own, and `quantize`
rounds a tensor as a GEMM does. Swapped layers are `nn.Linear`, GPT-2's `Conv1D` and experts. `register_linear_class`
adds a subclass of `nn.Linear` that multiplies as it does, and `register_layer_kind` adds other modules that multiply
with a weight. `coverage` reports the share of a model's matrix products that a plan can decide on, and why the rest
is left out. A forward hook that must not act during a probe asks `is_probing`.

Each folder of the package is one step of this story. Names are loaded on first use, so that `import snip_hf` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .extras import needed_by
from .import_warnings import hide_import_warnings

if TYPE_CHECKING:
    from .config import SnipArguments as SnipArguments
    from .config import SnipConfig as SnipConfig
    from .estimation.coverage import coverage as coverage
    from .estimation.divergence import estimate_divergence as estimate_divergence
    from .estimation.ground_truth import measure_divergence as measure_divergence
    from .estimation.passes import is_probing as is_probing
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
    from .numerics.formats import FORMATS as formats  # noqa: F401
    from .numerics.formats import register_format as register_format
    from .numerics.rounding import quantize as quantize
    from .parallel.pipeline import Pipeline as Pipeline
    from .planning.plan import PrecisionPlan as PrecisionPlan
    from .reporting.run_report import run_report as run_report
    from .training.controller import SnipController as SnipController

hide_import_warnings()  # before torchao is imported

__version__ = "0.3.0"

# Module -> the public names that it defines; tests compare this table with the imports above.
_MODULES = {
    "config": ("SnipArguments", "SnipConfig"),
    "estimation.coverage": ("coverage",),
    "estimation.divergence": ("estimate_divergence",),
    "estimation.ground_truth": ("measure_divergence",),
    "estimation.passes": ("is_probing",),
    "integrations.hub": ("keep_model_card", "load_plan", "push_plan"),
    "integrations.trackers": ("log_to",),
    "integrations.trainer": ("SnipCallback",),
    "layers.convert": ("SnipLinearConfig", "convert_model", "restore_model"),
    "layers.kinds": ("register_layer_kind",),
    "layers.linear": ("SnipLinear", "register_linear_class"),
    "numerics.formats": ("formats", "register_format"),
    "numerics.rounding": ("quantize",),
    "parallel.pipeline": ("Pipeline",),
    "planning.plan": ("PrecisionPlan",),
    "reporting.run_report": ("run_report",),
    "training.controller": ("SnipController",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(f"{__name__}.{name}"):
        module = importlib.import_module(f".{_HOMES[name]}", __name__)
    value = globals()[name] = getattr(module, "FORMATS" if name == "formats" else name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
