"""Experiment trackers: Weights & Biases, MLflow, Comet, Trackio."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "trackers",
    brings={
        "sinks": "megatron_ext.plugins.trackers.trackers:SINKS",
    },
)
