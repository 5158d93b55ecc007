"""Lets a trained model go on from prompts.

It is `megatron-ext generate` as a script: --help says how to use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import run_tool
from megatron_ext.plugins.tasks.commands.generate import main

if __name__ == "__main__":
    run_tool(main)
