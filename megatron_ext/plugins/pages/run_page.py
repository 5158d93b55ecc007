"""Shows a run as one HTML page: loss, learning rate, gradient norm and speed over the iterations, and with
--log-straggler the slowest rank.

Shows several runs on one HTML page: each chart has a line for every run, in the run's colour.
"""

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.plugins.pages import layout_picture
from megatron_ext.plugins.pages.charts import (
    COLOURS,
    TABLE_STYLE,
    Extras,
    Point,
    Series,
    chart,
    line_picture,
    load_picture,
    main,
    page,
    section,
    smoothed,
    wide,
)
from megatron_ext.plugins.pages.loss_curve import RunHistory, summary
from megatron_ext.plugins.pages.markup import Content, Markup, element, joined
from megatron_ext.telemetry.commands_file import Start

_MOST_TASKS = 100


_MANY = 50  # steps, from which on single ones hide the course of the loss
_PARTS = 4  # into which the loss of so many steps is enlarged
_OF_PHASES = ("", "third", "fourth", "fifth")


def run_page(
    history: RunHistory,
    title: str,
    *,
    facts: Sequence[str] = (),
    layout: LayoutConfig | None = None,
    starts: Sequence[Start] = (),
    files: Sequence[str] = (),
    following: Sequence[str] = (),
) -> str:
    """Return the page as text.

    Args:
        history: the run.
        title: its heading.
        facts: lines that say what was trained, on what and where.
        layout: the layout that is drawn.
        starts: the recorded starts of the run, oldest first; the page has their commands.
        files: paths that the page links to, as seen from its folder.
        following: commands that a reader may start next.
    """
    extras = _extras(history)
    charts = [
        *_losses(history, extras),
        chart("Learning rate", "", [Series(history.points("learning_rate"))], along="iteration", extras=extras),
        chart("Gradient norm", "before clipping", _curves(history, "grad_norm"), along="iteration", extras=extras),
        chart(
            "Speed",
            "tokens per second, whole job",
            [Series(history.points("tokens_per_second"))],
            along="iteration",
            extras=extras,
        ),
    ]
    if memory := [(at, value / 1e9) for at, value in history.points("peak_memory_bytes") if value]:
        charts.append(chart("Memory", "peak of a rank, GB", [Series(memory)], along="iteration", extras=extras))
    if history.slowness_points:
        unit = "compute time over its peers'"
        charts.append(_chart("Slowest rank", unit, [Series(history.slowness_points)]))
    charts += _experts(history)
    tasks = _task_curves(history)
    charts += [_chart(f"Task {name}", metric, [Series(points)]) for name, metric, points in tasks[:_MOST_TASKS]]
    if len(tasks) > _MOST_TASKS:
        charts.append(element("p", f"{len(tasks) - _MOST_TASKS} more tasks."))
    body = [main(charts), _enlarged(history, extras), _samples(history)]
    body += ["" if layout is None else layout_picture.as_section(layout)]
    if starts:
        body.append(wide("Command", _commands(starts)))
    if files:
        body.append(wide("Files", *(element("p", element("a", file, href=quote(file))) for file in files)))
    if following:
        body.append(wide("Next", *(element("pre", command) for command in following)))
    styles = [layout_picture.STYLE] * (layout is not None)
    return page(title, [*facts, *summary(history), *_said(extras)], body, style="".join(styles))


_MOST_COMMANDS = 5


def _commands(starts: Sequence[Start]) -> list[Content]:
    """Return the command of each start, of equal ones in a row the first, the latest of all last."""
    changed = [
        one
        for before, one in itertools.pairwise([None, *starts])
        if one and (before is None or (before.command, before.ranks) != (one.command, one.ranks))
    ]
    return [
        [
            element("p", f"{start.time[:16].replace('T', ' ')} UTC, {_ranks(start.ranks)}"),
            element("pre", start.command),
        ]
        for start in changed[-_MOST_COMMANDS:]
    ]


def _losses(history: RunHistory, extras: Extras) -> list[Markup]:
    """Return the loss, of long runs once more with logarithmic axes and its second half, where the differences are."""
    charts = [_loss(history, extras, "Loss")]
    if len(history.steps) >= _MANY:
        middle = history.steps[len(history.steps) // 2]["iteration"]
        charts.append(_loss(history, extras, "Loss, second half", middle))
        charts.append(_loss(history, extras, "Loss, logarithmic axes", logarithmic=True))
    return charts


def _enlarged(history: RunHistory, extras: Extras) -> Content:
    """Return the loss of a long run in parts with axes of their own, which a reader opens: a zoom without scripts."""
    number = len(history.steps)
    if number < _MANY:
        return ""
    bounds = [history.steps[part * (number - 1) // _PARTS]["iteration"] for part in range(_PARTS + 1)]
    parts = [
        _loss(history, extras, f"Loss, {begin:,} to {end:,}", begin, end) for begin, end in itertools.pairwise(bounds)
    ]
    return element("details", element("summary", f"The loss enlarged, in {_PARTS} parts"), main(parts))


def _loss(
    history: RunHistory, extras: Extras, name: str, begin: int = 0, end: float = math.inf, *, logarithmic: bool = False
) -> Markup:
    """Return the chart of both losses from an iteration to another; training has a line for each number of ranks."""
    lines = _curves(history, "lm_loss", "training", begin, end, phases=_phases(history))
    validation = [point for point in history.validation_points if begin <= point[0] <= end]
    if validation:
        lines.append(Series(validation, "validation", dotted=True))
    return chart(name, "nats per token", lines, along="iteration", logarithmic=logarithmic, extras=extras)


def _phases(history: RunHistory) -> list[tuple[int, int]]:
    """Return iteration and ranks of each row that has other ranks than the one before."""
    rows = [(row["iteration"], row["world_size"]) for row in history.steps if row.get("world_size")]
    return rows[:1] + [row for before, row in itertools.pairwise(rows) if before[1] != row[1]]


def _curves(
    history: RunHistory,
    field: str,
    name: str = "",
    begin: int = 0,
    end: float = math.inf,
    phases: Sequence[tuple[int, int]] = (),
) -> list[Series]:
    """Return the line of a field, in phases where there are several; of many points the smoothed one, before the faint
    line of all."""
    points, many = history.points(field), len(history.points(field)) >= _MANY
    line = smoothed(points, max(5, len(points) // 50)) if many else points
    kind, shown = ("smooth", f"{name}, smoothed" if name else "") if many else ("", name)

    def inside(points: Sequence[Point], first: float, last: float) -> list[Point]:
        return [point for point in points if max(begin, first) <= point[0] <= end and point[0] < last]

    faint = [Series(inside(points, begin, math.inf), style="faint")] if many else []
    if len(phases) < 2:
        return [*faint, Series(inside(line, begin, math.inf), shown, style=kind)]
    ends = [*(first for first, _ in phases[1:]), math.inf]
    of_phases = zip(phases, ends, itertools.cycle(_OF_PHASES))
    parts = [
        Series(inside(line, first, last), f"{shown}, {_ranks(ranks)}", style=f"{kind} {colour}".strip())
        for (first, ranks), last, colour in of_phases
    ]
    return [*faint, *(part for part in parts if part.points)]


def _ranks(number: int) -> str:
    return f"{number:,} rank{'s' * (number != 1)}"


def _extras(history: RunHistory) -> Extras:
    """Return the tokens under the axis, and where the run was resumed or the number of ranks changed."""
    rows = [row for row in history.steps if row.get("world_size")]
    marks = list[tuple[int, str]]()
    for before, row in itertools.pairwise(rows):
        began = row.get("resumed_at") or 0
        resumed = began != (before.get("resumed_at") or 0)
        changed = before["world_size"] != row["world_size"]
        texts = ["resumed"] * resumed + [f"{before['world_size']} -> {row['world_size']} ranks"] * changed
        if texts:
            marks.append((began if resumed else row["iteration"], ", ".join(texts)))
    known = [(row["iteration"], row["consumed_tokens"]) for row in history.steps if row.get("consumed_tokens")]
    if not known:
        return Extras(marks=marks)

    def tokens(iteration: float) -> str:
        place = min(bisect.bisect_left(known, (iteration, 0)), len(known) - 1)
        return _short(known[place][1])

    return Extras(tokens, "tokens", marks)


def _said(extras: Extras) -> list[str]:
    return [f"changed          at iteration {at}: {text}" for at, text in extras.marks]


def _short(count: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def _experts(history: RunHistory) -> list[Markup]:
    """Return how the load of experts went: the layer with the least even one, and every expert in the last row."""
    rows = [row for row in history.steps if row.get("expert_load")]
    if not rows:
        return []
    curves = []
    for name, unit, key, worst in _OF_EXPERTS:
        points = [(row["iteration"], worst(layer[key] for layer in row["expert_load"])) for row in rows]
        curves.append(_chart(name, unit, [Series(points)]))
    counted = [row for row in rows if len(row.get("expert_tokens", ())) == len(row["expert_load"])]
    if counted:
        last = counted[-1]
        names = [f"layer {layer['layer']}" for layer in last["expert_load"]]
        lines = list(zip(names, last["expert_tokens"], strict=True))
        picture = load_picture("tokens of experts by layer", lines, "expert")
        heading = f"Tokens of each expert in iteration {last['iteration']}: white is even, orange more, blue fewer"
        curves.append(section(heading, picture))
    return curves


_OF_EXPERTS = (
    ("Busiest expert", "over an even load, in the worst layer", "max_over_mean", max),
    ("Evenness of experts", "entropy over the greatest, in the worst layer", "entropy", min),
    ("Experts without a token", "in the worst layer", "without_tokens", max),
    ("Router z", "mean squared logsumexp of its logits, in the highest layer", "router_z", max),
)


def _task_curves(history: RunHistory) -> list[tuple[str, str, list[Point]]]:
    """Return each task's main metric over the iterations: accuracy where it has one, else the loss."""
    curves: dict[str, tuple[str, list[Point]]] = {}
    for row in history.tasks:
        for name, results in row["tasks"].items():
            metric = next((key for key in ("accuracy", "loss") if key in results), None)
            if metric is not None:
                curves.setdefault(name, (metric, []))[1].append((row["iteration"], results[metric]))
    return [(name, metric, points) for name, (metric, points) in curves.items()]


def _samples(history: RunHistory) -> Content:
    """Return the text that the model generated for each prompt at the first, middle and last time, unformatted."""
    rows = history.samples
    if not rows:
        return ""
    return wide(
        "Samples",
        *(
            joined(
                element("p", f"iteration {rows[index]['iteration']}"),
                element("pre", element("span", sample["prompt"], class_="prompt"), _shorter(sample["text"])),
            )
            for index in sorted({0, len(rows) // 2, len(rows) - 1})
            for sample in rows[index]["samples"]
        ),
    )


def _shorter(text: str) -> str:
    """Return a text with a note in the place of many empty lines, of which a young model writes pages."""
    return re.sub(r"\n{4,}", lambda found: f"\n[{len(found[0]) - 1} empty lines]\n", text)


def _chart(name: str, unit: str, series: list[Series]) -> Markup:
    return chart(name, unit, series, along="iteration")


_CHARTS = (
    ("Training loss", "nats per token", "lm_loss"),
    ("Validation loss", "nats per token", None),
    ("Learning rate", "", "learning_rate"),
    ("Gradient norm", "before clipping", "grad_norm"),
    ("Speed", "tokens per second, whole job", "tokens_per_second"),
)


def runs_page(
    runs: Mapping[str, RunHistory],
    verdict: str = "",
    *,
    tables: Sequence[Markup] = (),
    by_tokens: bool = False,
) -> str:
    """Return the page as text; of two runs it also draws the difference of their losses.

    Args:
        runs: the runs by name, in the order in which they are shown.
        verdict: a line that stands above all others.
        tables: parts of the page that stand above the charts.
        by_tokens: whether the charts count tokens in place of iterations: where runs read unequal numbers in a step.
    """
    lines = [line for name, run in runs.items() for line in (name, *(f"    {text}" for text in summary(run)))]
    unit, along = _token_unit(runs.values()) if by_tokens else (0, "iteration")
    charts = [chart(title, axis, _series(runs, field, unit), along=along) for title, axis, field in _CHARTS]
    if len(runs) == 2 and not by_tokens:
        first, second = (dict(run.points("lm_loss")) for run in runs.values())
        between = [(at, second[at] - loss) for at, loss in first.items() if at in second]
        charts.insert(1, _chart("Difference of training losses", "second less first", [Series(between)]))
    title = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return page(
        title,
        [*filter(None, [verdict]), *lines],
        [tables, main(charts)],
        style=_colours(len(runs)) + TABLE_STYLE * bool(tables),
    )


def _token_unit(runs: Iterable[RunHistory]) -> tuple[int, str]:
    """Return the largest unit of which the longest run has at least ten, and its name."""
    most = max((run.steps[-1]["consumed_tokens"] for run in runs if run.steps), default=0)
    units = ((10**9, "B tokens"), (10**6, "M tokens"), (10**3, "k tokens"))
    return next(((unit, name) for unit, name in units if most >= 10 * unit), (1, "tokens"))


def losses_picture(runs: Mapping[str, RunHistory]) -> str:
    """Return the training losses of runs as an SVG file; later runs are drawn thinner, so that equal ones are seen.

    Raises:
        ConfigurationError: no loss is finite.
    """
    series = _series(runs, "lm_loss")
    widths = "".join(f".line.run{n} {{ stroke-width: {max(1.2, 6.0 - 3.6 * n)}; }}\n" for n in range(len(runs)))
    return line_picture(
        "Training loss", "nats per token", series, along="iteration", style=_colours(len(runs)) + widths
    )


def _colours(count: int) -> str:
    """Return the rules that give each run its colour."""
    colours = [COLOURS[number % len(COLOURS)] for number in range(count)]
    rules = (f".run{n} {{ stroke: {each}; color: {each}; }}\n" for n, each in enumerate(colours))
    return "".join([*rules, ".key { stroke: none; }\n"])


def _series(runs: Mapping[str, RunHistory], field: str | None, unit: int = 0) -> list[Series]:
    """Return the line of each run, over its iterations, or over its tokens in a unit of so many."""
    lines = []
    for number, (name, run) in enumerate(runs.items()):
        points = run.validation_points if field is None else run.points(field)
        if unit:
            points = [(round(run.tokens_at(at) / unit, 3), value) for at, value in points]
        lines.append(Series(points, name, style=f"run{number}"))
    return lines
