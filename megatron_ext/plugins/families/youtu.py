"""Youtu-LLM: deepseek_v3's attention with an MLP in every layer."""

from megatron_ext.plugins.families import latents
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import DECODER_NAMES

YOUTU = Family(
    "youtu",
    "YoutuForCausalLM",
    {**DECODER_NAMES, **latents.LATENT_NAMES},
    latents.LATENT_FLAGS,
    latents.latent_values,
    latents.latent_json,
    {
        **{**latents.LATENT_DEFAULTS, "max_position_embeddings": 131072, "tie_word_embeddings": True},
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32},
        "num_attention_heads": 16,
    },
    dependent_flags=latents.what_latents_can_say,
    is_seldom=True,
)
