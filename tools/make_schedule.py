"""Makes a pipeline's schedule for measured times and a limit of memory, as a file for --pipeline-schedule.

It is `megatron-ext` as a script: megatron_ext/cli/make_schedule.py does the work, and --help says how to use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.cli.make_schedule import main
from megatron_ext.commandline import run_tool

if __name__ == "__main__":
    run_tool(main)
