"""Latent attention, and indexers that choose its keys."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "latent_attention",
    page="docs/plugins/latent_attention.md",
    brings={
        "flags": "megatron_ext.plugins.latent_attention.flags:FLAGS",
        "choices": "megatron_ext.plugins.latent_attention.flags:CHOICES",
        "counts_as": "megatron_ext.plugins.latent_attention.flags:COUNTS_AS",
        "resolvers": "megatron_ext.plugins.latent_attention.rules:RESOLVERS",
        "rules": "megatron_ext.plugins.latent_attention.rules:RULES",
        "draws": "megatron_ext.plugins.latent_attention.describe:DRAWS",
        "mixers": "megatron_ext.plugins.latent_attention.describe:MIXERS",
    },
)
