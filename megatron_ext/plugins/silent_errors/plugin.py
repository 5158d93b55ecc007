"""Errors that no step notices: copies of weights that are not equal, and losses that leap."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "silent_errors",
    page="docs/silent_errors.md",
    brings={
        "callbacks": "megatron_ext.plugins.silent_errors.spike_check:CALLBACKS",
        "flags": "megatron_ext.plugins.silent_errors.flags:FLAGS",
        "resolvers": "megatron_ext.plugins.silent_errors.rules:RESOLVERS",
        "rules": "megatron_ext.plugins.silent_errors.rules:RULES",
    },
)
