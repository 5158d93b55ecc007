"""Rows of weights that a rank keeps, and the whole that all ranks have together."""

import torch

from megatron_ext.parallel.rows import RowShard, local_part, mark, row_shard


def test_a_whole_that_one_rank_holds_is_a_copy() -> None:
    local = torch.ones(2, 2)
    whole = RowShard(local, 0, (2, 2), None).gather()
    whole.zero_()
    assert local.tolist() == [[1.0, 1.0]] * 2


def test_a_part_is_the_rows_or_all_of_a_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 2))
    assert row_shard(weight) is None
    assert local_part(weight).shape == (4, 2)
    assert not local_part(weight).requires_grad
    shard = RowShard(torch.zeros(1, 2), 3, (4, 2), None)
    mark(weight, shard)
    assert row_shard(weight) is shard
    assert local_part(weight) is shard.local


def test_rows_end_where_their_first_axis_does() -> None:
    assert RowShard(torch.zeros(2, 5), 3, (8, 5), None).stop == 5
