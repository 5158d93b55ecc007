"""Shows runs: the loss curve of each in the terminal, and all on one web page.

    megatron-ext show checkpoints/quickstart --html run.html
    megatron-ext show checkpoints/tp2 checkpoints/pp2 --html both.html

reads metrics.jsonl in each folder (or the file that --metrics-file named). --files FILE ... are linked to at the end of
one run's page.
"""

import contextlib
import os
from math import prod
from pathlib import Path

from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.config.derived.rank_order import axis_sizes
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import TrainingError
from megatron_ext.plugins.pages.loss_curve import RunHistory, loss_chart, named, read_history, saved_values, summary
from megatron_ext.plugins.pages.run_page import losses_picture, run_page, runs_page
from megatron_ext.resilience import exit_record
from megatron_ext.telemetry.banner import described
from megatron_ext.telemetry.commands_file import starts
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Show runs: their loss curves in the terminal, and as a web page.", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's --save folder, or its metrics file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with loss, rate, norm and speed")
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="FILE", help="with --html and one run: what it links to"
    )
    parser.add_argument(
        "--next", nargs="+", default=[], metavar="COMMAND", help="with --html and one run: commands that it ends with"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the training losses")
    options = parser.parse_args(argv)
    runs = {name: read_history(run) for name, run in named(options.runs).items()}
    for number, (name, history) in enumerate(runs.items()):
        if len(runs) > 1:
            say(f"{chr(10) * bool(number)}== {name}")
        say(loss_chart(history))
        say()
        say("\n".join(summary(history)))
    if options.html is not None:
        files = [os.path.relpath(file, options.html.parent) for file in options.files]
        write_output("--html", options.html, _page(runs, options.runs[0], files, options.next))
        say(f"page             {options.html}")
    if options.svg is not None:
        write_output("--svg", options.svg, losses_picture(runs))
        say(f"picture          {options.svg}")
    return 0


def _page(runs: dict[str, RunHistory], first: Path, files: list[str], following: list[str]) -> str:
    if len(runs) > 1:
        return runs_page(runs)
    [(name, history)] = runs.items()
    ranks = next((row["world_size"] for row in reversed(history.steps) if row.get("world_size")), 1)
    config = _config(first, ranks)
    layout = config.layout if config is not None else None
    if layout is not None and prod(axis_sizes(layout)) != ranks:
        layout = None  # of a checkpoint that the latest ranks did not write
    return run_page(
        history,
        name,
        facts=_facts(first, config),
        layout=layout,
        starts=starts(_folder(first)),
        files=files,
        following=following,
    )


def _folder(run: Path) -> Path:
    return run if run.is_dir() else run.parent


def _config(run: Path, ranks: int) -> Config | None:
    """Return the configuration saved in the run's newest checkpoint, resolved for `ranks` ranks; None where it cannot
    be read."""
    folder = _folder(run)
    with contextlib.suppress(TrainingError, OSError):  # a page without it is better than none
        values = saved_values(folder / "metrics.jsonl")
        return resolve(values, Facts(world_size=ranks)) if values else None
    return None


def _facts(run: Path, config: Config | None) -> list[str]:
    """Return lines on what the run trained, and how it ended; files that are missing or unreadable give no line."""
    folder = _folder(run)
    facts = {} if config is None else described(config)
    if (end := exit_record.read(folder)) is not None and "time" in end:
        facts["ended"] = f"{str(end['time'])[:16].replace('T', ' ')} UTC, exit code {end['code']}"
    return [f"{name:<17}{text}" for name, text in facts.items()]
