"""The hash of a tensor's bits, another for every flip of one, and who is wrong where equal weights are not.

tests/distributed/test_replica_check.py flips bits on ranks.
"""

import pytest
import torch

from megatron_ext.train.callbacks import replicas as module
from megatron_ext.train.callbacks.replicas import (
    _who_is_wrong,
    check_data_parallel_replicas,
    check_model_parallel_copies,
    weight_hash,
)
from tests.support.small_runs import built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_every_bit_counts(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORDS_AT_ONCE", 4)
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    data, seen = tensor.view(torch.uint8), {int(weight_hash(tensor))}
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(int(weight_hash(tensor)))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(data)


def test_two_flips_do_not_cancel() -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0))
    known = int(weight_hash(tensor))
    for bit in (0, 15, 31):
        for first in range(63):
            for second in range(first + 1, 64):
                changed = tensor.clone()
                changed.view(torch.int32)[[first, second]] ^= torch.tensor(1 << bit).to(torch.int32)
                assert int(weight_hash(changed)) != known


def test_order_counts_within_and_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORDS_AT_ONCE", 4)
    words = torch.arange(16, dtype=torch.float64)
    assert len({int(weight_hash(words.roll(shift))) for shift in range(16)}) == 16


def test_place_and_strides_do_not_count() -> None:
    tensor = torch.randn(6, 5)
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(6, 5)
    for same in (tensor.clone(), shifted, tensor.t().contiguous().t()):
        assert int(weight_hash(same)) == int(weight_hash(tensor))
    assert int(weight_hash(torch.empty(0))) == 0


@pytest.mark.parametrize(
    ("ranks", "hashes", "said"),
    [
        ([4, 6, 8], [1, 2, 1], "rank 6 differs from ranks 4, 8 in"),
        ([4, 5, 6, 7, 8], [1, 2, 1, 3, 1], "ranks 5, 7 differ from ranks 4, 6, 8 in"),
        ([0, 2], [1, 2], "ranks 0, 2 do not agree, and no majority says who is right, in"),
        ([0, 1, 2, 3], [1, 1, 2, 2], "ranks 0, 1, 2, 3 do not agree, and no majority says who is right, in"),
        ([0, 1, 2, 3], [1, 1, 2, 3], "ranks 0, 1, 2, 3 do not agree, and no majority says who is right, in"),
    ],
)
def test_more_than_half_are_a_majority(ranks: list[int], hashes: list[int], said: str) -> None:
    assert _who_is_wrong(ranks, hashes) == said


def test_a_rank_that_is_alone_agrees_with_itself() -> None:
    with built() as run:
        check_data_parallel_replicas(run, 1, 0)
        check_model_parallel_copies(run, 1, 0)
