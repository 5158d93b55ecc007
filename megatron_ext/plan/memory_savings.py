"""Which flags take memory from a rank that does not have enough, and what they take it from."""

from collections.abc import Mapping

from megatron_ext.config.schema import Config
from megatron_ext.plan.memory import MemoryEstimate, memory, worst_stage
from megatron_ext.plan.shapes import Shapes
from megatron_ext.plan.state_bytes import StateBytes, sharding, state_bytes

_STATE = ("weights", "gradients", "optimizer")


def estimate(config: Config, *, fused: bool) -> tuple[int, MemoryEstimate]:
    """Return the pipeline stage whose ranks need most, and what each of them needs.

    Args:
        fused: whether this is a GPU.
    """
    return worst_stage(config, Shapes(config), fused=fused)


def kept_at_least(config: Config, *, fused: bool, anywhere: bool) -> tuple[int, dict[str, float]]:
    """Return a pipeline stage and, by part, the bytes that each of its ranks keeps between steps.

    Without training (--skip-train) weights alone are sure to be there.

    Args:
        fused: whether this is a GPU.
        anywhere: the stage that keeps least, which every rank keeps wherever it is; else the one that keeps most.
    """
    shapes = Shapes(config)
    parts = _STATE[:1] if config.training.skip_train else _STATE
    needed = {stage: memory(config, stage, shapes, fused=fused).parts for stage in set(shapes.representatives())}
    kept = {stage: {part: needed[stage][part] for part in parts} for stage in sorted(needed)}
    stage = (min if anywhere else max)(kept, key=lambda stage: sum(kept[stage].values()))
    return stage, kept[stage]


def host_bytes(config: Config, *, fullest: bool = False) -> float:
    """Return the bytes of state that every rank keeps in host memory, next to its GPU: those of the emptiest stage.

    Args:
        fullest: those of the fullest stage instead.
    """
    shapes = Shapes(config)
    kinds = state_bytes(config), state_bytes(config, expert=True)
    per_stage = (shapes.parameters_of_stage(stage) for stage in set(shapes.representatives()))
    choose = max if fullest else min
    return choose(sum(size * _moved(kind) for size, kind in zip(sizes, kinds, strict=True)) for sizes in per_stage)


def described(parts: Mapping[str, float]) -> str:
    """Return what holds how much, the largest first: `optimizer 12.0 GB, activations 3.1 GB`."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in largest if size >= 0.005 * sum(parts.values()))


def helpful_flags(config: Config, needed: MemoryEstimate, *, fused: bool) -> list[str]:
    """Return the flags that take most, best first: never empty, and each is legal by itself for most models.

    Args:
        fused: whether this is a GPU.
    """
    layout, training = config.layout, config.training
    state = sum(getattr(needed, part) for part in _STATE)
    found: list[str] = []
    if state < needed.activations + needed.loss + needed.work:
        if training.recompute_granularity != "full":
            found.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        if training.micro_batch_size > 1:
            found.append(f"--micro-batch-size {training.micro_batch_size // 2}")
        if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
            found.append("--sequence-parallel")
        if not training.mixed_precision:
            found.append("--bf16")
    elif layout.data_parallel_size > 1 and sharding(config) == "ddp":
        found.append("--use-distributed-optimizer")
    elif layout.data_parallel_size > 1 and sharding(config) == "optim":
        found.append("--use-torch-fsdp2 in place of --use-distributed-optimizer")
    elif fused and sharding(config) in ("ddp", "optim") and not config.optimizer.optimizer_cpu_offload:
        found.append("--optimizer-cpu-offload")
    return [*found, "more ranks with a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"]


def gigabytes(size: float) -> str:
    """Return bytes in GB, or in MB where there are few."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _moved(state: StateBytes) -> float:
    """Return the bytes a parameter that are not in the memory of the device."""
    sizes = (state.weights, state.gradients, state.optimizer)
    parts = zip(sizes, state.shares, state.on_device, strict=True)
    return sum(size / share * (1 - on_device) for size, share, on_device in parts)
