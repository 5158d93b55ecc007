"""Writes the log line of Megatron-LM, byte for byte: users' log parsers read it.

Writes the log line and the validation lines to standard output.

Writes the short lines that a person reads in a terminal: step, loss, rate, remaining time.

    step     60/100   loss 6.8123   norm 0.712      1,234 tokens/s   41.2% MFU   52.1 GB   0:43 left
"""

import math
import sys
import time
from collections.abc import Mapping
from datetime import datetime

from megatron_ext.telemetry.metrics import (
    Evaluated,
    Metrics,
    SampleMetrics,
    SaveFailure,
    StepMetrics,
    TaskMetrics,
    TestMetrics,
    ValidationMetrics,
    perplexity,
)
from megatron_ext.terminal import bar, is_watched, keep_status, remaining, say, status

_SHOWN_MEMORY = 5e7  # bytes, 0.1 GB when rounded


def short_line(metrics: StepMetrics | Evaluated) -> str:
    """Return one line, without a newline, for a logged step or an evaluation."""
    if isinstance(metrics, StepMetrics):
        return _step(metrics)
    if isinstance(metrics, TaskMetrics | SampleMetrics):
        return evaluation_lines(metrics).lstrip()
    test = isinstance(metrics, TestMetrics)
    kind, loss = ("test", metrics.test_loss) if test else ("validation", metrics.validation_loss)
    return f"{kind} after step {metrics.iteration}   loss {loss:.4f}   perplexity {perplexity(loss):,.2f}"


def _step(metrics: StepMetrics) -> str:
    width = len(str(metrics.train_iters))
    left = (metrics.train_iters - metrics.iteration) * metrics.elapsed_ms / 1000.0
    fields = [
        f"step {metrics.iteration:>{width}}/{metrics.train_iters}",
        f"loss {metrics.lm_loss:.4f}",
        *([] if metrics.grad_norm is None else [f"norm {metrics.grad_norm:.3f}"]),
        f"{metrics.tokens_per_second:>9,.0f} tokens/s",
        *([] if metrics.mfu is None else [f"{metrics.mfu:.1%} MFU"]),
        *([f"{metrics.peak_memory_bytes / 1e9:.1f} GB"] if metrics.peak_memory_bytes >= _SHOWN_MEMORY else []),
        f"{remaining(left)} left" if metrics.iteration < metrics.train_iters else "done",
    ]
    if metrics.skipped_iterations:
        fields.append(f"{metrics.skipped_iterations} skipped")
    if metrics.nan_iterations:
        fields.append(f"{metrics.nan_iterations} NaN")
    return "   ".join(fields)


def _tflops(tflops: float) -> str:
    """Return Megatron's one digit after the point, or as many as show two that are not zero."""
    digits = 1 - math.floor(math.log10(tflops)) if 0.0 < tflops < 0.1 else 1
    return f"{tflops:.{digits}f}"


def step_line(metrics: StepMetrics, now: datetime, *, throughput: bool = False) -> str:
    """Return the line of one logged step, without a newline; it begins with a space.

    Args:
        metrics: metrics of the step.
        now: time printed in front; in local time, as in Megatron-LM.
        throughput: whether to print TFLOP/s per GPU (--log-throughput).
    """
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {metrics.iteration:8d}/{metrics.train_iters:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {metrics.elapsed_ms:.1f}",
    ]
    if throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {_tflops(metrics.tflops_per_gpu)}")
    titled = [pair for pair in metrics.numbers if pair[0].title is not None]
    fields += [
        f"learning rate: {metrics.learning_rate:.6E}",
        f"global batch size: {metrics.global_batch_size:5d}",
        f"lm loss: {scientific(metrics.lm_loss)}",
        *(f"{number.title}: {scientific(value)}" for number, value in titled if number.mean != "largest"),
        f"loss scale: {metrics.loss_scale:.1f}",
    ]
    if metrics.grad_norm is not None:
        fields.append(f"grad norm: {metrics.grad_norm:.3f}")
    if metrics.num_zeros is not None:
        fields.append(f"num zeros: {metrics.num_zeros}")
    if metrics.params_norm is not None:
        fields.append(f"params norm: {metrics.params_norm:.3f}")
    fields += [
        *(f"{number.title}: {value:.3f}" for number, value in titled if number.mean == "largest"),
        f"number of skipped iterations: {metrics.skipped_iterations:3d}",
        f"number of nan iterations: {metrics.nan_iterations:3d}",
    ]
    return " | ".join(fields) + " |"


def evaluation_lines(metrics: Evaluated) -> str:
    """Return the loss between dashes, three lines: of each source of several, and of all; a line for each task or
    sample. The last newline is left out."""
    if isinstance(metrics, TaskMetrics):
        return "\n".join(_task(metrics.iteration, name, results) for name, results in metrics.tasks.items())
    if isinstance(metrics, SampleMetrics):
        return "\n".join(
            f" sample at iteration {metrics.iteration} | {sample.prompt!r} -> {sample.text!r}"
            for sample in metrics.samples
        )
    if isinstance(metrics, TestMetrics):
        return _evaluation(metrics.iteration, "", " on test set", metrics.test_loss)
    sources = [_evaluation(metrics.iteration, f"-{source.suffix}", "", source.loss) for source in metrics.sources]
    return "\n".join([*sources, _evaluation(metrics.iteration, "", "", metrics.validation_loss)])


def _evaluation(iteration: int, suffix: str, data: str, loss: float) -> str:
    line = (
        f" validation{suffix} loss at iteration {iteration}{data} | lm loss value: {scientific(loss)}"
        f" | lm loss PPL: {scientific(perplexity(loss))} | "
    )
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def _task(iteration: int, name: str, results: Mapping[str, float]) -> str:
    values = [f"{key}: {value}" if isinstance(value, int) else f"{key}: {value:.6f}" for key, value in results.items()]
    return " | ".join([f" task {name} at iteration {iteration}", *values]) + " |"


def scientific(value: float) -> str:
    """Return `9.845123E+00`; but `nan` and `inf`, which the E format would print in capitals."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)


class Console:
    """Prints the log lines; in the short form also, at the end, the result of the run and the next steps for the user.

    Args:
        throughput: whether Megatron's line has the TFLOP/s per GPU.
        form: `megatron`; `short`, for people; or `auto`, which is short where the output is a terminal or a notebook.
        save: the folder of the run's files, where it has one.
    """

    def __init__(self, *, throughput: bool, form: str = "auto", save: str | None = None):
        self._throughput = throughput
        self._short = is_watched() if form == "auto" else form == "short"
        self._save = save
        self._steps = (0, 0)
        self._shown_at = time.monotonic()
        self._best: ValidationMetrics | None = None

    def write(self, metrics: Metrics) -> None:
        """Print the line of a step or of an evaluation; of a failed save the warning was printed."""
        if isinstance(metrics, SaveFailure):
            return
        if isinstance(metrics, ValidationMetrics):
            self._best = min(filter(None, (self._best, metrics)), key=lambda each: each.validation_loss)
        if self._short:
            say(short_line(metrics))
        elif isinstance(metrics, StepMetrics):
            say(step_line(metrics, datetime.now(), throughput=self._throughput))
        else:
            say(evaluation_lines(metrics))

    def alive(self, iteration: int, train_iters: int) -> None:
        """Note that a step is done, and show it in the short form, once a second at most."""
        self._steps = (iteration, train_iters)
        # A notebook shows the end; a terminal's last line gives way to the next line.
        ends = iteration == train_iters and not sys.stdout.isatty()
        if self._short and (ends or time.monotonic() - self._shown_at > 1.0):
            self._shown_at = time.monotonic()
            status(f"step {iteration:>{len(str(train_iters))}}/{train_iters} {bar(iteration / train_iters)}")

    def close(self) -> None:
        """Print the summary in the short form; no file is held open."""
        keep_status()
        if self._short and any(self._steps):
            say("\n".join(self._summary(*self._steps)))

    def _summary(self, iteration: int, train_iters: int) -> list[str]:
        lines = [f"trained  {iteration:,} of {train_iters:,} steps"]
        if self._best is not None:
            loss = self._best.validation_loss
            lines.append(
                f"best     validation loss {loss:.4f}, perplexity {perplexity(loss):,.2f}, "
                f"after step {self._best.iteration:,}"
            )
        if self._save is not None:
            lines += [
                f"files    {self._save}: checkpoints, metrics.jsonl, exit.json",
                f"next     megatron-ext show {self._save} --html run.html",
                f"         megatron-ext generate --load {self._save} --prompts 'Once upon a time'",
            ]
        return lines
