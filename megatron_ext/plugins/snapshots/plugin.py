"""Snapshots of a run in the memory of its machines, which a restart finds before the last checkpoint."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "snapshots",
    page="docs/checkpoints.md",
    brings={
        "callbacks": "megatron_ext.plugins.snapshots.take:CALLBACKS",
        "flags": "megatron_ext.plugins.snapshots.flags:FLAGS",
        "newer_states": "megatron_ext.plugins.snapshots.take:NEWER_STATES",
        "rules": "megatron_ext.plugins.snapshots.rules:RULES",
    },
)
