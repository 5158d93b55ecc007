"""Search for the fastest layout that fits, and pictures of pipelines."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "planner",
    page="docs/planner.md",
    needs=("families", "pages"),
    commands={
        "plan": ("megatron_ext.plugins.planner.commands.plan", "say which layout to use for a model on some devices"),
        "draw-pipeline": (
            "megatron_ext.plugins.planner.commands.draw_pipeline",
            "draw a simulated step of a pipeline",
        ),
    },
)
