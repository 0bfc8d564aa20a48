"""Gradients of gradients: exact through layers in high precision, in high precision through quantized ones."""

from __future__ import annotations

import pytest
import torch
from configs import fp4_config
from models import CONFIGS, batch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from snip_hf import convert_model
from snip_hf.kernels.linear import linear_function
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS


def model(family: str, format: str | None) -> nn.Module:
    """A model whose attention can be differentiated twice, with all its linears in one format."""
    torch.manual_seed(0)
    found = AutoModelForCausalLM.from_config(_config(family), attn_implementation="eager").train()
    if format is not None:
        convert_model(found, fp4_config())
        for layer in snip_linears(found).values():
            layer.set_formats(dict.fromkeys(GEMMS, format))
    return found


def _config(family: str) -> Qwen3MoeConfig:
    if family != "experts":
        return CONFIGS[family]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return Qwen3MoeConfig(vocab_size=80, num_experts=4, num_experts_per_tok=2, **sizes, **heads)


def penalized(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a loss plus the squared norm of its gradient with regard to the embeddings."""
    given = batch()
    embedded = model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=given["labels"]).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    (loss + 100 * gradient.pow(2).sum()).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "gpt2", "experts"])
def test_a_gradient_penalty_through_layers_in_high_precision_is_that_of_plain_layers(family: str) -> None:
    expected, found = penalized(model(family, None)), penalized(model(family, "bf16"))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("family", ["llama", "experts"])
def test_a_gradient_penalty_through_quantized_layers_is_near_that_of_plain_layers(family: str) -> None:
    expected, found = penalized(model(family, None)), penalized(model(family, "fp8"))
    for name, gradient in expected.items():
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), 0) > 0.9, name


def test_backends_that_keep_no_operands_refuse_a_second_derivative() -> None:
    apply = linear_function(
        lambda x, weight, bias, how, tensors: (x @ weight.t(), (x,)),
        lambda grad, weight, how, saved, needs: (grad @ weight, grad.t() @ saved[0], None),
    )
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    y = apply(x, weight, None, None)
    (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(grad, torch.ones(3, 2) @ weight)
    with pytest.raises(NotImplementedError, match="compute first derivatives only"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
