"""Latent attention in the form of generation, which attends to latents, against that of training, in fp64."""

from typing import Any

import pytest
import torch

from megatron_ext.parallel import groups
from megatron_ext.parts.attention.cached import KeyValueCache
from tests.support.small_models import LATENTS, build_small_model, small_config

PROMPTS, FILLED, MORE = (9, 6, 1), 9, 4


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "v_head_dim": 22}, {"window_size": "4,0"}], ids=str)
def test_generation_from_latents_is_the_training_form(changes: dict[str, Any]) -> None:
    """Prompts of different lengths, then one token after the other: each as at its place in the whole text."""
    config = small_config({**LATENTS, **changes})
    [gpt], _ = build_small_model(config)
    attention: Any = gpt.decoder.layers[0].self_attention.double()
    rotary: Any = gpt.rotary_pos_emb
    torch.manual_seed(0)
    texts = [torch.randn(length + MORE, 1, 64, dtype=torch.float64) for length in PROMPTS]
    with torch.no_grad():
        expected = []
        for text in texts:
            table = rotary.at(torch.arange(len(text))[None]).double()
            expected.append(attention(text, None, table)[0])
        cache = KeyValueCache(FILLED + MORE, list(PROMPTS), FILLED, torch.device("cpu"))
        prompts = torch.zeros(FILLED, len(texts), 64, dtype=torch.float64)
        for row, (text, length) in enumerate(zip(texts, PROMPTS, strict=True)):
            prompts[:length, row] = text[:length, 0]
        first = attention(prompts, None, rotary.at(torch.arange(FILLED)[None]).double(), cache)[0]
        for row, length in enumerate(PROMPTS):
            torch.testing.assert_close(first[:length, row], expected[row][:length, 0], atol=1e-10, rtol=1e-10)
        for step in range(MORE):
            positions = cache.advance()
            tokens = torch.stack([text[length + step] for text, length in zip(texts, PROMPTS, strict=True)], dim=1)
            found = attention(tokens, None, rotary.at_token(positions).double(), cache)[0]
            wanted = torch.stack([whole[length + step] for whole, length in zip(expected, PROMPTS, strict=True)], dim=1)
            torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    # A row keeps the latent and the shared channels of the key, and no heads.
    held = {kept.untyped_storage().data_ptr(): kept.untyped_storage().nbytes() for kept in cache._kept[1]}
    assert sum(held.values()) == 8 * len(texts) * (FILLED + MORE) * (24 + 8)
    groups.destroy()


def test_latents_without_norms_have_none() -> None:
    [gpt], _ = build_small_model(small_config({**LATENTS, "qk_layernorm": False}))
    assert not [name for name, _ in gpt.named_parameters() if "q_layernorm" in name or "kv_layernorm" in name]
    groups.destroy()
