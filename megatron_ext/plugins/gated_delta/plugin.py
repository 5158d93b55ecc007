"""Gated delta rules: a recurrence in the place of attention."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "gated_delta",
    brings={
        "switches": (("experimental_attention_variant", ("gated_delta_net", "kda")),),
        "mixers": "megatron_ext.plugins.gated_delta.describe:MIXERS",
    },
)
