"""`megatron-ext COMMAND ...`: one console command, with everything that the library does for people.

    megatron-ext preprocess --input text.jsonl --output-prefix data/train --append-eod --tokenizer-type ByteTokenizer
    megatron-ext pretrain --config run.yaml --dry-run --world-size 8
    torchrun --nproc-per-node 8 -m megatron_ext pretrain --config run.yaml

A command's module is imported when the command is used, so that `megatron-ext --help` answers at once.
"""

import difflib
import importlib
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron_ext.commandline import run_tool
from megatron_ext.config.parse.help_text import version
from megatron_ext.errors import ConfigurationError
from megatron_ext.registry import command_modules
from megatron_ext.terminal import say

COMMANDS = {
    "pretrain": ("megatron_ext.cli.pretrain", "pretrain a GPT model; pretrain_gpt.py is the same"),
    "torchrun": (
        "megatron_ext.cli.torchrun",
        "start ranks as torchrun does; last line and exit code are those of the rank that failed",
    ),
    "recipes": ("megatron_ext.cli.recipes", "list the recipes of published models, which pretrain --recipe takes"),
    **command_modules(),
}
"""Module and one-line description of each command, in the order of `--help`: the core's commands, then the plugins'."""


def help_text() -> str:
    """Return the text of `megatron-ext --help`."""
    lines = ["usage: megatron-ext COMMAND [arguments]", "", "Pretrain GPT models on megatron-core.", "", "commands:"]
    lines += [f"  {name:<22}{sentence}" for name, (_, sentence) in COMMANDS.items()]
    lines += ["", "`megatron-ext COMMAND --help` says more of each.", "", "examples:"]
    examples = (__doc__ or "").split("\n\n")[1]
    return "\n".join([*lines, *(line[2:] for line in examples.splitlines())])


def command(name: str) -> Callable[[list[str]], int]:
    """Return the function of a tool: it takes the command line and returns the exit code. Not for `pretrain`.

    Raises:
        ConfigurationError: there is no such command.
    """
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else "megatron-ext --help lists the commands"
        raise ConfigurationError(f"{name} is not a command; {hint}")
    return importlib.import_module(COMMANDS[name][0]).main


def start() -> NoReturn:
    """Run the command that the command line names, and end the process with its exit code."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name == "pretrain":
        from megatron_ext.cli import pretrain

        pretrain.start(argv)
    if name in ("--help", "-h", "--version"):
        run_tool(lambda _: say(version() if name == "--version" else help_text()) or 0)
    sys.argv = [f"megatron-ext {name}", *argv]  # what argparse calls the program
    run_tool(lambda words: command(name)(words))
