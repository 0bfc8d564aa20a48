"""The model to score, from a folder or the Hub, in BF16 or under the formats of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .local_tasks import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(name: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns model (in its saved dtype) and tokenizer from a folder or the Hub; never runs the model's own code."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EvaluationError(f"--device {device} needs a CUDA device, and torch finds none. Use --device cpu or auto.")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        missing = "" if Path(name).is_dir() else " is not a folder here, and"
        raise EvaluationError(
            f"{name!r}{missing} could not be loaded as a causal language model with its tokenizer: {error} Expected a "
            "folder written by save_pretrained (both model and tokenizer) or the name of a model on the Hub."
        ) from error
    model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def use_plan(model: PreTrainedModel, name: str, plan_path: str | None) -> str:
    """Makes the model's linears compute in the formats of a plan; returns the path of the plan.

    Args:
        name: the model's folder or Hub name, whose snip/plan.json is taken if `plan_path` is None.
    """
    from transformers.utils.hub import cached_file

    from snip_hf.config import SnipConfig
    from snip_hf.layers.convert import convert_model
    from snip_hf.planning.plan import PrecisionPlan

    try:
        path = plan_path or str(cached_file(name, "plan.json", subfolder="snip"))
        plan = PrecisionPlan.load(path)
        # The fields of the training run's configuration that decide which layers are swapped.
        config = plan.provenance.config or {}
        patterns = {field: config.get(field, ()) for field in ("skip_modules", "include_modules")}
        convert_model(model, SnipConfig(**patterns))
        model.requires_grad_(False)  # a plan of a frozen base has no grad_weight
        plan.apply(model)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(
            f"--arithmetic plan: {error.args[0] if isinstance(error, KeyError) else error} "
            "Give the plan of this model with --plan PATH, or evaluate with --arithmetic bf16."
        ) from error
    return path
