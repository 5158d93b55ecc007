"""Mamba-2 mixers."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "mamba",
    needs=("gated_delta",),
    brings={
        "mixers": "megatron_ext.plugins.mamba.describe:MIXERS",
    },
)
