"""Depths of multi-token prediction."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "next_token",
    page="docs/plugins/next_token.md",
    brings={
        "draws": "megatron_ext.plugins.next_token.describe:DRAWS",
        "switches": (("mtp_num_layers", None),),
        "next_tokens": "megatron_ext.plugins.next_token.describe:NEXT_TOKENS",
    },
)
