"""Shows a run as one HTML page: loss, learning rate, gradient norm and speed over the iterations, with --log-straggler
the slowest rank, and its pipeline.

Shows several runs on one HTML page: each chart has a line for every run, in the run's colour.
"""

from collections.abc import Mapping

from megatron_ext.charts import COLOURS, Point, Series, chart, line_picture, load_picture, main, page, section, wide
from megatron_ext.markup import Content, Markup, element, joined
from megatron_ext.plan import timeline_svg
from megatron_ext.plan.timeline import Timeline, slow_stages
from megatron_ext.plan.timeline import summary as stages_table
from megatron_ext.telemetry.loss_curve import RunHistory, summary

_MOST_TASKS = 100


def run_page(history: RunHistory, title: str, pipeline: Timeline | None = None) -> str:
    """Return the page as text.

    Args:
        history: the run.
        title: its heading.
        pipeline: one step of its pipeline, where one was recorded.
    """
    losses = [Series(history.points("lm_loss"), "training")]
    if history.validation_points:
        losses.append(Series(history.validation_points, "validation", dotted=True))
    charts = [
        _chart("Loss", "nats per token", losses),
        _chart("Learning rate", "", [Series(history.points("learning_rate"))]),
        _chart("Gradient norm", "before clipping", [Series(history.points("grad_norm"))]),
        _chart("Speed", "tokens per second, whole job", [Series(history.points("tokens_per_second"))]),
    ]
    if history.slowness_points:
        unit = "compute time over its peers'"
        charts.append(_chart("Slowest rank", unit, [Series(history.slowness_points)]))
    charts += _experts(history)
    tasks = _task_curves(history)
    charts += [_chart(f"Task {name}", metric, [Series(points)]) for name, metric, points in tasks[:_MOST_TASKS]]
    if len(tasks) > _MOST_TASKS:
        charts.append(element("p", f"{len(tasks) - _MOST_TASKS} more tasks."))
    style = "" if pipeline is None else timeline_svg.STYLE
    body = [main(charts), _samples(history), "" if pipeline is None else _pipeline(pipeline)]
    return page(title, summary(history), body, style=style)


def _pipeline(timeline: Timeline) -> Markup:
    """Return the picture of a step with its heading, the table of its stages, and which of them are slow."""
    lines = [timeline.title, *stages_table(timeline), *slow_stages(timeline.lanes)]
    return joined(wide("Pipeline", element("pre", "\n".join(lines))), timeline_svg.as_section(timeline))


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
    """Return what the model made of each prompt at the first, middle and last time."""
    rows = history.samples
    if not rows:
        return ""
    shown = sorted({0, len(rows) // 2, len(rows) - 1})
    lines = [
        f"iteration {rows[index]['iteration']}: {sample['prompt']!r} -> {sample['text']!r}"
        for index in shown
        for sample in rows[index]["samples"]
    ]
    return wide("Samples", element("pre", "\n".join(lines)))


def _chart(name: str, unit: str, series: list[Series]) -> Markup:
    return chart(name, unit, series, along="iteration")


_CHARTS = (
    ("Training loss", "nats per token", "lm_loss"),
    ("Validation loss", "nats per token", None),
    ("Learning rate", "", "learning_rate"),
    ("Gradient norm", "before clipping", "grad_norm"),
    ("Speed", "tokens per second, whole job", "tokens_per_second"),
)


def runs_page(runs: Mapping[str, RunHistory]) -> str:
    """Return the page as text.

    Args:
        runs: the runs by name, in the order in which they are shown.
    """
    lines = [line for name, run in runs.items() for line in (name, *(f"    {text}" for text in summary(run)))]
    charts = [chart(title, unit, _series(runs, field), along="iteration") for title, unit, field in _CHARTS]
    return page(f"{len(runs)} runs", lines, main(charts), style=_colours(len(runs)))


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


def _series(runs: Mapping[str, RunHistory], field: str | None) -> list[Series]:
    return [
        Series(run.validation_points if field is None else run.points(field), name, style=f"run{number}")
        for number, (name, run) in enumerate(runs.items())
    ]
