"""A step's metrics and a rank's trace for the tests of what writes them; each test names only what it is about."""

from typing import Any

from megatron_ext.telemetry.metrics import StepMetrics

STEP: dict[str, Any] = {
    "iteration": 10,
    "train_iters": 100,
    "consumed_samples": 160,
    "consumed_tokens": 160 * 64,
    "lm_loss": 9.845123,
    "grad_norm": 2.345,
    "learning_rate": 6e-6,
    "weight_decay": 0.1,
    "global_batch_size": 16,
    "loss_scale": 1.0,
    "skipped_iterations": 0,
    "nan_iterations": 0,
    "elapsed_ms": 312.4,
    "tokens_per_second": 3277.8,
    "tflops_per_gpu": 41.7,
    "mfu": None,
    "peak_memory_bytes": 3000,
    "allocated_bytes": 1000,
    "reserved_bytes": 2000,
    "world_size": 8,
}


def step(**changes: Any) -> StepMetrics:
    """The step above with some fields changed."""
    return StepMetrics(**(STEP | changes))
