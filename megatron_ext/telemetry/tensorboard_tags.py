"""Holds Megatron-LM's tags for a step and for an evaluation; TensorBoard and Weights & Biases show the same ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.telemetry.log_line import perplexity
from megatron_ext.telemetry.metrics import (
    LayerLoad,
    Metrics,
    SampleMetrics,
    TaskMetrics,
    TestMetrics,
    ValidationMetrics,
)

# Shown against samples too, as `<tag> vs samples`. The rest is about the machine and shown against iterations only.
_AGAINST_SAMPLES = frozenset(
    {"learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm"}
)


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
