"""Proofs: layouts, runs and exports compared."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "prove",
    needs=("huggingface", "pages"),
    commands={
        "compare": (
            "megatron_ext.plugins.prove.commands.compare_runs",
            "compare the metrics of two runs, float for float",
        ),
        "replay-step": (
            "megatron_ext.plugins.prove.commands.replay_step",
            "replay a step of a run in one process, and compare it with the record",
        ),
        "parity": ("megatron_ext.plugins.prove.commands.parity", "prove that a layout trains as one process does"),
        "coordinate-check": (
            "megatron_ext.plugins.prove.commands.coordinate_check",
            "check that activations keep their size as a model gets wider",
        ),
    },
    brings={
        "preloaded": ("megatron_ext.plugins.prove.gather",),
    },
)
