"""Checkpoints outside of a run: written by one process, inspected and averaged."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "checkpoint_tools",
    page="docs/checkpoints.md",
    commands={
        "average-checkpoints": (
            "megatron_ext.plugins.checkpoint_tools.commands.average_checkpoints",
            "average the weights of several checkpoints of a run",
        ),
        "inspect-checkpoint": (
            "megatron_ext.plugins.checkpoint_tools.commands.inspect_checkpoint",
            "list, show, verify and compare checkpoints",
        ),
    },
)
