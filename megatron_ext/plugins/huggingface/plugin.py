"""Weights and tokenizers of Hugging Face folders."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "huggingface",
    page="docs/huggingface.md",
    needs=("checkpoint_tools", "families", "pages"),
    commands={
        "convert": (
            "megatron_ext.plugins.huggingface.commands.convert_checkpoint",
            "convert between checkpoints and Hugging Face folders",
        ),
        "new-family": (
            "megatron_ext.plugins.huggingface.commands.new_family",
            "begin the file of a type of Hugging Face model",
        ),
    },
    functions={"convert": "megatron_ext.plugins.huggingface.commands.convert_checkpoint:convert"},
    brings={
        "switches": (("load_hf", None),),
        "facts": "megatron_ext.plugins.huggingface.begin:FACTS",
        "endings": "megatron_ext.plugins.huggingface.at_end:ENDINGS",
        "flags": "megatron_ext.plugins.huggingface.flags:FLAGS",
        "rules": "megatron_ext.plugins.huggingface.begin:RULES",
        "warnings": "megatron_ext.plugins.huggingface.begin:WARNINGS",
        "initial_weights": "megatron_ext.plugins.huggingface.begin:INITIAL_WEIGHTS",
        "preloaded": ("megatron_ext.plugins.huggingface.load_hf",),
    },
)
