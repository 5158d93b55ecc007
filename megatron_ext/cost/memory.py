"""Computes the bytes that a rank of each stage needs, part by part: formulas, not measurements.

State comes from cost/state_bytes.py, which benchmarks/sharding.py checks. Activations are cost/activations.py times the
microbatches in flight. On top come temporary tensors of a layer's backward pass (the gradients of one MLP's activations
and of one matrix) and, under ZeRO-2, ZeRO-3 and FSDP2, gathered weights and gradients. The CUDA context, NCCL's
buffers, libraries' workspaces and the allocator's fragmentation are not included. A share of the memory is to be left
for these.

`helpful_flags` lists the flags that reduce the memory of a rank that does not have enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron_ext.config.derived.pipeline_split import splits_backward
from megatron_ext.config.schema import Config
from megatron_ext.cost.activations import ChunkBytes
from megatron_ext.cost.schedule import most_held_of_stage
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.state_bytes import StateBytes, state_bytes
from megatron_ext.cost.workload import Workload


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that one rank needs, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations of the layers, for all microbatches in flight."""

    loss: float
    """Final norm, softmax, and logits while they exist."""

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
    """Bytes of weights, gradients and optimizer state, and of tensors that sharded ranks gather."""

    held: list[float]
    """Bytes of one microbatch between its forward and its backward pass, by chunk."""

    for_a_while: list[float]
    """Further bytes while a pass runs, by chunk."""


def over_time(config: Config, stage: int, shapes: Shapes, *, fused: bool) -> OverTime:
    """Return the parts of this stage's memory over the course of a step; its peak is the total of `stage_memory`."""
    work = Workload(config, shapes, fused=fused)
    kinds, chunks = _chunks(work, stage)
    for_a_while = [max(chunk.logits, _in_layers(work, chunk)) for chunk in kinds]
    always = sum(work.kept(stage)) + _gathered(work, stage)
    return OverTime(always, [kinds[kind].held for kind in chunks], [for_a_while[kind] for kind in chunks])


def stage_memory(work: Workload, stage: int) -> MemoryEstimate:
    """Return the bytes that a rank of this stage needs."""
    peak = _most_held(work, stage)
    weights, gradients, optimizer = work.kept(stage)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=peak.activations,
        loss=peak.loss,
        work=peak.most - peak.activations - peak.loss + _gathered(work, stage),
    )


class _Held(NamedTuple):
    """Bytes beyond weights, gradients and optimizer state at the moment at which a stage needs most."""

    most: float
    activations: float
    loss: float


def _most_held(work: Workload, stage: int) -> _Held:
    return work.once(("held", stage), lambda: _held(work, stage))


def _held(work: Workload, stage: int) -> _Held:
    kinds, chunks = _chunks(work, stage)
    in_layers = [_in_layers(work, chunk) for chunk in kinds]
    kept = [chunk.held for chunk in kinds]
    for_a_while = [max(chunk.logits, later) for chunk, later in zip(kinds, in_layers, strict=True)]
    of_chunks = tuple([kept[kind] for kind in chunks]), tuple([for_a_while[kind] for kind in chunks])
    most = most_held_of_stage(work.schedule.few(), stage, *of_chunks)
    activations = loss = 0.0
    for number, kind in zip(most.flight, chunks, strict=True):
        activations += number * (kinds[kind].layers + kinds[kind].rest)
        loss += number * kinds[kind].loss
    running, later = kinds[chunks[most.chunk]], in_layers[chunks[most.chunk]]
    loss += running.logits if later < running.logits else -running.loss
    return _Held(most.bytes, activations, loss)


def worst_stage(work: Workload) -> tuple[int, MemoryEstimate]:
    """Return the stage that needs most memory, and the bytes that its ranks need."""
    stage = max(work.shapes.kinds_of_stages, key=lambda stage: _total(work, stage))
    return stage, stage_memory(work, stage)


def fits(work: Workload, usable: float) -> bool:
    """Return whether no stage needs more than `usable` bytes."""
    return all(_total(work, stage) <= usable for stage in work.shapes.kinds_of_stages)


def state_fits(work: Workload, usable: float) -> bool:
    """Return whether no stage needs more than `usable` bytes without activations: for the state that it keeps between
    steps, and gathered tensors."""
    return all(sum(work.kept(stage)) + _gathered(work, stage) <= usable for stage in work.shapes.kinds_of_stages)


def _total(work: Workload, stage: int) -> float:
    if stage not in work.totals:
        work.totals[stage] = sum(work.kept(stage)) + _most_held(work, stage).most + _gathered(work, stage)
    return work.totals[stage]


def _chunks(work: Workload, stage: int) -> tuple[list[ChunkBytes], list[int]]:
    """Return the bytes of every kind of chunk of a stage, and the kind of each of its chunks."""
    kinds, chunks = work.shapes.kinds_of_chunks(stage)
    return [work.formulas.chunk(layers, first=first, last=last) for layers, first, last in kinds], chunks


def _in_layers(work: Workload, chunk: ChunkBytes) -> float:
    """Return the bytes held for a while in the backward pass of a chunk's layers, beyond the bytes that the chunk held
    before."""
    # Before the gradients of the first layer exist, the logits are freed, and all that the loss held.
    return chunk.recomputed + work.portion.gradients_of_a_layer - chunk.loss


def _gathered(work: Workload, stage: int) -> float:
    """Return the bytes of gradients and weights that ZeRO-2 and ZeRO-3 gather for a while.

    ZeRO-2: the gradient of the largest layer, as computed and as summed in fp32; with split backward passes the summed
    gradients of all parameters of the stage. ZeRO-3 in addition: the weights of the two largest layers (one computes
    while the next is gathered), or of all layers with --torch-fsdp2-no-reshard-after-forward, and the weights that
    belong to no layer.
    """
    if not work.scheme.gradients:
        return 0.0
    shapes, width = work.shapes, work.formulas.width
    gradient = (width + 4) * shapes.largest_layer
    if splits_backward(work.config.layout):
        gradient = width * shapes.largest_layer + 4 * sum(shapes.parameters_of_stage(stage))
    if not work.scheme.weights:
        return gradient
    layers = shapes.layer_sizes(stage)
    kept = layers if work.config.layout.torch_fsdp2_no_reshard_after_forward else layers[:2]
    return width * (sum(kept) + sum(shapes.parameters_of_stage(stage)) - sum(layers)) + gradient


_STATE = ("weights", "gradients", "optimizer")


def estimate(config: Config, *, fused: bool) -> tuple[int, MemoryEstimate]:
    """Return the pipeline stage whose ranks need most memory, and the bytes that each of them needs.

    Args:
        fused: whether this is a GPU.
    """
    return worst_stage(Workload(config, Shapes(config), fused=fused))


def kept_at_least(config: Config, *, fused: bool, anywhere: bool) -> tuple[int, dict[str, float]]:
    """Return a pipeline stage and, by part, the bytes that each of its ranks keeps between steps.

    Without training (--skip-train) a rank keeps at least the weights.

    Args:
        fused: whether this is a GPU.
        anywhere: the stage that keeps least, which every rank keeps wherever it is; else the one that keeps most.
    """
    work = Workload(config, Shapes(config), fused=fused)
    parts = _STATE[:1] if config.training.skip_train else _STATE
    needed = {stage: stage_memory(work, stage).parts for stage in set(work.shapes.representatives())}
    kept = {stage: {part: needed[stage][part] for part in parts} for stage in sorted(needed)}
    stage = (min if anywhere else max)(kept, key=lambda stage: sum(kept[stage].values()))
    return stage, kept[stage]


def host_bytes(config: Config, *, fullest: bool = False) -> float:
    """Return the bytes of state that every rank keeps at least in host memory, next to its GPU: the smallest stage's.

    Args:
        fullest: return the largest stage's bytes instead.
    """
    shapes = Shapes(config)
    kinds = state_bytes(config), state_bytes(config, expert=True)
    per_stage = (shapes.parameters_of_stage(stage) for stage in set(shapes.representatives()))
    choose = max if fullest else min
    return choose(sum(size * _moved(kind) for size, kind in zip(sizes, kinds, strict=True)) for sizes in per_stage)


def described(parts: Mapping[str, float]) -> str:
    """Return the parts with their sizes in a text, largest first: `optimizer 12.0 GB, activations 3.1 GB`."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in largest if size >= 0.005 * sum(parts.values()))


def helpful_flags(config: Config, needed: MemoryEstimate, *, fused: bool) -> list[str]:
    """Return the flags that take most, best first: never empty, and each is legal by itself for most models.

    Args:
        fused: whether this is a GPU.
    """
    layout, training = config.layout, config.training
    state = sum(getattr(needed, part) for part in _STATE)
    flags: list[str] = []
    if state < needed.activations + needed.loss + needed.work:
        if training.recompute_granularity != "full":
            flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        if training.micro_batch_size > 1:
            flags.append(f"--micro-batch-size {training.micro_batch_size // 2}")
        if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
            flags.append("--sequence-parallel")
        if not training.mixed_precision:
            flags.append("--bf16")
    elif layout.data_parallel_size > 1 and layout.sharding.divides_more:
        flags.append(layout.sharding.divides_more)
    elif fused and not layout.sharding.gradients and not config.optimizer.optimizer_cpu_offload:
        flags.append("--optimizer-cpu-offload")
    return [*flags, "more ranks with a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"]


def gigabytes(size: float) -> str:
    """Return bytes in GB, or in MB where there are few."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _moved(state: StateBytes) -> float:
    """Return the bytes a parameter that are not in the memory of the device."""
    sizes = (state.weights, state.gradients, state.optimizer)
    parts = zip(sizes, state.shares, state.on_device, strict=True)
    return sum(size / share * (1 - on_device) for size, share, on_device in parts)
