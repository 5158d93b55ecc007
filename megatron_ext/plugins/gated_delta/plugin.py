"""Gated delta rules: a recurrence in the place of attention."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "gated_delta",
    page="docs/plugins/gated_delta.md",
    brings={
        "flags": "megatron_ext.plugins.gated_delta.flags:FLAGS",
        "choices": "megatron_ext.plugins.gated_delta.flags:CHOICES",
        "rules": "megatron_ext.plugins.gated_delta.rules:RULES",
        "draws": "megatron_ext.plugins.gated_delta.describe:DRAWS",
        "mixers": "megatron_ext.plugins.gated_delta.describe:MIXERS",
    },
)
