"""Mamba-2 mixers."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "mamba",
    page="docs/plugins/mamba.md",
    needs=("gated_delta",),
    brings={
        "flags": "megatron_ext.plugins.mamba.flags:FLAGS",
        "choices": "megatron_ext.plugins.mamba.flags:CHOICES",
        "resolvers": "megatron_ext.plugins.mamba.rules:RESOLVERS",
        "rules": "megatron_ext.plugins.mamba.rules:RULES",
        "draws": "megatron_ext.plugins.mamba.describe:DRAWS",
        "mixers": "megatron_ext.plugins.mamba.describe:MIXERS",
    },
)
