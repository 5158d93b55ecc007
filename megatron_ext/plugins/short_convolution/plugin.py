"""Gated short convolutions in the place of attention."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "short_convolution",
    page="docs/plugins/short_convolution.md",
    needs=("gated_delta",),
    brings={
        "flags": "megatron_ext.plugins.short_convolution.flags:FLAGS",
        "choices": "megatron_ext.plugins.short_convolution.flags:CHOICES",
        "rules": "megatron_ext.plugins.short_convolution.describe:RULES",
        "draws": "megatron_ext.plugins.short_convolution.describe:DRAWS",
        "mixers": "megatron_ext.plugins.short_convolution.describe:MIXERS",
        "comparisons": "megatron_ext.plugins.short_convolution.comparisons:COMPARISONS",
    },
)
