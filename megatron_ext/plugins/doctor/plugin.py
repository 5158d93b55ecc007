"""Looks for what breaks a launch, and for ranks that do not answer."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "doctor",
    page="docs/plugins/doctor.md",
    commands={
        "doctor": ("megatron_ext.plugins.doctor.commands.doctor", "look for what breaks a launch, before it starts"),
    },
)
