"""Shows several runs on one HTML page: each chart has a line for every run, in the run's colour."""

from collections.abc import Mapping

from megatron_ext.charts import Series, chart, main, page
from megatron_ext.telemetry.curve import RunHistory, summary

# Told apart in light and dark, and by readers who do not see red and green as different (Okabe and Ito 2008).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")

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
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(runs))]
    style = "".join(f".run{n} {{ stroke: {colour}; color: {colour}; }}\n" for n, colour in enumerate(colours))
    lines = [line for name, run in runs.items() for line in (name, *(f"    {text}" for text in summary(run)))]
    charts = [chart(title, unit, _series(runs, field), along="iteration") for title, unit, field in _CHARTS]
    return page(f"{len(runs)} runs", lines, main(charts), style=style)


def _series(runs: Mapping[str, RunHistory], field: str | None) -> list[Series]:
    return [
        Series(run.validation_points if field is None else run.points(field), name, style=f"run{number}")
        for number, (name, run) in enumerate(runs.items())
    ]
