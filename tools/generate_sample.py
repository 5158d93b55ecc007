"""Generates a sample of text from an exported model, by transformers alone: nothing of this repository computes it.

It is `megatron-ext` as a script: megatron_ext/cli/generate_sample.py does the work, and --help says how to use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.cli.generate_sample import main
from megatron_ext.commandline import run_tool

if __name__ == "__main__":
    run_tool(main)
