"""How a model scales: the best layout for each of several numbers of devices, or lengths of the sequence.

The global batch keeps its tokens: over lengths its samples change. A table, and a page with charts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_ext.charts import Series, chart, main, page
from megatron_ext.plan.costs import Cost, Prices, cost
from megatron_ext.plan.flops import flops_per_token
from megatron_ext.plan.goodput import Failures
from megatron_ext.plan.presentation import name
from megatron_ext.plan.search import Candidate, Question, search

DEVICES, LENGTHS = "devices", "sequence length"


@dataclass(frozen=True)
class Point:
    """The best layout at one number."""

    number: int
    """Number of devices, or the length of the sequence."""

    devices: int
    best: Candidate | None
    """The fastest layout; None where there is none."""

    mfu: float
    """Operations of the model (attention's causal) over the peak of the devices."""

    cost: Cost | None
    """What the tokens cost, where a number of them was given."""

    spread: tuple[float, float] = (1.0, 1.0)
    """The time over the estimate between which nine of ten runs are expected."""

    missing: str = "nothing fits"
    """Why there is no layout."""

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of a step: the estimate, and between what nine of ten runs are expected."""
        assert self.best is not None
        low, high = self.spread
        return self.best.seconds, low * self.best.seconds, high * self.best.seconds

    @property
    def step_tokens(self) -> int:
        """Tokens of one step."""
        assert self.best is not None
        config = self.best.config
        return (config.training.global_batch_size or 0) * config.model.seq_length

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all devices; 0 where nothing fits."""
        return 0.0 if self.best is None else self.step_tokens / self.best.seconds


@dataclass(frozen=True)
class Wanted:
    """What the points say besides their time."""

    tokens: int | None = None
    failures: Failures = field(default_factory=Failures)
    prices: Prices = field(default_factory=Prices)


def over_devices(question: Question, numbers: Sequence[int], wanted: Wanted) -> list[Point]:
    """Return the best layout for each number of devices."""
    return [_point(number, replace(question, world_size=number), wanted) for number in numbers]


def over_lengths(question: Question, lengths: Sequence[int], wanted: Wanted) -> list[Point]:
    """Return the best layout for each length of the sequence, with as many tokens in a global batch as given."""
    tokens = question.values["global_batch_size"] * question.values["seq_length"]
    points = []
    for length in lengths:
        values = {**question.values, "seq_length": length, "global_batch_size": max(tokens // length, 1)}
        if values.get("max_position_embeddings") is not None:
            values["max_position_embeddings"] = max(values["max_position_embeddings"], length)
        points.append(_point(length, replace(question, values=values), wanted))
    return points


def _point(number: int, question: Question, wanted: Wanted) -> Point:
    answer = search(question, 1)
    best = next(iter(answer.best), None)
    if best is None:
        illegal = f"no layout is legal with a global batch of {question.values['global_batch_size']:,}"
        missing = "nothing fits" if answer.legal else illegal
        return Point(number, question.world_size, None, 0.0, None, missing=missing)
    point = Point(number, question.world_size, best, 0.0, None, question.machine.range)
    peak = question.machine.devices.peak_flops(best.config.training) * question.world_size
    mfu = flops_per_token(best.config) * point.tokens_per_second / peak
    whole = None
    if wanted.tokens is not None:
        arguments = (wanted.tokens, point.step_tokens, best.seconds, question.world_size)
        whole = cost(*arguments, wanted.failures, wanted.prices)
    return replace(point, mfu=mfu, cost=whole)


def table(points: Sequence[Point], along: str) -> list[str]:
    """Return one row for each number; `scaling` is tokens a second and device over those of the first row."""
    rows = [
        [along, "s/step", "range", "tokens/s", "tokens/s/device", "scaling", "MFU", "GB", "days", "dollars", "layout"]
    ]
    first = next((point.tokens_per_second / point.devices for point in points if point.best is not None), 1.0)
    for point in points:
        if point.best is None:
            rows.append([f"{point.number:,}", *[""] * 9, point.missing])
            continue
        each = point.tokens_per_second / point.devices
        spent = point.cost
        rows.append(
            [
                f"{point.number:,}",
                f"{point.best.seconds:.3g}",
                "-".join(f"{seconds:.3g}" for seconds in point.seconds[1:]),
                f"{point.tokens_per_second:,.0f}",
                f"{each:,.0f}",
                f"{each / first:.0%}",
                f"{point.mfu:.1%}",
                f"{point.best.memory.total / 1e9:.1f}",
                f"{spent.days:,.1f}" if spent else "",
                f"{spent.dollars:,.0f}" if spent and spent.dollars is not None else "",
                name(point.best),
            ]
        )
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    last = len(kept) - 1
    return [
        "  ".join(
            cell.ljust(width) if place == last else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*kept, strict=True)
    ]


def scaling_page(title: str, groups: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """Return the charts as a page.

    Args:
        title: its heading.
        groups: what each group of points counts, and the points.
    """
    text, charts = [], []
    for along, points in groups:
        text += [*table(points, along), ""]
        there = [point for point in points if point.best is not None]
        tokens = [point.step_tokens / point.devices for point in there]
        days = [point.cost.days for point in there if point.cost is not None]
        values = {
            ("Speed of one device", "tokens per second"): [
                [each / seconds for each, seconds in zip(tokens, times, strict=True)] for times in _seconds(there)
            ],
            ("Seconds a step", ""): _seconds(there),
            ("MFU", "percent of the peak"): [[100 * point.mfu for point in there]],
            ("Days", "with failures and checkpoints"): [days],
        }
        charts += [
            chart(heading, unit, _with_range(there, lines), along=along, doublings=True)
            for (heading, unit), lines in values.items()
            if lines[0]
        ]
    style = ".range { stroke: var(--quiet); stroke-dasharray: 3 3; stroke-width: 1; color: var(--quiet); }\n"
    style += "pre { white-space: pre; overflow-x: auto; font-size: 12px; }\n"
    return page(title, text[:-1], main(charts), style=style)


def _seconds(points: Sequence[Point]) -> list[list[float]]:
    """Return the estimates, and the lower and upper ends of their ranges."""
    return [[point.seconds[end] for point in points] for end in range(3)]


def _with_range(points: Sequence[Point], lines: Sequence[Sequence[float]]) -> list[Series]:
    """Return a line and, where there are, those between which nine of ten runs are expected, below it."""
    line, *ends = (_pairs(points, values) for values in lines)
    names = ("nine of ten runs", "")
    return [
        *(Series(end, name, style="range") for end, name in zip(ends, names, strict=False)),
        Series(line, "estimate" if ends else ""),
    ]


def _pairs(points: Sequence[Point], values: Sequence[float]) -> list[tuple[int, float]]:
    return [(point.number, value) for point, value in zip(points, values, strict=True)]
