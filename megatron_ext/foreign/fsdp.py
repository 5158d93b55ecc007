"""Translates the keys of `fsdp_config`, which Accelerate and Axolotl share but for a prefix."""

from megatron_ext.foreign.key_meanings import (
    CHECKPOINTS,
    FULL_RECOMPUTE,
    FULL_SHARD,
    SHARD_GRAD,
    Cases,
    Default,
    Flags,
    NoCounterpart,
    switch,
)

_HYBRID = NoCounterpart(
    "say how many replicas of the shards there are: --use-torch-fsdp2 --num-distributed-optimizer-instances N"
)
_NO_SHARD = Default("plain data parallelism, as without a flag")

VERSION = Cases({"2": Flags("--use-torch-fsdp2"), "1": FULL_SHARD}, NoCounterpart("FSDP has the versions 1 and 2"))

# torch.distributed.fsdp.ShardingStrategy numbers them from 1.
_STRATEGIES = {
    "full_shard": FULL_SHARD,
    "shard_grad_op": SHARD_GRAD,
    "no_shard": _NO_SHARD,
    "hybrid_shard": _HYBRID,
    "hybrid_shard_zero2": _HYBRID,
}

_KEYS = {
    "version": VERSION,
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

TABLE = {f"fsdp_config.{prefix}{name}": meaning for name, meaning in _KEYS.items() for prefix in ("", "fsdp_")}
