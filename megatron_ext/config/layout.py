"""Layout maths: which rank does what. Pure functions of the configuration, in Megatron's rank order.

World size = tensor (TP) x context (CP) x data (DP) x pipeline (PP) parallel size. Tensor-parallel ranks are
neighbours, so that the heaviest traffic stays inside a machine; pipeline stages are farthest apart:

    rank = tp + TP x (cp + CP x (dp + DP x pp))
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_ext.config.schema import Config, LayoutConfig

Axis = Literal["tp", "cp", "dp", "pp"]

AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")

CONTEXT_PARALLEL_SIZE = 1  # context parallelism has its own issue; the formulas already know it


class Coordinates(NamedTuple):
    """A rank's place on each axis of the layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class BatchPhase:
    """A stretch of training with one global batch size, in optimizer steps and samples."""

    global_batch_size: int
    first_sample: int
    steps: int


def axis_sizes(layout: LayoutConfig) -> Coordinates:
    """How many ranks each axis has."""
    return Coordinates(
        layout.tensor_model_parallel_size,
        CONTEXT_PARALLEL_SIZE,
        layout.data_parallel_size,
        layout.pipeline_model_parallel_size,
    )


def coordinates(layout: LayoutConfig, rank: int) -> Coordinates:
    """The place of a rank, 0 <= rank < world size."""
    assert 0 <= rank < layout.world_size, f"rank {rank} of {layout.world_size}"
    place = []
    for size in axis_sizes(layout):
        rank, along = divmod(rank, size)
        place.append(along)
    return Coordinates(*place)


def rank_of(layout: LayoutConfig, place: Coordinates) -> int:
    """The rank at a place: the inverse of `coordinates`."""
    rank = 0
    for size, along in zip(reversed(axis_sizes(layout)), reversed(place), strict=True):
        rank = rank * size + along
    return rank


def groups(layout: LayoutConfig, axis: Axis) -> list[list[int]]:
    """The ranks that differ only along one axis, group by group, each in the order of that axis."""
    found: dict[Coordinates, list[int]] = {}
    for rank in range(layout.world_size):
        place = coordinates(layout, rank)
        found.setdefault(place._replace(**{axis: 0}), []).append(rank)
    return list(found.values())


def chunk_layers(config: Config) -> list[list[range]]:
    """Global layer indices (from 0) by pipeline stage and model chunk: `chunk_layers(config)[pp][chunk]`.

    Without interleaving a stage has one chunk. With it, chunk v of stage p holds the layers from (v x PP + p) x n on,
    n = layers / (PP x chunks) (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    """
    stages = config.layout.pipeline_model_parallel_size
    chunks = config.layout.virtual_pipeline_model_parallel_size
    size, rest = divmod(config.model.num_layers, stages * chunks)
    assert rest == 0, "validated: the layers divide evenly"
    return [
        [range((chunk * stages + stage) * size, (chunk * stages + stage + 1) * size) for chunk in range(chunks)]
        for stage in range(stages)
    ]


def num_microbatches(config: Config, global_batch_size: int | None = None) -> int:
    """Microbatches of one data-parallel rank in one step of `global_batch_size` samples (default the full one)."""
    samples = config.training.global_batch_size if global_batch_size is None else global_batch_size
    count, rest = divmod(samples, config.training.micro_batch_size * config.layout.data_parallel_size)
    assert rest == 0, "validated: the global batch divides evenly"
    return count


def batch_phases(config: Config) -> list[BatchPhase]:
    """The whole run as stretches of equal global batch size: one, or several with `--rampup-batch-size`.

    As megatron-core's calculator has it, the batch is start + increment x floor(consumed / (samples / increments))
    until `samples` are consumed. The last phase ends with the run, and a last step that would need more than
    `--train-samples` is not taken.
    """
    training = config.training
    full = training.global_batch_size
    sizes = [full]
    borders = []  # consumed samples at which the next size begins
    if training.rampup_batch_size is not None:
        start, increment, samples = training.rampup_batch_size
        increments = (full - start) // increment
        sizes = [start + increment * i for i in range(increments + 1)]
        borders = [samples / increments * (i + 1) for i in range(increments)]
    phases = []
    consumed = steps_taken = 0
    for size, border in zip(sizes, [*borders, None], strict=True):
        if training.train_iters is not None:
            left = training.train_iters - steps_taken
        else:
            assert training.train_samples is not None, "validated: one of them is given"
            left = max(training.train_samples - consumed, 0) // size
        steps = left if border is None else min(left, max(-int(-(border - consumed) // size), 0))
        if steps > 0:
            phases.append(BatchPhase(size, consumed, steps))
        consumed += size * steps
        steps_taken += steps
    return phases


def training_steps(config: Config) -> int:
    """Optimizer steps of the whole run."""
    return sum(phase.steps for phase in batch_phases(config))
