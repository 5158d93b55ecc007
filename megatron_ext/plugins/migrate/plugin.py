"""Configurations, launch scripts and checkpoints of other programs."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "migrate",
    page="docs/coming_from.md",
    needs=("checkpoint_tools", "huggingface"),
    commands={
        "import-config": (
            "megatron_ext.plugins.migrate.commands.import_config",
            "print another program's configuration as flags of ours",
        ),
    },
    brings={
        "saved_flags": "megatron_ext.plugins.migrate.megatron_lm_checkpoint.saved_flags:READERS",
        "importers": "megatron_ext.plugins.migrate.deepspeed_checkpoint.direction:IMPORTERS",
        "translators": "megatron_ext.plugins.migrate.marks:TRANSLATORS",
        "other_flags": "megatron_ext.plugins.migrate.other_programs:OTHER_FLAGS",
        "checkpoint_formats": "megatron_ext.plugins.migrate.megatron_lm_checkpoint.state:FORMATS",
    },
)
