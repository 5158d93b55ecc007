"""What a second moment of 16 bits comes to after many updates."""

import pytest
import torch

from megatron_ext.optim.torch_optimizer import torch_optimizer
from tests.support.small_models import config_with


def _second_moment(dtype: str, beta2: float, gradients: list[float]) -> float:
    settings = config_with(optimizer={"exp_avg_sq_dtype": dtype, "adam_beta2": beta2}).optimizer
    weight = torch.zeros(1)
    optimizer = torch_optimizer(settings)([{"params": [weight], "lr": 1e-5, "weight_decay": 0.0}])
    for gradient in gradients:
        weight.grad = torch.full((1,), gradient)
        optimizer.step()
    kept = optimizer.state[weight]["exp_avg_sq"]
    return ((kept.float() / 2**8) ** 2 if kept.dtype == torch.float16 else kept).item()


@pytest.mark.parametrize(
    ("dtype", "beta2", "least", "most"),
    [("fp32", 0.999, 0.86, 0.87), ("fp16", 0.999, 0.6, 0.64), ("bf16", 0.95, 0.96, 0.965), ("bf16", 0.999, 0.25, 0.25)],
)
def test_a_second_moment_in_bf16_stops_at_a_quarter_of_equal_squares(
    dtype: str, beta2: float, least: float, most: float
) -> None:
    """With a beta2 of 0.999, of which the program warns (`rules/warnings.py`); what it recommends comes closer to 1."""
    assert least <= _second_moment(dtype, beta2, [1.0] * 2000) <= most


@pytest.mark.parametrize(
    ("dtype", "beta2", "falls"),
    [("fp32", 0.999, True), ("fp16", 0.999, True), ("bf16", 0.95, True), ("bf16", 0.996, True), ("bf16", 0.999, False)],
)
def test_a_second_moment_in_bf16_does_not_fall_after_a_large_gradient(dtype: str, beta2: float, falls: bool) -> None:
    """After 2,000 gradients of zero 0.135 of it or less is left, but in bf16 all of it, with the beta2 warned of."""
    first, last = (_second_moment(dtype, beta2, [1.0] + [0.0] * zeros) for zeros in (0, 2000))
    assert (last < 0.14 * first) if falls else (last == first)
