"""Weights and tokenizers of Hugging Face folders."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "huggingface",
    page="docs/huggingface.md",
    needs=("families",),
    commands={
        "convert": (
            "megatron_ext.plugins.huggingface.commands.convert_checkpoint",
            "convert between checkpoints and Hugging Face folders",
        ),
    },
    brings={
        "switches": (("load_hf", None),),
        "facts": "megatron_ext.plugins.huggingface.begin:FACTS",
        "rules": "megatron_ext.plugins.huggingface.begin:RULES",
        "warnings": "megatron_ext.plugins.huggingface.begin:WARNINGS",
        "initial_weights": "megatron_ext.plugins.huggingface.begin:INITIAL_WEIGHTS",
        "preloaded": ("megatron_ext.plugins.huggingface.load_hf",),
    },
)
