"""Gated delta rules: a recurrence in the place of attention."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "gated_delta",
    brings={
        "mixers": "megatron_ext.plugins.gated_delta.describe:MIXERS",
    },
)
