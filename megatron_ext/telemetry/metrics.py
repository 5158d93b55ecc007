"""Holds what one logged step and one evaluation tell. Every sink (log line, metrics file, TensorBoard) reads these.

`as_row` is a row of the metrics file; `scalars` has Megatron-LM's tags, which TensorBoard and other trackers show.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The fields that a repeated or resumed run cannot reproduce: times, rates, memory, resumes. All others must be equal.
MEASURED_FIELDS = frozenset(
    {
        "elapsed_ms",
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


MOST_COUNTS_OF_A_ROW = 16_384
"""Most tokens of experts that a row holds, some 80 kB: 61 layers of 256 experts."""


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """The load of one layer's experts in a step, over the global batch."""

    layer: int
    """Its index; depths of multi-token prediction follow the last layer."""

    tokens: tuple[int, ...]
    """Tokens of each expert."""

    dropped: float
    """Share of the choices of an expert for a token that were dropped."""

    router_z: float
    """Mean squared logsumexp of the router's logits."""

    bias: tuple[float, float] | None
    """The least and the greatest bias by which experts are chosen; None without biases."""

    @property
    def max_over_mean(self) -> float:
        """Tokens of the busiest expert over those of an even load; 1 is even."""
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares over that of an even load; 1 is even, 0 is one expert alone."""
        total = sum(self.tokens)
        shares = [count / total for count in self.tokens if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens) or 1)

    def as_row(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        row: dict[str, Any] = {"layer": self.layer, "max_over_mean": self.max_over_mean, "entropy": self.entropy}
        row |= {"without_tokens": self.tokens.count(0), "dropped": self.dropped, "router_z": self.router_z}
        return row if self.bias is None else row | {"bias": list(self.bias)}


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
    max_attention_logit: float | None = None  # of this step's queries and keys, with --log-max-attention-logit
    load_balancing_loss: float | None = None  # of a mixture of experts, as the next three: means over layers
    seq_load_balancing_loss: float | None = None  # that of each sample
    global_load_balancing_loss: float | None = None  # that with the load of the global batch so far
    z_loss: float | None = None
    indexer_loss: float | None = None  # of --experimental-attention-variant dsa, a mean over layers
    dropped_share: float | None = None  # mean over layers of what `expert_load` says, with a capacity of experts
    time_shares: Mapping[str, float] | None = None  # compute, communication, idle; with --log-communication-share
    slowest_rank: Mapping[str, Any] | None = (
        None  # rank, ratio to its peers' compute time, slow: [ranks]; --log-straggler
    )
    world_size: int = 1
    resumed_at: int = 0  # the iteration that the job went on from; the row has it only if there is one
    consumed_by_source: Mapping[str, Mapping[str, float]] | None = None  # samples, tokens, epochs, from the beginning
    mtp_losses: tuple[float, ...] = ()  # of each depth of multi-token prediction, in this step
    expert_load: tuple[LayerLoad, ...] = ()  # of each layer with experts, in this step


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
"""What is told of the model between two steps."""

Metrics = StepMetrics | Evaluated


def as_row(metrics: Metrics) -> dict[str, Any]:
    """Return the object of the metrics file: the fields by name, the losses of several sources by the source's name,
    `mtp_1_loss` and on, and `expert_load` with `expert_tokens`, layers against experts, where they are not too many."""
    row = dataclasses.asdict(metrics)
    row.pop("expert_load", None)
    if isinstance(metrics, StepMetrics) and metrics.expert_load:
        row["expert_load"] = [layer.as_row() for layer in metrics.expert_load]
        if sum(len(layer.tokens) for layer in metrics.expert_load) <= MOST_COUNTS_OF_A_ROW:
            row["expert_tokens"] = [list(layer.tokens) for layer in metrics.expert_load]
    if not row.get("resumed_at"):
        row.pop("resumed_at", None)
    row |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(row.pop("mtp_losses", ()), start=1)}
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
    """Return tag to value, for an axis of iterations; what was not measured is left out. `iteration-time` is in
    seconds."""
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
        **{f"mtp_{depth} loss": loss for depth, loss in enumerate(metrics.mtp_losses, start=1)},
        "loss-scale": metrics.loss_scale,
        "world-size": metrics.world_size,
        "grad-norm": metrics.grad_norm,
        "num-zeros": metrics.num_zeros,
        "params-norm": metrics.params_norm,
        "max_attention_logit": metrics.max_attention_logit,
        "load_balancing_loss": metrics.load_balancing_loss,
        "seq_load_balancing_loss": metrics.seq_load_balancing_loss,
        "global_load_balancing_loss": metrics.global_load_balancing_loss,
        "z_loss": metrics.z_loss,
        "indexer loss": metrics.indexer_loss,
        "dropped_share": metrics.dropped_share,
        "iteration-time": metrics.elapsed_ms / 1000.0,
        "throughput": metrics.tflops_per_gpu,
        "tokens-per-second": metrics.tokens_per_second,
        "mem-allocated-bytes": metrics.allocated_bytes,
        "mem-max-allocated-bytes": metrics.peak_memory_bytes,
        "mem-reserved-bytes": metrics.reserved_bytes,
        **_of_the_slowest_rank(metrics.slowest_rank),
        **_of_experts(metrics.expert_load),
        **{f"{name}-share": share for name, share in (metrics.time_shares or {}).items()},
    }
    return {tag: value for tag, value in values.items() if value is not None}


def _of_the_slowest_rank(slowest: Mapping[str, Any] | None) -> dict[str, float]:
    if slowest is None:
        return {}
    return {"slowest-rank": slowest["rank"], "slowest-rank-ratio": slowest["ratio"], "slow-ranks": len(slowest["slow"])}


def _of_experts(loads: Sequence[LayerLoad]) -> dict[str, float]:
    """Return the load of each layer's experts, `expert-max-over-mean/layer 3` and the like."""
    values: dict[str, float] = {}
    for load in loads:
        of_layer = {**load.as_row()}
        least, greatest = of_layer.pop("bias", (None, None))
        of_layer |= {} if least is None else {"bias-least": least, "bias-greatest": greatest}
        number = of_layer.pop("layer")
        values |= {f"expert-{name.replace('_', '-')}/layer {number}": value for name, value in of_layer.items()}
    return values


def scalars_against_samples(metrics: Metrics) -> dict[str, float]:
    """Return tag to value, for an axis of consumed samples."""
    return {f"{tag} vs samples": value for tag, value in scalars(metrics).items() if _has_samples(tag)}


def _has_samples(tag: str) -> bool:
    return tag in _AGAINST_SAMPLES or tag.startswith("lm loss validation")
