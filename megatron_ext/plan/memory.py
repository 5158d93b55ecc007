"""Computes the bytes that a rank of each stage needs, part by part: formulas, not measurements.

State is what plan/state_bytes.py says and benchmarks/sharding.py counts. Activations are plan/activations.py times
the microbatches in flight. On top come what a layer's backward pass needs for a while (the gradients of one MLP's
activations and of one matrix) and, under ZeRO-2, ZeRO-3 and FSDP2, what is whole for a while. The CUDA context, NCCL's
buffers, libraries' workspaces and what the allocator loses between blocks are not in it. A share of the memory is to be
left for these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_ext.config.schema import Config
from megatron_ext.plan.activations import ChunkBytes
from megatron_ext.plan.schedule import few_microbatches, most_held_of_stage
from megatron_ext.plan.shapes import Shapes
from megatron_ext.plan.workload import Workload


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that one rank needs, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations of the layers, for all microbatches in flight."""

    loss: float
    """Final norm, softmax, and logits while they are there."""

    work: float
    """Bytes held for a while in a backward pass: recomputed activations, gradients of one layer, gathered weights."""

    @property
    def total(self) -> float:
        """Sum over the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss + self.work

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class OverTime:
    """The bytes that a stage needs while it works."""

    always: float
    """Bytes of weights, gradients and optimizer state, and of what sharded ranks gather."""

    held: list[float]
    """Bytes of one microbatch between its forward and its backward pass, by chunk."""

    for_a_while: list[float]
    """Further bytes while a pass runs, by chunk."""


def over_time(config: Config, stage: int, shapes: Shapes, *, fused: bool) -> OverTime:
    """Return what makes up the memory of this stage at any time; its most is the total of `memory`."""
    work = Workload(config, shapes, fused=fused)
    chunks = _chunks(work, stage)
    for_a_while = [max(chunk.logits, later) for chunk, later in zip(chunks, _in_layers(work, chunks), strict=True)]
    return OverTime(sum(work.kept(stage)) + _gathered(work, stage), [chunk.held for chunk in chunks], for_a_while)


def memory(config: Config, stage: int, shapes: Shapes, *, fused: bool) -> MemoryEstimate:
    """Return what a rank of this stage needs.

    Args:
        fused: whether this is a GPU, as for `activations.Activations`.
    """
    return stage_memory(Workload(config, shapes, fused=fused), stage)


def stage_memory(work: Workload, stage: int) -> MemoryEstimate:
    """Return what a rank of this stage needs."""
    layout, chunks = work.config.layout, _chunks(work, stage)
    stages, group = layout.pipeline_model_parallel_size, layout.microbatch_group_size
    few = few_microbatches(stages, len(chunks), work.microbatches, group)
    in_layers = _in_layers(work, chunks)
    for_a_while = tuple(max(chunk.logits, later) for chunk, later in zip(chunks, in_layers, strict=True))
    most = most_held_of_stage(stage, stages, few, group, tuple(chunk.held for chunk in chunks), for_a_while)
    activations = sum(number * (chunk.layers + chunk.rest) for number, chunk in zip(most.flight, chunks, strict=True))
    loss = sum(number * chunk.loss for number, chunk in zip(most.flight, chunks, strict=True))
    running = chunks[most.chunk]
    loss += running.logits if in_layers[most.chunk] < running.logits else -running.loss
    weights, gradients, optimizer = work.kept(stage)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        loss=loss,
        work=most.bytes - activations - loss + _gathered(work, stage),
    )


def worst_stage(config: Config, shapes: Shapes, *, fused: bool) -> tuple[int, MemoryEstimate]:
    """Return the stage that needs most, and what it needs."""
    return worst_stage_of(Workload(config, shapes, fused=fused))


def worst_stage_of(work: Workload) -> tuple[int, MemoryEstimate]:
    """Return the stage that needs most, and what it needs."""
    found = {stage: stage_memory(work, stage) for stage in sorted(set(work.shapes.heaviest()))}
    stage = max(found, key=lambda stage: found[stage].total)
    return stage, found[stage]


def _chunks(work: Workload, stage: int) -> list[ChunkBytes]:
    formulas, shapes = work.formulas, work.shapes
    return [
        formulas.chunk(layers, first=shapes.is_first(stage, chunk), last=shapes.is_last(stage, chunk))
        for chunk, layers in enumerate(shapes.stacks[stage])
    ]


def _in_layers(work: Workload, chunks: Sequence[ChunkBytes]) -> list[float]:
    """Return the bytes held for a while in the backward pass of each chunk's layers, beyond what it held before."""
    # Before the gradients of the first layer are there, the logits are gone, and all that the loss held.
    return [chunk.recomputed + work.gradients_of_a_layer - chunk.loss for chunk in chunks]


def _gathered(work: Workload, stage: int) -> float:
    """Return what ZeRO-2 and ZeRO-3 have whole for a while: the gradient of a layer, as computed and as it is summed,
    in fp32; and of divided weights those of a layer and the next one (the two largest), all where they are kept, and
    what belongs to no layer."""
    if work.kind in ("ddp", "optim"):
        return 0.0
    shapes, width = work.shapes, work.formulas.width
    gradient = (width + 4) * shapes.largest_layer
    if work.kind == "optim_grads":
        return gradient
    layers = sorted(shapes.layer_sizes(stage), reverse=True)
    kept = layers if work.config.layout.torch_fsdp2_no_reshard_after_forward else layers[:2]
    return width * (sum(kept) + sum(shapes.parameters_of_stage(stage)) - sum(layers)) + gradient
