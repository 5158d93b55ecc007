"""Shows a run as one HTML page: loss, learning rate, gradient norm and speed over the iterations."""

from megatron_ext.charts import Series, chart, page
from megatron_ext.telemetry.curve import RunHistory, summary


def run_page(history: RunHistory, title: str) -> str:
    """Return the page as text.

    Args:
        history: the run.
        title: its heading.
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
    return page(title, summary(history), f"<main>\n{''.join(charts)}</main>\n")


def _chart(name: str, unit: str, series: list[Series]) -> str:
    return chart(name, unit, series, along="iteration")
