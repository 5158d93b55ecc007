"""The metrics of one logged step and of one evaluation. Every sink (log line, metrics file, TensorBoard) reads these.

`as_row` is a row of the metrics file; `scalars` has Megatron-LM's tags, which TensorBoard and other trackers show.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.parts.protocol import Number, Report

# The fields that a repeated or resumed run cannot reproduce: times, rates, memory, resumes. All others must be equal.
MEASURED_FIELDS = frozenset(
    {
        "elapsed_ms",
        "cpu_ms",
        "tokens_per_second",
        "tflops_per_gpu",
        "mfu",
        "peak_memory_bytes",
        "allocated_bytes",
        "reserved_bytes",
        "time_shares",
        "slowest_rank",
        "resumed_at",
    }
)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics of one logged step. Losses are in nats per token; norms are L2 over the whole model."""

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    grad_norm: float | None  # None where the loss scaler skipped the step
    learning_rate: float
    weight_decay: float
    global_batch_size: int
    loss_scale: float
    skipped_iterations: int  # since the last logged step
    nan_iterations: int  # since the last logged step
    elapsed_ms: float  # per iteration
    tokens_per_second: float  # of the whole job
    tflops_per_gpu: float
    mfu: float | None  # None where the device's peak is unknown
    peak_memory_bytes: int  # of this rank, as the two below
    allocated_bytes: int
    reserved_bytes: int
    num_zeros: int | None = None  # with --log-num-zeros-in-grad
    params_norm: float | None = None  # with --log-params-norm
    time_shares: Mapping[str, float] | None = None  # compute, communication, idle; with --log-communication-share
    slowest_rank: Mapping[str, Any] | None = (
        None  # rank, ratio to its peers' compute time, slow: [ranks]; --log-straggler
    )
    cpu_ms: float | None = None  # processor time of this rank's process per iteration, of all its threads
    world_size: int = 1
    resumed_at: int = 0  # the iteration that the job went on from; the row has it only if there is one
    consumed_by_source: Mapping[str, Mapping[str, float]] | None = None  # samples, tokens, epochs, from the beginning
    numbers: tuple[tuple[Number, float], ...] = ()  # of parts of the model, each a field by its name
    reports: tuple[Report, ...] = ()  # what else parts report, each with fields of its own


@dataclass(frozen=True, kw_only=True)
class ValidationMetrics:
    """The metrics of one evaluation on the validation data, after the step `iteration`."""

    iteration: int
    consumed_samples: int
    validation_loss: float
    sources: tuple["SourceLoss", ...] = ()  # of several sources


@dataclass(frozen=True, kw_only=True)
class SourceLoss:
    """The loss on one of several validation sources."""

    name: str
    suffix: str  # of its log line and its tags: its number, or its name in --validation-set-names
    loss: float


@dataclass(frozen=True, kw_only=True)
class TestMetrics:
    """The metrics of the evaluation on the test data, after the last step."""

    iteration: int
    consumed_samples: int
    test_loss: float


@dataclass(frozen=True, kw_only=True)
class TaskMetrics:
    """The results of the tasks of --eval-tasks, after the step `iteration`."""

    iteration: int
    consumed_samples: int
    tasks: Mapping[str, Mapping[str, float]]  # metrics by name, of each task by name


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text that the model made of a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class SampleMetrics:
    """The samples of --sample-interval, after the step `iteration`."""

    iteration: int
    consumed_samples: int
    samples: tuple[Sample, ...]


Evaluated = ValidationMetrics | TestMetrics | TaskMetrics | SampleMetrics
"""Metrics of the model that are measured between two steps."""

Metrics = StepMetrics | Evaluated


def as_row(metrics: Metrics) -> dict[str, Any]:
    """Return the object of the metrics file: the fields by name, the losses of several sources by the source's name,
    and each number and field that parts of the model report."""
    if isinstance(metrics, StepMetrics):
        row = dataclasses.asdict(dataclasses.replace(metrics, numbers=(), reports=()))
        del row["numbers"], row["reports"]
        row |= {number.name: value for number, value in metrics.numbers}
        for report in metrics.reports:
            row |= report.row
    else:
        row = dataclasses.asdict(metrics)
    if not row.get("resumed_at"):
        row.pop("resumed_at", None)
    sources = row.pop("sources", ())
    if sources:
        row["validation_loss_by_source"] = {source["name"]: source["loss"] for source in sources}
    return row


# Shown against samples too, as `<tag> vs samples`. The rest is about the machine and shown against iterations only.
_AGAINST_SAMPLES = frozenset(
    {"learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm"}
)


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss capped at 20 as Megatron-LM caps it; NaN stays NaN."""
    return math.exp(min(loss, 20.0))


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return tag to value, for an axis of iterations; values that were not measured are left out. `iteration-time` is
    in seconds."""
    if isinstance(metrics, ValidationMetrics):
        losses = {"": metrics.validation_loss, **{f"-{source.suffix}": source.loss for source in metrics.sources}}
        return {
            tag: value
            for suffix, loss in losses.items()
            for tag, value in (
                (f"lm loss validation{suffix}", loss),
                (f"lm loss validation{suffix} ppl", perplexity(loss)),
            )
        }
    if isinstance(metrics, TaskMetrics):
        return {f"{task}/{name}": value for task, results in metrics.tasks.items() for name, value in results.items()}
    if isinstance(metrics, TestMetrics | SampleMetrics):
        return {}  # Megatron has no tag for the first; the second is text
    values = {
        "learning-rate": metrics.learning_rate,
        "batch-size": metrics.global_batch_size,
        "lm loss": metrics.lm_loss,
        "loss-scale": metrics.loss_scale,
        "world-size": metrics.world_size,
        "grad-norm": metrics.grad_norm,
        "num-zeros": metrics.num_zeros,
        "params-norm": metrics.params_norm,
        "iteration-time": metrics.elapsed_ms / 1000.0,
        "throughput": metrics.tflops_per_gpu,
        "tokens-per-second": metrics.tokens_per_second,
        "mem-allocated-bytes": metrics.allocated_bytes,
        "mem-max-allocated-bytes": metrics.peak_memory_bytes,
        "mem-reserved-bytes": metrics.reserved_bytes,
        **_of_the_slowest_rank(metrics.slowest_rank),
        **{number.tag: value for number, value in metrics.numbers},
        **{tag: value for report in metrics.reports for tag, value in report.tags.items()},
        **{f"{name}-share": share for name, share in (metrics.time_shares or {}).items()},
    }
    return {tag: value for tag, value in values.items() if value is not None}


def _of_the_slowest_rank(slowest: Mapping[str, Any] | None) -> dict[str, float]:
    if slowest is None:
        return {}
    return {"slowest-rank": slowest["rank"], "slowest-rank-ratio": slowest["ratio"], "slow-ranks": len(slowest["slow"])}


def scalars_against_samples(metrics: Metrics) -> dict[str, float]:
    """Return tag to value, for an axis of consumed samples."""
    return {f"{tag} vs samples": value for tag, value in scalars(metrics).items() if _has_samples(tag)}


def _has_samples(tag: str) -> bool:
    return tag in _AGAINST_SAMPLES or tag.startswith("lm loss validation")
