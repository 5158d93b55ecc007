"""Activations of the MLP are those that were published, and keep no more than their input."""

from typing import Any

import pytest
import torch
from megatron.core.activations import quick_gelu
from megatron.core.transformer import TransformerConfig

from megatron_ext.parts.mlp.compute import computed_again, glu, xielu
from megatron_ext.parts.mlp.describe import XIELU_BEGINNINGS
from tests.support.saved_bytes import bytes_held_for_backward


def test_xielu_is_that_of_transformers() -> None:
    """Values and gradients, of its input and of its two numbers, which begin as theirs do."""
    from transformers.activations import XIELUActivation

    theirs = XIELUActivation(dtype=torch.float64)
    alphas = torch.tensor(list(XIELU_BEGINNINGS.values()), dtype=torch.float64)
    torch.testing.assert_close(alphas, torch.cat((theirs.alpha_p, theirs.alpha_n)).detach(), rtol=1e-12, atol=0)
    torch.manual_seed(0)
    with torch.no_grad():
        theirs.alpha_p.add_(0.4)
        theirs.alpha_n.sub_(0.7)
    alphas = torch.cat((theirs.alpha_p, theirs.alpha_n)).detach().requires_grad_()
    x = torch.cat((torch.randn(300, dtype=torch.float64) * 3.0, torch.tensor([0.0, 1e-8, -1e-8, 30.0, -30.0])))
    ours, other = x.double().requires_grad_(), x.double().requires_grad_()
    weight = torch.randn(305, dtype=torch.float64)
    found, expected = computed_again(xielu, ours, alphas), theirs(other)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad, other.grad, rtol=1e-10, atol=1e-12)
    both = torch.cat((theirs.alpha_p.grad, theirs.alpha_n.grad))  # pyright: ignore[reportArgumentType, reportCallIssue]
    torch.testing.assert_close(alphas.grad, both, rtol=1e-10, atol=1e-12)


def _gated(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        gated_linear_unit=True,
        use_cpu_initialization=True,
        **settings,
    )


@pytest.mark.parametrize("limit", [7.0, 0.3])
def test_bounded_quick_geglu_is_that_of_gpt_oss(limit: float) -> None:
    """transformers' GptOssExperts: gate sigmoid(1.702 gate) (up + 1), the gate at most 7, up between -7 and 7."""
    config = _gated(activation_func=quick_gelu, activation_func_clamp_value=limit, glu_linear_offset=1.0)
    torch.manual_seed(0)
    x = (torch.randn(5, 3, 20, dtype=torch.float64) * 6.0).requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    expected = (up + 1.0) * (gate * torch.sigmoid(gate * 1.702))
    found, weight = glu(x, config), torch.randn(5, 3, 10, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(*(torch.autograd.grad((y * weight).sum(), x) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_they_keep_their_input_alone() -> None:
    x, alphas = torch.randn(50, 40).requires_grad_(), torch.zeros(2, requires_grad=True)
    config = _gated(activation_func=quick_gelu, activation_func_clamp_value=7.0)
    assert bytes_held_for_backward(lambda: glu(x, config), (x,)) == 0
    assert bytes_held_for_backward(lambda: computed_again(xielu, x, alphas), (x, alphas)) == 0
