"""Writes the log line of Megatron-LM, byte for byte: users' log parsers read it."""

import math
from collections.abc import Mapping
from datetime import datetime

from megatron_ext.telemetry.metrics import Evaluated, SampleMetrics, StepMetrics, TaskMetrics, TestMetrics


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
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {metrics.tflops_per_gpu:.1f}")
    fields += [
        f"learning rate: {metrics.learning_rate:.6E}",
        f"global batch size: {metrics.global_batch_size:5d}",
        f"lm loss: {scientific(metrics.lm_loss)}",
        f"loss scale: {metrics.loss_scale:.1f}",
    ]
    if metrics.grad_norm is not None:
        fields.append(f"grad norm: {metrics.grad_norm:.3f}")
    if metrics.num_zeros is not None:
        fields.append(f"num zeros: {metrics.num_zeros}")
    if metrics.params_norm is not None:
        fields.append(f"params norm: {metrics.params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {metrics.skipped_iterations:3d}",
        f"number of nan iterations: {metrics.nan_iterations:3d}",
    ]
    return " | ".join(fields) + " |"


def evaluation_lines(metrics: Evaluated) -> str:
    """Return the loss between dashes, three lines: of each source of several, and of all; a line for each task or
    sample. The last newline is left out."""
    if isinstance(metrics, TaskMetrics):
        return "\n".join(_task(metrics.iteration, name, found) for name, found in metrics.tasks.items())
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


def _task(iteration: int, name: str, found: Mapping[str, float]) -> str:
    values = [f"{key}: {value}" if isinstance(value, int) else f"{key}: {value:.6f}" for key, value in found.items()]
    return " | ".join([f" task {name} at iteration {iteration}", *values]) + " |"


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss capped at 20 as Megatron-LM caps it; NaN stays NaN."""
    return math.exp(min(loss, 20.0))


def scientific(value: float) -> str:
    """Return `9.845123E+00`; but `nan` and `inf`, which the E format would print in capitals."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)
