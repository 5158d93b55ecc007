"""The numbers of a step that all ranks add up."""

import math

import torch

from megatron_ext.train.step_allreduce import SharedNumbers, StopVotes, named
from tests.support.small_runs import built


def test_the_sums_have_their_names() -> None:
    found = named([6.0, 12.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert found == (0.5, 12, 1, 2, StopVotes(by_sigterm=3, otherwise=4, overdue=5), ())
    assert named([0.25, 0.5] + [0.0] * 5).loss == 0.5, "weights of tokens may be below one"
    assert math.isnan(named([0.0] * 7).loss)
    parts = named([6.0, 12.0, 0.0, 0.0, 1.0, 0.0, 0.0, 3.0, 9.5])
    assert (parts.of_parts, parts.votes) == ((3.0, 9.5), StopVotes(by_sigterm=1))


def test_each_number_of_a_rank_has_its_place_on_the_device() -> None:
    """In fp64: fp32 would lose a token in 2^24. Who was given `loss` sees the rank's own part."""
    loss, tokens = 1.0 + 2.0**-40, 2.0**24 + 1.0
    with built() as run:
        numbers = SharedNumbers(run)
        own = numbers.loss
        numbers.add_loss(torch.tensor([loss, tokens], dtype=torch.float64))
        norm = torch.tensor(math.nan, dtype=torch.float64)
        numbers.add_gradients(False, norm)
        assert numbers.summed(StopVotes(0, 0, 1)).tolist() == [loss, tokens, 1.0, 0.0, 0.0, 0.0, 1.0]
        assert own.item() == loss
        numbers = SharedNumbers(run)
        numbers.add_loss(torch.tensor([loss, tokens], dtype=torch.float64))
        numbers.add_gradients(True, norm)
        counted = named(numbers.summed(StopVotes()).tolist())
        assert counted[:4] == (loss / tokens, int(tokens), 0, 1), "an overflow is no bad gradient"
