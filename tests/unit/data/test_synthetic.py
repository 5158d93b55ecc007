import collections

import numpy as np
import pytest

from megatron_ext.data.synthetic import ENTROPY, MockDataset


def mock(seed: int = 1, split: int = 0, vocab_size: int = 64, seq_length: int = 256) -> MockDataset:
    return MockDataset(vocab_size=vocab_size, seq_length=seq_length, num_samples=50, seed=seed, split=split)


def test_a_sample_is_a_function_of_seed_split_and_number():
    for name, values in mock()[7].items():
        np.testing.assert_array_equal(values, mock()[7][name])
    tokens = [dataset[i]["tokens"].tolist() for dataset in (mock(), mock(split=1), mock(seed=2)) for i in (7, 8)]
    assert len({tuple(row) for row in tokens}) == 6


def test_pinned_against_a_change_of_numpy():
    assert mock()[0]["tokens"][:12].tolist() == [30, 35, 36, 41, 42, 43, 46, 47, 48, 49, 51, 52]


def test_a_sample_has_the_fields_of_megatron_core():
    sample = mock(seq_length=5)[3]
    assert {name: (values.shape, values.dtype.name) for name, values in sample.items()} == {
        "tokens": ((5,), "int64"),
        "labels": ((5,), "int64"),
        "loss_mask": ((5,), "float32"),
        "position_ids": ((5,), "int64"),
    }
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 4]
    assert sample["loss_mask"].tolist() == [1.0] * 5


def test_length():
    assert len(mock()) == 50
    with pytest.raises(IndexError):
        mock()[50]


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 50_000])
def test_ids_stay_in_the_vocabulary(vocab_size: int):
    tokens = np.concatenate([mock(vocab_size=vocab_size)[i]["tokens"] for i in range(20)])
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size


def test_the_next_token_can_be_predicted_as_well_as_it_says():
    counts: dict[int, int] = collections.Counter()
    for i in range(50):
        sample = mock()[i]
        counts.update(((sample["labels"] - sample["tokens"]) % 64).tolist())
    shares = np.array(list(counts.values())) / sum(counts.values())
    assert set(counts) == {1, 2, 3, 5}
    assert abs(-(shares * np.log(shares)).sum() - ENTROPY) < 0.02
