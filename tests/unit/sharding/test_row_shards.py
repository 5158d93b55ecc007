"""Rows that ranks keep of weights: their marks, without ranks."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron_ext.parallel.rows import RowShard, mark
from megatron_ext.sharding.row_shards import RowPart, _optimized


def test_rows_have_the_marks_of_their_weight() -> None:
    """By which the engine counts copies once in the norm: what tensor-parallel ranks divide, experts, tied copies."""
    weight: Any = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    weight.tensor_model_parallel, weight.allreduce, weight.shared = True, False, True
    mark(weight, RowShard(weight[1:3], 1, (4, 3), None))
    rows: Any = _optimized(weight)
    assert (rows.tensor_model_parallel, rows.allreduce, rows.shared) == (True, False, True)
    assert not rows.requires_grad
    rows.add_(1.0)
    assert weight[1].tolist() == [4.0, 5.0, 6.0], "what is updated is in use"
    plain: Any = torch.nn.Parameter(torch.zeros(2))
    mark(plain, RowShard(plain, 0, (2,), None))
    assert not hasattr(_optimized(plain), "shared")


def test_masters_are_saved_where_16_bits_are_computed_with() -> None:
    for dtype, saves in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True)):
        core: Any = SimpleNamespace(compute_dtype=dtype, optimizer=None)
        assert RowPart(core).saves_master(torch.nn.Parameter(torch.zeros(1))) == saves
