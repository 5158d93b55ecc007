"""Mamba-1 mixers in the place of attention."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "selective_scan",
    page="docs/plugins/selective_scan.md",
    needs=("gated_delta",),
    brings={
        "flags": "megatron_ext.plugins.selective_scan.flags:FLAGS",
        "choices": "megatron_ext.plugins.selective_scan.flags:CHOICES",
        "resolvers": "megatron_ext.plugins.selective_scan.describe:RESOLVERS",
        "draws": "megatron_ext.plugins.selective_scan.describe:DRAWS",
        "mixers": "megatron_ext.plugins.selective_scan.describe:MIXERS",
        "comparisons": "megatron_ext.plugins.selective_scan.comparisons:COMPARISONS",
    },
)
