"""Weight gradients that the matrix product adds to the main gradient, against float64."""

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_ext.device import weight_gradients
from megatron_ext.device.weight_gradients import ProductsOfTorch, add_product_, expect_first
from megatron_ext.model.names import global_named_parameters
from tests.support.several_models import end_layout
from tests.support.small_models import LLAMA, build_small_model, small_config

BOUNDS = {
    (torch.float32, torch.float32): 1e-6,
    (torch.float32, torch.bfloat16): 3e-3,  # on a CPU the product is rounded before it is added
    (torch.bfloat16, torch.bfloat16): 6e-3,
}
"""Norm of the error over the norm of the sum, by the dtypes of the sum and of the factors."""


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtypes", BOUNDS, ids=str)
def test_the_product_is_added_in_place(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    of_sum, of_factors = dtypes
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(70, size, generator=generator).to(of_factors) for size in (40, 24))
    main = torch.randn(40, 24, generator=generator).to(of_sum)
    expected, place = main.double() + grad.double().t() @ x.double(), main.data_ptr()
    add_product_(main, grad, x)
    assert main.data_ptr() == place
    assert error(main, expected) < BOUNDS[dtypes]


@pytest.mark.parametrize("dtypes", BOUNDS, ids=str)
def test_the_first_product_is_written(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """With the bits of its sum with zeros, whatever was there; the second one is added."""
    of_sum, of_factors = dtypes
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(70, size, generator=generator).to(of_factors) for size in (40, 24))
    main, zeros = torch.full((40, 24), float("nan")).to(of_sum), torch.zeros(40, 24).to(of_sum)
    expect_first(main)
    for _ in range(2):
        add_product_(main, grad, x)
        add_product_(zeros, grad, x)
        assert torch.equal(main, zeros)


def test_apexs_kernels_stay_where_megatron_core_has_found_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", "apex", raising=False)
    weight_gradients.stand_in()
    assert layers.fused_weight_gradient_mlp_cuda == "apex"  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    weight_gradients.stand_in()
    assert layers.fused_weight_gradient_mlp_cuda is ProductsOfTorch  # pyright: ignore[reportAttributeAccessIssue]
    assert layers._grad_accum_fusion_available


def main_gradients(model: dict[str, Any], fused: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two microbatches, and the main gradients of both."""
    config = small_config(model, training={"gradient_accumulation_fusion": fused})
    [gpt], groups = build_small_model(config)
    wrapped = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt, pg_collection=groups)
    wrapped.zero_grad_buffer()
    losses = []
    for seed in range(2):
        tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(seed))
        loss = wrapped(tokens[:, :-1], torch.arange(16).expand(2, 16), labels=tokens[:, 1:]).sum()
        loss.backward()
        losses.append(loss.item())
    gradients = {name: weight.main_grad.clone() for name, weight in global_named_parameters([wrapped])}  # pyright: ignore
    end_layout()
    return losses, gradients


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["tied, biases", "untied"])
def test_main_gradients_are_those_of_two_steps(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear layer's product adds, the output layer's too; all that others add is still there."""
    added: list[tuple[int, ...]] = []

    def counted(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        added.append(tuple(main_grad.shape))
        add_product_(main_grad, grad, x)

    plain_losses, plain = main_gradients(model, fused=False)
    monkeypatch.setattr(ProductsOfTorch, "wgrad_gemm_accum_fp32", staticmethod(counted))
    losses, fused = main_gradients(model, fused=True)
    assert len(added) == 2 * (4 * 4 + 1)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    whole = torch.stack([gradient.norm() for gradient in plain.values()]).norm()
    for name, gradient in plain.items():
        assert (fused[name] - gradient).norm() < max(1e-5 * gradient.norm(), 1e-7 * whole), name


def test_apexs_names_take_the_input_before_the_gradient() -> None:
    x, grad = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0, 7.0]])
    for dtype, add in (
        (torch.float32, ProductsOfTorch.wgrad_gemm_accum_fp32),
        (torch.bfloat16, ProductsOfTorch.wgrad_gemm_accum_fp16),
    ):
        main = torch.ones(3, 2, dtype=dtype)
        add(x.to(dtype), grad.to(dtype), main)
        assert main.tolist() == [[4.0, 7.0], [6.0, 11.0], [8.0, 15.0]]


@pytest.mark.parametrize("added_to", [False, True])
def test_what_autograd_gets_in_place_of_an_added_gradient(added_to: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied embedding's gradient is added to it, so that it must be zero there."""
    monkeypatch.setattr(torch, "empty_like", lambda weight: torch.full_like(weight, torch.nan))
    weight: Any = torch.nn.Parameter(torch.ones(2, 3))
    assert weight_gradients.replaces_gradient(weight) is None
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = added_to
    made = weight_gradients.replaces_gradient(weight)
    assert weight.grad_added_to_main_grad
    assert made is not None
    assert made.shape == weight.shape
    assert not (added_to and made.isnan().any())
