"""Experiment trackers: Weights & Biases, MLflow, Comet, Trackio."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "trackers",
    page="docs/plugins/trackers.md",
    brings={
        "switches": (
            ("wandb_project", None),
            ("mlflow_experiment", None),
            ("comet_project", None),
            ("trackio_project", None),
        ),
        "sinks": "megatron_ext.plugins.trackers.trackers:SINKS",
    },
)
