"""Several small computations by the same ranks: what takes time is the start of a rank, not a model of two layers."""

import gc
from collections.abc import Callable, Sequence
from typing import Any


def in_turn(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """On a rank of `run_ranks`: what `function` returns for each of the arguments, one after the other.

    In between, megatron-core's groups end, so that each may have a layout of its own on these ranks.
    """
    results = []
    for argument in arguments:
        results.append(function(argument))
        end_layout()
    return results


def end_layout() -> None:
    """End megatron-core's groups and every other one but the default, which a store serves only once.

    megatron-core forgets its groups and leaves them, and each keeps a thread of gloo, which wakes up over and over.
    """
    from megatron.core import parallel_state
    from torch.distributed import GroupMember, destroy_process_group
    from torch.distributed.distributed_c10d import _world

    parallel_state.destroy_model_parallel()
    for group in list(_world.pg_map):
        if group is not GroupMember.WORLD:
            destroy_process_group(group)
    gc.collect()
