"""Checks that activations keep their size as a model gets wider: what --use-mup is for.

It is `megatron-ext` as a script: megatron_ext/cli/coordinate_check.py does the work, and --help says how to use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.cli.coordinate_check import main
from megatron_ext.commandline import run_tool

if __name__ == "__main__":
    run_tool(main)
