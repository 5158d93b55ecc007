"""Holds what one logged step and one evaluation tell. Every sink (log line, metrics file, TensorBoard) reads these."""

import dataclasses
import math
from collections.abc import Mapping
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
