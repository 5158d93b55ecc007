"""Defines what one key of another program's configuration can mean here. The tables of this folder are made of
these."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.errors import listed


@dataclass(frozen=True)
class Flags:
    """Flags of ours; `{}` stands for the value, `{0}`, `{1}` for the values of a list."""

    template: str
    convert: Callable[[Any], Any] = field(default=lambda value: value)


@dataclass(frozen=True)
class Default:
    """Says that the program does this in any case, or does not do it without a flag: there is nothing to write."""

    reason: str


@dataclass(frozen=True)
class NoCounterpart:
    """Says that nothing here does this. The reason says what to do instead, if anything."""

    reason: str


@dataclass(frozen=True)
class Fact:
    """A number of the layout, from which sizes are computed: see `parallel_sizes.Layout`."""

    name: str


@dataclass(frozen=True)
class Launch:
    """Something that torchrun is told, not the program; `{}` stands for the value."""

    template: str


@dataclass(frozen=True)
class Cases:
    """Says that the meaning depends on the value, written as text in lower case (true, false, null)."""

    by_value: Mapping[str, "Meaning"]
    otherwise: "Meaning"


@dataclass(frozen=True)
class OfOptimizer:
    """An argument of the optimizer that the same file chooses, by the name that torch has for it (`betas`)."""

    argument: str


Meaning = Flags | Default | NoCounterpart | Fact | Launch | Cases | OfOptimizer

Table = Mapping[str, Meaning]
"""Meanings by key; nested keys are joined by dots, and `*` stands for the index in a list."""

OFF = Default("off, as without a flag")


def switch(flags: str) -> Cases:
    """Return flags where the value is true, nothing where it is false."""
    return Cases({"true": Flags(flags), "false": OFF, "null": OFF}, NoCounterpart("neither true nor false"))


def only_off(reason: str) -> Cases:
    """Return nothing to write where the value is false, empty or "none"; else no counterpart."""
    off: dict[str, Meaning] = dict.fromkeys(("false", "null", "none", "no", "0", ""), OFF)
    return Cases(off, NoCounterpart(reason))


FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers {}"
FULL_SHARD = Flags("--use-torch-fsdp2")
# Weights are sharded too, but stay whole from a layer's forward pass to its backward pass.
SHARD_GRAD = Flags("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward")

ZERO_STAGE = Cases(
    {
        "0": Default("plain data parallelism, as without a flag"),
        "1": Flags("--use-distributed-optimizer"),
        "2": SHARD_GRAD,
        "3": FULL_SHARD,
    },
    NoCounterpart("ZeRO has the stages 0 to 3"),
)

MIXED_PRECISION = Cases(
    {
        "bf16": Flags("--bf16"),
        "fp16": Flags("--fp16"),
        "fp8": Flags("--bf16 --fp8-format hybrid"),
        "no": Default("fp32, as without a flag"),
        "false": Default("fp32, as without a flag"),
    },
    NoCounterpart("unknown precision; use --bf16 or --fp16"),
)


def optimizers(program: str) -> Cases:
    """Return the optimizers that are here, by their names in another program."""
    known = {
        name: Flags(f"--optimizer {traits.name} {traits.elsewhere[program].flags}".strip())
        for traits in OPTIMIZERS.values()
        if program in traits.elsewhere
        for name in traits.elsewhere[program].names
    }
    ours = (f"{traits.name} ({traits.remark})" if traits.remark else traits.name for traits in OPTIMIZERS.values())
    return Cases(known, NoCounterpart(f"use --optimizer {listed(ours)}"))


CHECKPOINTS = Default(
    "checkpoints are sharded and load into any layout; `megatron-ext convert to-hf` writes the whole model"
)
EPOCHS = NoCounterpart(
    "the length of a run is --train-iters or --train-samples: with --data-path PREFIX of the preprocessed data this "
    "tool says how many steps that is"
)


_HYBRID = NoCounterpart(
    "say how many replicas of the shards there are: --use-torch-fsdp2 --num-distributed-optimizer-instances N"
)
_NO_SHARD = Default("plain data parallelism, as without a flag")

FSDP_VERSION = Cases({"2": Flags("--use-torch-fsdp2"), "1": FULL_SHARD}, NoCounterpart("FSDP has the versions 1 and 2"))

# torch.distributed.fsdp.ShardingStrategy numbers them from 1.
_STRATEGIES = {
    "full_shard": FULL_SHARD,
    "shard_grad_op": SHARD_GRAD,
    "no_shard": _NO_SHARD,
    "hybrid_shard": _HYBRID,
    "hybrid_shard_zero2": _HYBRID,
}

_FSDP_KEYS = {
    "version": FSDP_VERSION,
    "sharding_strategy": Cases(
        _STRATEGIES | {str(number): meaning for number, meaning in enumerate(_STRATEGIES.values(), start=1)},
        NoCounterpart("unknown strategy"),
    ),
    "reshard_after_forward": Cases(
        {
            "true": Default("weights are freed after the forward pass of a layer"),
            "false": Flags("--torch-fsdp2-no-reshard-after-forward"),
            # Accelerate keeps version 1's names for it.
            "full_shard": FULL_SHARD,
            "shard_grad_op": SHARD_GRAD,
            "no_shard": _NO_SHARD,
            "hybrid_shard": _HYBRID,
        },
        NoCounterpart("neither true nor false"),
    ),
    "auto_wrap_policy": Cases(
        {"transformer_based_wrap": Default("every transformer layer is a unit of sharding")},
        NoCounterpart("every transformer layer is a unit of sharding; there is no other division"),
    ),
    "transformer_layer_cls_to_wrap": Default("every transformer layer is a unit of sharding; it need not be named"),
    "min_num_params": NoCounterpart("every transformer layer is a unit of sharding, whatever its size"),
    "backward_prefetch": Default("the next layer's weights are fetched while this one computes"),
    "backward_prefetch_policy": Default("the next layer's weights are fetched while this one computes"),
    "forward_prefetch": Cases(
        {"true": Default("the next layer's weights are fetched while this one computes")},
        NoCounterpart("the next layer's weights are fetched while this one computes; it cannot be turned off"),
    ),
    "cpu_offload": switch("--use-torch-fsdp2 --torch-fsdp2-cpu-offload"),
    "offload_params": switch("--use-torch-fsdp2 --torch-fsdp2-cpu-offload"),
    "cpu_offload_pin_memory": Cases(
        {"true": Default("host memory is pinned on a GPU machine"), "false": Flags("--no-pin-cpu-params")},
        NoCounterpart("neither true nor false"),
    ),
    "state_dict_type": CHECKPOINTS,
    "final_state_dict_type": CHECKPOINTS,
    "sync_module_states": Default("weights are a function of the seed and the parameter's name: equal on every rank"),
    "cpu_ram_efficient_loading": Default("every rank reads its own slices alone"),
    "use_orig_params": Default("parameters keep their names and shapes"),
    "activation_checkpointing": switch(FULL_RECOMPUTE.format(1)),
}

FSDP = {f"fsdp_config.{prefix}{name}": meaning for name, meaning in _FSDP_KEYS.items() for prefix in ("", "fsdp_")}
"""Keys of `fsdp_config`, which Accelerate and Axolotl share but for a prefix."""
