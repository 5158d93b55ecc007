"""Evaluates a checkpoint: perplexity, LAMBADA, multiple choice, and the tasks of lm-evaluation-harness.

It is `megatron-ext tasks` as a script: --help says how to use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import run_tool
from megatron_ext.plugins.tasks.commands.tasks import main

if __name__ == "__main__":
    run_tool(main)
