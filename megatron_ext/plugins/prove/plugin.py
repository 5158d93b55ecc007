"""Proofs: layouts, runs and exports compared."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "prove",
    page="docs/plugins/prove.md",
    needs=("families", "huggingface", "pages"),
    commands={
        "compare": (
            "megatron_ext.plugins.prove.commands.compare_runs",
            "compare runs: settings, losses, speed, curves; --equal: float for float",
        ),
        "replay-step": (
            "megatron_ext.plugins.prove.commands.replay_step",
            "replay a step of a run in one process, and compare it with the record",
        ),
        "parity": ("megatron_ext.plugins.prove.commands.parity", "prove that a layout trains as one process does"),
        "parity-fuzz": (
            "megatron_ext.plugins.prove.commands.parity_fuzz",
            "train random models in random layouts, and compare them with one process",
        ),
        "coordinate-check": (
            "megatron_ext.plugins.prove.commands.coordinate_check",
            "check that activations keep their size as a model gets wider",
        ),
    },
    brings={
        "preloaded": (
            "megatron_ext.plugins.prove.gather",
            "megatron_ext.sharding.poisoned",
            "megatron_ext.checkpoint.native.load_checkpoint",
            "megatron_ext.checkpoint.native.save",
            "megatron_ext.train.callbacks.standard",
            "megatron_ext.train.pretrain",
        ),
    },
)
