"""Starts a command of megatron-ext for the script of its name in this folder, also where nothing is installed."""

import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.cli import main
from megatron_ext.commandline import run_tool


def start(name: str) -> NoReturn:
    """Run a command with the command line of this process, and end with its exit code."""
    run_tool(lambda words: main.command(name)(words))
