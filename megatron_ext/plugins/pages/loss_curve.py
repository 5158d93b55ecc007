"""Reads a run's history from its metrics file, and draws loss curves as text for a terminal."""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.config.parse.saved import read_saved
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.pages.charts import Point, finite
from megatron_ext.untrusted.metrics_rows import read_rows


@dataclass(frozen=True)
class RunHistory:
    """The rows of one metrics file: logged steps and evaluations, each in the order of iterations."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Rows with results of --eval-tasks."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Rows with samples of --sample-interval."""

    def points(self, field: str) -> list[Point]:
        """Return (iteration, value) of a field of the steps, without the rows that have none (a skipped step's
        norm)."""
        return [(row["iteration"], row[field]) for row in self.steps if row.get(field) is not None]

    def tokens_at(self, iteration: float) -> int:
        """Return the tokens that were read until the first logged step at or after an iteration, or until the last."""
        place = min(bisect.bisect_left(self._consumed, (iteration, 0)), len(self._consumed) - 1)
        return self._consumed[place][1] if self._consumed else 0

    @functools.cached_property
    def _consumed(self) -> list[tuple[int, int]]:
        return [(row["iteration"], row["consumed_tokens"]) for row in self.steps]

    @property
    def slowness_points(self) -> list[Point]:
        """Return (iteration, compute time of the slowest rank over its peers'); empty without --log-straggler."""
        return [(iteration, slowness["ratio"]) for iteration, slowness in self._slowest]

    @property
    def slow_ranks(self) -> dict[int, list[int]]:
        """Return the iterations of the rows in which each slow rank was slow."""
        by_rank: dict[int, list[int]] = {}
        for iteration, slowest in self._slowest:
            for rank in slowest["slow"]:
                by_rank.setdefault(rank, []).append(iteration)
        return by_rank

    @property
    def _slowest(self) -> list[tuple[int, dict[str, Any]]]:
        return [(row["iteration"], row["slowest_rank"]) for row in self.steps if row.get("slowest_rank")]

    @property
    def validation_points(self) -> list[Point]:
        """Return (iteration, loss) of the evaluations."""
        return [(row["iteration"], row["validation_loss"]) for row in self.evaluations]


def named(runs: list[Path]) -> dict[str, Path]:
    """Return the runs by the ends of their paths in which they differ; one alone by the last two parts of its path."""
    folders = [run.parent if run.name == "metrics.jsonl" else run for run in runs]
    depth = next(
        (n for n in range(1 + (len(runs) == 1), 99) if len({each.parts[-n:] for each in folders}) == len(set(folders))),
        99,
    )
    return {str(Path(*folder.parts[-depth:])): run for folder, run in zip(folders, runs, strict=True)}


def metrics_path(run: Path) -> Path:
    """Return the metrics file of a run, given that file or the folder (--save) that holds `metrics.jsonl`."""
    return run / "metrics.jsonl" if run.is_dir() else run


def read_history(run: Path) -> RunHistory:
    """Return the history of a run, given its metrics file or the folder (--save) that holds `metrics.jsonl`.

    Raises:
        ConfigurationError: there is no such file, or no row in it.
        DataError: no line of it is a row.
    """
    path = metrics_path(run)
    if not path.exists():
        raise ConfigurationError(
            f"{path}: no such file. Give the --save folder of a run, or the file that it wrote with --metrics-file."
        )
    rows = list(read_rows(path, pipe=path == run))
    if not rows:
        raise ConfigurationError(f"{path}: no row yet. The first is written after iteration 1.")
    return RunHistory(
        steps=[row for row in rows if "lm_loss" in row],
        evaluations=[row for row in rows if "validation_loss" in row],
        tasks=[row for row in rows if "tasks" in row],
        samples=[row for row in rows if "samples" in row],
    )


def loss_chart(history: RunHistory, width: int = 72, height: int = 16) -> str:
    """Return the loss over the iterations: `.` training (mean of a column), `o` validation.

    Args:
        history: the run.
        width: columns of the plot, without the axis.
        height: lines of the plot.
    """
    curves = [(".", history.points("lm_loss")), ("o", history.validation_points)]
    return text_chart("loss in nats per token (. training, o validation)", curves, width, height)


def text_chart(title: str, curves: Sequence[tuple[str, Sequence[Point]]], width: int = 72, height: int = 16) -> str:
    """Return a chart for a terminal; a later curve covers an earlier one.

    Args:
        title: its first line.
        curves: the mark of each curve and its points; the points of a column are shown by their mean.
        width: columns of the plot, without the axis.
        height: lines of the plot.
    """
    drawn = [(mark, shown) for mark, points in curves if (shown := finite(points))]
    if not drawn:
        return "no finite loss to show"
    places = [place for _, points in drawn for place, _ in points]
    first, last = min(places), max(places)

    def columns(points: Sequence[Point]) -> dict[int, float]:
        values: dict[int, list[float]] = {}
        for place, value in points:
            column = round((place - first) / max(1, last - first) * (width - 1))
            values.setdefault(column, []).append(value)
        return {column: sum(inside) / len(inside) for column, inside in values.items()}

    shown = [(mark, columns(points)) for mark, points in drawn]
    levels = [value for _, points in shown for value in points.values()]
    low, high = min(levels), max(levels)
    grid = [[" "] * width for _ in range(height)]
    for mark, points in shown:
        for column, value in points.items():
            line = round((high - value) / ((high - low) or 1.0) * (height - 1))
            grid[line][column] = mark
    labels = {line: f"{high - line / (height - 1) * (high - low):.2f}" for line in (0, height // 2, height - 1)}
    margin = max(map(len, labels.values()))
    plot = [f"{labels.get(line, ''):>{margin}} |{''.join(cells).rstrip()}" for line, cells in enumerate(grid)]
    axis = f"{first}{str(last).rjust(width - len(str(first)))}"
    return "\n".join([f"{'':{margin}}  {title}", *plot, f"{'':{margin}} +{'-' * width}", f"{'':{margin}}  {axis}"])


def summary(history: RunHistory) -> list[str]:
    """Return a summary of the run's losses and speed, in a few lines."""
    lines = []
    train, validation = history.points("lm_loss"), history.validation_points
    if train:
        lines.append(f"training loss    {_from_to(train)}")
    if validation:
        lines.append(f"validation loss  {_from_to(validation)}, perplexity {_perplexity(validation[-1][1])}")
    rates = finite(history.points("tokens_per_second"))
    if rates:
        # The first logged step holds what happens once: compilation, first allocations.
        steady = sorted(rate for _, rate in rates[1:] or rates)
        median, tokens = steady[len(steady) // 2], history.steps[-1]["consumed_tokens"]
        lines.append(f"tokens           {tokens:,}, at {median:,.0f} per second (median)")
    bad = len(train) + len(validation) - len(finite(train + validation))
    if bad:
        lines.append(f"not finite       {bad} losses, left out of the curve")
    for rank, iterations in sorted(history.slow_ranks.items()):
        lines.append(
            f"slow rank        {rank}, in {len(iterations)} rows from iteration {iterations[0]} to {iterations[-1]}"
        )
    return lines


def _from_to(points: list[Point]) -> str:
    (first, begin), (last, end) = points[0], points[-1]
    return f"{begin:.4f} at iteration {first} -> {end:.4f} at iteration {last}"


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 20 else f"exp({loss:.1f})"


def saved_values(metrics: Path) -> dict[str, Any] | None:
    """Return the resolved values of the run that wrote this metrics file: of the newest checkpoint next to it, or of a
    config.yaml next to it; None where there is none, or it cannot be read."""
    own = metrics.parent / "config.yaml"
    files = sorted(metrics.parent.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime) or [own]
    return read_saved(files[-1]) if files[-1].is_file() else None
