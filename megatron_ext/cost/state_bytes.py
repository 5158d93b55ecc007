"""Computes bytes of weights, gradients and optimizer state that a rank keeps between steps, for each of its
parameters."""

import functools
from collections import Counter
from dataclasses import dataclass

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import kinds_of_parameters


@dataclass(frozen=True)
class StateBytes:
    """The whole bytes a parameter, and over how many ranks each of them is divided."""

    weights: int
    gradients: int
    optimizer: float
    """Bytes of the moments and, for 16-bit weights, of the fp32 master copy."""

    shares: tuple[int, int, int] = (1, 1, 1)

    on_device: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Share of each that is not in host memory, which does not count."""

    @functools.cached_property
    def sizes(self) -> tuple[float, float, float]:
        """Return the bytes a parameter that one rank keeps of weights, gradients and optimizer state."""
        weights, gradients, optimizer = (size / share for size, share in zip(self._whole, self.shares, strict=True))
        return weights, gradients, optimizer

    @property
    def total(self) -> float:
        """Bytes a parameter that one rank keeps."""
        return sum(self.sizes)

    @property
    def formula(self) -> str:
        """Return the formula in numbers: `2 + 4 + 12/8`."""
        return " + ".join(
            f"{size:g}/{share}" if share > 1 else f"{size:g}"
            for size, share in zip(self._whole, self.shares, strict=True)
        )

    @property
    def _whole(self) -> list[float]:
        """Bytes a parameter of weights, gradients and optimizer state on the device, before division over ranks."""
        sizes = (self.weights, self.gradients, self.optimizer)
        return [size * share for size, share in zip(sizes, self.on_device, strict=True)]


def state_bytes(config: Config, *, expert: bool = False) -> StateBytes:
    """Return the bytes a parameter, of routed experts or of everything else.

    Mixed precision with Adam: 2 (weight) + 4 (fp32 gradient) + 12 (fp32 master and two moments) = 18, and 6 + 12/d
    with the distributed optimizer over d data- times context-parallel ranks (Megatron-LM's documentation of its
    distributed optimizer). fp16 without --accumulate-allreduce-grads-in-fp32 has 2-byte gradients (Megatron-FSDP 4).
    fp32 has no master: 8 + 8, or 8 + 8/d. Other optimizers keep other states (config/derived/optimizers.py). FSDP2's
    weights are its fp32 masters: (4 + 4 + 8)/d. For a routed expert, d is the expert-data-parallel size. With copies of
    the sharded state, d is divided by their number, but for the optimizer's state where the copies divide that
    (--outer-dp-sharding-strategy optim).
    """
    training, scheme = config.training, config.layout.sharding
    mixed = training.mixed_precision and not scheme.weights_in_fp32
    in_fp32 = training.accumulate_allreduce_grads_in_fp32 or scheme.gradients_in_fp32
    gradients = 4 if not mixed or in_fp32 else 2
    states = optimizer_bytes(config, expert=expert)
    ranks = sharing_ranks(config, expert=expert)
    shares = scheme.shares(ranks)
    if config.layout.outer_dp_sharding_strategy == "optim":
        shares = (ranks, ranks, ranks * config.layout.num_distributed_optimizer_instances)
    return StateBytes(2 if mixed else 4, gradients, states + (4 if mixed else 0), shares, _on_device(config))


def optimizer_bytes(config: Config, *, expert: bool | None = None) -> float:
    """Return the bytes of optimizer state a parameter, of routed experts, of everything else, or (None) of both; the
    mean, where matrices and other parameters have optimizers of their own."""
    traits, sizes = traits_of(config.optimizer), Counter[str]()
    if traits.of_elements is None:
        return traits.bytes_each(config.optimizer)
    for parameter, number in kinds_of_parameters(config):
        if expert in (None, parameter.expert is not None):
            sizes[parameter.update] += number * parameter.size
    states = sum(size * traits.updating(kind).bytes_each(config.optimizer) for kind, size in sizes.items())
    return states / max(sizes.total(), 1)


def _on_device(config: Config) -> tuple[float, float, float]:
    """Return the shares of weights, gradients and optimizer state that are in the memory of the device."""
    if config.layout.torch_fsdp2_cpu_offload:
        return (0.0, 0.0, 0.0)
    moved = config.optimizer.optimizer_offload_fraction if config.optimizer.optimizer_cpu_offload else 0.0
    return (1.0, 1.0, 1.0 - moved)


def sharing_ranks(config: Config, *, expert: bool = False) -> int:
    """Return the ranks over which a sharded optimizer divides one copy of its state."""
    layout = config.layout
    replicas = layout.data_parallel_size * layout.context_parallel_size
    return (layout.expert_data_parallel_size if expert else replicas) // layout.num_distributed_optimizer_instances
