"""Compare the metrics files of two runs, float for float.

    megatron-ext compare before.jsonl after.jsonl
    megatron-ext compare checkpoints/before checkpoints/after --html both.html

Prints `identical: N rows` and exits with 0, or names the first row and field that differ and exits with 1. Times,
rates and memory are left out: no run repeats them. --html FILE draws both runs as `show` does, under the verdict.
"""

import math
from pathlib import Path
from typing import Any

from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.pages.commands.show_run import named
from megatron_ext.plugins.pages.loss_curve import metrics_path, read_history
from megatron_ext.plugins.pages.run_page import runs_page
from megatron_ext.telemetry.metrics import MEASURED_FIELDS
from megatron_ext.terminal import say
from megatron_ext.untrusted.metrics_rows import HAS_ITERATION, read_rows


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Compare the metrics files of two runs, float for float.", __doc__)
    parser.add_argument("first", type=Path, help="a run's --save folder, or its metrics file")
    parser.add_argument("second", type=Path, help="those of the other run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with both runs, and their difference")
    options = parser.parse_args(argv)
    if options.html is not None and any(metrics_path(run).is_fifo() for run in (options.first, options.second)):
        parser.error("--html reads each metrics file twice, and a pipe can be read once; give a file")
    first, second = _rows(options.first), _rows(options.second)
    difference = first_difference(first, second)
    verdict = difference or f"identical: {len(first)} rows"
    say(verdict)
    if options.html is not None:
        runs = {name: read_history(run) for name, run in named([options.first, options.second]).items()}
        write_output("--html", options.html, runs_page(runs, verdict))
    return 0 if difference is None else 1


def first_difference(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str | None:
    """Return where the runs differ first, in words; None if they do not."""
    for number, (one, other) in enumerate(zip(first, second, strict=False), start=1):
        for name in sorted((one.keys() | other.keys()) - MEASURED_FIELDS):
            if not _same(one.get(name), other.get(name)):
                return f"row {number} (iteration {one['iteration']}): {name} is {one.get(name)} and {other.get(name)}"
    if len(first) != len(second):
        return f"{len(first)} and {len(second)} rows; equal up to row {min(len(first), len(second))}"
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other


def _rows(run: Path) -> list[dict[str, Any]]:
    path = metrics_path(run)
    try:
        # Whatever the fields hold is compared; where a line cannot be read, the runs may differ in it.
        return list(read_rows(path, HAS_ITERATION, pipe=True, strict=True))
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist; give the --save folder or metrics.jsonl of a run") from None
