"""For whoever doubts: trains a few steps in one process and in a layout, and says whether, and where, they differ.

It is `megatron-ext` as a script: megatron_ext/cli/parity.py does the work, and --help says how to use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.cli.parity import main
from megatron_ext.commandline import run_tool

if __name__ == "__main__":
    run_tool(main)
