"""Compares runs by their settings and results: the differences of their flags, losses, speed and memory.

compared = read_runs([Path("runs/adam"), Path("runs/muon")])
differing_settings(compared)        # --lr: 0.002, 0.01; --optimizer: adam, muon
results(compared)                   # validation loss, best: 5.4424, 4.9210 (-0.5214)
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.parse.options import flag_of, options_by_name
from megatron_ext.plugins.pages.charts import Point, finite
from megatron_ext.plugins.pages.loss_curve import RunHistory, metrics_path, named, read_history, saved_values

_PLACES = ("save", "tensorboard_dir", "metrics_file")
"""Fields that say where a run writes, which no result depends on."""

_RECENT = 20
"""The mean of the last training losses is over one row in so many."""


@dataclass(frozen=True)
class ComparedRun:
    """A run of several that are compared."""

    letter: str
    """Short name in tables and in the terminal's chart."""
    name: str
    history: RunHistory
    settings: Mapping[str, Any] | None
    """Values of its flags by field; None where the run has no readable configuration."""
    clock: str
    """Unit of `seconds`: "GPU", "CPU" (processor time), or "rank", the wall clock of a rank."""

    @property
    def title(self) -> str:
        """Letter and name."""
        return f"{self.letter}  {self.name}"

    @property
    def ranks(self) -> int:
        """Number of ranks of the last logged step."""
        return next((row["world_size"] for row in reversed(self.history.steps) if row.get("world_size")), 1)

    @property
    def tokens(self) -> int:
        """Tokens read until the last logged step."""
        return self.history.steps[-1]["consumed_tokens"] if self.history.steps else 0

    @functools.cached_property
    def training(self) -> list[Point]:
        """(iteration, training loss) of the logged steps whose loss is finite."""
        return finite(self.history.points("lm_loss"))

    @functools.cached_property
    def validation(self) -> list[Point]:
        """(iteration, validation loss) of the evaluations whose loss is finite."""
        return finite(self.history.validation_points)

    @property
    def not_finite(self) -> int:
        """Number of losses that are NaN or infinite."""
        shown = len(self.training) + len(self.validation)
        return len(self.history.points("lm_loss")) + len(self.history.evaluations) - shown

    @property
    def restarts(self) -> int:
        """Number of times that the run went on from a checkpoint, as far as its rows tell."""
        resumed = [row.get("resumed_at") or 0 for row in self.history.steps]
        return sum(before != after for before, after in itertools.pairwise([0, *resumed]))

    @functools.cached_property
    def seconds(self) -> list[Point]:
        """(iteration, seconds of all ranks together until then) of the logged steps, without evaluations, saves, and
        steps that were lost and repeated. Processor seconds are the writing rank's times the ranks."""
        field = "cpu_ms" if self.clock == "CPU" else "elapsed_ms"
        found, total = list[Point](), 0.0
        before = (self.history.steps[0].get("resumed_at") or 0) if self.history.steps else 0
        for row in self.history.steps:
            steps = max(0, row["iteration"] - before)
            total += steps * (row.get(field) or 0.0) / 1000 * (row.get("world_size") or 1)
            before = row["iteration"]
            found.append((before, total))
        return found

    def seconds_until(self, iteration: float) -> float:
        """Return the seconds of all ranks until this iteration, between two logged ones in proportion."""
        place = bisect.bisect_left(self.seconds, (iteration, -math.inf))
        if place == len(self.seconds):
            return self.seconds[-1][1] if self.seconds else 0.0
        (begin, spent), (end, total) = self.seconds[place - 1] if place else (0, 0.0), self.seconds[place]
        return spent + (total - spent) * (iteration - begin) / max(1, end - begin)


def read_runs(runs: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs, each with a letter of its own; from the 27th on with two letters.

    Args:
        runs: --save folders, or metrics files; one named metrics.jsonl has the configuration of its folder.
    Raises:
        ConfigurationError: a run does not exist or has no row.
        DataError: a file has no line that is a row.
    """
    by_path = {path: name for name, path in named([*dict.fromkeys(runs)]).items()}
    letters = [chr(ord("A") + n % 26) * (1 + n // 26) for n in range(len(runs))]
    read = [(by_path[run], read_history(run), _settings(run)) for run in runs]
    clock = _clock([history for _, history, _ in read], [settings for *_, settings in read])
    return [ComparedRun(letter, *each, clock) for letter, each in zip(letters, read, strict=True)]


def _clock(histories: Sequence[RunHistory], settings: Sequence[Mapping[str, Any] | None]) -> str:
    """Return the clock that all runs are measured by: of processors where each run records it and none is known to
    have trained on GPUs, else of the ranks."""
    devices = {None if values is None else values.get("device") for values in settings}
    if devices == {"cuda"}:
        return "GPU"
    rows = (row for history in histories for row in history.steps)
    return "CPU" if "cuda" not in devices and all(row.get("cpu_ms") is not None for row in rows) else "rank"


def _settings(run: Path) -> dict[str, Any] | None:
    path = metrics_path(run)
    values = saved_values(path) if path.name == "metrics.jsonl" else None
    if values is None:
        return None
    own = values.get("save") is not None and values.get("load") == values.get("save")
    # A run that goes on from its own checkpoints began afresh.
    return {name: value for name, value in values.items() if name not in _PLACES and not (own and name == "load")}


def differing_settings(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return each flag whose values differ between the runs that have a configuration, with the value of every run
    ("?" where a run has none); `ranks` is the number of ranks."""
    known = [run.settings for run in runs if run.settings is not None]
    rows = []
    if len({run.ranks for run in runs}) > 1:
        rows.append(("ranks", [str(run.ranks) for run in runs]))
    for name, option in options_by_name().items() if len(known) > 1 else ():
        values = [None if each is None else each.get(name, option.default) for each in (run.settings for run in runs)]
        if name not in _PLACES and len({repr(each.get(name, option.default)) for each in known}) > 1:
            told = zip(runs, values, strict=True)
            rows.append((flag_of(name), ["?" if run.settings is None else _value(value) for run, value in told]))
    return rows


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return " ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def results(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of results: name, and the text of each run with its difference to the first."""
    rows = [
        ("iterations", [_iterations(run) for run in runs]),
        ("training loss, last", _losses(runs, lambda run: run.training[-1:])),
        (f"training loss, mean of the last {100 // _RECENT}%", _losses(runs, lambda run: _recent(run.training))),
        ("training loss, best", _losses(runs, lambda run: _best(run.training), places=True)),
        ("validation loss, last", _losses(runs, lambda run: run.validation[-1:])),
        ("validation loss, best", _losses(runs, lambda run: _best(run.validation), places=True)),
    ]
    if len({run.tokens for run in runs}) > 1:
        shared = min(run.tokens for run in runs)
        name = f"training loss at {shared:,} tokens"
        rows.append((name, _losses(runs, lambda run: _recent(_until(run, run.training, shared)))))
        name = f"validation loss at {shared:,} tokens"
        rows.append((name, _losses(runs, lambda run: _until(run, run.validation, shared)[-1:])))
    rows += [
        ("tokens", _amounts(runs, lambda run: run.tokens)),
        ("tokens per second, median", _amounts(runs, lambda run: _rate(run.history))),
        *_seconds_to_shared_loss(runs),
        (f"{runs[0].clock} seconds of all steps", _amounts(runs, lambda run: run.seconds_until(math.inf))),
        ("peak memory of a rank, GB", _amounts(runs, lambda run: _memory(run.history), digits=3)),
        ("restarts", [str(run.restarts) if run.restarts else "" for run in runs]),
        ("losses not finite", [str(run.not_finite) if run.not_finite else "" for run in runs]),
    ]
    return [(name, [cell or "-" for cell in cells]) for name, cells in rows if any(cells)]


def _iterations(run: ComparedRun) -> str:
    if not run.history.steps:
        return ""
    last = run.history.steps[-1]
    planned = last.get("train_iters") or last["iteration"]
    return f"{last['iteration']:,}" + (f" of {planned:,}" if planned != last["iteration"] else "")


def _best(points: Sequence[Point]) -> Sequence[Point]:
    return [min(points, key=lambda point: point[1])] if points else []


def _recent(points: Sequence[Point]) -> Sequence[Point]:
    """Return the mean of the last points as one point."""
    last = points[-max(1, len(points) // _RECENT) :]
    return [(last[-1][0], sum(loss for _, loss in last) / len(last))] if last else []


def _until(run: ComparedRun, points: Sequence[Point], tokens: int) -> Sequence[Point]:
    """Return the points up to the last logged step that had read no more than these tokens."""
    last = max((row["iteration"] for row in run.history.steps if row["consumed_tokens"] <= tokens), default=0)
    return [point for point in points if point[0] <= last]


def _rate(history: RunHistory) -> float:
    """Return the median of the tokens per second, without the first step, in which things happen that happen once."""
    rates = [rate for _, rate in finite(history.points("tokens_per_second"))]
    return sorted(rates[1:] or rates)[len(rates[1:] or rates) // 2] if rates else 0.0


def _memory(history: RunHistory) -> float:
    return max((value for _, value in history.points("peak_memory_bytes")), default=0) / 1e9


def _losses(
    runs: Sequence[ComparedRun], value: Callable[[ComparedRun], Sequence[Point]], *, places: bool = False
) -> list[str]:
    """Return the texts of a row of losses; `places`: with their iterations."""
    points = [value(run) for run in runs]
    texts = []
    for number, point in enumerate(points):
        if not point:
            texts.append("")
            continue
        [(iteration, loss)] = point
        text = f"{loss:.4f}" + (f" at {iteration:,}" if places else "")
        texts.append(f"{text} ({loss - points[0][0][1]:+.4f})" if number and points[0] else text)
    return texts


def _amounts(runs: Sequence[ComparedRun], value: Callable[[ComparedRun], float], digits: int = 0) -> list[str]:
    """Return the texts of a row of amounts, with their differences to the first run in percent."""
    values = [value(run) for run in runs]
    texts = []
    for number, amount in enumerate(values):
        text = f"{amount:,.{digits if amount >= 0.1 or not digits else 2 * digits}f}" if amount else ""
        changed = number and amount and values[0] and amount != values[0]
        texts.append(f"{text} ({100 * (amount / values[0] - 1):+.0f}%)" if changed else text)
    return texts


def _seconds_to_shared_loss(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the row with the seconds of each run until the loss that all of them have reached: the validation loss
    where every run has one, else the mean of the recent training losses."""
    kind, curves = "validation", [run.validation for run in runs]
    if not all(curves):
        kind, curves = "training", [_means(run.training) for run in runs]
    if not all(curves):
        return []
    reached = max(min(loss for _, loss in curve) for curve in curves)
    ends = [next(at for at, loss in curve if loss <= reached) for curve in curves]
    spent = {id(run): run.seconds_until(end) for run, end in zip(runs, ends, strict=True)}
    name = f"{runs[0].clock} seconds to {kind} loss {reached:.4f}"
    return [(name, _amounts(runs, lambda run: spent[id(run)], digits=1))]


def _means(points: Sequence[Point]) -> list[Point]:
    """Return the means of the recent losses at each point, over as many as `_recent` takes at the end."""
    window, total, found = max(1, len(points) // _RECENT), 0.0, list[Point]()
    for number, (at, loss) in enumerate(points):
        total += loss - (points[number - window][1] if number >= window else 0.0)
        if number + 1 >= window:
            found.append((at, total / window))
    return found
