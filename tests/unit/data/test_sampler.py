"""Each sample is used once, in the order of Megatron, with any number of ranks."""

import itertools

import pytest

from megatron_ext.data.sampler import microbatch_sample_ids


def step(consumed: int, microbatches: int, micro: int, dp: int, end: int | None = None) -> dict[tuple[int, int], list]:
    """{(microbatch, rank): samples} of one step."""
    return {
        (microbatch, rank): microbatch_sample_ids(
            consumed, microbatch, micro_batch_size=micro, dp_rank=rank, dp_size=dp, end=end
        )
        for microbatch, rank in itertools.product(range(microbatches), range(dp))
    }


def test_samples_are_dealt_in_the_order_of_megatron():
    assert step(100, microbatches=2, micro=3, dp=2) == {
        (0, 0): [100, 101, 102],
        (0, 1): [103, 104, 105],
        (1, 0): [106, 107, 108],
        (1, 1): [109, 110, 111],
    }


@pytest.mark.parametrize(("consumed", "micro", "dp"), itertools.product([0, 7, 10**12], [1, 2, 5], [1, 2, 3, 8]))
def test_a_step_uses_each_sample_once_whatever_the_ranks(consumed: int, micro: int, dp: int):
    for microbatches in (1, 2, 7):
        ids = list(itertools.chain.from_iterable(step(consumed, microbatches, micro, dp).values()))
        assert sorted(ids) == list(range(consumed, consumed + microbatches * micro * dp))


@pytest.mark.parametrize("resumed_with", [(1, 1), (2, 2), (4, 1), (1, 4)])
def test_no_sample_is_repeated_or_skipped_when_the_ranks_change(resumed_with: tuple[int, int]):
    used, consumed = [], 0
    for micro, dp, steps in ((2, 2, 3), (*resumed_with, 3)):
        for _ in range(steps):
            used += itertools.chain.from_iterable(step(consumed, 8 // (micro * dp), micro, dp).values())
            consumed += 8
    assert sorted(used) == list(range(48))


@pytest.mark.parametrize("remainder", range(9))
def test_places_past_the_end_hold_no_sample(remainder: int):
    batch = step(16, microbatches=2, micro=2, dp=2, end=16 + remainder)
    assert all(len(ids) == 2 for ids in batch.values())
    ids = list(itertools.chain.from_iterable(batch.values()))
    assert sorted(i for i in ids if i is not None) == list(range(16, 16 + remainder))
    assert ids.count(None) == 8 - remainder
