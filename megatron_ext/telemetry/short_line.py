"""Writes the short lines that a person reads in a terminal: step, loss, rate, remaining time.

step     60/100   loss 6.8123    1,234 tokens/s   0:43 left
"""

from megatron_ext.telemetry.log_line import evaluation_lines, perplexity
from megatron_ext.telemetry.metrics import Metrics, SampleMetrics, StepMetrics, TaskMetrics, TestMetrics


def short_line(metrics: Metrics) -> str:
    """Return one line, without a newline, for a logged step or an evaluation."""
    if isinstance(metrics, StepMetrics):
        return _step(metrics)
    if isinstance(metrics, TaskMetrics | SampleMetrics):
        return evaluation_lines(metrics).lstrip()
    test = isinstance(metrics, TestMetrics)
    kind, loss = ("test", metrics.test_loss) if test else ("validation", metrics.validation_loss)
    return f"{kind} after step {metrics.iteration}   loss {loss:.4f}   perplexity {perplexity(loss):,.2f}"


def remaining(seconds: float) -> str:
    """Return a time as people write it: 0:43, 12:05, 3:20:00, or 2 days 3:20:00."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{whole:02}" if hours or days else f"{minutes}:{whole:02}"
    return f"{days} day{'s' * (days > 1)} {clock}" if days else clock


def _step(metrics: StepMetrics) -> str:
    width = len(str(metrics.train_iters))
    left = (metrics.train_iters - metrics.iteration) * metrics.elapsed_ms / 1000.0
    fields = [
        f"step {metrics.iteration:>{width}}/{metrics.train_iters}",
        f"loss {metrics.lm_loss:.4f}",
        f"{metrics.tokens_per_second:>9,.0f} tokens/s",
        f"{remaining(left)} left" if metrics.iteration < metrics.train_iters else "done",
    ]
    if metrics.skipped_iterations:
        fields.append(f"{metrics.skipped_iterations} skipped")
    if metrics.nan_iterations:
        fields.append(f"{metrics.nan_iterations} NaN")
    return "   ".join(fields)
