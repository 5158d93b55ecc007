"""`megatron-ext COMMAND ...`: one console command, with everything that the library does for people.

    megatron-ext preprocess --input text.jsonl --output-prefix data/train --append-eod --tokenizer-type ByteTokenizer
    megatron-ext pretrain --config run.yaml --dry-run --world-size 8
    torchrun --nproc-per-node 8 -m megatron_ext pretrain --config run.yaml
    eval "$(megatron-ext completion bash)"

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
from megatron_ext.terminal import say

COMMANDS = {
    "pretrain": ("pretrain", "pretrain a GPT model; pretrain_gpt.py is the same"),
    "torchrun": ("torchrun", "start ranks as torchrun does; last line and exit code are those of the rank that failed"),
    "new": ("new_run", "make a model of your own text: tokenizer, data, training, export, sample, page"),
    "preprocess": ("preprocess_data", "turn text into the .bin/.idx files that training reads"),
    "train-tokenizer": ("train_tokenizer", "train a tokenizer on text files"),
    "merge-datasets": ("merge_datasets", "merge .bin/.idx pairs into one"),
    "inspect-dataset": ("inspect_dataset", "look into a .bin/.idx pair, or prove that it is whole"),
    "prepare-cache": ("prepare_cache", "build a run's index cache before it starts"),
    "convert": ("convert_checkpoint", "convert between checkpoints and Hugging Face folders"),
    "average-checkpoints": ("average_checkpoints", "average the weights of several checkpoints of a run"),
    "inspect-checkpoint": ("inspect_checkpoint", "list, show, verify and compare checkpoints"),
    "tasks": ("tasks", "evaluate a checkpoint: perplexity, LAMBADA, multiple choice"),
    "generate": ("generate", "let a checkpoint go on from prompts"),
    "sample": ("generate_sample", "generate text from an exported model"),
    "show": ("show_run", "show runs: loss curve in the terminal, and as a web page"),
    "compare": ("compare_runs", "compare the metrics of two runs, float for float"),
    "replay-step": ("replay_step", "replay a step of a run in one process, and compare it with the record"),
    "parity": ("parity", "prove that a layout trains as one process does"),
    "coordinate-check": ("coordinate_check", "check that activations keep their size as a model gets wider"),
    "plan": ("plan", "say which layout to use for a model on some devices"),
    "draw-pipeline": ("draw_pipeline", "draw a step of a pipeline, simulated or as a run recorded it"),
    "make-schedule": ("make_schedule", "make a pipeline's schedule for measured times and a limit of memory"),
    "doctor": ("doctor", "look for what breaks a launch, before it starts"),
    "import-config": ("import_config", "print another program's configuration as flags of ours"),
    "api": ("api", "print the library's reference, a page for each room"),
    "completion": ("completion", "print the completion of a shell: eval it in its startup file"),
}
"""Module and one-line description of each command, in the order of `--help`."""


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
    return importlib.import_module(f"megatron_ext.cli.{COMMANDS[name][0]}").main


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
