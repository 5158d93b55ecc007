"""Finds the flags that make a layout fit in a device's memory at the least cost of time, by the planner's estimate."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.cost.memory import estimate
from megatron_ext.rules.validate import RULES_OF_LAYOUTS, broken_rule

Change = tuple[str, str, dict[str, Any]]
"""Flags as they are typed, the group of their fields, and the values of these."""

_MACHINE = Facts(cuda_available=True)
"""The facts that --dry-run assumes of the machine: it has GPUs."""


def fitting_flags(config: Config, usable_bytes: float) -> str | None:
    """Return the cheapest flags with which a rank needs no more than `usable_bytes`; None where these are not enough.

    Flags that cost less time come first; of those that are enough together, each that is not needed is left out.
    """
    chosen: list[Change] = []
    for change in _changes(config):
        if broken_rule(_with(config, [*chosen, change]), _MACHINE, RULES_OF_LAYOUTS) is not None:
            continue
        chosen.append(change)
        if _fits(config, chosen, usable_bytes):
            break
    else:
        return None
    for change in list(chosen):
        others = [one for one in chosen if one is not change]
        if _fits(config, others, usable_bytes):
            chosen = others
    return " ".join(flags for flags, *_ in chosen)


def _changes(config: Config) -> Iterator[Change]:
    """Yield changes of flags that reduce the memory of a rank, cheapest first; a later change of a field replaces an
    earlier one."""
    layout, training = config.layout, config.training
    if layout.sharding.divides_more == "--use-distributed-optimizer" and layout.data_parallel_size > 1:
        yield "--use-distributed-optimizer", "layout", {"use_distributed_optimizer": True}
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        yield "--sequence-parallel", "layout", {"sequence_parallel": True}
    if training.recompute_granularity is None:
        yield "--recompute-activations", "training", {"recompute_granularity": "selective"}
    size = training.micro_batch_size
    while size % 2 == 0:
        size //= 2
        yield f"--micro-batch-size {size}", "training", {"micro_batch_size": size}
    if training.recompute_granularity != "full":
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        values = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield flags, "training", values
    if layout.device != "cpu" and not config.optimizer.optimizer_cpu_offload:
        yield "--optimizer-cpu-offload", "optimizer", {"optimizer_cpu_offload": True}


def _with(config: Config, changes: Sequence[Change]) -> Config:
    for _, group, values in changes:
        config = replace(config, **{group: replace(getattr(config, group), **values)})
    return config


def _fits(config: Config, changes: Sequence[Change], usable_bytes: float) -> bool:
    changed = _with(config, changes)
    return estimate(changed, fused=changed.layout.device != "cpu")[1].total <= usable_bytes
