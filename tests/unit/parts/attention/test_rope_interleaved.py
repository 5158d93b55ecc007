"""--rotary-interleaved against megatron-core's own rotation, forward and backward, in both pairings of channels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from megatron_ext.parts.attention.rope import ScaledRotaryEmbedding, rotate, rotate_reference

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
