"""Web pages: charts, runs, and the reference of the library."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "pages",
    page="docs/reading_a_run.md",
    commands={
        "show": (
            "megatron_ext.plugins.pages.commands.show_run",
            "show runs: loss curve in the terminal, and as a web page",
        ),
        "api": ("megatron_ext.plugins.pages.commands.api", "print the library's reference, a page for each room"),
    },
)
