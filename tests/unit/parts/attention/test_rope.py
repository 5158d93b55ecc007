"""Rotary frequencies and their scaling."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_ext.parts.attention.describe import RotaryScaling, YarnScaling
from megatron_ext.parts.attention.rope import (
    rotate,
    rotate_reference,
    scaled_inverse_frequencies,
    split_and_rotate,
    yarn_inverse_frequencies,
)


def _frequencies(base: float = 500000.0, channels: int = 128) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)


def test_equals_megatron_core_for_the_constants_that_it_knows() -> None:
    frequencies = _frequencies()
    expected = RotaryEmbedding._apply_scaling(None, frequencies, factor=8.0)  # pyright: ignore
    torch.testing.assert_close(
        scaled_inverse_frequencies(frequencies, RotaryScaling(8.0, 1.0, 4.0, 8192)), expected, rtol=2e-6, atol=0
    )


def test_other_constants_take_effect() -> None:
    """Llama 3.2: factor 32. And by hand, at an original length of 1,000: waves above 1,000 and below 250."""
    scaling = RotaryScaling(32.0, 1.0, 4.0, original_positions=1000)
    wavelengths = torch.tensor([2000.0, 1000.0, 400.0, 250.0, 100.0], dtype=torch.float64)
    frequencies = 2.0 * torch.pi / wavelengths
    kept = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    expected = frequencies * (kept + (1.0 - kept) / 32.0)
    torch.testing.assert_close(scaled_inverse_frequencies(frequencies, scaling), expected, rtol=1e-12, atol=0)

    narrower = RotaryScaling(8.0, 2.0, 4.0, original_positions=1000)
    assert scaled_inverse_frequencies(frequencies, narrower)[2] < frequencies[2] / 2.0


@pytest.mark.parametrize(("factor", "original", "betas"), [(40.0, 4096, (32.0, 1.0)), (4.0, 32, (8.0, 7.9))])
def test_yarn_is_that_of_transformers(factor: float, original: int, betas: tuple[float, float]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "mscale": 0.7, "mscale_all_dim": 0.4}
    parameters |= {"original_max_position_embeddings": original, "beta_fast": betas[0], "beta_slow": betas[1]}
    config: Any = LlamaConfig(head_dim=64, rope_parameters=parameters)  # pyright: ignore[reportCallIssue]
    expected, length = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    scaling = YarnScaling(factor, original, *betas, 0.7, 0.4)
    ours = yarn_inverse_frequencies(_frequencies(10000.0, 64), scaling, 10000.0)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
    assert scaling.of_table == pytest.approx(length, rel=1e-12)


@pytest.mark.parametrize("channels", [16, 24])
def test_rotation_turns_each_pair_of_channels_by_its_angle(channels: int) -> None:
    """As complex numbers: channel i + i * channel (i + 8) times e^(i angle); channels from 16 on are left alone."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, channels, dtype=torch.float64)
    angles = torch.outer(torch.arange(5, dtype=torch.float64), _frequencies(10000.0, 16).double())
    expected = torch.complex(x[..., :8], x[..., 8:16]) * torch.polar(torch.ones_like(angles), angles)
    rotated = rotate(x, torch.stack((angles.cos(), angles.sin())))
    assert rotated.is_contiguous()
    torch.testing.assert_close(rotated[..., :16], torch.cat((expected.real, expected.imag), -1), rtol=1e-12, atol=1e-12)
    assert torch.equal(rotated[..., 16:], x[..., 16:])


def test_the_gradient_is_the_rotation_back() -> None:
    """A rotation keeps lengths, so that |rotate(x)|^2 / 2 = |x|^2 / 2, whose gradient is x itself."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 24, dtype=torch.float64, requires_grad=True)
    angles = torch.outer(torch.arange(5, dtype=torch.float64), _frequencies(10000.0, 16).double())
    table = torch.stack((angles.cos(), angles.sin()))
    torch.testing.assert_close(rotate(x, table), rotate_reference(x, table), rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(rotate(x, table).square().sum() / 2, x)
    torch.testing.assert_close(grad, x.detach(), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda value: rotate(value, table), (x[:1, :1],))


@pytest.mark.parametrize(
    ("heads_per_group", "interleaved", "rotated", "each_sample"),
    [(1, False, 16, False), (3, True, 16, False), (2, False, 8, True), (3, True, 8, True)],
)
def test_splitting_and_rotating_at_once_has_the_bits_of_one_after_the_other(
    heads_per_group: int, interleaved: bool, rotated: int, each_sample: bool
) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(5, 3, 2, (heads_per_group + 2) * 16, requires_grad=True)
    angles = torch.rand(3, 1, 5, rotated // 2) if each_sample else torch.rand(5, rotated // 2)
    table = torch.stack((angles.cos(), angles.sin()))
    query, key, value = mixed.split((heads_per_group * 16, 16, 16), dim=3)
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query.reshape(5, 3, -1, 16), key, value))
    expected = *(rotate(tensor, table, interleaved=interleaved) for tensor in (query, key)), value.contiguous()
    heads = split_and_rotate(mixed, heads_per_group, table, interleaved=interleaved)
    assert all(map(torch.equal, heads, expected))
    assert all(tensor.is_contiguous() for tensor in heads)
    grads = [torch.randn_like(tensor) for tensor in heads]
    assert torch.equal(*(torch.autograd.grad(outputs, mixed, grads)[0] for outputs in (heads, expected)))


def test_splitting_without_a_rotation_copies() -> None:
    torch.manual_seed(0)
    mixed = torch.randn(5, 3, 2, 4 * 16, requires_grad=True)
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in mixed.split((2 * 16, 16, 16), dim=3))
    expected = query.unflatten(-1, (2, 16)).permute(0, 1, 3, 2, 4).reshape(3, 4, 5, 16), key, value
    heads = split_and_rotate(mixed, 2, None)
    assert all(map(torch.equal, heads, expected))
    grads = [torch.randn_like(tensor) for tensor in heads]
    assert torch.equal(*(torch.autograd.grad(outputs, mixed, grads)[0] for outputs in (heads, expected)))


def test_the_gradient_of_splitting_and_rotating_is_its_derivative() -> None:
    torch.manual_seed(0)
    mixed = torch.randn(3, 2, 1, 4 * 6, dtype=torch.float64, requires_grad=True)
    angles = torch.rand(3, 2, dtype=torch.float64)
    table = torch.stack((angles.cos(), angles.sin()))
    assert torch.autograd.gradcheck(lambda value: split_and_rotate(value, 2, table), (mixed,))
