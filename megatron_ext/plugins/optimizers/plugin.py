"""Optimizers beyond Adam, SGD and Muon."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "optimizers",
    page="docs/optimizers.md",
    brings={"optimizers": "megatron_ext.plugins.optimizers.traits:OPTIMIZERS"},
)
