"""Latent attention, and indexers that choose its keys."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "latent_attention",
    brings={
        "switches": (
            ("multi_latent_attention", None),
            ("experimental_attention_variant", ("dsa",)),
        ),
        "mixers": "megatron_ext.plugins.latent_attention.describe:MIXERS",
    },
)
