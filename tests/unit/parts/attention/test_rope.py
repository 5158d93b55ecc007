"""Rotary frequencies and their scaling."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.model.config import transformer_config
from megatron_ext.parts.attention.describe import Scaling, Temperature
from megatron_ext.parts.attention.rope import (
    RotaryTable,
    ScaledRotaryEmbedding,
    heated,
    rotate,
    rotate_reference,
    scaled_inverse_frequencies,
    split_and_rotate,
)
from megatron_ext.parts.stack import stack
from tests.support.family_configs import WRITTEN, read_config
from tests.support.small_models import LLAMA, small_config


def _frequencies(base: float = 500000.0, channels: int = 128) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)


def test_equals_megatron_core_for_the_constants_that_it_knows() -> None:
    frequencies = _frequencies()
    expected = RotaryEmbedding._apply_scaling(None, frequencies, factor=8.0)  # pyright: ignore
    torch.testing.assert_close(
        scaled_inverse_frequencies(frequencies, Scaling("llama3", (8.0,), 8192, 1.0, 4.0), 500000.0),
        expected,
        rtol=2e-6,
        atol=0,
    )


def test_other_constants_take_effect() -> None:
    """Llama 3.2: factor 32. And by hand, at an original length of 1,000: waves above 1,000 and below 250."""
    scaling = Scaling("llama3", (32.0,), 1000, 1.0, 4.0)
    wavelengths = torch.tensor([2000.0, 1000.0, 400.0, 250.0, 100.0], dtype=torch.float64)
    frequencies = 2.0 * torch.pi / wavelengths
    kept = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    expected = frequencies * (kept + (1.0 - kept) / 32.0)
    torch.testing.assert_close(scaled_inverse_frequencies(frequencies, scaling, 1e4), expected, rtol=1e-12, atol=0)

    narrower = Scaling("llama3", (8.0,), 1000, 2.0, 4.0)
    assert scaled_inverse_frequencies(frequencies, narrower, 1e4)[2] < frequencies[2] / 2.0


_LISTS = {"short_factor": [1.0 + 0.1 * pair for pair in range(64)], "long_factor": [2.0**pair for pair in range(64)]}
_CONTEXT = {"original_max_position_embeddings": 32}


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("channels", [64, 30, 6])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.0, **_CONTEXT},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 7.9, **_CONTEXT},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False, **_CONTEXT},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, **_CONTEXT},
        {"rope_type": "longrope", **_LISTS, **_CONTEXT},
        {"rope_type": "longrope", **_LISTS, **_CONTEXT, "factor": 5.0},
        {"rope_type": "longrope", **_LISTS, **_CONTEXT, "attention_factor": 1.3},
    ],
)
def test_scalings_are_those_of_transformers(
    parameters: dict[str, Any], channels: int, length: int, tmp_path: Path
) -> None:
    """Frequencies and attention factor to 1e-6, read from a config.json; at a length below and above the original."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 5000.0, **parameters}
    parameters |= {key: value[: channels // 2] for key, value in parameters.items() if isinstance(value, list)}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": channels, "max_position_embeddings": 40}
    theirs: Any = LlamaConfig(**sizes, rope_parameters=dict(parameters))  # pyright: ignore[reportArgumentType]
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"), seq_len=length)
    values = read_config(tmp_path, {**WRITTEN, **sizes, "model_type": "llama", "rope_scaling": parameters})
    [(kind, _)] = stack(resolve({**values, "seq_length": length}, Facts())).kinds
    rotary = kind.attention.rotary
    assert rotary is not None
    ours = _frequencies(rotary.base, channels)
    if rotary.scaling is not None:
        ours = scaled_inverse_frequencies(ours, rotary.scaling, rotary.base)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert (1.0 if rotary.scaling is None else rotary.scaling.of_table) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_grow_with_their_position_as_in_llama_4(dtype: torch.dtype) -> None:
    """transformers' Llama4TextAttention multiplies by a factor in fp32; positions may be of several samples."""
    heat, positions = Temperature(0.3, 4.0), torch.tensor([[0, 1, 2, 3, 4, 5, 6], [9, 90, 900, 8191, 8192, 2, 3]])
    config = small_config({**LLAMA, "no_rope_freq": "1", "attention_temperature_scale": 0.3})
    config = replace(config, model=replace(config.model, attention_temperature_step=4.0))
    [(kind, _)] = stack(config).kinds
    assert kind.attention.positions == heat
    groups: Any = SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    settings = transformer_config(config, "cpu")
    settings.params_dtype = dtype
    table = RotaryTable(kind.attention, settings, groups).at(positions)
    query = torch.randn(2, 3, 7, 8).to(dtype)
    scales = torch.log1p(torch.floor((positions.float() + 1.0) / 4.0)) * 0.3 + 1.0
    expected = (query.float() * scales[:, None, :, None]).to(dtype)
    torch.testing.assert_close(heated(query, table), expected, rtol=1e-6 if dtype == torch.float32 else 0.0, atol=0)


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


POSITIONS, HEAD = 6, 16


@pytest.mark.parametrize("channels", [HEAD, HEAD // 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_as_in_megatron_core(interleaved: bool, channels: int):
    generator = torch.Generator().manual_seed(0)
    x_BHSD = torch.randn(2, 3, POSITIONS, HEAD, generator=generator, requires_grad=True)
    weight = torch.randn(2, 3, POSITIONS, HEAD, generator=generator)
    angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float32), 1.7 ** -torch.arange(channels // 2))
    of_engine: Any = SimpleNamespace(interleaved=interleaved, get_freqs_non_repeated=lambda *_: angles)
    config: Any = SimpleNamespace(rotary_interleaved=interleaved, apply_rope_fusion=False, multi_latent_attention=False)
    given = ScaledRotaryEmbedding.get_emb(of_engine, POSITIONS)
    alone: Any = SimpleNamespace(size=lambda: 1)
    known = apply_rotary_pos_emb(x_BHSD.permute(2, 0, 1, 3), given, config, cp_group=alone).permute(1, 2, 0, 3)
    (known_gradient,) = torch.autograd.grad((known * weight).sum(), x_BHSD)
    table = torch.stack((angles.cos(), angles.sin()))
    for turn in (rotate, rotate_reference):
        turned = turn(x_BHSD, table, interleaved=interleaved)
        (gradient,) = torch.autograd.grad((turned * weight).sum(), x_BHSD)
        torch.testing.assert_close(turned, known, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, known_gradient, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(known, x_BHSD)
    assert torch.equal(known[..., channels:], x_BHSD[..., channels:])


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_angles_are_those_of_a_ranks_positions(rank: int, expected: list[int]) -> None:
    """Chunk after chunk, as a rank holds its tokens; scaled where the model is."""
    scaling = {"use_rope_scaling": True, "rope_scaling_factor": 4.0}
    config = small_config({**LLAMA, **scaling, "seq_length": 8}, layout={"context_parallel_size": 2, "world_size": 2})
    groups: Any = SimpleNamespace(cp=_group(rank, 2))
    [(kind, _)] = stack(config).kinds
    assert kind.attention.rotary is not None
    assert isinstance(kind.attention.rotary.scaling, Scaling)
    table = RotaryTable(kind.attention, transformer_config(config, "cpu"), groups)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16.0)
    scaled = scaled_inverse_frequencies(frequencies, kind.attention.rotary.scaling, 10000.0)
    assert not torch.equal(scaled, frequencies / 4.0)
    known = torch.tensor(expected)[:, None] * scaled
    torch.testing.assert_close(table.get_emb(8), torch.stack((known.cos(), known.sin())), rtol=1e-5, atol=1e-6)
    assert table.get_emb(1).tolist() == [[[1.0] * 8], [[0.0] * 8]], "one token is divided among no ranks"
