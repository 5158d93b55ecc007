"""Averages the weights of several checkpoints of a run.

It is `megatron-ext` as a script: megatron_ext/cli/average_checkpoints.py does the work, and --help says how to use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.cli.average_checkpoints import main
from megatron_ext.commandline import run_tool

if __name__ == "__main__":
    run_tool(main)
