"""Evaluation tasks and generation."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "tasks",
    page="docs/tasks.md",
    needs=("families", "huggingface", "prepare"),
    commands={
        "tasks": (
            "megatron_ext.plugins.tasks.commands.tasks",
            "evaluate a checkpoint: perplexity, LAMBADA, multiple choice",
        ),
        "generate": ("megatron_ext.plugins.tasks.commands.generate", "let a checkpoint go on from prompts"),
        "sample": ("megatron_ext.plugins.tasks.commands.generate_sample", "generate text from an exported model"),
    },
    functions={
        "evaluate": "megatron_ext.plugins.tasks.commands.tasks:evaluate",
        "generate": "megatron_ext.plugins.tasks.commands.generate:generate",
    },
    brings={
        "switches": (
            ("eval_tasks", None),
            ("sample_interval", None),
        ),
        "facts": "megatron_ext.plugins.tasks.begin:FACTS",
        "callbacks": "megatron_ext.plugins.tasks.begin:CALLBACKS",
    },
)
