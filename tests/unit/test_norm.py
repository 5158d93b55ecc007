"""Our norms against their formulas in fp64, and the mark that sequence parallelism needs."""

import pytest
import torch

from megatron_ext.model.config import transformer_config
from megatron_ext.model.norm import LayerNorm, RMSNorm, norm_class
from tests.support.small_models import small_config

PARALLEL = {"tensor_model_parallel_size": 2, "world_size": 2, "sequence_parallel": True}


def _written_out(norm: RMSNorm | LayerNorm, x: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    normal = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return normal * norm.weight.double() + (norm.bias.double() if isinstance(norm, LayerNorm) else 0.0)


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 3e-6), (True, 2e-2)])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_equals_its_formula(kind: str, bf16: bool, tolerance: float) -> None:
    torch.manual_seed(0)
    config = transformer_config(small_config(training={"bf16": bf16}), "cpu")
    norm = norm_class(kind)(config, 48, eps=1e-3)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter.data)
    x = (3.0 * torch.randn(7, 2, 48) + 1.0).to(config.params_dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()

    result, expected = norm(x), _written_out(norm, exact)
    assert result.dtype == config.params_dtype
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    weight = torch.randn(7, 2, 48).to(config.params_dtype)
    [got] = torch.autograd.grad((result * weight).sum(), x)
    [wanted] = torch.autograd.grad((expected * weight.double()).sum(), exact)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_parameters_are_marked_under_sequence_parallelism(kind: str, sequence_parallel: bool) -> None:
    layout = {**PARALLEL, "sequence_parallel": sequence_parallel}
    norm = norm_class(kind)(transformer_config(small_config(layout=layout), "cpu"), 48)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [sequence_parallel] * len(  # pyright: ignore
        list(norm.parameters())
    )
