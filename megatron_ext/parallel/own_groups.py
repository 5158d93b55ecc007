"""Lets a rank make only those process groups that it is in, out of all that megatron-core makes.

megatron-core calls `new_group` on every rank for every group of the world: 5,249 times with 1,024 ranks, of which a
rank is in 20. For the others torch does nothing but count: a group's name is the number of groups that were asked for
before it. So the other calls can be left out, as long as the count goes on; names, ranks and order of the groups that
are made stay as they were.

(torch's own `use_local_synchronization` would not do. It names a group after its ranks and the number of groups that
this rank is in, and a stage in the middle of a pipeline is in fewer than its ends: they would not agree on the names of
the groups that they share.)
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state


@contextmanager
def own_groups_only() -> Iterator[None]:
    """Return a context in which megatron-core makes the groups of this rank alone, and lists ranks by numpy."""
    create, generate = parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups
    parallel_state.generate_masked_orthogonal_rank_groups = rank_groups
    if _others_may_be_left_out():
        parallel_state.create_group = _if_member(create)
    try:
        yield
    finally:
        parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups = create, generate


def rank_groups(world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Return all groups of ranks that differ in the masked dimensions alone, as megatron-core's function does, which
    takes seconds for ten thousand ranks.

    Args:
        world_size: product of the sizes, or a part of it that whole groups fill.
        parallel_size: ranks in each dimension, the fastest varying first.
        mask: whether a group extends over the dimension.
    """
    last = len(parallel_size) - 1
    ranks_by_place = np.arange(int(np.prod(parallel_size))).reshape(tuple(reversed(parallel_size)))
    # The slowest varying dimension is numpy's first; who varies faster in a group, or among groups, stays so.
    across = [last - dimension for dimension, masked in enumerate(mask) if not masked][::-1]
    within = [last - dimension for dimension, masked in enumerate(mask) if masked][::-1]
    size = int(np.prod([parallel_size[dimension] for dimension, masked in enumerate(mask) if masked]))
    groups = ranks_by_place.transpose(*across, *within).reshape(-1, size)
    return groups[: world_size // size].tolist()


def _others_may_be_left_out() -> bool:
    """Return whether torch does no more than count for a group that this rank is not in.

    It does more where communicators are split from the group of all ranks, which is bound to a device then, and where
    all ranks wait for each other after each group.
    """
    everyone: Any = c10d._get_default_group()
    is_plain = type(everyone) is torch.distributed.ProcessGroup and everyone.bound_device_id is None
    waits = os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1"
    return is_plain and not waits and torch.distributed.get_backend() != "mpi"


def _if_member(create: Callable[..., Any]) -> Callable[..., Any]:
    rank = torch.distributed.get_rank()

    def create_group(ranks: Sequence[int], **options: Any) -> Any:
        if rank in ranks:
            return create(ranks, **options)
        c10d._process_group_name(ranks, use_hashed_name=False)  # counts it
        return c10d.GroupMember.NON_GROUP_MEMBER

    return create_group
