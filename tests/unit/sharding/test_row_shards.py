"""Rows that ranks keep of weights: marks and clipping, without ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.parallel.rows import RowShard, mark
from megatron_ext.sharding.row_shards import HostRowOptimizer, RowPart, _optimized


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


@pytest.mark.parametrize(("norm", "share"), [(4.0, 0.5), (1.0, 1.0)])
def test_gradients_in_host_memory_are_only_made_smaller(norm: float, share: float) -> None:
    optimizer: Any = HostRowOptimizer.__new__(HostRowOptimizer)
    rows = [torch.zeros(2), torch.zeros(3), torch.zeros(1)]
    for one in rows[:2]:
        one.grad = torch.ones_like(one)
    optimizer.get_parameters = lambda: rows
    optimizer.clip(2.0, norm)
    for one in rows[:2]:
        assert one.grad is not None
        torch.testing.assert_close(one.grad, torch.full_like(one, share), rtol=1e-6, atol=0)
    assert rows[2].grad is None
