"""Families of Hugging Face models."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "families",
    page="docs/huggingface.md",
    needs=("gated_delta", "latent_attention", "mamba", "next_token", "short_convolution", "side_by_side"),
    brings={
        "flags": "megatron_ext.plugins.families.flags:FLAGS",
        "rules": "megatron_ext.plugins.families.rules:RULES",
    },
)
