"""From text to .bin/.idx pairs."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "prepare",
    page="docs/data.md",
    needs=("pages",),
    commands={
        "new": (
            "megatron_ext.plugins.prepare.commands.new_run",
            "make a model of your own text: tokenizer, data, training, export, sample, page",
        ),
        "preprocess": (
            "megatron_ext.plugins.prepare.commands.preprocess_data",
            "turn text into the .bin/.idx files that training reads",
        ),
        "train-tokenizer": ("megatron_ext.plugins.prepare.commands.train_tokenizer", "train a tokenizer on text files"),
        "merge-datasets": ("megatron_ext.plugins.prepare.commands.merge_datasets", "merge .bin/.idx pairs into one"),
        "inspect-dataset": (
            "megatron_ext.plugins.prepare.commands.inspect_dataset",
            "look into a .bin/.idx pair, or prove that it is whole",
        ),
        "prepare-cache": (
            "megatron_ext.plugins.prepare.commands.prepare_cache",
            "build a run's index cache before it starts",
        ),
    },
)
