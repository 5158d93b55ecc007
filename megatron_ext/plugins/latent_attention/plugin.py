"""Latent attention, and indexers that choose its keys."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "latent_attention",
    brings={
        "mixers": "megatron_ext.plugins.latent_attention.describe:MIXERS",
    },
)
