"""Compares runs: the settings that differ, losses, speed, memory, and their curves in one chart.

    megatron-ext compare runs/adam runs/muon
    megatron-ext compare runs/lr-1e-3 runs/lr-2e-3 runs/lr-4e-3 --html compared.html
    megatron-ext compare --equal before.jsonl after.jsonl

A run is its --save folder, or its metrics file. Differences are to the first run. Seconds are those of all ranks
together: of GPUs, or of the processors that a CPU run worked on, which other programs of the machine do not change
much. They are counted until the validation loss that all runs have reached; without validation, until that training
loss (mean of 5% of the rows). Exit code 0.

--equal compares two runs float for float: it prints `identical: N rows` and exits with 0, or names the first row and
field that differ and exits with 1. Times, rates and memory are left out: no run repeats them.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.pages.charts import table
from megatron_ext.plugins.pages.comparison import ComparedRun, differing_settings, read_runs, results
from megatron_ext.plugins.pages.loss_curve import metrics_path, named, read_history, text_chart
from megatron_ext.plugins.pages.run_page import runs_page
from megatron_ext.telemetry.metrics import MEASURED_FIELDS
from megatron_ext.terminal import columns, say, warn
from megatron_ext.untrusted.metrics_rows import HAS_ITERATION, read_rows

_PAGE = Path("compared.html")
"""The page, where --html names none."""

_WIDEST = 36
"""Most characters of a cell on a terminal; the page has all of it."""


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Compare runs: settings, losses, speed, memory and curves.", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's --save folder, or its metrics file")
    parser.add_argument(
        "--html",
        nargs="?",
        const=_PAGE,
        type=Path,
        metavar="PAGE",
        help=f"write a page with the tables and all curves; without a name it is {_PAGE}",
    )
    parser.add_argument(
        "--equal", action="store_true", help="compare two runs float for float; the exit code is 1 if they differ"
    )
    options = parser.parse_args(argv)
    if options.html is not None and options.html.suffix == ".jsonl":
        parser.error(f"--html {options.html} is the name of a metrics file; put --html behind the runs, or name a page")
    if len(options.runs) < 2:
        parser.error(f"give two runs or more to compare; `megatron-ext show {options.runs[0]}` shows one")
    if not options.equal:
        return _compare(options.runs, options.html)
    if len(options.runs) > 2:
        parser.error(f"--equal compares two runs, and {len(options.runs)} are given; compare them two by two")
    if options.html is not None and any(metrics_path(run).is_fifo() for run in options.runs):
        parser.error("--html reads each metrics file twice, and a pipe can be read once; give a file")
    first, second = map(_rows, options.runs)
    difference = first_difference(first, second)
    verdict = difference or f"identical: {len(first)} rows"
    say(verdict)
    if options.html is not None:
        runs = {name: read_history(run) for name, run in named(options.runs).items()}
        write_output("--html", options.html, runs_page(runs, verdict))
    return 0 if difference is None else 1


def _compare(paths: Sequence[Path], html: Path | None) -> int:
    runs = read_runs(paths)
    settings, measured = differing_settings(runs), results(runs)
    for run in runs:
        if run.settings is None:
            warn(f"{run.name}: no config.yaml of a checkpoint can be read there; its settings are not compared")
    known = sum(run.settings is not None for run in runs)
    heading = "settings that differ" if settings or known > 1 else "settings: fewer than two runs have a config.yaml"
    say("\n".join(run.title for run in runs))
    say()
    say(_text(heading if settings or known < 2 else "no setting differs", runs, settings))
    say()
    say(_text("results", runs, measured))
    say()
    say(_curves(runs))
    if html is not None:
        head = [run.title for run in runs]
        tables = [table("Settings that differ", head, settings)] if settings else []
        tables.append(table("Results", head, measured))
        page = runs_page({run.title: run.history for run in runs}, tables=tables, by_tokens=_unlike_steps(runs))
        write_output("--html", html, page)
        say(f"page  {html}")
    return 0


def _text(heading: str, runs: Sequence[ComparedRun], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table as lines; the runs that do not fit next to each other follow in further tables."""
    names = [heading, *(name for name, _ in rows)]
    first = max(map(len, names))
    cells = [[run.letter, *(_shortened(texts[number]) for _, texts in rows)] for number, run in enumerate(runs)]
    widths = [max(map(len, column)) for column in cells]
    lines, begin = list[str](), 0
    while begin < len(runs):
        end, used = begin + 1, first + 2 + widths[begin]
        while end < len(runs) and used + 2 + widths[end] <= columns():
            used += 2 + widths[end]
            end += 1
        for line, name in enumerate(names):
            shown = (f"{cells[number][line]:<{widths[number]}}" for number in range(begin, end))
            lines.append("  ".join([f"{name:<{first}}", *shown]).rstrip())
        lines += [""] * (end < len(runs))
        begin = end
    return "\n".join(lines if rows else [heading])


def _shortened(text: str) -> str:
    half = _WIDEST // 2 - 1
    return text if len(text) <= _WIDEST else f"{text[:half]}..{text[-half:]}"


def _curves(runs: Sequence[ComparedRun]) -> str:
    """Return the chart of all runs for a terminal: of training losses by letters, of validation by small ones."""
    by_tokens = _unlike_steps(runs)
    curves = [
        (mark, [(run.history.tokens_at(int(at)) if by_tokens else at, loss) for at, loss in points])
        for run in runs
        for mark, points in ((run.letter[0], run.training), (run.letter[0].lower(), run.validation))
    ]
    along = "tokens" if by_tokens else "iterations"
    letters = ", ".join(run.letter for run in runs)
    title = f"loss in nats per token, by {along} ({letters} training; in small letters validation)"
    return text_chart(title, curves, width=min(100, max(40, columns() - 10)))


def _unlike_steps(runs: Sequence[ComparedRun]) -> bool:
    """Return whether runs have read unequal numbers of tokens by the same iteration."""
    tokens = [{row["iteration"]: row["consumed_tokens"] for row in run.history.steps} for run in runs]
    return any(one[at] != other[at] for one, other in itertools.pairwise(tokens) for at in one.keys() & other.keys())


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
