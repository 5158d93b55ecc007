"""Matrices of experts in a checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.parts.experts.compute import ExpertMatrices


@pytest.mark.parametrize(("gated", "divided"), [(True, 0), (False, 0), (False, 1)])  # the second matrix has no gate
def test_experts_of_tensor_parallel_ranks_are_whole_in_a_checkpoint(gated: bool, divided: int) -> None:
    """Two ranks divide the matrices of four experts, two of which each of two others has. A gate lies above its whole
    up projection, of each of which a rank has a part."""
    rows, columns = (8, 3) if divided == 0 else (3, 8)
    whole = torch.arange(4.0 * rows * columns).view(4, rows, columns)
    found = torch.full_like(whole, -1.0)
    for expert_rank in range(2):
        for rank in range(2):
            parts = whole.chunk(2, 1) if gated else (whole,)
            own = torch.cat([part.chunk(2, 1 + divided)[rank] for part in parts], 1)
            experts: Any = ExpertMatrices.__new__(ExpertMatrices)
            torch.nn.Module.__init__(experts)
            experts.experts, experts.divided, experts.gated = (
                range(2 * expert_rank, 2 * expert_rank + 2),
                divided,
                gated,
            )
            experts.weight = torch.nn.Parameter(own[2 * expert_rank : 2 * expert_rank + 2].contiguous())
            groups = {"ep": (expert_rank, 2), "expt_tp": (rank, 2), "expt_dp": (3, 4), "dp_cp": (5, 8)}
            experts.groups = SimpleNamespace(
                **{
                    name: SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
                    for name, (rank, size) in groups.items()
                }
            )
            experts.bias = None if divided == 0 else torch.nn.Parameter(torch.zeros(2, rows))
            bias = experts.bias if experts.bias is None else experts.sharded(experts.bias, "experts.bias", ())
            assert bias is None or bias.replica_id == (0, rank, 3), "all ranks have the whole of it"
            factory = experts.sharded(experts.weight, "experts.weight", ())
            assert factory.replica_id == (0, 0, 3)
            pieces = factory.build()
            for piece in pieces:
                assert piece.global_shape == tuple(whole.shape)
                first = piece.global_offset
                shape = piece.data.shape
                there = found[first[0], first[1] : first[1] + shape[0], first[2] : first[2] + shape[1]]
                assert bool((there == -1.0).all()), "nobody else writes it"
                there.copy_(piece.data)
            assert torch.equal(factory.merge_fn([piece.data for piece in pieces]), experts.weight)
    assert torch.equal(found, whole)
