"""Row shards (FSDP) in a checkpoint: every rank writes and reads its own rows of the same global tensors that all other
layouts write, so that any layout can load what any other has saved."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.parallel.rows import RowShard

Pieces = dict[str, ShardedTensor]
"""One after another, this rank's rows; two or more where a weight is saved in parts (SwiGLU's gate and up, experts)."""


def pieces(weight: ShardedTensor | ShardedTensorFactory, shard: RowShard, rows: torch.Tensor, key: str) -> Pieces:
    """Return how to save, or where to load, `rows`.

    Args:
        weight: how the weight would be saved if this rank held all of it.
        shard: the place of the rows in it.
        rows: rows of the weight or of optimizer state that is cut as it is.
        key: global name in the checkpoint.
    """
    found: Pieces = {}
    start = 0
    for part in _parts(weight):
        stop = start + part.local_shape[0]
        # A row of stacked experts is one expert, a matrix of many rows, and saved by itself.
        each = math.prod(shard.shape[1:]) // math.prod(part.local_shape[1:])
        first = shard.first * each
        low, high = max(start, first), min(stop, shard.stop * each)
        if low < high:
            # Layers are one tensor in the checkpoint, stacked along axes before those of the weight.
            axis = part.prepend_axis_num
            data = rows.view(-1, *part.local_shape[1:])[low - first : high - first]
            data = data.view((1,) * axis + tuple(data.shape))
            offset = list(part.global_offset)
            offset[axis] += low - start
            found[str(len(found))] = replace(
                part,
                key=key,
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_offset=tuple(offset),
                axis_fragmentations=None,
                prepend_axis_num=0,
                replica_id=(*part.replica_id[:-1], shard.replica),  # pyright: ignore[reportIndexIssue]
            )
        start = stop
    return found


def joined(shard: RowShard, loaded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return this rank's rows, from what was read into their pieces."""
    whole = torch.cat([loaded[index].reshape(-1) for index in sorted(loaded, key=int)])
    return whole.view(-1, *shard.shape[1:])


def _parts(weight: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors of the checkpoint that the rows of a weight belong to, in their order."""
    if isinstance(weight, ShardedTensor):
        return [weight]
    whole = torch.empty(weight.data.shape, dtype=weight.data.dtype, device="meta")
    return cast(list[ShardedTensor], weight.build_fn(weight.key, whole, weight.replica_id, None))
