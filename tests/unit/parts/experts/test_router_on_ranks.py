"""What a router makes of other ranks' tokens, which a stand-in for the collective gives it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sinkhorn

from megatron_ext.parts.experts import router as of_router
from megatron_ext.parts.experts.router import Router

_GATHER = "gather_from_sequence_parallel_region"


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize("rank", range(3))
def test_the_load_so_far_is_that_of_earlier_microbatches(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three data-parallel ranks the microbatches of one turn come one after another."""
    turns = [torch.tensor([[4, 0], [3, 1], [0, 4]]), torch.tensor([[2, 2], [1, 3], [0, 4]])]
    router: Any = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.dp_group = _group(rank, 3)
    router.reset_global_aux_loss_tracker()
    for number, everyones in enumerate(turns):
        monkeypatch.setattr(of_router, _GATHER, lambda own, group, everyones=everyones: everyones.flatten())
        before = torch.cat(turns)[: 3 * number + rank + 1].double()
        assert router._load_so_far(everyones[rank]).tolist() == pytest.approx(before.mean(0).tolist())


@pytest.mark.parametrize("rank", range(2))
def test_a_balanced_assignment_is_of_all_tokens(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    router: Any = SimpleNamespace(tp_cp_group=_group(rank, 2))
    monkeypatch.setattr(of_router, _GATHER, lambda own, group: logits)
    assert torch.equal(Router._own_rows(router, sinkhorn, logits.chunk(2)[rank]), sinkhorn(logits).chunk(2)[rank])
