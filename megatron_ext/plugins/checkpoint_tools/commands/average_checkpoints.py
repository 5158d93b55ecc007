"""Averages the weights of several checkpoints of a run.

    megatron-ext average-checkpoints --load checkpoints --last 5 --save averaged
    megatron-ext average-checkpoints --load checkpoints --iterations 8000 9000 10000 --save averaged
    megatron-ext average-checkpoints --load run-a run-b --save averaged         # the newest of each

Writes a checkpoint of iteration 0 that holds weights alone: train on from it with --load, export it with
`megatron-ext convert to-hf`, evaluate it with `megatron-ext tasks`.
"""

from pathlib import Path

from megatron_ext.checkpoint.native.checkpoint_folder import (
    checkpoint_at,
    iteration_folder,
    saved_iterations,
    without_checkpoint,
)
from megatron_ext.commandline import ToolParser
from megatron_ext.errors import ConfigurationError
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Average the weights of several checkpoints of a run.", __doc__)
    parser.add_argument("--load", type=Path, nargs="+", required=True, metavar="DIR", help="--save folders of runs")
    parser.add_argument("--iterations", type=int, nargs="+", metavar="N", help="checkpoints of the one --load folder")
    parser.add_argument("--last", type=int, metavar="N", help="the newest N checkpoints of the one --load folder")
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="folder to write")
    options = parser.parse_args(argv)
    of_one = options.iterations is not None or options.last is not None
    if of_one and (len(options.load) > 1 or None not in (options.iterations, options.last)):
        parser.error("--iterations and --last choose among the checkpoints of one --load folder; give one of them")
    chosen = _of_run(options.load[0], options.iterations, options.last) if of_one else _newest(options.load)
    if len(chosen) < 2:
        raise ConfigurationError("one checkpoint is its own average; give several with --last, --iterations or --load")
    from megatron_ext.plugins.checkpoint_tools.averaging import average_checkpoints

    path = average_checkpoints(chosen, options.save)
    say(f"wrote {path}, the mean of {len(chosen)} checkpoints; begin with --load {options.save}")
    return 0


def _of_run(folder: Path, iterations: list[int] | None, last: int | None) -> list[Path]:
    """Return checkpoints of one run."""
    saved = saved_iterations(folder)
    wanted = saved[-last:] if last else iterations or []
    missing = [iteration for iteration in wanted if iteration not in saved]
    if missing or (last is not None and not 0 < last <= len(saved)):
        asked = f"--iterations {missing[0]}" if missing else f"--last {last}"
        listed = ", ".join(map(str, saved)) or "none"
        raise ConfigurationError(f"--load {folder} does not hold {asked}; its checkpoints are {listed}")
    return [iteration_folder(folder, iteration) for iteration in wanted]


def _newest(folders: list[Path]) -> list[Path]:
    """Return the newest checkpoint of each folder."""
    found = {folder: checkpoint_at(folder) for folder in folders}
    for folder, path in found.items():
        if path is None:
            raise ConfigurationError(f"--load {without_checkpoint(folder)}")
    return [path for path in found.values() if path is not None]
