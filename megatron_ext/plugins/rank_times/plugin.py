"""How the time of each rank divides into computing, communicating and waiting, and which rank is slow."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "rank_times",
    page="docs/reading_a_run.md",
    brings={
        "measures": "megatron_ext.plugins.rank_times.measures:MEASURES",
        "rules": "megatron_ext.plugins.rank_times.rules:RULES",
        "switches": (("log_communication_share", None), ("log_straggler", None)),
    },
)
