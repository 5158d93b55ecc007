"""A step's metrics and a rank's trace for the tests of what writes them; each test names only what it is about."""

from typing import Any

from megatron_ext.plan.simulated_timeline import equal_stages
from megatron_ext.plan.timeline import COMMUNICATION, MESSAGES, Block
from megatron_ext.telemetry.metrics import StepMetrics
from megatron_ext.telemetry.schedule_record import Place, RankRecord, RecordedStep

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


def recorded_rank(rank: int, world_size: int = 4, stages: int = 2, chunks: int = 2, slower: float = 1.0) -> RankRecord:
    """Two steps of a rank, whose passes take `slower` times a thousandth of what equal stages take."""
    place = Place(rank, world_size, rank // (world_size // stages), stages, chunks, stages)
    drawn = equal_stages(stages, chunks, 4)
    scale = 1e-3 * slower
    passes = tuple(
        each._replace(begin=each.begin * scale, end=each.end * scale) for each in drawn.lanes[place.stage].passes
    )
    blocks = (Block(MESSAGES, 0.0, 0.5e-3), Block(COMMUNICATION, 1e-3, 1.25e-3))
    memory = tuple((each.end, 1_000_000 + 1000 * number) for number, each in enumerate(passes))
    step = RecordedStep(10, 0.0, drawn.total * scale, passes, blocks, memory)
    return RankRecord(place, (step, RecordedStep(11, 0.25, step.total, passes, (), memory)))
