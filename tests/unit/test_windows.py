"""How texts are cut into sequences to score: every token once, in any stride and length."""

import pytest
import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.inference.sampling import Sampler, Sampling
from megatron_ext.inference.scoring import Scorable, _batches
from megatron_ext.inference.tasks import continuation, windows
from megatron_ext.tokenizer.byte import ByteTokenizer


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_score_each_token_once(count: int, stride: int) -> None:
    tokens = list(range(count))
    found = list(windows(tokens, 99, 8, stride))
    assert [token for window in found for token in window.tokens[-window.scored :]] == tokens
    assert all(len(window.tokens) <= 9 for window in found)
    assert all(len(window.tokens) == 9 for window in found[1:]), "later windows are given all that there is room for"
    assert found[0].tokens[0] == 99


def test_blanks_before_a_continuation_belong_to_it() -> None:
    found = continuation(ByteTokenizer(), "ab ", "cd", 100)
    assert (bytes(found.tokens), found.scored) == (b"ab cd", 3)
    assert continuation(ByteTokenizer(), "", "cd", 100) == Scorable([256, *b"cd"], 2)
    cut = continuation(ByteTokenizer(), "abcdef", "gh", 4)
    assert (bytes(cut.tokens), cut.scored) == (b"defgh", 2)


@pytest.mark.parametrize(("count", "rows", "replicas"), [(1, 4, 1), (7, 2, 3), (13, 4, 2), (5, 1, 4), (24, 3, 2)])
def test_batches_hold_each_sequence_once_in_equal_shapes(count: int, rows: int, replicas: int) -> None:
    sequences = [Scorable(list(range(3 + 3 * (number % 5))), 1 + number % 2) for number in range(count)]
    dealt = [list(_batches(sequences, rows, replica, replicas, torch.device("cpu"))) for replica in range(replicas)]
    members = [number for batches in dealt for batch in batches for number in batch.members]
    assert sorted(members) == list(range(count))
    for same_round in zip(*dealt, strict=True):
        assert len({(batch.tokens_BS.shape, batch.wanted_N.shape) for batch in same_round}) == 1
    for batch in (batch for batches in dealt for batch in batches):
        for place, target, owner in zip(batch.wanted_N, batch.targets_N, batch.owners_N, strict=True):
            if owner >= 0:
                row = batch.members.index(int(owner))
                position, same_row = divmod(int(place), len(batch.tokens_BS))
                assert same_row == row
                assert sequences[int(owner)].tokens[position + 1] == int(target)


def test_what_is_drawn_depends_on_the_prompt_and_not_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    sampling = Sampling(temperature=1.0, seed=5)

    def drawn(rows: list[int]) -> list[list[int]]:
        sampler = Sampler(sampling, [[0] for _ in rows], rows, 20)
        return [sampler.next(logits[rows]).tolist() for _ in range(6)]

    together = drawn([0, 1, 2])
    for row in range(3):
        assert [chosen[row] for chosen in together] == [chosen[0] for chosen in drawn([row])]
    assert len({tuple(chosen) for chosen in together}) > 1


def test_all_that_is_wrong_with_a_sampling_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Sampling(temperature=-1, top_k=-1, top_p=0, min_p=2, repetition_penalty=0, max_new_tokens=0, stop=("",)).check()
    assert len(caught.value.problems) == 7
