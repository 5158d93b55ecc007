"""Options and spellings of Megatron-LM and its forks."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "megatron_lm",
    page="docs/coming_from/megatron_lm.md",
    needs=("pages",),
    brings={"other_flags": "megatron_ext.plugins.megatron_lm.megatron_options:OTHER_FLAGS"},
)
