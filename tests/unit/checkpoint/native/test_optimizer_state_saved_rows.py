"""Rows of a weight, as FSDP holds them, in the tensors of a checkpoint."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.checkpoint.native import optimizer_state
from megatron_ext.checkpoint.native.optimizer_state import joined
from megatron_ext.parallel.rows import RowShard


def _saved(local: tuple[int, ...], of: tuple[int, ...], offset: tuple[int, ...], axes: int = 0) -> ShardedTensor:
    """Return a part of a tensor of the checkpoint, which has `axes` axes more before those of the weight."""
    data = torch.zeros(*local, dtype=torch.bfloat16)
    whole = ShardedTensor.from_rank_offsets("weight", data, replica_id=(0, 1, 2))
    return replace(whole, global_shape=of, global_offset=offset, axis_fragmentations=None, prepend_axis_num=axes)


def _weight(*parts: ShardedTensor) -> ShardedTensorFactory:
    """Return a weight that is saved in these parts."""
    build: Any = lambda *_: list(parts)  # noqa: E731
    return ShardedTensorFactory("weight", torch.zeros(1), build, build)


def _pieces(weight: Any, shard: RowShard, rows: torch.Tensor) -> list[tuple[Any, ...]]:
    found = optimizer_state.pieces(weight, shard, rows, "state")
    assert {piece.key for piece in found.values()} == {"state"}
    assert {piece.replica_id for piece in found.values()} == {(0, 1, shard.replica)}
    assert [piece.dtype for piece in found.values()] == [rows.dtype] * len(found)
    return [(piece.global_offset, torch.as_tensor(piece.data).tolist()) for piece in found.values()]


def test_rows_of_several_tensors_are_saved_where_they_belong() -> None:
    """A weight of six rows is rows 4 to 6 of one tensor and 20 to 22 of another; this rank has its rows 1 to 4."""
    weight = _weight(_saved((3, 2), (10, 2), (4, 0)), _saved((3, 2), (30, 2), (20, 0)))
    rows = torch.arange(8.0).view(4, 2)
    assert _pieces(weight, RowShard(rows, 1, (6, 2), None, replica=3), rows) == [
        ((5, 0), [[0.0, 1.0], [2.0, 3.0]]),
        ((20, 0), [[4.0, 5.0], [6.0, 7.0]]),
    ]


def test_rows_of_stacked_experts_are_whole_matrices() -> None:
    """Of three experts of 4 by 5 in layer 3, a rank has the second and third; none of the first is written."""
    experts = [_saved((4, 5), (9, 9, 12, 5), (3, expert, 8, 0), axes=2) for expert in range(3)]
    rows = torch.arange(40.0).view(2, 4, 5)
    assert _pieces(_weight(*experts), RowShard(rows, 1, (3, 4, 5), None, replica=7), rows) == [
        ((3, expert, 8, 0), [[rows[expert - 1].tolist()]]) for expert in (1, 2)
    ]
    rows = torch.arange(20.0).view(4, 5)
    assert _pieces(_weight(*experts), RowShard(rows, 6, (12, 5), None, replica=0), rows) == [
        ((3, 1, 10, 0), [[rows[:2].tolist()]]),
        ((3, 2, 8, 0), [[rows[2:].tolist()]]),
    ]


def test_pieces_are_joined_by_their_numbers() -> None:
    pieces = {str(number): torch.full((1, 1, 2), float(number)) for number in (10, 9, 2)}
    shard = RowShard(torch.zeros(3, 2), 0, (3, 2), None)
    assert joined(shard, pieces).tolist() == [[2.0, 2.0], [9.0, 9.0], [10.0, 10.0]]
