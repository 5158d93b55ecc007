"""Attention and Mamba-2 side by side."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "side_by_side",
    page="docs/plugins/side_by_side.md",
    needs=("mamba",),
    brings={
        "flags": "megatron_ext.plugins.side_by_side.flags:FLAGS",
        "choices": "megatron_ext.plugins.side_by_side.flags:CHOICES",
        "rules": "megatron_ext.plugins.side_by_side.rules:RULES",
        "draws": "megatron_ext.plugins.side_by_side.describe:DRAWS",
        "mixers": "megatron_ext.plugins.side_by_side.describe:MIXERS",
    },
)
