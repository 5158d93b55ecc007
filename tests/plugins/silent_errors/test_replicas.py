"""The hash of a tensor's bits, another for every flip of one, and who is wrong where equal weights are not.

tests/distributed/test_replica_check.py flips bits on ranks.
"""

import pytest

from megatron_ext.plugins.silent_errors.replicas import (
    _who_is_wrong,
    check_data_parallel_replicas,
    check_model_parallel_copies,
)
from tests.support.small_runs import built


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
