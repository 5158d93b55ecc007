"""Latent attention in the form of generation, which attends to latents, against that of training, in fp64."""

from typing import Any

import pytest
import torch

from megatron_ext.parallel import groups
from tests.support.generated_texts import FILLED, MORE, PROMPTS, going_on
from tests.support.small_models import LATENTS, build_small_model, small_config


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "v_head_dim": 22}, {"window_size": "4,0"}], ids=str)
def test_generation_from_latents_is_the_training_form(changes: dict[str, Any]) -> None:
    [gpt], _ = build_small_model(small_config({**LATENTS, **changes}))
    attention: Any = gpt.decoder.layers[0].self_attention.double()
    rotary: Any = gpt.rotary_pos_emb
    torch.manual_seed(0)

    def attend(x: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        table = rotary.at(positions) if len(x) > 1 else rotary.at_token(positions)
        return attention(x, None, table.double(), cache)[0]

    *_, cache = going_on(attend)
    # A row keeps the latent and the shared channels of the key, and no heads.
    held = {kept.untyped_storage().data_ptr(): kept.untyped_storage().nbytes() for kept in cache._kept[1]}
    assert sum(held.values()) == 8 * len(PROMPTS) * (FILLED + MORE) * (24 + 8)
    groups.destroy()


def test_latents_without_norms_have_none() -> None:
    [gpt], _ = build_small_model(small_config({**LATENTS, "qk_layernorm": False}))
    assert not [name for name, _ in gpt.named_parameters() if "q_layernorm" in name or "kv_layernorm" in name]
    groups.destroy()
