"""Attention over positions that context-parallel ranks share, each of which is a thread here; results by value."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.data.packing import Segment
from megatron_ext.parts.attention import context_parallel
from megatron_ext.parts.attention.context_parallel import _in_chunks, _in_order, _neighbours, _visible, segments_of_rank


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def test_the_ring_goes_one_way() -> None:
    """Who is sent to receives from the sender; a rank's own keys are causal, earlier ones half, later ones for half of
    the queries."""
    assert [_neighbours(rank, 4) for rank in range(4)] == [(1, 3), (2, 0), (3, 1), (0, 2)]
    everything = slice(0, 8)
    assert _visible(1, 1, 8) == (everything, everything, True)
    assert _visible(1, 0, 8) == (everything, slice(0, 4), False)
    assert _visible(1, 2, 8) == (slice(4, 8), everything, False)


def test_chunks_of_the_head_and_of_the_tail_see_what_is_before_them() -> None:
    assert segments_of_rank(0, 2, 16) == (Segment(0, 4, 0, 4), Segment(4, 4, 0, 16))
    assert segments_of_rank(1, 2, 16) == (Segment(0, 4, 0, 8), Segment(4, 4, 0, 12))
    whole = torch.arange(2 * 16).view(1, 16, 2)
    parts = _in_chunks(whole, 2)
    assert parts[1, 0, :, 0].tolist() == [8, 10, 12, 14, 16, 18, 20, 22]
    assert torch.equal(_in_order(parts), whole)


class _Posted:
    """Stands for an exchange of the ring: ranks are threads, and messages wait by place, step and tag."""

    boxes: defaultdict[tuple[int, int], SimpleQueue[torch.Tensor]]
    sent: list[tuple[int, torch.dtype]]

    def __init__(self, tensor: torch.Tensor, group: Any, tag: int):
        after, _ = _neighbours(group.rank(), group.size())
        self._own = self.boxes[group.rank(), tag]
        self.sent.append((tag, tensor.dtype))
        self.boxes[after, tag].put(tensor.detach().clone())

    def wait(self) -> torch.Tensor:
        return self._own.get(timeout=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_is_attention_over_all_positions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, each with its chunks, in threads. Sums over ranks are kept in fp32 whatever travels."""
    ranks, scale = 3, 0.4
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, 12, 8, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]
    query, key, value = exact = [tensor.double().requires_grad_() for tensor in whole[:3]]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    wanted = torch.autograd.grad(expected, exact, whole[3].double())
    parts = [_in_chunks(tensor, ranks) for tensor in whole]
    merged: set[torch.dtype] = set()
    genuine = context_parallel.merge

    def merge(out: torch.Tensor, *others: torch.Tensor) -> Any:
        merged.add(out.dtype)
        return genuine(out, *others)

    monkeypatch.setattr(_Posted, "boxes", defaultdict(SimpleQueue), raising=False)
    monkeypatch.setattr(_Posted, "sent", [], raising=False)
    monkeypatch.setattr(context_parallel, "_Exchange", _Posted)
    monkeypatch.setattr(context_parallel, "merge", merge)

    def forward(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        query, key, value = heads = [part[rank].clone().requires_grad_() for part in parts[:3]]
        return context_parallel.attend_ring(query, key, value, _group(rank, ranks), scale), heads

    with ThreadPoolExecutor(ranks) as threads:
        made = list(threads.map(forward, range(ranks)))
        assert set(_Posted.sent) == {(step, dtype) for step in range(ranks - 1)}
        _Posted.sent.clear()
        found = list(
            threads.map(lambda rank: torch.autograd.grad(made[rank][0], made[rank][1], parts[3][rank]), range(ranks))
        )
    # Keys and values go on as they are, one step ahead of the sums of their gradients.
    assert set(_Posted.sent) == {
        *((2 * step, dtype) for step in range(ranks - 1)),
        *((2 * step + 1, torch.float32) for step in range(ranks)),
    }
    assert merged == {torch.float32}
    results = [_in_order(torch.stack([out.detach() for out, _ in made]))]
    results += [_in_order(torch.stack(gradients)) for gradients in zip(*found, strict=True)]
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    for got, known in zip(results, (expected.detach(), *wanted), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), known, rtol=tolerance, atol=tolerance)
